"""DEHB's numbers are those of the paper, and its individuals those of the search space."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from benchmarks.fidelity_problems import FidelityProblem, counting_ones
from hyperopt import hp
from services.rounds import Player

from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.fidelity.brackets import Hyperband
from shadho_celery.fidelity.dehb import Dehb
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Rounds
from shadho_celery.space.compile import compile_space

S = TrialState
LADDER = Ladder.of({"least": 1, "most": 27, "eta": 3})
ONES = counting_ones(16, 16, least=9, most=729)


def evaluate(
    problem: FidelityProblem, rounds: Rounds, seed: int, enough: Callable[[int, float], bool], workers: int = 1
) -> float:
    """Return the true loss of the incumbent after so many evaluations or so much cost, on workers of uneven speed."""
    space = compile_space(problem.space)
    draw = np.random.default_rng([seed, 3])
    trials: list[Params] = []
    running: list[tuple[float, int, Trial]] = []
    best = (math.inf, math.inf, -1)
    now, cost, ended = 0.0, 0.0, 0
    while not enough(ended, cost):
        while len(running) < workers:
            wanted = rounds.offers()[0]
            params = trials[wanted.origin] if wanted.origin is not None else wanted.params or space.sample(draw, 1)[0]
            number = len(trials)
            trial = Trial(
                number=number,
                subspace="all",
                params=params,
                budget=wanted.budget,
                rung=wanted.rung,
                origin=wanted.origin,
            )
            trials.append(params)
            rounds.add(trial)
            seconds = 1 + abs(draw.standard_normal()) if workers > 1 else 1.0
            heapq.heappush(running, (now + seconds, number, trial))
        now, number, trial = heapq.heappop(running)
        assert trial.budget is not None
        loss = problem.loss(space.evaluate(trial.params), trial.budget, draw)
        cost, ended = cost + trial.budget, ended + 1
        rounds.tell(trial.evolve(state=S.COMPLETE, outcome=Outcome(state=S.COMPLETE, loss=float(loss))))
        best = min(best, (-trial.budget, float(loss), number))
    return problem.truth(space.evaluate(trials[best[2]]))


def dehb(problem: FidelityProblem, ladder: Ladder, seed: int) -> Dehb:
    return Dehb(ladder, compile_space(problem.space), seed)


@pytest.mark.slow
def test_on_counting_ones_of_16_and_16_its_regret_is_that_of_the_paper() -> None:
    """Normalised regret after 300 full evaluations: .162 in the paper, .159 by the dehb package."""
    ladder = Ladder.of({"least": 9, "most": 729, "eta": 3})

    def regret(make: Callable[[int], Rounds]) -> float:
        ends = [evaluate(ONES, make(seed), seed, lambda _, cost: cost >= 300 * 729) for seed in range(5)]
        return float(np.mean([(end + 32) / 32 for end in ends]))

    ours = regret(lambda seed: dehb(ONES, ladder, seed))
    assert 0.13 <= ours <= 0.20
    assert ours < 0.75 * regret(lambda seed: Hyperband(ladder))


@pytest.mark.slow
def test_eight_workers_of_uneven_speed_come_as_far_as_one_in_the_paper_with_as_many_evaluations() -> None:
    """2600 evaluations cost about 300 full ones, after which the regret of one worker is .162 in the paper.

    Our own one worker comes to .14: eight lose about a sixth of that, as they evolve from older populations.
    """
    ladder = Ladder.of({"least": 9, "most": 729, "eta": 3})
    ends = [evaluate(ONES, dehb(ONES, ladder, seed), seed, lambda ended, _: ended >= 2600, 8) for seed in range(5)]
    assert float(np.mean([(end + 32) / 32 for end in ends])) <= 1.15 * 0.162


SPACE = hp.choice(
    "model",
    [
        {"x": hp.uniform("x", -1, 1), "rate": hp.loguniform("rate", -7, 0)},
        {"k": hp.randint("k", 5), "n": hp.quniform("n", 0, 10, 2), "z": hp.normal("z", 0, 1)},
    ],
)


def test_its_params_are_points_of_the_space_with_the_active_labels_alone() -> None:
    space = compile_space(SPACE)
    player = Player(Dehb(LADDER, space, 0), lambda origin, budget: origin * 7919 % 101 / budget)
    player.play_on(5, 300, random.Random(0))
    for trial in player.trials:
        space.check(trial.params)
        assert {*trial.params} == {*space.active(trial.params)}
    assert {trial.params["model"] for trial in player.trials} == {0, 1}


@pytest.mark.parametrize(
    "space", [hp.choice("c", [1]), {"a": 1}, {"c": hp.choice("c", [0, 1])}], ids=["one point", "none", "two"]
)
def test_a_space_with_next_to_nothing_to_choose_is_searched_all_the_same(space: Any) -> None:
    compiled = compile_space(space)
    player = Player(Dehb(LADDER, compiled, 0)).play_on(3, 200, random.Random(1))
    assert {trial.rung for trial in player.finished} == {0, 1, 2, 3}
    for trial in player.finished:
        compiled.check(trial.params)


def test_the_first_bracket_is_drawn_and_promoted_and_from_the_second_cycle_on_all_evolves() -> None:
    player = Player(Dehb(LADDER, compile_space(SPACE), 0)).play_on(1, 3 * 69, random.Random(2))
    first, rest = player.trials[:40], player.trials[69:]
    assert Counter((trial.rung, trial.origin is not None) for trial in first) == {
        (0, False): 27,
        (1, True): 9,
        (2, True): 3,
        (3, True): 1,
    }
    assert all(trial.origin is None for trial in rest)
    assert Counter(trial.rung for trial in rest) == {0: 54, 1: 2 * 21, 2: 2 * 13, 3: 2 * 8}


def test_an_individual_gives_way_to_one_that_is_as_good() -> None:
    """Where all losses are equal the populations go on changing."""
    player = Player(Dehb(LADDER, compile_space(SPACE), 0), lambda origin, budget: 1.0)
    player.play_on(1, 276, random.Random(3))
    late = [tuple(sorted(trial.params.items())) for trial in player.trials[138:]]
    assert len({*late}) > 0.5 * len(late)


def test_the_same_seed_gives_the_same_trials_and_another_one_others() -> None:
    def params(seed: int) -> list[Params]:
        return [
            t.params for t in Player(Dehb(LADDER, compile_space(SPACE), seed)).play_on(1, 100, random.Random(4)).trials
        ]

    assert params(0) == params(0) != params(1)
