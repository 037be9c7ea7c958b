"""The rate of preemption of a class, and the seconds that it adds to trials without checkpoints."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.placement.model import MOST_EXPECTED, CostModel, charged, preemption_rate
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SUBSPACES = split(compile_space(hp.choice("model", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.uniform("b", 0, 1)}])))
NAMES = ("spot", "own")


def test_without_a_preemption_the_rate_is_zero_and_with_many_hours_it_is_what_was_observed() -> None:
    assert preemption_rate(0, 0.0) == 0.0
    assert preemption_rate(1, 0.1) < 1.0, "not ten an hour"
    assert preemption_rate(3000, 1000.0) == pytest.approx(3.0, rel=1e-2)


def test_the_charged_seconds_are_the_mean_time_until_a_trial_has_run_without_a_preemption() -> None:
    seconds, rate = 900.0, 3.0 / 3600
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(20_000):
        while (until := rng.exponential(1 / rate)) < seconds:
            total += until
        total += seconds
    found = charged(np.log([[seconds, seconds]]), np.array([rate, 0.0]))
    assert np.exp(found[0, 0]) == pytest.approx(total / 20_000, rel=0.03)
    assert np.exp(found[0, 1]) == pytest.approx(seconds)


def test_a_trial_that_never_ends_has_finite_seconds() -> None:
    assert charged(np.array([[math.log(1e9)]]), np.array([1.0]))[0, 0] < math.log(1e9) + MOST_EXPECTED


def learned(*continued: bool | None) -> CostModel:
    """Two subspaces of ten minutes and of ten seconds, on classes that are alike."""
    model = CostModel(SUBSPACES)
    for number in range(40):
        found = continued[number] if number < len(continued) else None
        seconds = 600.0 if number % 2 else 10.0
        outcome = Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=seconds, continued=found)
        name, label = SUBSPACES[number % 2].name, "ab"[number % 2]
        facts = {"number": number, "subspace": name, "params": {"model": number % 2, label: number / 40}, "attempt": 1}
        model.tell(Trial(**facts, state=TrialState.COMPLETE, compute_class=NAMES[number // 2 % 2], outcome=outcome))
    return model


def ratios(model: CostModel, *seconds: float) -> list[float]:
    """Return by subspace the seconds on the spot class divided by those on the other one, in each prediction."""
    found = []
    for row, each in enumerate(SUBSPACES):
        trial = Trial(number=0, subspace=each.name, params={"model": row, "ab"[row]: 0.5})
        logs = model.costs([trial], NAMES).log_seconds[0]
        mean = model.mean_seconds([trial], NAMES)[0]
        assert mean[0] / mean[1] == pytest.approx(math.exp(logs[0] - logs[1]), rel=0.1)
        found.append(float(mean[0] / mean[1]))
    return found


def test_long_trials_are_charged_for_preemption_and_short_ones_are_not() -> None:
    model = learned()
    assert ratios(model) == [pytest.approx(1.0, abs=0.1)] * 2
    version = model.version
    model.note_preemptions({"spot": 12.0})
    assert model.version > version
    short, long = ratios(model)
    assert short == pytest.approx(1.0, abs=0.1)
    assert long == pytest.approx(math.expm1(2.0) / 2.0, rel=0.3)
    model.note_preemptions({"spot": 12.3})
    assert model.version == version + 1, "a rate that has changed by less than a tenth gives no new effects"


def test_trials_that_go_on_from_checkpoints_are_not_charged() -> None:
    anew, kept = learned(False, False, True), learned(True, True, False)
    for model in (anew, kept):
        model.note_preemptions({"spot": 12.0})
    assert ratios(anew)[1] > 2.0
    assert ratios(kept)[1] == pytest.approx(1.0, abs=0.1)
