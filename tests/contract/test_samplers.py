"""What every sampler keeps to: lawful params, the same ones for the same seed and history, whatever the losses are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.cases import cases
from services.trials import told

from shadho_celery import minimize
from shadho_celery.core.names import SAMPLERS, WHOLE_SAMPLERS
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.samplers import find_sampler
from shadho_celery.samplers.random import Sampler
from shadho_celery.samplers.wrapped import points
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split

Params = Mapping[str, Any]

LAWS: dict[str, Any] = {
    "uniform": hp.uniform("uniform", -2, 3),
    "quniform": hp.quniform("quniform", 1, 10, 4),
    "loguniform": hp.loguniform("loguniform", -6, 2),
    "qloguniform": hp.qloguniform("qloguniform", -1, 4, 3),
    "normal": hp.normal("normal", 5, 2),
    "qnormal": hp.qnormal("qnormal", 5, 2, 2),
    "lognormal": hp.lognormal("lognormal", 0, 1),
    "qlognormal": hp.qlognormal("qlognormal", 1, 1, 1),
    "randint": hp.randint("randint", 3, 9),
    "pchoice": hp.pchoice("pchoice", [(0.5, "a"), (0.2, "b"), (0.3, "c")]),
}
INNER = hp.choice("inner", [hp.uniform("deep", 0, 1), {"n": hp.randint("n", 4)}, "nothing"])
NESTED = {"top": hp.choice("top", [hp.uniform("shallow", 0, 1), INNER]), "x": hp.uniform("x", 0, 1)}
SPACES: dict[str, Any] = {
    "every law": LAWS,
    "nested choices": NESTED,
    "one number": hp.uniform("x", 0, 1),
    "one choice": hp.choice("c", ["a", "b", "c"]),
    "no labels": {"x": 3},
    "two hundred numbers": [hp.uniform(f"x{place}", 0, 1) for place in range(200)],
    "ten thousand options": hp.choice("c", [*range(10_000)]),
    "a law as narrow as floats are": hp.uniform("x", 1.0, 1.0 + 1e-15),
    "one point": [hp.choice("c", ["a"]), hp.randint("n", 1), hp.quniform("q", 1.6, 2.4, 1)],
    "laws of one value beside others": {
        "x": hp.uniform("x", 0, 1),
        "c": hp.choice("c", ["a"]),
        "top": hp.choice("top", [hp.randint("n", 1), {"q": hp.quniform("q", 1.6, 2.4, 1), "m": hp.randint("m", 3)}]),
        "p": hp.pchoice("p", [(1.0, "a"), (0.0, "b")]),
        "narrow": hp.normal("narrow", 1e9, 1e-9),
    },
    "numbers of every size": [hp.uniform("x", -1e300, 1e300), hp.loguniform("y", -700, 700), hp.randint("n", 2**62)],
}
FINITE: dict[str, Any] = {
    "one choice": hp.choice("c", ["a", "b", "c"]),
    "steps": [hp.quniform("q", 0, 1, 0.25), hp.randint("n", 4)],
    "an option hardly ever drawn": hp.pchoice("p", [(1e-9, "a"), (0.0, "never"), (1 - 1e-9, hp.choice("c", [1, 2]))]),
    "nested choices": hp.choice("top", ["x", hp.choice("inner", [hp.randint("n", 4), "y"]), hp.randint("m", 4)]),
}


ELSEWHERE = ["optuna:TPESampler"]


@pytest.fixture(params=[*SAMPLERS, *(pytest.param(each, marks=pytest.mark.slow) for each in ELSEWHERE)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def whole(space: Any) -> Subspace:
    """The undivided space as one subspace."""
    return split(compile_space(space), max_subspaces=1)[0]


def waiting(asked: Collection[Params]) -> list[Trial]:
    return [Trial(number=place, subspace="all", params=params) for place, params in enumerate(asked)]


def run(sampler: Sampler, ends: Collection[float | TrialState]) -> list[Params]:
    asked = []
    for end in ends:
        if not (proposed := sampler.ask(1, [])):
            break  # a grid is exhausted
        [params] = proposed
        sampler.tell([told(params, end)])
        asked.append(params)
    return asked


def losses(count: int) -> list[float]:
    return [math.sin(3.0 * place) for place in range(count)]


@pytest.mark.slow
@cases("space", SPACES)
def test_params_can_be_drawn_from_the_space(name: str, space: str) -> None:
    """Every active label is there, no other, with a value of its law and of the law's type."""
    subspace = whole(SPACES[space])
    sampler = find_sampler(name)(subspace, (0, 0))
    for params in [*run(sampler, losses(14)), *sampler.ask(3, waiting([]))]:
        subspace.space.check(params)
        assert {*params} == {*subspace.space.active(params)}
        for label, value in params.items():
            assert type(value) is type(subspace.space.domains[label].quantile([0.5]).tolist()[0])


@pytest.mark.parametrize("name", SAMPLERS)
def test_pinned_choices_are_among_the_params(name: str) -> None:
    """Those of other libraries are asked for the whole space only."""
    space = hp.choice("kind", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.uniform("b", 0, 1)}])
    for place, subspace in enumerate(split(compile_space(space))):
        for params in run(find_sampler(name)(subspace, (0, place)), losses(14)):
            assert subspace.contains(params)
            assert {*params} == {"kind", "ab"[place]}


@pytest.mark.slow
@cases("space", ["every law", "nested choices"])
def test_the_same_seed_and_history_give_the_same_params(name: str, space: str) -> None:
    one, two, other = (find_sampler(name)(whole(SPACES[space]), (seed, 0)) for seed in (1, 1, 2))
    first = run(one, losses(16))
    assert run(two, losses(16)) == first
    assert run(other, losses(16)) != first
    assert one.ask(3, []) == two.ask(3, [])


@pytest.mark.parametrize("name", SAMPLERS)
def test_trials_told_at_once_teach_what_they_teach_one_by_one(name: str) -> None:
    """A resumed study's sampler goes on as the one before would have; Optuna's draw from a stream of their own."""
    one, two = (find_sampler(name)(whole(LAWS), (1, 0)) for _ in range(2))
    trials = [told(*each) for each in zip(run(one, losses(16)), losses(16), strict=True)]
    two.tell(trials)
    assert two.ask(1, [])[0] == pytest.approx(one.ask(1, [])[0], rel=1e-6)


@pytest.mark.slow
@cases(
    "ends",
    [
        [1.0] * 14,
        [math.inf] * 14,
        [1e300, -1e300] * 7,
        [math.nan] * 5 + [1.0, 2.0] * 5,
        [TrialState.FAILED] * 14,
        [TrialState.FAILED, 0.5] * 8,
        [TrialState.PRUNED, 0.5] * 8,
        [TrialState.CANCELLED] * 14,
        [1e-300, 2e-300] * 7,
        [1.7e308, -1.7e308, 0.0] * 6,
        [-math.inf, math.inf, 1.0] * 6,
        [5.0, *[TrialState.FAILED] * 40],
    ],
)
@cases("space", [NESTED, {"x": hp.uniform("x", 0, 1), "n": hp.randint("n", 9)}])
def test_whatever_comes_of_the_trials_params_are_proposed(
    name: str, space: Any, ends: list[float | TrialState]
) -> None:
    subspace = whole(space)
    sampler = find_sampler(name)(subspace, (0, 0))
    run(sampler, ends)
    for params in sampler.ask(4, []):
        subspace.space.check(params)


@pytest.mark.slow
@cases("space", ["every law", "one number", "one choice", "one point", "no labels"])
def test_a_long_history_without_a_difference_is_gone_on_from(name: str, space: str) -> None:
    """Equal losses and failures: nothing can be learned, and no start anew is without an end."""
    subspace = whole(SPACES[space])
    for end in (1.0, TrialState.FAILED):
        sampler = find_sampler(name)(subspace, (0, 0))
        sampler.tell([told(params, end) for params in subspace.sample(np.random.default_rng(0), 400)])
        for params in run(sampler, [end] * 3):
            subspace.space.check(params)


def test_slots_that_are_filled_at_once_get_different_params(name: str) -> None:
    sampler = find_sampler(name)(whole(LAWS), (0, 0))
    run(sampler, losses(14))
    asked = sampler.ask(16, [])
    asked += sampler.ask(4, waiting(asked))
    assert len({tuple(params.values()) for params in asked}) == 20


def test_nothing_is_told_of_a_trial_that_is_pending(name: str) -> None:
    """Pending trials count for the place in the stream alone where proposals do not depend on losses."""
    sampler = find_sampler(name)(whole(NESTED), (0, 0))
    asked = sampler.ask(3, [])
    assert sampler.ask(2, waiting(asked)) == find_sampler(name)(whole(NESTED), (0, 0)).ask(5, [])[3:]


@cases("name", [*WHOLE_SAMPLERS, "grid"])
@cases("space", FINITE)
def test_finite_spaces_are_not_asked_twice_for_a_point(name: str, space: str) -> None:
    """Trials that are pending, have failed or are told count as tried, and every point is."""
    subspace = whole(FINITE[space])
    count = len(list(points(subspace, np.random.default_rng(0))))
    sampler = find_sampler(name)(subspace, (0, 0))
    seen: list[Params] = []
    held: list[Params] = []
    while asked := sampler.ask(3, waiting(held)):
        seen += asked
        held += asked[1:]
        sampler.tell([told(asked[0], TrialState.FAILED if len(seen) % 2 else float(len(seen)))])
    keys = [tuple(sorted(each.items())) for each in seen]
    assert len(keys) == len({*keys}) == count


@pytest.mark.parametrize("name", [*WHOLE_SAMPLERS, "grid"])
def test_a_cancelled_point_is_asked_for_again(name: str) -> None:
    sampler = find_sampler(name)(whole(FINITE["one choice"]), (0, 0))
    asked = sampler.ask(3, [])
    sampler.tell([told(asked[0], TrialState.CANCELLED), *(told(each, 1.0) for each in asked[1:])])
    assert sampler.ask(3, []) == asked[:1]


BOUNDED = {
    "x": hp.uniform("x", 0, 1),
    "y": hp.uniform("y", 0, 1),
    "top": hp.choice("top", [{"n": hp.randint("n", 9)}, {"q": hp.quniform("q", 0, 1, 0.25)}]),
}


def in_bounds(values: Any) -> bool:
    """Allow a third of the space, at whose edge its least loss is."""
    return bool(values["x"] < values["y"] and values["top"].get("n", 0) < 6)


@cases("ends", [[float(place) for place in range(14)], [TrialState.FAILED, 0.5] * 8])
def test_points_obey_the_bounds_between_params(name: str, ends: list[float | TrialState]) -> None:
    """They do at first, once a model proposes them, and for several slots at once, which get different ones."""
    space = replace(compile_space(BOUNDED), where=in_bounds)
    subspace = split(space, max_subspaces=1)[0]
    sampler = find_sampler(name)(subspace, (0, 0))
    asked = run(sampler, ends)
    several = sampler.ask(6, waiting([]))
    assert all(in_bounds(space.evaluate(params)) for params in [*asked, *several])
    assert len({tuple(params.values()) for params in several}) == len(several) == 6


@cases("sampler", [*SAMPLERS, "dehb", "own"])
@pytest.mark.filterwarnings("ignore:ended after")
def test_a_study_of_several_subspaces_obeys_the_bounds_between_params(sampler: str) -> None:
    class Own:
        def __init__(self, subspace: Subspace, entropy: Collection[int]) -> None:
            self.subspace = subspace

        def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
            return [{**self.subspace.space.draw(np.random.default_rng(0), 1, self.subspace.fixed)[0]}] * n

        def tell(self, trials: Collection[Trial]) -> None:
            pass

    given: dict[str, Any] = {"sampler": sampler}
    if sampler == "dehb":
        given = {"fidelity": {"least": 1, "most": 9, "how": "dehb"}}
    elif sampler == "own":
        given = {"sampler": Own}
    got: list[Any] = []

    def objective(values: Any) -> float:
        got.append(values)
        return float(values["x"] - values["y"])

    minimize(objective, BOUNDED, trials=24, where=in_bounds, seed=0, progress=False, **given)
    assert len(got) == 24
    assert all(map(in_bounds, got))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sampler .* from now on", "ignore:.*ended")
def test_a_study_goes_on_with_another_sampler(name: str, tmp_path: Path) -> None:
    """It learns from the trials so far, failed ones too, and is in force from then on."""

    def objective(values: Any) -> float:
        if values["x"] > 0.9:
            raise ValueError
        return float(values["x"]) + values.get("deep", 0.5)

    space = {"x": hp.uniform("x", 0, 1), "top": hp.choice("top", [{"deep": hp.uniform("deep", 0, 1)}, {}])}
    flat = {"x": hp.uniform("x", 0, 1), "deep": hp.uniform("deep", 0, 1)}
    for place, each in enumerate((space, flat)):
        options: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/{place}.db", "study": "s", "progress": False}

        def loss(values: Any) -> float:
            return objective({**values, **values.get("top", {})})

        minimize(loss, each, trials=14, sampler="random", seed=0, **options)
        study = minimize(loss, each, trials=20, sampler=name, resume=True, **options)
        assert (study.count(), study.in_force["sampler"]) == (20, name)
        study = minimize(loss, each, trials=24, sampler="tpe", resume=True, **options)
        assert (study.count(), study.in_force["sampler"]) == (24, "tpe")
