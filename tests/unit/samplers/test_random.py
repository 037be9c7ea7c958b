"""Random search draws from the prior, the same draws for the same seed."""

from __future__ import annotations

from hyperopt import hp

from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.samplers import find_sampler
from shadho_celery.samplers.random import BLOCK, Sampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SPACE = hp.choice("kernel", [hp.uniform("C", 0, 1), {"degree": hp.randint("degree", 5), "gamma": hp.normal("g", 0, 1)}])


def sampler(seed: int = 0, place: int = 1) -> Sampler:
    return find_sampler("random")(split(compile_space(SPACE))[place], (seed, place))


def trial(params: Params, state: TrialState = TrialState.WAITING) -> Trial:
    return Trial(number=0, subspace="kernel=1", params=params, state=state)


def test_its_trials_are_a_prefix_of_one_stream_however_they_are_asked_for() -> None:
    whole = sampler().ask(3 * BLOCK, [])
    assert len({str(params) for params in whole}) == len(whole)
    pieces, pending, asked = sampler(), [], []
    for number in (1, 5, BLOCK, 0, 20):
        drawn = pieces.ask(number, pending)
        asked += drawn
        pending += [trial(params) for params in drawn]
        if number == 5:  # some of them end, in whatever way
            pieces.tell([trial(pending.pop(2).params, TrialState.CANCELLED), trial(pending.pop().params)])
    assert asked == whole[: len(asked)]


def test_another_seed_or_subspace_draws_otherwise() -> None:
    assert sampler(seed=0).ask(1, []) != sampler(seed=1).ask(1, [])
    assert sampler(place=0).ask(1, []) != sampler(place=1).ask(1, [])


def test_results_change_nothing() -> None:
    told = sampler()
    [params] = told.ask(1, [])
    outcome = Outcome(state=TrialState.COMPLETE, loss=0.0)
    told.tell([Trial(number=0, subspace="kernel=1", params=params, state=outcome.state, outcome=outcome)])
    assert told.ask(1, []) == sampler().ask(2, [])[1:]
    assert not told.adaptive


def test_pinned_choices_are_among_the_params() -> None:
    assert sampler(place=1).ask(1, [])[0]["kernel"] == 1
    assert set(sampler(place=0).ask(1, [])[0]) == {"kernel", "C"}
