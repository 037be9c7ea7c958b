"""A user's function is called after each trial that is recorded; what it raises stops nothing."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery import Study, minimize
from shadho_celery.errors import UsageError

SPACE = hp.uniform("x", 0, 1)


def search(on_trial: Any, trials: int = 6, **options: Any) -> Any:
    return minimize(lambda x: x, SPACE, trials=trials, seed=0, sampler="random", on_trial=on_trial, **options)


def test_it_is_called_once_for_each_trial_and_sees_it_recorded() -> None:
    seen: list[tuple[int, Any, int, float]] = []

    def on_trial(study: Any, trial: Any) -> None:
        seen.append((trial.number, study.trial(trial.number).state, study.count("COMPLETE"), study.best.loss))

    study = search(on_trial)
    losses = [trial.loss for trial in study.trials]
    assert seen == [(number, "COMPLETE", number + 1, min(losses[: number + 1])) for number in range(6)]


def test_failed_trials_are_told_too() -> None:
    states: list[str] = []

    def fail(x: float) -> float:
        raise ValueError("no")

    with pytest.warns(UserWarning, match=r"no successful trial \(3 failed\)"):
        minimize(fail, SPACE, trials=3, seed=0, on_trial=lambda study, trial: states.append(trial.state))
    assert states == ["FAILED"] * 3


def test_stop_ends_the_study_as_a_limit_does() -> None:
    study = search(lambda study, trial: study.stop() if trial.number == 2 else None)
    assert study.count("COMPLETE") == 3


def test_a_stopped_study_goes_on_when_it_is_run_again() -> None:
    with Study(SPACE, seed=0, sampler="random") as study:
        study.run(lambda x: x, trials=6, on_trial=lambda running, trial: running.stop())
        assert study.count("COMPLETE") == 1
        study.run(lambda x: x, trials=6)
        assert study.count("COMPLETE") == 6


def test_an_exception_is_warned_of_once_and_loses_nothing() -> None:
    """One line, with the last line of its traceback."""

    def on_trial(study: Any, trial: Any) -> None:
        raise KeyError("mine")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study = search(on_trial)
    [warning] = caught
    said = str(warning.message)
    assert re.fullmatch(
        r"on_trial failed after trial 0: KeyError: 'mine' \(test_on_trial\.py:\d+\); the study continues", said
    )
    assert "\n" not in said
    assert study.count("COMPLETE") == 6


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (3, r"on_trial cannot be called with two arguments: it is 3; write def on_trial\(study, trial\)"),
        (lambda study: None, "on_trial cannot be called with two arguments"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_study(wrong: Any, words: str, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=words):
        search(wrong, store=f"sqlite:///{tmp_path}/shadho.db")
    assert not list(tmp_path.iterdir())


def test_an_exit_in_on_trial_is_a_warning_that_names_the_users_line() -> None:
    def leaves(study: Any, trial: Any) -> None:
        raise SystemExit(3)

    def deletes(study: Any, trial: Any) -> None:
        study.delete()

    for function in (leaves, deletes):
        with pytest.warns(UserWarning, match=r"on_trial failed after trial 0: .*test_on_trial\.py") as said:
            assert search(function).count() == 6
        assert len(said) == 1


def test_a_stopped_study_sends_nothing_more() -> None:
    study = search(lambda study, trial: study.stop() if trial.number == 9 else None, trials=40)
    assert len(study.trials) == 10
