"""A user's function is called once when a run ends, with the reason of the end; what it raises changes nothing."""

from __future__ import annotations

import _thread
import re
import warnings
from typing import Any

import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery import Study, minimize
from shadho_celery.errors import StoreError, UsageError

SPACE = hp.uniform("x", 0, 1)


def search(objective: Any = lambda x: x, **options: Any) -> list[tuple[str, int]]:
    """Run a search. Return the reasons that `on_end` got, and the numbers of trials that it saw."""
    ends: list[tuple[str, int]] = []
    minimize(
        objective,
        options.pop("space", SPACE),
        **{"trials": 6, "seed": 0, "sampler": "random", **options},
        on_end=lambda study, why: ends.append((why, study.count())),
    )
    return ends


@cases(
    "options, why, trials",
    [
        ({}, "6 trials have ended", 6),
        ({"target": 1.0}, "the target was reached", 1),
        ({"early_stop": 2, "objective": lambda x: 1.0}, "2 trials without a better feasible loss", 3),
        ({"seconds": 1e-9}, "the time of the run is over", 0),
        ({"on_trial": lambda study, trial: study.stop()}, "on_trial called study.stop()", 1),
        (
            {"space": hp.choice("x", [0, 1]), "sampler": "grid", "trials": None, "seconds": 60.0},
            "the sampler has no further params, all of its points have been tried",
            2,
        ),
    ],
)
def test_it_is_called_once_with_the_reason_when_all_is_recorded(options: dict[str, Any], why: str, trials: int) -> None:
    assert search(**options) == [(why, trials)]


def test_a_study_whose_trials_all_fail_ends_with_the_failure() -> None:
    def fail(x: float) -> float:
        raise ValueError("mine")

    with pytest.warns(UserWarning, match="max_failures") as said:
        [(why, trials)] = search(fail, max_failures=3)
    assert f"stopped: {why} (max_failures)" in [str(each.message) for each in said]
    assert ("mine" in why, trials) == (True, 3)


def test_ctrl_c_is_a_reason_and_the_study_may_be_changed_in_the_function() -> None:
    def interrupt(x: float) -> float:
        _thread.interrupt_main()
        return x

    reasons: list[str] = []
    with Study(SPACE, seed=0) as study, pytest.warns(UserWarning, match="interrupted"):
        study.run(
            interrupt, trials=5, on_end=lambda found, why: reasons.extend([why, str(found.enqueue([{"x": 0.5}]))])
        )
    assert reasons == ["interrupted: 0 trials have ended", "1"]


def test_an_error_that_ends_the_run_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []

    def full() -> None:
        raise StoreError("the disk is full")

    def run() -> None:
        study.run(lambda x: x, trials=5, on_end=lambda _, why: reasons.append(why))

    with Study(SPACE, seed=0) as study:
        with monkeypatch.context() as patched:
            patched.setattr(study._study, "commit", full)
            with pytest.raises(StoreError):
                run()
        study.close()
        with pytest.raises(UsageError):
            run()
    assert reasons == ["failed: StoreError: the disk is full"]


@cases("error", [KeyError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_is_one_warning_and_changes_nothing(error: BaseException) -> None:
    def on_end(study: Any, why: str) -> None:
        raise error

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        study = minimize(lambda x: x, SPACE, trials=3, seed=0, on_end=on_end)
    [warning] = caught
    assert str(warning.message).startswith(f"on_end failed: {type(error).__name__}")
    assert re.search(r" \(test_on_end\.py:\d+\)$", str(warning.message))
    assert study.count("COMPLETE") == 3


@cases("wrong", [3, lambda study: None])
def test_a_function_that_cannot_be_called_is_refused_before_the_study(wrong: Any) -> None:
    with pytest.raises(
        UsageError, match=r"on_end cannot be called with two arguments: .*; write def on_end\(study, why\)"
    ):
        minimize(lambda x: x, SPACE, trials=1, on_end=wrong)
