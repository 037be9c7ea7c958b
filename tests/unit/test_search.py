"""`minimize` and `fmin` search in this process; what they return and keep is true to hyperopt."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from pprint import pformat
from typing import Any

import hyperopt
import numpy as np
import pytest
from hyperopt import hp
from hyperopt.pyll import scope
from hyperopt.tests.unit import test_domains as domains
from services.cases import cases

import shadho_celery
from shadho_celery.core.names import SAMPLERS
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.errors import NoSuccessfulTrial, StoreError, StudyExists, StudyNotFound, UsageError
from shadho_celery.objective.context import Context
from shadho_celery.placement.policies import POLICIES, CostPolicy
from shadho_celery.placement.shares import EvenShares, PromiseShares
from shadho_celery.results.study import StudyResults
from shadho_celery.samplers.auto import AutoSampler
from shadho_celery.scheduler.executors import InlineExecutor
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits

# Studies are resumed with other objectives, of which a search warns; some have no success.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the objective's code is now version"),
    pytest.mark.filterwarnings("ignore:study .* has no successful trial"),
]

S = TrialState


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def x_squared(params: dict[str, float]) -> float:
    return params["x"] ** 2


SPACE = {"x": hp.uniform("x", -1, 1)}


def values(study: StudyResults) -> list[dict[str, Any]]:
    return [dict(trial.params) for trial in sorted(study.trials, key=lambda trial: trial.number)]


# The study that comes back


def test_trials_come_in_the_order_in_which_they_finished_with_params_loss_and_state() -> None:
    seen: list[float] = []

    def objective(params: dict[str, float]) -> float:
        seen.append(params["x"])
        return x_squared(params)

    study = shadho_celery.minimize(objective, SPACE, trials=15, seed=0)
    assert [trial.params["x"] for trial in study.trials] == seen
    assert [trial.loss for trial in study.trials] == [x**2 for x in seen]
    assert {trial.state for trial in study.trials} == {S.COMPLETE}
    assert study.best is not None
    assert study.best.loss == min(x**2 for x in seen)
    finished = [trial.finished_at or 0.0 for trial in study.trials]
    assert finished == sorted(finished)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trials_and_another_one_others() -> None:
    def params(**options: Any) -> list[dict[str, Any]]:
        return values(shadho_celery.minimize(x_squared, SPACE, trials=10, **options))

    assert params(seed=3) == params(seed=3)
    assert params(seed=3) != params(seed=4)
    assert all(params(seed=3, policy=policy) == params(seed=3) for policy in POLICIES)
    assert params() != params()


def test_failed_trials_are_trials_and_without_a_success_there_is_no_best() -> None:
    def objective(params: dict[str, float]) -> float:
        raise ArithmeticError("never")

    with pytest.warns(UserWarning, match=r"5 failed.*5 x ArithmeticError: never \(test_search.py:\d+\); the first"):
        study = shadho_celery.minimize(objective, SPACE, trials=5, seed=0)
    assert [trial.state for trial in study.trials] == [S.FAILED] * 5
    assert all(trial.loss is None and "never" in str(trial.error) for trial in study.trials)
    assert study.best_or_none is None
    with pytest.raises(NoSuccessfulTrial, match=r"no successful trial .*ArithmeticError: never"):
        _ = study.best


@pytest.mark.parametrize("trials", [1, 8, 12])
def test_an_objective_that_only_fails_is_warned_of_once_whatever_the_number_of_trials(trials: int) -> None:
    def objective(params: dict[str, float]) -> float:
        raise ArithmeticError("never")

    with pytest.warns(UserWarning, match="ArithmeticError: never") as warned:
        shadho_celery.minimize(objective, SPACE, trials=trials)
    assert len(warned) == 1


def test_a_nan_among_losses_is_a_failure_and_never_the_best() -> None:
    def objective(params: dict[str, float]) -> float:
        return math.nan if params["x"] < 0 else params["x"]

    study = shadho_celery.minimize(objective, SPACE, trials=30, seed=0)
    assert study.count(S.FAILED) == sum(trial.params["x"] < 0 for trial in study.trials) > 5
    assert study.best is not None
    assert study.best.loss == min(t.params["x"] for t in study.trials if t.params["x"] >= 0)


def test_it_stops_at_the_target() -> None:
    study = shadho_celery.minimize(x_squared, SPACE, target=0.05, seed=0)
    losses = [trial.loss for trial in study.trials]
    assert losses[-1] is not None
    assert losses[-1] <= 0.05
    assert all(loss is not None and loss > 0.05 for loss in losses[:-1])


def test_it_stops_after_the_seconds() -> None:
    study = shadho_celery.minimize(x_squared, SPACE, seconds=0.2, seed=0)
    assert study.count(S.COMPLETE) == study.count() > 0


def test_the_objective_may_take_a_context_and_report() -> None:
    seeds = []

    def objective(params: dict[str, float], context: Any) -> dict[str, Any]:
        for step in range(3):
            context.report(step, params["x"] + step)
        seeds.append(context.seed)
        return {"loss": params["x"], "device": context.device, "class": context.compute_class}

    study = shadho_celery.minimize(objective, SPACE, trials=4, seed=0, store="sqlite:///s.db")
    assert [trial.metrics for trial in study.trials] == [{"device": "cpu", "class": "local"}] * 4
    assert [trial.seed for trial in study.trials] == seeds
    assert len(set(seeds)) == 4
    kept = SqlStore("sqlite:///s.db")
    reports = kept.reports(study.key)
    kept.close()
    assert [(r.number, r.step) for r in reports] == [(number, step) for number in range(4) for step in range(3)]
    assert [r.loss for r in reports] == [t.params["x"] + step for t in study.trials for step in range(3)]


def test_ctrl_c_ends_the_search_and_the_study_can_be_resumed() -> None:
    def interrupted(params: dict[str, float]) -> float:
        if len(asked) == 5:
            raise KeyboardInterrupt
        asked.append(params["x"])
        return 0.0

    asked: list[float] = []
    options: dict[str, Any] = {"store": "sqlite:///s.db", "study": "s", "trials": 12, "sampler": "random"}
    with pytest.warns(UserWarning, match="interrupted: 5 trials have ended"):
        study = shadho_celery.minimize(interrupted, SPACE, seed=0, **options)
    assert [trial.params["x"] for trial in study.trials if trial.loss is not None] == asked
    study = shadho_celery.minimize(x_squared, SPACE, resume=True, **options)
    assert study.count(S.COMPLETE) == study.count() == 12
    assert values(study) == values(shadho_celery.minimize(x_squared, SPACE, seed=0, trials=12, sampler="random"))


# The store


def test_by_default_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    shadho_celery.minimize(x_squared, SPACE, trials=3)
    assert list(tmp_path.iterdir()) == []


def test_a_kept_study_is_resumed_where_it_ended() -> None:
    options: dict[str, Any] = {"store": "sqlite:///s.db", "study": "größe 1"}
    first = [*shadho_celery.minimize(x_squared, SPACE, trials=6, seed=1, **options).trials]
    second = shadho_celery.minimize(x_squared, SPACE, trials=14, resume=True, **options)
    assert [*second.trials][:6] == first
    assert values(second) == values(shadho_celery.minimize(x_squared, SPACE, trials=14, seed=1))
    assert second.best is not None
    assert second.best.loss == min(trial.loss for trial in second.trials if trial.loss is not None)
    again = shadho_celery.minimize(lambda params: 1 / 0, SPACE, trials=14, resume=True, **options)
    assert [*again.trials] == [*second.trials]


def test_a_name_is_given_once_and_resumed_only_where_it_exists() -> None:
    options: dict[str, Any] = {"store": "sqlite:///s.db", "trials": 1}
    shadho_celery.minimize(x_squared, SPACE, study="s", **options)
    with pytest.raises(StudyExists):
        shadho_celery.minimize(x_squared, SPACE, study="s", **options)
    with pytest.raises(StudyNotFound, match=r"'t' .* leave out resume"):
        shadho_celery.minimize(x_squared, SPACE, study="t", resume=True, **options)
    assert shadho_celery.minimize(x_squared, SPACE, resume=True, **options).name == "s"


# Policy, shares and cost


TWO = hp.choice("model", [{"name": "good", "x": hp.uniform("x", 0, 1)}, {"name": "bad", "y": hp.uniform("y", 0, 1)}])


@pytest.mark.slow
def test_by_promise_the_better_subspace_gets_more_trials_and_by_default_each_gets_its_part() -> None:
    def objective(params: dict[str, Any]) -> float:
        return float(params["x"]) if params["name"] == "good" else 50.0 + float(params["y"])

    def asked(**options: Any) -> tuple[int, int]:
        study = shadho_celery.minimize(objective, TWO, trials=90, seed=0, **options)
        subspaces = Counter(trial.subspace for trial in study.trials)
        assert subspaces.total() == 90
        return subspaces["model=good"], subspaces["model=bad"]

    assert asked(sampler="random") == asked(shares="uniform") == (45, 45)
    assert asked() == asked(sampler="auto", shares="promise")
    good, bad = asked(sampler="random", shares="promise")
    assert good > 55
    assert bad > 0


def scheduler_of(**options: Any) -> Scheduler:
    space = compile_space(TWO)
    study = open_study(SqlStore("sqlite://"), space.describe(), seed=0, clock=ManualClock())
    executor = InlineExecutor(lambda params: 0.0, space.evaluate)
    return make_scheduler(Plan.of(space, StudySettings(**options), Limits(trials=1)), study, executor)


def test_by_default_auto_samples_trials_are_placed_by_cost_and_shared_out_by_promise() -> None:
    assert (StudySettings().policy, StudySettings().shares_in_force) == ("cost", "promise")
    assert StudySettings(sampler="random").shares_in_force == "even"
    assert StudySettings(policy="paper").shares_in_force == "paper"
    assert StudySettings(policy="paper", shares="uniform").shares_in_force == "uniform"
    proposals = scheduler_of().proposals
    assert (type(proposals.policy), type(proposals.shares)) == (CostPolicy, PromiseShares)
    assert {type(each.sampler) for each in proposals.samplers.values()} == {AutoSampler}  # type: ignore[attr-defined]
    assert type(scheduler_of(sampler="random").proposals.shares) is EvenShares


def test_the_cost_that_the_study_file_tells_is_what_is_believed_before_any_trial() -> None:
    model = scheduler_of(cost={"model=good": 100.0, "model=bad": 1.0}).cost_model
    good = Trial(number=0, subspace="model=good", params={"model": 0, "x": 0.25})
    bad = Trial(number=1, subspace="model=bad", params={"model": 1, "y": 0.5})
    [of_good], [of_bad] = np.exp(model.predict([good, bad], ["local"]).mean)
    assert of_good == pytest.approx(100 * of_bad)
    model = scheduler_of(cost=lambda params: params.get("x", 1.0)).cost_model
    assert np.exp(model.predict([good], ["local"]).mean) == pytest.approx(0.25)


def test_a_cost_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="not a subspace"):
        scheduler_of(cost={"good": 1.0})
    with pytest.raises(UsageError, match="above 0"):
        scheduler_of(cost=lambda params: -1.0)


# Arguments


@pytest.mark.parametrize(
    ("options", "about"),
    [
        ({}, "give trials, seconds, target or early_stop"),
        ({"trials": 0}, "trials: 0"),
        ({"trials": 1, "sampler": "oracle"}, "oracle"),
        ({"trials": 1, "policy": "best"}, "best.*cost, paper, fifo"),
        ({"trials": 1, "shares": "fair"}, "fair.*even, uniform, promise, paper"),
        ({"trials": 1, "seed": -1}, "seed"),
        ({"trials": 1, "study": "a/b"}, "a/b"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], about: str) -> None:
    with pytest.raises(UsageError, match=about):
        shadho_celery.minimize(x_squared, SPACE, **options)


@cases("name", ["trials", "seconds", "target", "seed", "store", "study", "resume", "sampler", "fidelity"])
@cases("value", [True, 2.5, "3", math.nan, 10**400, None, [3], b"3", object()])
def test_an_argument_of_another_kind_is_refused_in_one_line_that_names_it(name: str, value: Any) -> None:
    """The exceptions are those that fit, of course."""
    fitting = {"seconds": [2.5], "target": [2.5], "resume": [True], "study": ["3"]}
    nothing = ("seed", "target", "seconds", "study", "fidelity", "sampler")
    if value in fitting.get(name, ()) or (value is None and name in nothing):
        return
    with pytest.raises((UsageError, StoreError)) as refused:
        shadho_celery.minimize(x_squared, SPACE, **{"trials": 1, name: value})
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_an_objective_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match="not a function but int"):
        shadho_celery.minimize(3, SPACE, trials=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="its own SPACE"):
        shadho_celery.minimize("objective", SPACE, trials=1)


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%25b", "имя", "a;b", "x" * 200])
def test_a_study_may_have_any_name_that_a_folder_may_have(name: str) -> None:
    study = shadho_celery.minimize(x_squared, SPACE, trials=1, store="sqlite:///s.db", study=name)
    assert study.name == name


@cases("name", ["\ud800x", "\udcff", "д" * 101, "a/b", ".a", "", "a\nb"])
@cases("resume", [False, True])
def test_a_name_that_no_folder_can_have_is_refused_in_one_line_that_any_terminal_can_print(
    name: str, resume: bool
) -> None:
    with pytest.raises(UsageError, match="cannot name a study") as refused:
        shadho_celery.minimize(x_squared, SPACE, trials=1, study=name, resume=resume)
    assert str(refused.value).isascii()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("bad", [{"sampler": "oracle"}, {"sampler": ["tpe"]}, {"policy": "best"}, {"shares": "fair"}])
def test_a_refused_search_leaves_no_study_behind(bad: dict[str, Any]) -> None:
    options: dict[str, Any] = {"store": "sqlite:///s.db", "study": "s", "trials": 1}
    with pytest.raises(UsageError):
        shadho_celery.minimize(x_squared, SPACE, **options, **bad)
    assert shadho_celery.minimize(x_squared, SPACE, **options).count() == 1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "grid"])
@pytest.mark.parametrize(("space", "given"), [({"lr": 0.1}, {"lr": 0.1}), ([1, "a"], (1, "a")), ({}, {}), (3, 3)])
def test_a_space_of_constants_runs_the_same_params_with_other_seeds(space: Any, given: Any, sampler: str) -> None:
    seen: list[tuple[Any, int]] = []

    def objective(params: Any, context: Context) -> float:
        seen.append((params, context.seed))
        if len(seen) == 1:
            raise ValueError
        return context.seed / 2**32

    options: dict[str, Any] = {"sampler": sampler, "store": "sqlite:///s.db", "study": "s", "seed": 1}
    shadho_celery.minimize(objective, space, trials=12, **options)
    study = shadho_celery.minimize(objective, space, trials=15, resume=True, **options)
    assert [params for params, _ in seen] == [given] * 15
    assert len({seed for _, seed in seen}) == 15
    assert study.best is not None
    assert study.best.params == {}
    assert study.best.loss == min(seed for _, seed in seen[1:]) / 2**32


def test_a_function_of_params_without_a_space_fails_with_a_hint() -> None:
    with pytest.warns(UserWarning, match="give a space"):
        shadho_celery.minimize(x_squared, None, trials=1)


# True to hyperopt


def typed(value: Any) -> Any:
    """The types in a nested value."""
    if isinstance(value, dict):
        return {key: typed(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [typed(part) for part in value]
    return type(value)


SPACES = {
    "flat": {"u": hp.uniform("u", -1, 1), "n": scope.int(hp.quniform("n", 1, 9, 1)), "fixed": "text"},
    "nested": hp.choice(
        "model",
        [
            {"name": "a", "layers": [hp.randint("l1", 4), hp.randint("l2", 2, 9)], "deep": (hp.normal("w", 0, 1),)},
            {"name": "b", "inner": hp.choice("inner", [None, {"rate": hp.loguniform("rate", -9, 0)}, "text"])},
        ],
    ),
    "computed": {"C": 2 ** hp.uniform("C", -5, 15), "twice": hp.uniform("t", 0, 1) * 2, "p": hp.pchoice("p", [(1, 3)])},
    "a list": [hp.lognormal("ln", 0, 1), hp.qnormal("qn", 0, 10, 2), hp.uniformint("ui", 0, 9)],
}


@pytest.mark.parametrize("name", SPACES)
def test_the_objective_gets_what_hyperopts_space_eval_gives_types_included(name: str) -> None:
    got: list[Any] = []

    def objective(params: Any) -> float:
        got.append(params)
        return 0.0

    study = shadho_celery.minimize(objective, SPACES[name], trials=20, seed=0)
    for trial, params in zip(study.trials, got, strict=True):
        expected = hyperopt.space_eval(SPACES[name], dict(trial.params))
        assert params == expected
        # Types too; hyperopt sorts a dict by its keys, we leave it as it was written.
        assert pformat(params, sort_dicts=True) == pformat(expected, sort_dicts=True)
        assert typed(params) == typed(expected)


@pytest.mark.filterwarnings("ignore:all .* points of the space")
@pytest.mark.parametrize(
    "make", ["coin_flip", "quadratic1", "q1_choice", "q1_lognormal", "distractor", "gauss_wave", "branin"]
)
def test_hyperopts_own_test_domains_are_searched_and_their_losses_are_hyperopts(make: str) -> None:
    """Such a domain computes its loss inside the space."""
    domain = getattr(domains, make)()
    study = shadho_celery.minimize(lambda result: result, domain.expr, trials=12, seed=0)
    assert study.count(S.COMPLETE) == 12, study.trials[0].error
    for trial in study.trials:
        expected = hyperopt.space_eval(domain.expr, dict(trial.params))
        assert trial.loss == pytest.approx(expected["loss"])
    assert study.best is not None
    assert study.best.loss == min(trial.loss for trial in study.trials if trial.loss is not None)


@pytest.mark.filterwarnings("ignore:all .* points of the space")
@pytest.mark.parametrize("make", ["n_arms", "gauss_wave2", "many_dists"])
def test_domains_that_add_noise_or_use_every_distribution_are_searched(make: str) -> None:
    domain = getattr(domains, make)()
    study = shadho_celery.minimize(lambda result: result, domain.expr, trials=20, seed=0)
    assert study.count(S.COMPLETE) == 20, study.trials[0].error
    assert len({trial.loss for trial in study.trials}) == 20
    assert {label for trial in study.trials for label in trial.params} == set(domain.params)


# Checkpoints and budgets


def test_a_study_finds_the_checkpoints_of_its_own_trials_and_of_no_other_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promoted trial carries on the one that it comes from."""
    monkeypatch.chdir(tmp_path)
    found: list[tuple[float, list[str]]] = []

    def objective(x: float, context: Context) -> float:
        assert context.budget is not None
        found.append((context.budget, sorted(path.read_text() for path in context.checkpoint_dir.iterdir())))
        (context.checkpoint_dir / f"{context.budget:g}").write_text(f"{x!r} at {context.budget:g}")
        return x

    for seed in (0, 1):
        found.clear()
        study = shadho_celery.minimize(
            objective,
            hp.uniform("x", 0, 1),
            trials=4,
            seed=seed,
            fidelity={"least": 1, "most": 3, "eta": 3, "how": "halving"},
        )
        best = study.best
        assert best is not None
        assert found == [*[(1.0, [])] * 3, (3.0, [f"{best.params['x']!r} at 1"])]


def test_a_whole_budget_counts_steps_after_a_resume_too() -> None:
    """Stores give budgets back as floats, which `range` refuses."""
    steps: list[int] = []

    def objective(x: float, context: Context) -> float:
        budget: Any = context.budget
        steps.append(len(range(budget)))
        return x

    for trials in (7, 13):
        study = shadho_celery.minimize(
            objective,
            hp.uniform("x", 0, 1),
            trials=trials,
            seed=0,
            fidelity={"least": 1, "most": 9, "how": "halving"},
            store="sqlite:///s.db",
            study="s",
            resume=trials > 7,
        )
    assert steps == [1] * 9 + [3] * 3 + [9]
    assert {trial.state for trial in study.trials} == {S.COMPLETE}


@pytest.mark.parametrize("budgets", [3, [1, 2], "x", {"least": 1e-308, "most": 1e308}])
def test_budgets_that_are_no_ladder_are_refused_before_anything_runs(budgets: Any) -> None:
    with pytest.raises(UsageError, match="fidelity: "):
        shadho_celery.minimize(x_squared, SPACE, trials=1, fidelity=budgets)


def test_a_search_whose_first_trials_fail_alike_stops_and_says_so() -> None:
    def objective(params: object) -> float:
        raise KeyError("lr")

    with pytest.warns(UserWarning, match=r"the first 10 trials have all failed with KeyError: 'lr' \(test_search.py"):
        study = shadho_celery.minimize(objective, hp.uniform("x", 0, 1), trials=50)
    assert len(study.trials) == 10
    assert len(shadho_celery.minimize(objective, hp.uniform("x", 0, 1), trials=50, max_failures=0).trials) == 50


# Ends


def test_a_search_ends_after_so_many_trials_without_a_lower_loss() -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.5, 1.5, 0.0])
    options: dict[str, Any] = {"sampler": "random", "seed": 0, "store": "sqlite:///s.db", "study": "s"}
    study = shadho_celery.minimize(lambda _: next(losses), SPACE, early_stop=3, **options)
    assert [trial.loss for trial in study.trials] == [3.0, 2.0, 2.5, 2.0, 1.0, 1.5, 1.5, 1.5]
    again = shadho_celery.minimize(lambda _: 5.0, SPACE, early_stop=5, resume=True, **options)
    assert len(again.trials) == 10


def test_failures_are_no_gain_and_a_search_may_have_no_other_end() -> None:
    def fails(_: Any) -> float:
        raise ValueError("no")

    study = shadho_celery.minimize(fails, SPACE, early_stop=4, max_failures=0)
    assert study.count(S.FAILED) == study.count() == 4
    with pytest.raises(UsageError, match=r"early_stop|early-stop|seconds"):
        shadho_celery.minimize(x_squared, SPACE)
