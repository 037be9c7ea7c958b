"""`fmin` and `Trials` are hyperopt's by one changed import; what cannot be honoured is refused by name."""

from __future__ import annotations

import errno
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import hyperopt
import numpy as np
import pytest
from hyperopt import base
from hyperopt.exceptions import AllTrialsFailed, InvalidLoss
from hyperopt.fmin import generate_trials_to_calculate
from hyperopt.tests.unit import test_fmin as theirs
from services.cases import cases

from shadho_celery import STATUS_FAIL, STATUS_OK, Trials, anneal, auto, fmin, gp, hp, rand, space_eval, tpe
from shadho_celery.errors import NoSuccessfulTrial, ShadhoError, UsageError
from shadho_celery.samplers.tpe import TpeSampler

SPACE = {"x": hp.uniform("x", -1, 1)}
quiet = functools.partial(fmin, verbose=False)


def x_squared(values: dict[str, float]) -> float:
    return values["x"] ** 2


# hyperopt's own tests of fmin

#: those that run for seconds run once, by hyperopt's own loop, which is that of our `fmin`, too
SLOW = ("test_quadratic1_rand", "test_loss_threshold", "test_early_stop")
#: all but the one that fails where the machine has other work: it compares seconds
THEIRS = [name for name in vars(theirs) if name.startswith("test_") and name != "test_timeout"]
METHODS = [
    (kind, name)
    for kind in ("TestFmin", "TestGenerateTrialsToCalculate")
    for name in vars(getattr(theirs, kind))
    if name.startswith("test_")
]


@pytest.fixture
def with_our_algorithms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """hyperopt's tests with its own `fmin`, and our `suggest` as `algo`."""
    monkeypatch.setattr(theirs, "tpe", tpe)
    monkeypatch.setattr(theirs, "rand", rand)
    return theirs


@pytest.fixture
def changed(with_our_algorithms: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """hyperopt's tests with the import changed."""
    for name, ours in {"fmin": fmin, "Trials": Trials, "space_eval": space_eval}.items():
        monkeypatch.setattr(theirs, name, ours)
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIRS)
def test_hyperopts_own_tests_pass_with_our_suggest(with_our_algorithms: ModuleType, name: str) -> None:
    getattr(with_our_algorithms, name)()


@pytest.mark.parametrize("name", [name for name in THEIRS if name not in SLOW])
def test_hyperopts_own_tests_pass_with_our_fmin(changed: ModuleType, name: str) -> None:
    getattr(changed, name)()


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_hyperopts_own_cases_of_fmin_pass(changed: ModuleType, kind: str, name: str) -> None:
    case = getattr(changed, kind)(name)
    case.setUp()
    getattr(case, name)()


# Trials


@pytest.mark.parametrize("algo", [None, auto.suggest, tpe.suggest, rand.suggest, anneal.suggest])
def test_trials_are_filled_as_hyperopt_fills_them(algo: Any) -> None:
    space = hp.choice("model", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.quniform("b", 0, 9, 1)}])

    def objective(values: dict[str, float]) -> dict[str, Any]:
        return {"loss": sum(values.values()), "status": STATUS_OK, "given": values, "attachments": {"log": b"text"}}

    trials = Trials()
    best = quiet(objective, space, algo, 20, trials=trials, rstate=np.random.default_rng(0))
    assert len(trials) == 20
    assert trials.tids == [*range(20)]
    assert set(trials.statuses()) == {STATUS_OK}
    assert trials.losses() == [result["loss"] for result in trials.results]
    assert trials.best_trial["result"]["loss"] == min(trials.losses())
    assert trials.argmin == best
    for trial in trials.trials:
        misc, label = trial["misc"], "b" if trial["misc"]["vals"]["model"] == [1] else "a"
        assert misc["idxs"] == {
            name: [trial["tid"]] if name in ("model", label) else [] for name in ("model", "a", "b")
        }
        assert {name: len(found) for name, found in misc["vals"].items()} == {
            name: len(found) for name, found in misc["idxs"].items()
        }
        drawn = {name: found[0] for name, found in misc["vals"].items() if found}
        assert space_eval(space, drawn) == trial["result"]["given"]
        assert trials.trial_attachments(trial)["log"] == b"text"
        assert trial["state"] == hyperopt.JOB_STATE_DONE
        assert trial["refresh_time"] >= trial["book_time"]
    assert sum(map(len, (trials.vals["a"], trials.vals["b"]))) == len(trials.vals["model"]) == 20
    assert pickle.loads(pickle.dumps(trials)).losses() == trials.losses()


@pytest.mark.parametrize("algo", [tpe.suggest, rand.suggest, anneal.suggest])
def test_a_search_is_resumed_by_passing_its_trials_again(algo: Any) -> None:
    trials = Trials()
    quiet(x_squared, SPACE, algo, 10, trials=trials, rstate=np.random.default_rng(0))
    first = trials.vals["x"]
    quiet(x_squared, SPACE, algo, 25, trials=trials, rstate=np.random.default_rng(0))
    assert len(trials) == 25
    assert trials.vals["x"][:10] == first
    assert len(set(trials.vals["x"])) == 25
    quiet(x_squared, SPACE, algo, 25, trials=trials, rstate=np.random.default_rng(0))
    assert len(trials) == 25


def test_known_trials_are_learned_from_without_being_proposed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials()
    quiet(x_squared, SPACE, tpe.suggest, 30, trials=trials, rstate=0)
    asked, told = [], []
    ask, tell = TpeSampler.ask, TpeSampler.tell
    monkeypatch.setattr(TpeSampler, "ask", lambda self, n, *rest: asked.append(n) or ask(self, n, *rest))
    monkeypatch.setattr(
        TpeSampler,
        "tell",
        lambda self, trials: told.extend(trial.outcome.loss for trial in trials) or tell(self, trials),
    )
    quiet(x_squared, SPACE, tpe.suggest, 32, trials=trials, rstate=1)
    assert asked == [1, 1]
    # Nothing is proposed after the last one.
    assert told == trials.losses()[:-1]


def test_many_choices_are_no_matter_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    many = {f"c{n}": hp.choice(f"c{n}", [hp.uniform(f"c{n}_{k}", 0, 1) for k in range(4)]) for n in range(5)}
    quiet(lambda values: 0.0, many, tpe.suggest, 3, rstate=0)
    assert not caplog.records


@pytest.mark.parametrize("wrong", [[], {}, "trials"])
def test_trials_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"trials is .*; give Trials\(\), which is filled, or leave it out"):
        quiet(x_squared, SPACE, tpe.suggest, 3, trials=wrong)


def test_failed_trials_have_no_loss_and_without_any_success_there_is_no_argmin() -> None:
    trials = Trials()
    with pytest.raises(AllTrialsFailed, match=r"none of 3 trials has succeeded.*the last one: .*'fail'"):
        quiet(lambda _: {"status": STATUS_FAIL}, SPACE, rand.suggest, 3, trials=trials)
    assert trials.statuses() == [STATUS_FAIL] * 3
    assert trials.losses() == [None] * 3


def test_an_objective_that_only_raises_has_no_argmin_and_the_error_names_its_failure() -> None:
    def objective(values: dict[str, float]) -> float:
        raise ArithmeticError("never")

    with pytest.raises(NoSuccessfulTrial, match=r"none of 3 trials has succeeded.*ArithmeticError.*never"):
        quiet(objective, SPACE, rand.suggest, 3, catch_eval_exceptions=True)


# Exceptions


def test_an_objectives_exception_is_the_callers() -> None:
    class Mine(Exception):
        pass

    def objective(values: dict[str, float]) -> float:
        raise Mine("mine")

    with pytest.raises(Mine, match="mine"):
        quiet(objective, SPACE, tpe.suggest, 5)
    with pytest.raises(InvalidLoss):
        quiet(lambda _: {"status": STATUS_OK}, SPACE, tpe.suggest, 5)
    trials = Trials()
    quiet(objective, SPACE, tpe.suggest, 5, trials=trials, catch_eval_exceptions=True, return_argmin=False)
    assert len(trials) == 0
    assert [trial["misc"]["error"][1] for trial in trials._dynamic_trials] == ["mine"] * 5


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"loss": 1.0}, r"has no status; let it return one number, or .*STATUS_OK}$"),
        ({"losses": {"a": 1.0}}, r"has no status; .* several losses are for minimize\(\.\.\., objectives=\.\.\.\)$"),
    ],
)
def test_a_result_without_a_status_is_refused_in_one_line(result: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        quiet(lambda _: result, SPACE, tpe.suggest, 5)


def test_an_interrupt_is_the_callers_and_the_trials_stay() -> None:
    trials = Trials()

    def objective(values: dict[str, float]) -> float:
        if len(trials) == 4:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        quiet(objective, SPACE, tpe.suggest, 9, trials=trials)
    assert len([loss for loss in trials.losses() if loss is not None]) == 3


# Algorithms


@pytest.mark.parametrize(
    ("algo", "about"),
    [
        ("bayes", "'bayes'"),
        (3, "is 3; give auto.suggest"),
    ],
)
def test_an_algo_that_is_not_known_is_refused_by_name(algo: Any, about: str) -> None:
    with pytest.raises(UsageError, match=f"algo.*{about}"):
        quiet(x_squared, SPACE, algo, 3)


def drawn(algo: Any, trials: int = 30, **options: Any) -> list[float]:
    found = Trials()
    quiet(x_squared, SPACE, algo, trials, trials=found, rstate=np.random.default_rng(0), **options)
    values: list[float] = found.vals["x"]
    return values


@pytest.mark.parametrize(
    "partial",
    [
        functools.partial(anneal.suggest, shrink_coef=2.0),
        functools.partial(anneal.suggest, avg_best_idx=9.0),
    ],
)
def test_options_of_hyperopts_own_algorithms_are_honoured(partial: Any) -> None:
    plain = drawn(partial.func)
    changed = drawn(partial)
    assert len(changed) == 30
    assert changed != plain


def test_options_of_hyperopts_tpe_have_no_effect_which_a_warning_says() -> None:
    with pytest.warns(UserWarning, match="no effect here: n_startup_jobs, gamma"):
        found = drawn(functools.partial(tpe.suggest, n_startup_jobs=2, gamma=0.9))
    assert found == drawn(tpe.suggest)


@pytest.mark.slow
def test_tpe_is_the_default_and_the_seed_decides() -> None:
    assert drawn(None) == drawn(tpe.suggest) != drawn(rand.suggest)
    seeds: list[Callable[[int], Any]] = [np.random.default_rng, np.random.RandomState, int]
    for make in seeds:
        found = [quiet(x_squared, SPACE, rand.suggest, 3, rstate=make(seed)) for seed in (1, 1, 2)]
        assert found[0] == found[1] != found[2]


def test_the_seed_may_stand_in_hyperopts_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPEROPT_FMIN_SEED", "7")
    assert quiet(x_squared, SPACE, rand.suggest, 3) == quiet(x_squared, SPACE, rand.suggest, 3)
    with pytest.raises(UsageError, match="rstate is 'seven'"):
        quiet(x_squared, SPACE, rand.suggest, 3, rstate="seven")


# Limits and the rest


def test_the_time_is_a_limit() -> None:
    trials = Trials()
    quiet(x_squared, SPACE, rand.suggest, 10**9, timeout=0.2, trials=trials)
    assert 0 < len(trials) < 10**6


def test_a_loss_below_the_threshold_ends_the_search() -> None:
    trials = Trials()
    quiet(x_squared, SPACE, rand.suggest, 1000, loss_threshold=0.01, trials=trials, rstate=0)
    assert trials.losses()[-1] < 0.01
    assert min(trials.losses()[:-1]) >= 0.01


def test_known_points_are_evaluated_first_even_outside_of_the_space() -> None:
    seen: list[float] = []

    def objective(values: dict[str, float]) -> float:
        seen.append(values["x"])
        return values["x"] ** 2

    quiet(objective, SPACE, tpe.suggest, 6, points_to_evaluate=[{"x": 0.25}, {"x": -7.0}])
    assert seen[:2] == [0.25, -7.0]
    # As in hyperopt, beside the other trials.
    assert len(seen) == 8
    with pytest.raises(UsageError, match="leave out one of trials and points_to_evaluate"):
        quiet(objective, SPACE, tpe.suggest, 6, points_to_evaluate=[{"x": 0.25}], trials=Trials())


def test_several_trials_may_be_queued_at_once() -> None:
    for algo in (tpe.suggest, gp.suggest):
        assert len(drawn(algo, 23, max_queue_len=5)) == 23


def test_the_trials_are_kept_in_a_file_and_taken_from_it(tmp_path: Path) -> None:
    file = str(tmp_path / "trials.pkl")
    quiet(x_squared, SPACE, rand.suggest, 4, trials_save_file=file, rstate=0)
    seen: list[dict[str, float]] = []
    quiet(lambda values: float(bool(seen.append(values))), SPACE, rand.suggest, 6, trials_save_file=file, rstate=0)
    assert len(seen) == 2


def test_saved_trials_stay_whole_if_they_cannot_be_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trials.pkl"
    quiet(x_squared, SPACE, rand.suggest, 4, trials_save_file=str(file), rstate=0)
    before = file.read_bytes()

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fill)
    with pytest.raises(UsageError, match=r"trials_save_file .*trials.pkl cannot be written: No space left"):
        quiet(x_squared, SPACE, rand.suggest, 6, trials_save_file=str(file), rstate=0)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1])])
def test_a_file_without_trials_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "trials.pkl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"trials_save_file .*trials.pkl"):
        quiet(x_squared, SPACE, rand.suggest, 6, trials_save_file=str(file))
    assert file.read_bytes() == content


def test_a_progress_bar_is_shown_unless_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(x_squared, SPACE, rand.suggest, 3)
    fmin(x_squared, SPACE, rand.suggest, 3, show_progressbar=False)
    assert capsys.readouterr() == ("", "")
    fmin(x_squared, SPACE, rand.suggest, 3)
    assert "3/3" in "".join(capsys.readouterr())


def test_trials_that_other_processes_evaluate_are_refused() -> None:
    class Elsewhere(hyperopt.Trials):  # type: ignore[misc]
        asynchronous = True

    with pytest.raises(UsageError, match="trials of Elsewhere are evaluated by other processes"):
        quiet(x_squared, SPACE, rand.suggest, 3, trials=Elsewhere())


def test_an_unknown_argument_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="max_eval"):
        fmin(x_squared, SPACE, rand.suggest, max_eval=3)  # type: ignore[call-arg]


def test_without_a_trial_there_is_no_argmin_and_the_error_says_why() -> None:
    with pytest.raises(ShadhoError, match=r"No trial was run.*max_evals"):
        fmin(lambda x: x, hp.uniform("x", 0, 1), max_evals=0, verbose=False)


def test_a_point_to_evaluate_may_leave_labels_out() -> None:
    """Missing labels are proposed, evaluated and recorded in the document, as hyperopt requires."""
    seen: list[dict[str, Any]] = []
    space = {"x": hp.uniform("x", -5, 5), "kind": hp.choice("kind", ["a", {"depth": hp.randint("depth", 3)}])}
    trials = generate_trials_to_calculate([{"x": 1.0}, {"kind": 1}])

    def noted(values: dict[str, Any]) -> float:
        seen.append(values)
        return float(values["x"] ** 2)

    fmin(noted, space, tpe.suggest, 4, trials=trials, rstate=np.random.default_rng(0), verbose=False)
    assert seen[0]["x"] == 1.0
    assert seen[1]["kind"]["depth"] in range(3)
    drawn = [base.spec_from_misc(document["misc"]) for document in trials.trials]
    assert [each["x"] for each in drawn] == [values["x"] for values in seen]
    assert all(("depth" in each) is (each["kind"] == 1) for each in drawn)


@pytest.mark.slow
@cases("algo", [tpe.suggest, rand.suggest, None])
@cases(
    "space",
    [
        hp.choice("c", [3, 1, 2]),
        hp.choice("c", [3, {"k": hp.randint("k", 2)}]),
        {"c": hp.randint("c", 3)},
        hp.quniform("c", 0, 1, 0.5),
        hp.uniformint("c", 1, 2),
        hp.choice("c", [1]),
    ],
)
def test_a_finite_space_is_searched_for_all_evaluations_and_again_when_it_is_resumed(algo: Any, space: Any) -> None:
    """Points are repeated once all have been tried, as losses may be noisy."""
    trials, tried = Trials(), []
    for total in (10, 14):
        quiet(lambda values: float(len(tried.append(str(values)) or tried)), space, algo, total, trials=trials)
        assert len(trials) == len(tried) == total
