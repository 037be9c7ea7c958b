"""Random search draws from the prior, the same draws for the same seed."""

from __future__ import annotations

from typing import Any

from hyperopt import hp

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.samplers import make_sampler
from shadho_celery.samplers.base import Sampler
from shadho_celery.samplers.random import BLOCK
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SPACE = hp.choice("kernel", [hp.uniform("C", 0, 1), {"degree": hp.randint("degree", 5), "gamma": hp.normal("g", 0, 1)}])


def sampler(seed: int = 0, place: int = 1) -> Sampler:
    return make_sampler("random", split(compile_space(SPACE))[place], (seed, place))


def test_a_trials_params_depend_on_its_number_alone() -> None:
    in_order, backwards = sampler(), sampler()
    indices = range(0, 3 * BLOCK, 7)
    asked = [in_order.ask(index) for index in indices]
    assert asked == [backwards.ask(index) for index in reversed(indices)][::-1]
    assert len({str(params) for params in asked}) == len(asked)


def test_another_seed_or_subspace_draws_otherwise() -> None:
    assert sampler(seed=0).ask(0) != sampler(seed=1).ask(0)
    assert sampler(place=0).ask(0) != sampler(place=1).ask(0)


def test_results_change_nothing() -> None:
    told = sampler()
    params: Any = told.ask(0)
    outcome = Outcome(state=TrialState.COMPLETE, loss=0.0)
    told.tell(Trial(number=0, subspace="kernel=1", params=params, state=outcome.state, outcome=outcome))
    assert told.ask(1) == sampler().ask(1)
    assert not told.adaptive


def test_pinned_choices_are_among_the_params() -> None:
    assert sampler(place=1).ask(3)["kernel"] == 1
    assert set(sampler(place=0).ask(3)) == {"kernel", "C"}
