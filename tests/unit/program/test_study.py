"""A study in one's own loop: ask, tell, enqueue, run; misuse is refused by name and loses nothing."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery import Study, load_study, minimize
from shadho_celery.core.trial import TrialState
from shadho_celery.errors import ShadhoError, StudyLocked, UsageError
from shadho_celery.samplers.tpe import TpeSampler

S = TrialState
STORE = "sqlite:///shadho.db"
SPACE = {"x": hp.uniform("x", -1, 1)}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def params(study: Any) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


# Rows that somebody deletes meanwhile


def test_deleted_rows_of_trials_that_run_are_written_again_and_lost_results_are_named() -> None:
    with Study(SPACE, store=STORE, study="s") as study:
        asked = [study.ask() for _ in range(4)]
        for trial in asked[:2]:
            study.tell(trial, {"loss": 0.5, "epochs": 3})
        with closing(sqlite3.connect("shadho.db")) as other, other:
            other.execute("DELETE FROM trials WHERE number IN (1, 2, 3)")
        told = study.tell(asked[2], {"loss": 0.25, "epochs": 4})
        assert (told.loss, told.metrics, told.params) == (0.25, {"epochs": 4}, asked[2].params)
        with pytest.warns(UserWarning, match="deleted from the store") as warned:
            study.close()
    again, lost = [str(each.message) for each in warned]
    assert "rows deleted from the store while the study ran are written again: trials 2, 3" in again
    assert "results were deleted from the store while the study ran: trial 1; restore" in lost
    assert [trial.number for trial in load_study(STORE, "s").trials] == [0, 2, 3]


# Several threads


@pytest.mark.parametrize("store", ["sqlite://", STORE])
def test_eight_threads_ask_report_and_tell_and_all_of_it_is_recorded(store: str) -> None:
    with Study(SPACE, store=store, sampler="random", seed=1) as study:

        def work(_: int) -> tuple[int, float | None]:
            trial = study.ask()
            study.report(trial, 1, 0.5)
            told = study.tell(trial, trial.values["x"] ** 2)
            study.enqueue([{"x": 0.25}])
            assert study.best.loss is not None
            return told.number, told.loss

        with ThreadPoolExecutor(8) as pool:
            told = dict(pool.map(work, range(40)))
        assert len(told) == 40
        assert {trial.number: trial.loss for trial in study.trials if trial.loss is not None} == told


def test_while_a_study_runs_only_its_own_thread_may_enqueue() -> None:
    refused = []

    def square(values: dict[str, float]) -> float:
        return values["x"] ** 2

    with Study(SPACE, seed=1) as study, ThreadPoolExecutor(1) as pool:

        def on_trial(_: object, trial: Any) -> None:
            if trial.number:
                return
            study.enqueue([{"x": 0.25}])
            for call in (study.ask, lambda: study.run(square, trials=3), study.close):
                with pytest.raises(UsageError, match=r"is active in run\(\); call this after it has returned"):
                    call()
            for call in (study.ask, lambda: study.enqueue([{"x": 0.5}]), study.close):
                refused.append(pool.submit(call).exception(timeout=60))

        study.run(square, trials=5, on_trial=on_trial)
        assert {"x": 0.25} in params(study)
        assert [type(each) for each in refused] == [UsageError] * 3
        assert study.tell(study.ask(), 0.5).number == 5


def test_a_forked_process_does_not_change_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    with Study(SPACE) as study:
        child = os.getpid() + 1
        monkeypatch.setattr(os, "getpid", lambda: child)
        study.close()
        with pytest.raises(UsageError, match="was opened by process"):
            study.ask()
        monkeypatch.undo()
        assert study.ask().number == 0


# Several losses, and constraints

TWO = {"error": "minimize", "accuracy": "maximize"}


def two(values: dict[str, float]) -> dict[str, Any]:
    x = values["x"]
    return {"losses": {"error": x**2, "accuracy": 1 - (x - 1) ** 2}, "constraints": {"above": x - 0.8}}


def test_a_front_is_kept_and_read_again_in_the_users_own_numbers() -> None:
    found = minimize(two, SPACE, trials=30, seed=0, store=STORE, study="two", objectives=TWO)
    assert found.objectives == TWO
    for study in (found, load_study(STORE, "two")):
        front = study.front
        assert front
        assert study.best == front[0]
        errors, accuracies = ([each.losses[name] for each in front] for name in TWO)
        assert errors == sorted(errors)
        assert accuracies == sorted(accuracies)
        assert all(each.is_feasible and each.losses == two(each.values)["losses"] for each in front)
        covered = study.coverage({"error": 1.0, "accuracy": -1.0})
        assert covered is not None
        assert covered.reference == {"error": 1.0, "accuracy": -1.0}
        assert 1.0 < covered.hypervolume < 2.0


@pytest.mark.parametrize(
    "reference",
    [
        {"error": 1.0},
        {"error": "z", "accuracy": 2},
        5,
        [1, 2],
        *({"error": 1, "accuracy": x} for x in (math.nan, None)),
    ],
)
def test_a_reference_point_that_cannot_be_is_refused_in_one_line(reference: Any) -> None:
    found = minimize(two, SPACE, trials=3, seed=0, objectives=TWO)
    with pytest.raises(UsageError, match=r"^the reference point .* should have the losses error, accuracy, a finite"):
        found.coverage(reference)


def test_a_study_goes_on_with_its_objectives_and_refuses_others() -> None:
    minimize(two, SPACE, trials=5, seed=0, store=STORE, study="two", objectives=TWO)
    again = minimize(two, SPACE, trials=8, store=STORE, study="two", resume=True)
    assert (again.counts, again.objectives) == ({"COMPLETE": 8}, TWO)
    with pytest.raises(UsageError, match="was started with other objectives"):
        minimize(two, SPACE, trials=9, store=STORE, study="two", resume=True, objectives={"error": "minimize"})


def test_one_loss_may_be_maximised_up_to_a_target() -> None:
    study = minimize(lambda v: v["x"], SPACE, trials=100, seed=0, target=0.9, objectives={"x": "maximize"})
    assert study.best is not None
    assert study.best.losses["x"] == study.best.values["x"] >= 0.9
    assert len(study.trials) < 100
    assert (study.front, study.coverage()) == ([], None)


def test_losses_that_are_not_those_of_the_study_are_failures() -> None:
    with Study(SPACE, seed=0, objectives=TWO) as study:
        told = study.tell(study.ask(), {"losses": {"error": 1.0}})
        assert told.state is S.FAILED
        assert "have no accuracy" in str(told.error)
        assert study.tell(study.ask(), {"losses": {"error": 1, "accuracy": 0}}).losses == {"error": 1, "accuracy": 0}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"objectives": {"error": "upwards"}},
            "invalid enum value 'upwards'; losses by name",
        ),
        ({"objectives": {}}, "objectives: {} is not allowed; its length must be at least 1; losses by name"),
        ({"objectives": dict.fromkeys("abcdefghijk", "minimize")}, "its length must be at most 10; losses by name"),
        ({"objectives": {"": "minimize"}}, "objectives: not allowed as a key: ''; losses by name"),
        ({"objectives": {"a" * 61: "minimize"}}, "objectives: not allowed as a key: 'aaaa"),
        ({"objectives": {1: "minimize"}}, "objectives: the key 1 is not a text; losses by name"),
        ({"objectives": ["error"]}, "objectives: this is not a table but a list"),
        ({"objectives": TWO, "target": 0.5}, "a target is for one loss"),
        ({"objectives": TWO, "sampler": "gp"}, "sampler gp learns one loss"),
        ({"objectives": TWO, "fidelity": {"least": 1, "most": 9, "how": "dehb"}}, "how: dehb learns one loss"),
    ],
)
def test_objectives_that_cannot_be_are_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        minimize(two, SPACE, trials=5, **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# Ask and tell


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_loop_of_ones_own_gets_the_trials_that_minimize_runs(sampler: str) -> None:
    with Study(SPACE, seed=3, sampler=sampler) as study:
        for _ in range(25):
            trial = study.ask()
            assert trial.values == {"x": trial.params["x"]}
            told = study.tell(trial, trial.values["x"] ** 2)
            assert (told.state, told.loss) == (S.COMPLETE, trial.params["x"] ** 2)
    other = minimize(lambda values: values["x"] ** 2, SPACE, trials=25, seed=3, sampler=sampler)
    assert sorted(map(str, params(study))) == sorted(map(str, params(other)))


def test_several_trials_may_be_asked_for_at_once_and_told_in_any_order() -> None:
    with Study(SPACE, seed=0) as study:
        asked = [study.ask() for _ in range(4)]
        assert [trial.number for trial in asked] == [0, 1, 2, 3]
        assert study.count("RUNNING") == 4
        for trial in reversed(asked):
            study.tell(trial, trial.number)
        assert [trial.loss for trial in study.trials] == [0.0, 1.0, 2.0, 3.0]
        assert study.best is not None
        assert study.best.number == 0


def test_a_result_is_what_an_objective_returns_or_an_error() -> None:
    with Study(SPACE, seed=0) as study:
        assert study.tell(study.ask(), {"loss": 1, "size": 3}).metrics == {"size": 3}
        assert study.tell(study.ask(), math.nan).state is S.FAILED
        assert study.tell(study.ask(), {"los": 1}).state is S.FAILED
        assert "the disk" in str(study.tell(study.ask(), error=OSError("the disk")).error)
        assert study.tell(study.ask(), None, error="by hand").error == "by hand"
        trial = study.ask()
        for wrong in ({}, {"result": 1.0, "error": "both"}):
            with pytest.raises(UsageError, match="either a result or an error"):
                study.tell(trial, **wrong)
        study.tell(trial, 0.5)


def test_a_result_of_none_is_the_failure_that_it_is_in_a_run() -> None:
    with Study(SPACE, seed=0) as study:
        told = study.tell(study.ask(), None)
        with pytest.warns(UserWarning, match=r"no successful trial \(2 failed\)"):
            study.run(lambda values: None, trials=2)
        assert [trial.state for trial in study.trials] == [S.FAILED] * 2
        assert [told.error] * 2 == [trial.error for trial in study.trials]
        assert str(told.error).startswith("the objective's return value is None; return its loss")


def test_trials_that_were_evaluated_elsewhere_are_learned_from_at_once() -> None:
    points = [{"x": place / 100} for place in range(100)]
    with Study(SPACE, seed=0, sampler="tpe") as study:
        study.add(points, [{"loss": abs(point["x"] - 0.7), "size": 3} for point in points[:-1]] + [math.nan])
        assert study.count("COMPLETE") == 99
        assert study.trials[99].state is S.FAILED
        assert study.best is not None
        assert (study.best.values, study.best.metrics) == ({"x": 0.7}, {"size": 3})
        with pytest.raises(UsageError, match="100 points cannot have 1 results"):
            study.add(points, [0.0])
        with pytest.raises(UsageError, match="point 0"):
            study.add([{"y": 1}], [0.0])
        asked = [study.ask() for _ in range(20)]
        assert [trial.number for trial in asked] == [*range(100, 120)]
        assert sum(abs(trial.params["x"] - 0.7) < 0.3 for trial in asked) > 10


def test_a_trial_is_told_once_and_to_its_own_study() -> None:
    with Study(SPACE, seed=0) as study, Study(SPACE, seed=0) as other:
        trial = study.ask()
        other.ask()
        with pytest.raises(UsageError, match="of another study"):
            other.tell(trial, 1.0)
        study.tell(trial, 1.0)
        with pytest.raises(UsageError, match=r"has its result already \(loss 1\)"):
            study.tell(trial, 0.0)
        with pytest.raises(UsageError, match="a trial that ask has returned"):
            study.tell(0, 1.0)  # type: ignore[arg-type]
        assert [each.loss for each in study.trials] == [1.0]


def test_what_was_asked_and_never_told_is_asked_again_by_the_next_run() -> None:
    with Study(SPACE, seed=0, store=STORE, study="mine") as study:
        study.tell(study.ask(), 0.0)
        lost = study.ask()
    with pytest.raises(UsageError, match="is closed"):
        study.ask()
    with Study(SPACE, store=STORE, study="mine", resume=True) as study:
        again = study.ask()
        assert (again.number, again.params, again.seed) == (lost.number, lost.params, lost.seed)
        study.tell(again, 1.0)
        assert study.count("COMPLETE") == study.count() == 2


def test_the_trials_of_a_process_that_died_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(SPACE, seed=0, store=STORE, study="mine")
    lost = study.ask()
    # As a dead process leaves it: neither given back nor unlocked.
    study._is_open = False
    with pytest.raises(StudyLocked):
        Study(SPACE, store=STORE, study="mine", resume=True)
    study._opened.store.unlock(study.key, study._study.fence)
    with Study(SPACE, store=STORE, study="mine", resume=True) as study:
        assert study.ask().params == lost.params


def test_a_continued_study_has_the_settings_of_before_unless_others_are_given() -> None:
    def opened(**given: Any) -> dict[str, Any]:
        with Study(SPACE, store=STORE, study="mine", **given) as study:
            return dict(study.in_force)

    begun = {"sampler": "tpe", "policy": "cost", "shares": "promise", "pool": None, "pruner": None}
    assert opened(sampler="tpe", shares="promise") == begun
    assert opened(resume=True) == begun
    assert opened(resume=True, shares="uniform") == {**begun, "shares": "uniform"}
    assert opened(resume=True, shares="uniform") == {**begun, "shares": "uniform"}
    assert load_study(STORE, "mine").in_force == {**begun, "shares": "uniform"}


def test_importance_is_a_dict_with_the_most_important_label_first() -> None:
    space = {"x": hp.uniform("x", 0, 1), "noise": hp.uniform("noise", 0, 1)}
    found = minimize(lambda values: values["x"] ** 2, space, trials=60, sampler="random", seed=0).importance()
    assert [*found] == ["x", "noise"]
    assert (found["x"].loss or 0) - (found["x"].loss_error or 0) > 0.5


def test_the_limit_of_the_latest_run_is_recorded() -> None:
    with Study(SPACE, store=STORE, study="mine") as study:
        for limit in (3, 5, None):
            study.run(lambda params: params["x"], trials=limit, target=9.0)
            assert study.record.asked == load_study(STORE, "mine").record.asked == limit
    assert minimize(lambda trial: trial.suggest_float("x", 0, 1), trials=3, store=STORE).record.asked == 3


def test_a_study_with_a_sampler_of_its_own_is_not_continued_with_another_one_unasked() -> None:
    with Study(SPACE, store=STORE, study="mine", seed=0, sampler=TpeSampler) as study:
        assert study.in_force["sampler"] is None
    with pytest.raises(UsageError, match="a sampler of its own: pass that function again"):
        Study(SPACE, store=STORE, study="mine", resume=True)
    with Study(SPACE, store=STORE, study="mine", resume=True, sampler=TpeSampler) as study:
        assert study.in_force["sampler"] is None
    with pytest.warns(UserWarning, match="sampler tpe from now on, of its own until now"):
        study = Study(SPACE, store=STORE, study="mine", resume=True, sampler="tpe")
    with study:
        assert study.in_force["sampler"] == "tpe"


def test_another_sampler_than_before_is_warned_of() -> None:
    options: dict[str, Any] = {"store": STORE, "study": "mine", "progress": False}
    minimize(abs, hp.uniform("x", -1, 1), trials=3, sampler="random", **options)
    with pytest.warns(UserWarning, match="sampler tpe from now on, random until now: it learns from the 3 trials") as w:
        minimize(abs, hp.uniform("x", -1, 1), trials=4, sampler="tpe", resume=True, **options)
    assert [each.filename for each in w] == [__file__]
    minimize(abs, hp.uniform("x", -1, 1), trials=5, resume=True, **options)


def test_rungs_await_the_results_that_they_depend_on() -> None:
    with Study(SPACE, seed=0, fidelity={"least": 1, "most": 3, "eta": 3, "how": "halving"}) as study:
        asked = [study.ask() for _ in range(3)]
        assert [trial.budget for trial in asked] == [1, 1, 1]
        with pytest.raises(UsageError, match="tell the results of trial 0, 1, 2 first"):
            study.ask()
        for trial in asked:
            study.tell(trial, trial.values["x"])
        best = min(asked, key=lambda trial: trial.params["x"])
        promoted = study.ask()
        assert (promoted.budget, promoted.params) == (3, best.params)


def test_a_sampler_of_ones_own_may_be_passed() -> None:
    made: list[str] = []

    def make(subspace: Any, entropy: Any) -> TpeSampler:
        made.append(subspace.name)
        return TpeSampler(subspace, entropy)

    study = minimize(lambda values: values["x"] ** 2, SPACE, trials=8, seed=0, sampler=make)
    assert (study.count("COMPLETE"), set(made)) == (8, {"all"})


# Known points


def test_known_points_run_first_in_order_and_count() -> None:
    points = [{"x": 0.5}, {"x": -1}, {}]
    study = minimize(lambda values: values["x"] ** 2, SPACE, trials=5, seed=0, enqueue=points)
    assert [trial.values["x"] for trial in study.trials][:2] == [0.5, -1.0]
    assert study.count() == 5


def test_points_are_enqueued_while_trials_are_asked_for() -> None:
    with Study(SPACE, seed=0) as study:
        first = study.ask()
        assert study.enqueue([{"x": 0.5}]) == 1
        assert study.ask().values == {"x": 0.5}
        study.tell(first, 1.0)
        assert study.count("RUNNING") == 1


def test_a_refused_point_is_named_and_none_is_enqueued() -> None:
    with Study(SPACE, seed=0) as study:
        with pytest.raises(UsageError, match=r"point 1: 'x': 2.0 is outside"):
            study.enqueue([{"x": 0.5}, {"x": 2}])
        for wrong in ({"x": 0.5}, "x", 3):
            with pytest.raises(UsageError, match="a list of dicts"):
                study.enqueue(wrong)  # type: ignore[arg-type]
        assert study.count() == 0
    with pytest.raises(UsageError, match="point 0"):
        minimize(lambda _: 0.0, SPACE, trials=1, store=STORE, study="mine", enqueue=[{"y": 0.5}])
    assert not Path("shadho.db").exists()
    with pytest.raises(UsageError, match="fidelity"):
        minimize(lambda _: 0.0, SPACE, trials=1, fidelity={"least": 1, "most": 3}, enqueue=[{"x": 0.5}])


@pytest.mark.slow
def test_ten_thousand_points_are_kept_and_the_limit_holds() -> None:
    points = [{"x": place / 10_000} for place in range(10_000)]
    options: dict[str, Any] = {"store": STORE, "study": "many"}
    study = minimize(lambda values: values["x"], SPACE, trials=20, enqueue=points, **options)
    assert (study.count("COMPLETE"), study.count("WAITING")) == (20, 9_980)
    study = minimize(lambda values: values["x"], SPACE, trials=30, resume=True, **options)
    assert [trial.params["x"] for trial in study.trials[:30]] == [point["x"] for point in points[:30]]
    assert study.count("COMPLETE") == 30


# Runs


def test_a_study_may_be_run_and_asked_in_turn() -> None:
    with Study(SPACE, seed=0) as study:
        study.run(lambda values: values["x"] ** 2, trials=3)
        trial = study.ask()
        with pytest.raises(UsageError, match="tell the results of trial 3 first"):
            study.run(lambda values: 0.0, trials=5)
        study.tell(trial, 0.25)
        study.run(lambda values: values["x"] ** 2, trials=6)
        assert study.count("COMPLETE") == 6


def test_a_closed_study_can_be_looked_at() -> None:
    study = minimize(lambda values: values["x"] ** 2, SPACE, trials=3, seed=0, store=STORE, study="mine")
    assert study.running_on is None
    assert study.best is not None
    assert study.best.values == load_study(STORE, "mine").best.values  # type: ignore[union-attr]


# Arguments in Python's words


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"trials": 1, "study": "taken"},
        {"trials": 1, "study": "missing", "resume": True},
        {"trials": 1, "study": "taken", "resume": True, "seed": 5},
        {"trials": 1, "store": "nothing"},
        {"trials": 1, "resume": True, "store": "sqlite:///other.db"},
        {"trials": 1, "trial_timeout": 3},
        {"trials": 1, "workers": 0},
        {"trials": 1, "redis": "redis://nowhere"},
    ],
)
def test_a_refusal_names_arguments_and_no_option_of_the_command_line(wrong: dict[str, Any]) -> None:
    minimize(lambda values: 0.0, SPACE, trials=1, store=STORE, study="taken", seed=0)
    with pytest.raises(ShadhoError) as refused:
        minimize(lambda values: 0.0, SPACE, **{"store": STORE, **wrong})
    assert "--" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_argument_is_refused_with_the_one_that_was_meant() -> None:
    with Study(SPACE) as study:
        calls: dict[str, Callable[..., object]] = {"minimize": minimize, "Study": Study, "Study.run": study.run}
        for name, call in calls.items():
            wrong, meant = ("stady", "study") if call is Study else ("trails", "trials")
            words = rf"^{name} has no argument {wrong}; did you mean {meant}\? its arguments are "
            with pytest.raises(UsageError, match=words):
                call(lambda _: 0.0, **{wrong: 3})


def test_a_loss_that_should_be_large_is_maximised() -> None:
    named: dict[str, Any] = {"store": STORE, "study": "large", "seed": 0, "direction": "maximize"}
    study = minimize(lambda values: values["x"], SPACE, trials=10, **named)
    largest = max(trial.values["x"] for trial in study.trials)
    assert (study.best_loss, study.best_params["x"]) == (largest, largest)
    resumed = minimize(lambda values: values["x"], SPACE, trials=12, resume=True, target=2, **named)
    assert (len(resumed.trials), resumed.best_loss) == (12, max(trial.values["x"] for trial in resumed.trials))


def missing_key(values: dict[str, float]) -> float:
    return values["y"]


def minimize_missing() -> None:
    minimize(missing_key, SPACE, trials=20)


def run_missing() -> None:
    with Study(SPACE) as study:
        study.run(missing_key, trials=20)


@pytest.mark.parametrize("run", [minimize_missing, run_missing])
def test_a_warning_names_the_line_of_the_caller(run: Any) -> None:
    with pytest.warns(UserWarning, match="stopped: the first 10 trials") as warned:
        run()
    assert [each.filename for each in warned] == [__file__]


def test_what_auto_chose_is_kept_until_another_sampler_takes_over() -> None:
    options: dict[str, Any] = {"store": STORE, "study": "mine"}
    minimize(abs, hp.uniform("x", -1, 1), trials=15, seed=0, **options)
    chosen = load_study(STORE, "mine").choices
    assert {*chosen} == {"all"}
    assert chosen["all"].startswith("gp")
    with Study(hp.uniform("x", -1, 1), resume=True, **options) as study:
        assert study.choices == chosen
    with pytest.warns(UserWarning, match="sampler tpe from now on, auto until now"):
        minimize(abs, hp.uniform("x", -1, 1), trials=18, sampler="tpe", resume=True, **options)
    assert load_study(STORE, "mine").choices == {}


def test_a_study_that_goes_on_under_other_code_is_warned_of_with_the_trials_of_each_version() -> None:
    def of_epochs(epochs: int) -> Any:
        return lambda x: float(x**2) / epochs

    space, named = hp.uniform("x", -1, 1), {"store": STORE, "study": "edited", "seed": 0, "sampler": "random"}
    minimize(of_epochs(12), space, trials=3, **named)
    minimize(of_epochs(12), space, trials=4, resume=True, **named)
    found = r"trials of other code: 4 of version [0-9a-f]{12}; .* begin a new study for the new code"
    with pytest.warns(UserWarning, match=found):
        minimize(of_epochs(20), space, trials=6, resume=True, **named)
    with (
        pytest.warns(UserWarning, match=r"other code: 4 of version [0-9a-f]{12}, beside 2 of this version;"),
        Study(space, **{**named, "resume": True}) as study,
    ):
        study.run(of_epochs(20), trials=7)


def test_trials_that_fail_as_floats_are_whole_numbers_get_a_hint_at_uniformint() -> None:
    """Only labels that a law draws as whole floats are named, and only if the failure is one of types."""
    n, q = hp.quniform("n", 1, 9, 1), hp.quniform("q", 0, 1, 0.5)
    space = {"n": n, "q": q, "whole": hp.uniformint("whole", 1, 9), "x": hp.uniform("x", 0, 1)}

    def by_type(values: dict[str, Any]) -> float:
        return float(sum(range(values["n"])))

    def otherwise(values: dict[str, Any]) -> float:
        raise ValueError(f"too large: {values['n']}")

    for objective, hints in ((by_type, 1), (otherwise, 0)):
        with Study(space, seed=0) as study, pytest.warns(UserWarning, match="have all failed"):
            study.run(objective, trials=2, max_failures=2, progress=False)
        error = str(study.trials[0].error)
        assert error.count("n: drawn as float; hp.uniformint draws whole numbers as int") == hints


def test_best_params_are_what_the_objective_got_by_label() -> None:
    options = [{"k": hp.choice("k", [(1, 2), len])}]
    space = {"n": hp.uniformint("n", 1, 9), "e": 2 ** hp.uniformint("e", 1, 3), "o": hp.choice("o", options)}
    with Study(space, seed=0) as study:
        for k in (0, 1):
            study.add([{"n": 3, "e": 2, "o": 0, "k": k}], [1.0 - k])
            assert study.best_params == {"n": 3, "e": 2, "o": "{'k': k}", "k": (1, 2) if k == 0 else len}
            assert {label: type(value) for label, value in study.best_params.items() if label in "ne"} == {
                "n": int,
                "e": int,
            }
            assert study.best.params == {"n": 3.0, "e": 2.0, "o": 0, "k": k}


def test_bounds_that_fail_during_a_run_end_it_and_name_the_point() -> None:
    calls = 0

    def where(values: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls > 150:
            raise KeyError("late")
        return True

    with pytest.raises(UsageError, match=r"where failed for .*'x': .*KeyError: 'late' \(test_study.py:\d+\)"):
        minimize(lambda values: 0.0, {"x": hp.uniform("x", 0, 1)}, trials=200, where=where, progress=False)


def test_other_bounds_are_another_version_of_the_code() -> None:
    """A run that resumes says so, and so does one without bounds."""
    found = []
    for edge in (0.5, 0.5, 0.6, None):
        where = None if edge is None else partial(lambda edge, values: values["x"] < edge, edge)
        with Study({"x": hp.uniform("x", 0, 1)}, where=where) as study:
            found += [trial.code for trial in study.run(lambda values: 0.0, trials=1, progress=False).trials]
    assert found[0] == found[1]
    assert len({*found}) == 3


def test_what_a_trial_has_left_is_copied(tmp_path: Path) -> None:
    def objective(x: float, context: Any) -> float:
        (context.checkpoint_dir / "model").write_text(str(x))
        return x

    study = minimize(objective, hp.uniform("x", 0, 1), trials=3, progress=False)
    study.fetch("best")
    study.fetch(tmp_path / "second", 1)
    assert Path("best/model").read_text() == str(study.best_loss)
    assert Path("second/model").read_text() == str(study.trial(1).loss)
    with pytest.raises(UsageError, match="best is not empty"):
        study.fetch("best")


def test_seconds_beside_the_loss_are_those_of_the_trial() -> None:
    with Study({"x": hp.uniform("x", 0, 1)}) as study:
        told = study.tell(study.ask(), {"loss": 1, "seconds": 90, "accuracy": 0.5})
        assert (told.loss, told.seconds, told.metrics) == (1.0, 90.0, {"accuracy": 0.5})
        assert study.tell(study.ask(), {"loss": 1}).seconds is None
        trial = study.ask()
        for wrong in (-1, True, "fast", 1e11):
            with pytest.raises(UsageError, match=r"seconds: .* is not a duration"):
                study.tell(trial, {"loss": 1, "seconds": wrong})
        assert study.tell(trial, 2.0).loss == 2.0


def test_an_asked_trial_names_the_trial_that_it_continues() -> None:
    ladder = {"most": 52, "how": "asha"}
    with Study({"x": hp.uniform("x", 0, 1)}, fidelity=ladder) as study:
        asked = {}
        for _ in range(40):
            trial = study.ask()
            asked[trial.number] = trial
            study.tell(trial, trial.values["x"])
    assert {trial.budget for trial in asked.values()} == {2, 6, 17, 52}
    assert all(isinstance(trial.budget, int) for trial in asked.values())
    promoted = [trial for trial in asked.values() if trial.budget > 2]
    assert all(trial.values == asked[trial.origin].values for trial in promoted)
    assert {trial.origin for trial in asked.values() if trial.budget == 2} == {None}
