"""A grid has every combination once, spreads over them, and ends the study."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp
from services.families import fleet_of
from services.trials import told

import shadho_celery
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.samplers.grid import LEVELS, MOST, GridSampler, levels
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.simulation.executor import Change, SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits

# Studies are resumed with other objectives, of which a search warns; some have no success.
pytestmark = [
    pytest.mark.filterwarnings("ignore:the objective's code is now version"),
    pytest.mark.filterwarnings("ignore:study .* has no successful trial"),
]

FINITE = {"a": hp.choice("a", ["x", "y", "z"]), "n": hp.randint("n", 2, 6), "q": hp.quniform("q", 0, 1, 0.5)}
TREE = {
    "top": hp.choice("top", [{"k": hp.choice("k", [1, 2, 3])}, {"m": hp.randint("m", 4)}, "nothing"]),
    "on": hp.choice("on", [False, True]),
}


def grid(space: Any, seed: int = 0) -> GridSampler:
    return GridSampler(split(compile_space(space), max_subspaces=1)[0], (seed, 0))


def test_every_combination_comes_once_and_then_no_other() -> None:
    asked = grid(FINITE).ask(100, [])
    found = sorted((params["a"], params["n"], params["q"]) for params in asked)
    assert found == sorted(itertools.product(range(3), range(2, 6), (0.0, 0.5, 1.0)))


def test_what_is_under_an_option_that_was_not_chosen_makes_no_other_point() -> None:
    """Three, four and one points under the options, each with the label beside them on and off."""
    assert len(grid(TREE).ask(100, [])) == 2 * (3 + 4 + 1)


def test_the_seed_decides_on_the_order_alone() -> None:
    one, two = (grid(FINITE, seed).ask(100, []) for seed in (0, 1))
    assert one != two
    assert sorted(map(repr, one)) == sorted(map(repr, two))


def test_the_first_points_are_spread() -> None:
    asked = grid([hp.uniform(f"x{place}", 0, 1) for place in range(200)]).ask(30, [])
    for place in (0, 100, 199):
        assert len({params[f"x{place}"] for params in asked}) >= 3


def test_a_cancelled_point_comes_again_and_a_tried_or_pending_one_does_not() -> None:
    sampler = grid(FINITE)
    asked = sampler.ask(10, [])
    sampler.tell([told(asked[0], 1.0), told(asked[1], TrialState.FAILED), told(asked[2], TrialState.CANCELLED)])
    resumed = grid(FINITE)
    resumed.tell([told(asked[0], 1.0), told(asked[1], TrialState.FAILED)])
    for each in (sampler, resumed):
        rest = each.ask(100, [told(params, TrialState.RUNNING) for params in asked[3:]])
        assert len(rest) == 36 - 9
        assert asked[2] in rest
        assert not any(params in rest for params in (*asked[:2], *asked[3:]))


@pytest.mark.parametrize(
    ("space", "number"),
    [
        (hp.uniform("x", 0, 1), LEVELS),
        (hp.loguniform("x", -5, 1), LEVELS),
        (hp.normal("x", 0, 1), LEVELS),
        (hp.randint("x", 7), 7),
        (hp.randint("x", 1000), MOST),
        (hp.quniform("x", 1, 9, 2), 4),
        (hp.pchoice("x", [(0.999, 1), (0.001, 2)]), 2),
    ],
)
def test_a_label_has_its_own_values_or_some_quantiles(space: Any, number: int) -> None:
    [domain] = compile_space(space).domains.values()
    found = levels(domain)
    assert len(found) == number
    assert all(domain.contains(value) for value in found)


@pytest.mark.parametrize("space", [FINITE, TREE])
def test_an_exhausted_grid_ends_the_study(space: Any) -> None:
    with pytest.warns(UserWarning, match=r"ended after \d\d trials: the sampler has no further params"):
        study = shadho_celery.minimize(lambda _: 0.0, space, trials=1000, sampler="grid", seed=0)
    points = [repr(sorted(trial.params.items())) for trial in study.trials]
    assert len(points) == len({*points}) == (36 if space is FINITE else 16)


def test_a_resumed_grid_tries_nothing_twice(tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/grid.db", "study": "s", "sampler": "grid"}
    shadho_celery.minimize(lambda _: 0.0, FINITE, trials=10, seed=0, **options)
    with pytest.warns(UserWarning, match="ended after 36 trials"):
        study = shadho_celery.minimize(lambda _: math.nan, FINITE, trials=1000, resume=True, max_failures=0, **options)
    points = [repr(sorted(trial.params.items())) for trial in study.trials]
    assert len(points) == len({*points}) == 36


def test_a_point_that_is_lost_while_the_grid_ends_is_tried_again() -> None:
    """The slot that asks in vain must not end the study over the head of one that runs."""
    space, clock = compile_space({"n": hp.randint("n", 6)}), ManualClock()
    study = open_study(SqlStore("sqlite://"), space.describe(), seed=0, clock=clock)

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=TrialState.COMPLETE, loss=1.0, seconds=10.0 if compute_class == "fast" else 100.0)

    changes = (Change(at=90.0, compute_class="slow", workers=-1), Change(at=300.0, compute_class="late", workers=1))
    executor = SimulatedExecutor(fleet_of({"fast": 1, "slow": 1}, changes=changes), play, clock)
    settings = StudySettings(sampler="grid", policy="fifo", speculate=False)
    scheduler = make_scheduler(Plan.of(space, settings, Limits(trials=100)), study, executor)
    scheduler.run()
    assert study.lost == 1
    assert study.count(TrialState.COMPLETE) == len({trial.params["n"] for trial in study}) == 6
    assert scheduler.is_exhausted
