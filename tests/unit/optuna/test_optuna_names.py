"""`shadho_celery.optuna`: Optuna's interface over studies of this package."""

from __future__ import annotations

import binascii
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from services.cases import cases

import shadho_celery.optuna as here
from shadho_celery import load_study
from shadho_celery.core.trial import TrialState as State
from shadho_celery.errors import NoSuccessfulTrial, SpaceError, StudyExists, StudyNotFound, UsageError
from shadho_celery.objective.sources import function_version
from shadho_celery.optuna.study import MaxTrialsCallback
from shadho_celery.optuna.trial import FrozenTrial, TrialState
from shadho_celery.program import study as program

#: URL of a store in memory, other than the default
MEMORY = "sqlite:///:memory:"


def parabola(trial: here.Trial) -> float:
    x = trial.suggest_float("x", -10, 10)
    for step in range(3):
        trial.report(x**2 + 1 / (step + 1), step)
        if trial.should_prune():
            raise here.TrialPruned
    trial.set_user_attr("name", f"trial {trial.number}")
    return x**2 + trial.suggest_categorical("kind", [1, 0])


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/studies.db"


def test_a_study_is_optimised_and_read() -> None:
    study = here.create_study(sampler=here.samplers.TPESampler(seed=1))
    study.optimize(parabola, n_trials=15)
    study.optimize(parabola, n_trials=15)
    assert [trial.number for trial in study.trials] == [*range(30)]
    best = study.best_trial
    assert best.value == study.best_value == min(trial.value or 0.0 for trial in study.get_trials(states=[best.state]))
    assert study.best_params == best.params
    assert best.params.keys() == best.distributions.keys() == {"x", "kind"}
    assert best.user_attrs == {"name": f"trial {best.number}"}
    assert best.intermediate_values.keys() == {0, 1, 2}
    assert best.last_step == 2
    assert best.duration is not None
    pruned = study.get_trials(states=[TrialState.PRUNED])
    assert 0 < len(pruned) < 25
    assert all(trial.value == trial.intermediate_values[trial.last_step or 0] for trial in pruned)


def test_the_table_has_the_columns_of_optuna() -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tables = []
    for each in (here, optuna):
        one, several = each.create_study(), each.create_study(directions=["minimize", "maximize"])
        one.optimize(parabola if each is here else _theirs(optuna), n_trials=3)
        several.optimize(lambda trial: (trial.suggest_float("y", 0, 1), 1.0), n_trials=3)
        tables.append([[*study.trials_dataframe().columns] for study in (one, several)])
    assert tables[0] == tables[1]


def _theirs(optuna: Any) -> Callable[[Any], float]:
    def objective(trial: Any) -> float:
        trial.set_user_attr("name", "a")
        return float(trial.suggest_float("x", -10, 10) + trial.suggest_categorical("kind", [1, 0]))

    return objective


def test_losses_are_maximised_where_optuna_does() -> None:
    study = here.create_study(direction="maximize")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=10)
    assert study.best_value == max(trial.params["x"] for trial in study.trials)
    several = here.create_study(directions=["minimize", "maximize"])
    several.optimize(lambda trial: (x := trial.suggest_float("x", 0, 1), x**2), n_trials=10)
    assert len(several.best_trials) == 10
    assert several.trials[0].values == [(x := several.trials[0].params["x"]), x**2]
    with pytest.raises(RuntimeError, match="best_trials"):
        _ = several.best_trial
    with pytest.raises(RuntimeError, match="several values"):
        _ = several.trials[0].value


def test_an_exception_ends_the_search_unless_it_is_caught() -> None:
    study = here.create_study()
    with pytest.raises(ZeroDivisionError):
        study.optimize(lambda trial: 1 / (trial.number - 1), n_trials=9)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL"]
    with pytest.raises(ZeroDivisionError):
        study.optimize(lambda trial: 1 / 0, n_trials=9, callbacks=[lambda study, trial: {}["callback"]])
    caught, callbacks = here.create_study(), [lambda study, trial: {3: 1.0}.get(trial.number, 0.0) and {}["callback"]]
    with pytest.raises(KeyError, match="callback"):
        caught.optimize(lambda n: 1 / (n.number - 1), n_trials=9, catch=(ZeroDivisionError,), callbacks=callbacks)
    assert [trial.state.name for trial in caught.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    with pytest.raises(NoSuccessfulTrial):
        _ = here.create_study().best_trial
    with pytest.raises(ValueError, match="has no successful trial"):
        _ = here.create_study().best_value


def test_callbacks_and_objectives_may_stop_and_enqueue() -> None:
    def objective(trial: here.Trial) -> float:
        if trial.number == 7:
            trial.study.stop()
        return trial.suggest_float("x", 0, 1)

    def callback(study: here.Study, trial: FrozenTrial) -> None:
        if trial.number == 2:
            study.enqueue_trial({"x": 0.25})

    study = here.create_study()
    study.optimize(objective, callbacks=[callback])
    assert len(study.trials) == 8
    assert study.trials[3].params == {"x": 0.25}
    study.optimize(objective, n_trials=50, callbacks=[MaxTrialsCallback(12)])
    assert len(study.trials) == 12
    with pytest.raises(RuntimeError, match="objective or a callback"):
        study.stop()


def test_trials_are_asked_for_and_told() -> None:
    study = here.create_study(direction="maximize")
    one, two, three, four = (study.ask({"x": here.distributions.FloatDistribution(0, 1)}) for _ in range(4))
    assert study.tell(two.number, 0.5).params == two.params
    assert study.tell(one, state=TrialState.FAIL).state is TrialState.FAIL
    three.report(0.25, step=1)
    assert study.tell(three, state=TrialState.PRUNED).value == 0.25
    assert study.trials[3].state is TrialState.RUNNING
    with pytest.raises(UsageError, match="has its result already"):
        study.tell(two, 3.0)
    other = here.create_study(study_name=study.study_name)
    others = [other.ask() for _ in range(4)]
    with pytest.raises(UsageError, match="trial 3 is one of another study"):
        study.tell(others[3], 1.0)
    with pytest.raises(UsageError, match="trial 4 was not asked for here"):
        study.tell(4, 1.0)
    study.tell(four, 0.75)
    assert study.best_value == 0.75


def test_points_and_trials_from_elsewhere_are_added() -> None:
    study = here.create_study()
    laws = {"x": here.distributions.IntDistribution(0, 9), "kind": here.distributions.CategoricalDistribution(["a"])}
    for x in range(5):
        study.add_trial(here.create_trial(params={"x": x, "kind": "a"}, distributions=laws, value=float(x)))
    for trial in study.trials[1:3]:
        study.add_trial(trial)
    study.enqueue_trial({"x": 9})
    study.enqueue_trial({"x": 4}, skip_if_exists=True)
    study.optimize(lambda trial: trial.suggest_int("x", 0, 20) + 1, n_trials=2)
    assert [trial.params["x"] for trial in study.trials[:8]] == [0, 1, 2, 3, 4, 1, 2, 9]
    assert study.best_trial.params == {"x": 0, "kind": "a"}
    with pytest.raises(SpaceError, match="'x' is 11, which its law does not have"):
        study.add_trial(here.create_trial(params={"x": 11}, distributions=laws, value=1.0))
    with pytest.raises(SpaceError, match=r"'x' is 2\.7, which its law does not have"):
        study.add_trial(here.create_trial(params={"x": 2.7}, distributions=laws, value=1.0))
    waiting = here.create_trial(params={"x": 1}, distributions=laws, state=TrialState.WAITING)
    with pytest.raises(UsageError, match="this one is WAITING; enqueue it"):
        study.add_trial(waiting)


@pytest.mark.parametrize("state", ["PRUNED", "FAIL", "COMPLETE"])
def test_an_added_trial_keeps_its_state_values_and_reports(state: str) -> None:
    study, laws = here.create_study(direction="maximize"), {"x": here.distributions.FloatDistribution(0, 9)}
    facts: dict[str, Any] = {"params": {"x": 1.0}, "distributions": laws, "state": TrialState[state]}
    study.add_trial(here.create_trial(value=3.0, intermediate_values={1: 2.0, 4: 3.0}, user_attrs={"a": 1}, **facts))
    study.add_trial(here.create_trial(value=5.0, **facts))
    one, other = study.trials
    assert (one.state.name, one.value, other.value) == (state, *((3.0, 5.0) if state != "FAIL" else (None, None)))
    assert (one.params, one.intermediate_values, one.user_attrs) == ({"x": 1.0}, {1: 2.0, 4: 3.0}, {"a": 1})


def test_enqueued_points_survive_the_end_of_the_process(store: str) -> None:
    for stored in (store, here.study.IN_MEMORY):
        study = here.create_study(study_name="one", storage=stored)
        study.enqueue_trial({"x": 0.25, "kind": 0}, user_attrs={"name": "mine", "by": "hand"})
        assert study.trials[0].params.items() >= {"x": 0.25, "kind": 0}.items()
        assert "" not in study.trials[0].params
        if stored == store:
            del study
            study = here.load_study(study_name="one", storage=store)
        study.enqueue_trial({"x": 0.25}, skip_if_exists=True)
        study.optimize(parabola, n_trials=2)
        assert study.trials[0].params == {"x": 0.25, "kind": 0}
        assert study.trials[0].user_attrs == {"name": "trial 0", "by": "hand"}
        assert len(study.trials) == 2


def test_a_study_is_kept_and_found(store: str) -> None:
    first = here.create_study(study_name="one", storage=store, load_if_exists=True)
    first.optimize(parabola, n_trials=4)
    with pytest.raises(StudyExists, match="load_if_exists=True in shadho_celery"):
        here.create_study(study_name="one", storage=store)
    same = here.create_study(study_name="one", storage=store, load_if_exists=True)
    assert len(same.trials) == 4
    same.optimize(parabola, n_trials=4)
    here.load_study(study_name="one", storage=store).optimize(parabola, n_trials=4)
    first.optimize(parabola, n_trials=4)
    assert len(first.trials) == len(same.trials) == load_study(store, "one").count() == 16
    with pytest.raises(StudyNotFound, match="no study named 'on'; did you mean 'one'"):
        here.load_study(study_name="on", storage=store)
    with pytest.raises(KeyError) as found:
        here.load_study(study_name="two", storage=store)
    assert isinstance(found.value, StudyNotFound)
    assert str(found.value).startswith("there is no study named 'two' in")


def test_studies_without_a_name_are_apart(store: str) -> None:
    first, second = (here.create_study(storage=store) for _ in range(2))
    trial = first.ask()
    second.optimize(parabola, n_trials=2)
    first.tell(trial, parabola(trial))
    here.load_study(study_name=second.study_name, storage=store).optimize(parabola, n_trials=2)
    assert (len(first.trials), len(second.trials)) == (1, 4)


class OwnError(LookupError):
    pass


@cases(
    "error, caught, is_caught",
    [
        (None, (), True),
        ("the loss is NaN", (), True),
        ("Traceback (most recent call last):\n  File\nValueError: x", (), False),
        ("...  File\nValueError: x", (), False),
        ("...  File\nValueError: x", (ValueError,), True),
        ("Traceback (most recent call last):\n  File\nother.Error: x", (Exception,), True),
        ("Traceback (most recent call last):\n  File\nFileNotFoundError: x", (OSError,), True),
        (f"Traceback (most recent call last):\n  File\n{__name__}.OwnError: x", (LookupError,), True),
        ("Traceback (most recent call last):\n  File\nbinascii.Error: x", (binascii.Error,), True),
        ("Traceback (most recent call last):\n  File\nother.Error: x", (binascii.Error,), False),
        ("Traceback (most recent call last):\n  File\nother.OtherError: x", (ValueError,), False),
    ],
)
def test_what_fails_in_another_process_is_caught_by_the_name_of_its_class_or_raised(
    error: str | None, caught: tuple[type[Exception], ...], is_caught: bool
) -> None:
    trial = SimpleNamespace(number=3, state=State.FAILED, error=error)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        study = here.create_study(storage=f"sqlite:///{folder}/s.db")
        running = SimpleNamespace(stop=lambda: None)
        patched.setattr(program, "minimize", lambda *_, on_trial, **__: on_trial(running, trial))
        with nullcontext() if is_caught else pytest.raises(RuntimeError, match="trial 3 has failed: ") as found:
            study.optimize(parabola, n_trials=1, n_jobs=2, catch=caught)
        assert is_caught or str(error) in str(found.value)


def test_an_objective_has_the_version_that_it_has_on_workers(store: str) -> None:
    here.create_study(study_name="one", storage=store).optimize(parabola, n_trials=1)
    assert load_study(store, "one").trials[0].record.outcome.code == function_version(parabola)
    study = here.create_study()
    for factor in (1, 2):
        study.optimize(lambda trial: factor * trial.suggest_float("x", 0, 1), n_trials=2)  # noqa: B023


def test_a_study_without_reports_is_not_warned_of_the_default_pruner() -> None:
    here.create_study().optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=12)


def test_a_second_process_is_told_to_become_a_worker(store: str) -> None:
    here.create_study(study_name="one", storage=store).optimize(parabola, n_trials=2)
    script = (
        "import shadho_celery.optuna as optuna\n"
        f"study = optuna.load_study(study_name='one', storage={store!r})\n"
        "print(len(study.trials))\n"
        "study.optimize(lambda trial: 1.0, n_trials=1)\n"
    )
    study = here.load_study(study_name="one", storage=store)
    study.ask()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "3\n"
    line = done.stderr.splitlines()[-1]
    assert "one process runs a study: to take part" in line
    assert "be a worker: shadho-celery worker" in line


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: here.pruners.MedianPruner(1, 3), {"how": "median", "startup_trials": 1, "warmup_steps": 3}),
        (here.pruners.NopPruner, {"how": "none"}),
        (lambda: here.pruners.ThresholdPruner(upper=1e9), {"how": "threshold", "upper": 1e9}),
        (lambda: here.pruners.PatientPruner(None, 3), {"how": "patience", "steps": 3}),
        (lambda: here.pruners.HyperbandPruner(2), {"how": "asha", "least": 2}),
        (here.pruners.SuccessiveHalvingPruner, {"how": "asha", "eta": 4}),
    ],
)
def test_a_pruner_is_a_setting_of_this_package(make: Callable[[], Any], setting: object) -> None:
    assert make() == setting
    study = here.create_study(pruner=make())
    study.optimize(parabola, n_trials=3)
    assert len(study.trials) == 3


@pytest.mark.parametrize("name", ["TPESampler", "GPSampler", "CmaEsSampler", "QMCSampler", "RandomSampler"])
def test_a_sampler_is_one_of_this_package(name: str, store: str) -> None:
    sampler = getattr(here.samplers, name)(seed=3)
    study = here.create_study(sampler=sampler, storage=store, study_name="one")
    study.optimize(parabola, n_trials=3)
    assert load_study(store, "one").record.seed == 3
    assert load_study(store, "one").record.in_force["sampler"] == sampler["sampler"]


@pytest.mark.parametrize(
    ("do", "error", "said"),
    [
        (lambda: here.samplers.GridSampler({}), UsageError, "no GridSampler here; BruteForceSampler"),
        (lambda: here.samplers.OtherSampler, AttributeError, "no OtherSampler here; choose one of TPESampler"),
        (lambda: here.samplers.TPESampler(constraints_func=len), UsageError, "the objective returns its constraints"),
        (
            lambda: here.samplers.RandomSampler(1, 2),
            UsageError,
            "RandomSampler: give arguments after the first 1 by name",
        ),
        (lambda: here.pruners.NopPruner(1), UsageError, "NopPruner: give arguments after the first 0 by name"),
        (lambda: here.pruners.WilcoxonPruner, AttributeError, "no WilcoxonPruner here; choose one of Median"),
        (lambda: here.pruners.PatientPruner("none", 3), UsageError, "no wrapped_pruner here; give None"),
        (lambda: here.create_study(direction="up"), UsageError, "direction: .*minimize"),
        (lambda: here.create_study(direction="minimize", directions=["minimize"]), UsageError, "not both"),
        (lambda: here.create_study(sampler="tpe"), UsageError, "'tpe' is no sampler of shadho_celery.optuna"),  # type: ignore[arg-type]
        (lambda: here.create_study(storage=3), UsageError, "store"),  # type: ignore[arg-type]
        (lambda: here.create_study().optimize(parabola, n_jobs=2), UsageError, "n_jobs needs a storage"),
        (lambda: here.create_study(storage=MEMORY).optimize(parabola, n_jobs=2), UsageError, "n_jobs needs a storage"),
        (lambda: here.create_study().trials_dataframe(multi_index=True), UsageError, "no argument multi_index"),  # type: ignore[call-arg]
    ],
)
def test_what_is_not_there_is_refused_by_its_name(do: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        do()


def test_options_of_a_sampler_without_effect_are_named() -> None:
    with pytest.warns(UserWarning, match="TPESampler: multivariate has no effect, because here it is tpe"):
        here.samplers.TPESampler(multivariate=True)
    with pytest.warns(UserWarning, match="TPESampler: multivariate, group have no effect"):
        here.samplers.TPESampler(multivariate=True, group=True)
    with pytest.warns(UserWarning, match="CmaEsSampler: x0 has no effect, because here it is cma"):
        assert here.samplers.CmaEsSampler({"x": 1}, seed=3) == {"sampler": "cma", "seed": 3}
