"""Which sampler `auto` asks follows from the space and the history."""

from __future__ import annotations

from typing import Any

import numpy as np
from hyperopt import hp
from msgspec.structs import replace

from shadho_celery.core.trial import NO_OUTCOME, Outcome, Trial, TrialState
from shadho_celery.samplers.auto import AT_FIRST, MOST_LABELS, MOST_TRIALS, AutoSampler
from shadho_celery.samplers.gp import GpSampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split

NUMBERS = [hp.uniform(f"x{place}", 0, 1) for place in range(2)]


def whole(space: Any) -> Subspace:
    return split(compile_space(space), max_subspaces=1)[0]


def trials(space: Any, number: int, noise: bool = False, seconds: float = 0.0) -> list[Trial]:
    generator = np.random.default_rng(0)
    found = []
    for place, params in enumerate(whole(space).sample(generator, number)):
        loss = float(generator.normal()) if noise else float(params["x0"]) ** 2
        outcome = Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)
        found.append(Trial(number=place, subspace="all", params=params, state=outcome.state, outcome=outcome))
    return found


def test_a_smooth_function_of_few_numbers_is_for_gp() -> None:
    auto, gp = AutoSampler(whole(NUMBERS), (0, 0)), GpSampler(whole(NUMBERS), (0, 0))
    for sampler in (auto, gp):
        sampler.tell(trials(NUMBERS, 30))
    assert auto.ask(2, []) == gp.ask(2, [])
    assert auto.choice.startswith("gp: it predicts ")


def test_several_losses_are_for_tpe() -> None:
    auto, tpe = AutoSampler(whole(NUMBERS), (0, 0)), TpeSampler(whole(NUMBERS), (0, 0))
    told = [
        replace(trial, outcome=Outcome(state=trial.state, loss=x, losses={"a": x, "b": 1 - x}))
        for trial in trials(NUMBERS, 30)
        if (x := float(trial.params["x0"])) >= 0
    ]
    for sampler in (auto, tpe):
        sampler.tell(told)
    assert auto.ask(2, []) == tpe.ask(2, [])
    assert auto.choice == "tpe: it learns 2 losses at once"


def test_where_nothing_can_be_foretold_both_are_asked_by_turns() -> None:
    auto, gp = AutoSampler(whole(NUMBERS), (0, 0)), GpSampler(whole(NUMBERS), (0, 0))
    for sampler in (auto, gp):
        sampler.tell(trials(NUMBERS, 60, noise=True))
    asked = auto.ask(4, [])
    assert auto.choice.startswith("gp and tpe alternating: gp predicts ")
    assert asked[:2] == gp.ask(2, [])
    assert asked[2:] != gp.ask(4, [])[2:]


def chosen(space: Any, number: int, limit: int | None, seconds: float = 0.0, pending: int = 0) -> str:
    auto = AutoSampler(whole(space), (0, 0), limit=limit)
    told = trials(space, number, seconds=seconds)
    auto.tell(told)
    auto.ask(1, [replace(trial, state=TrialState.RUNNING, outcome=NO_OUTCOME) for trial in told[:pending]])
    return auto.choice


def test_many_labels_are_for_tpe() -> None:
    wide = [hp.uniform(f"x{place}", 0, 1) for place in range(MOST_LABELS + 1)]
    auto, tpe = AutoSampler(whole(wide), (0, 0), limit=100), TpeSampler(whole(wide), (0, 0))
    for sampler in (auto, tpe):
        sampler.tell(trials(wide, 20))
    assert auto.ask(2, []) == tpe.ask(2, [])
    assert auto.choice == f"tpe: {MOST_LABELS + 1} hyperparameters are more than {MOST_LABELS}"


def test_many_short_trials_are_for_tpe_after_the_first_ones() -> None:
    """A study of up to 500 trials asks gp throughout, a longer one in the beginning and where a trial takes long."""
    assert chosen(NUMBERS, AT_FIRST + 20, limit=MOST_TRIALS).startswith("gp: ")
    for limit in (MOST_TRIALS + 1, None):
        assert chosen(NUMBERS, AT_FIRST, limit=limit).startswith("gp: ")
        assert chosen(NUMBERS, AT_FIRST + 1, limit=limit, seconds=0.1).startswith("tpe: a trial takes 0.1 s")
        assert chosen(NUMBERS, AT_FIRST + 1, limit=limit, seconds=10.0).startswith("gp: ")
        assert chosen(NUMBERS, AT_FIRST + 1, limit=limit, seconds=10.0, pending=16).startswith("tpe: ")


def test_the_first_trials_cover_the_space() -> None:
    auto = AutoSampler(whole(NUMBERS), (0, 0))
    asked = np.array([[*params.values()] for params in auto.ask(8, [])])
    for column in asked.T:
        assert len({int(8 * value) for value in column}) >= 7
