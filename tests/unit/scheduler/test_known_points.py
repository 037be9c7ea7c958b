"""Known points: what they give stays, what they leave out is what the sampler proposes; misfits are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery import Study
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.samplers.random import RandomSampler
from shadho_celery.scheduler import known_points
from shadho_celery.scheduler.plan import Plan
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SPACE = {
    "x": hp.uniform("x", -5, 5),
    "y": hp.uniform("y", -5, 5),
    "kind": hp.choice("kind", ["plain", {"k": hp.randint("k", 3), "q": hp.quniform("q", 0, 10, 2)}]),
}
POINTS: list[Mapping[str, Any]] = [{"x": 1.0}, {"k": 2}, {}, {"kind": "plain", "y": 0}]


def loss(values: Mapping[str, Any]) -> float:
    return float((values["x"] - 1) ** 2 + (values["y"] + 2) ** 2)


def enqueued(sampler: str | Callable[..., Any], points: list[Mapping[str, Any]], seed: int = 3) -> list[dict[str, Any]]:
    with Study(SPACE, seed=seed, sampler=sampler) as study:
        study.run(loss, trials=25, progress=False)
        study.enqueue(points)
        return [trial.params for trial in [*study.trials][25:]]


class Fixed:
    """Proposes the same params always."""

    spans_space = True

    def __init__(self, subspace: Any, entropy: Any) -> None:
        self.asked = 0

    def ask(self, n: int, pending: Any) -> list[dict[str, Any]]:
        return [{"x": 0.5, "y": 4.0, "kind": 0}] * n

    def tell(self, trials: Any) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["auto", "tpe", "random", "grid", "optuna:TPESampler"])
def test_what_a_point_leaves_out_is_filled_the_same_way_each_time(sampler: str) -> None:
    space = compile_space(SPACE)
    found = enqueued(sampler, POINTS)
    assert found == enqueued(sampler, POINTS)
    for params in found:
        space.check(params)
    assert found[0]["x"] == 1.0
    assert (found[1]["kind"], found[1]["k"]) == (1, 2)
    assert (found[3]["kind"], found[3]["y"]) == (0, 0.0)


@pytest.mark.slow
def test_the_rest_comes_from_what_the_sampler_has_learned() -> None:
    """The least loss is at y = -2, from which draws from -5 to 5 are 2.9 away in the mean."""
    assert np.mean([abs(enqueued("tpe", [{"x": 1.0}], seed)[0]["y"] + 2) for seed in range(6)]) < 2


def test_a_sampler_of_ones_own_fills_points() -> None:
    """If none of its proposals has the given option, the labels below this option are drawn."""
    first, second = enqueued(Fixed, [{"x": 1.0}, {"k": 1}])
    assert first == {"x": 1.0, "y": 4.0, "kind": 0}
    assert {label: second[label] for label in ("x", "y", "kind", "k")} == {"x": 0.5, "y": 4.0, "kind": 1, "k": 1}


def test_points_that_random_search_fills_follow_the_law() -> None:
    with Study(SPACE, seed=0, sampler="random") as study:
        study.enqueue([{"x": 4.9}] * 300)
        filled = [trial.params for trial in study.trials]
    assert {params["x"] for params in filled} == {4.9}
    assert abs(np.mean([params["y"] for params in filled])) < 0.6
    assert 0.4 < np.mean([params["kind"] for params in filled]) < 0.6
    assert len({params["y"] for params in filled}) == 300


def test_an_enqueued_point_is_pending() -> None:
    told: list[list[dict[str, Any]]] = []

    class Watching(RandomSampler):
        def ask(self, n: int, pending: Any) -> Any:
            told.append([dict(trial.params) for trial in pending])
            return super().ask(n, pending)

    with Study({"x": hp.uniform("x", 0, 1)}, seed=0, sampler=Watching) as study:
        study.enqueue([{"x": 0.25}])
        assert (study.ask().params, study.ask().number) == ({"x": 0.25}, 1)
    assert {"x": 0.25} in told[0]


def test_filling_does_not_disturb_the_sampler() -> None:
    """A grid misses none of its points because proposals were made for a point."""
    space = {"a": hp.randint("a", 3), "b": hp.randint("b", 3)}
    with Study(space, seed=0, sampler="grid") as study:
        study.enqueue([{"a": 1}])
        study.run(lambda values: 0.0, trials=9, progress=False)
        assert len({tuple(trial.params.items()) for trial in study.trials}) == len(study.trials) == 9


@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp", "grid"])
def test_a_partial_point_of_a_finite_space_is_filled_so_that_it_was_not_tried(sampler: str) -> None:
    """Neither by a finished trial, nor by one that waits, nor by another point."""
    space = {"a": hp.randint("a", 3), "b": hp.randint("b", 8)}
    with Study(space, seed=0, sampler=sampler) as study:
        study.add([{"a": 1, "b": b} for b in range(4)], [0.0] * 4)
        study.enqueue([{"a": 1, "b": 4}, {"a": 1}, {"a": 1}])
        assert len({tuple(trial.params.items()) for trial in study.trials}) == 7


def test_where_all_that_a_point_can_be_was_tried_it_is_tried_again() -> None:
    with Study({"a": hp.randint("a", 3), "b": hp.randint("b", 2)}, seed=0) as study:
        study.add([{"a": 1, "b": b} for b in range(2)], [0.0] * 2)
        assert study.enqueue([{"a": 1}]) == 1
        assert study.trials[2].params["a"] == 1


def test_a_stored_study_is_enqueued_from_outside(tmp_path: Any) -> None:
    store = f"sqlite:///{tmp_path}/shadho.db"
    named: dict[str, Any] = {"store": store, "study": "mine"}
    with Study(SPACE, **named, seed=0, sampler="gp") as study:
        study.run(loss, trials=20, progress=False)
    with Study(SPACE, **named, resume=True) as study:
        study.enqueue([{"x": 1.0}])
    with Study(SPACE, **named, resume=True) as study:
        params = study.ask().params
        assert params["x"] == 1.0
        assert abs(params["y"] + 2) < 1


@cases(
    "point, words",
    [
        ({"x": 9}, "'x': 9.0 is outside uniform(-5, 5)"),
        ({"x": float("nan")}, "'x': nan is outside uniform(-5, 5)"),
        ({"x": float("inf")}, "'x': inf is outside uniform(-5, 5)"),
        ({"x": 10**400}, "is outside uniform(-5, 5)"),
        ({"x": "1"}, "'x': '1' is outside uniform(-5, 5)"),
        ({"x": True}, "'x': True is outside uniform(-5, 5)"),
        ({"x": None}, "'x': None is outside uniform(-5, 5)"),
        ({"k": 1.5}, "'k': 1.5 is outside randint(0, 3)"),
        ({"q": 12}, "'q': 12.0 is outside quniform(0, 10, 2)"),
        ({"kind": "third"}, "'kind' has no option 'third'"),
        ({"kind": 2}, "'kind': 2 is outside choice(2)"),
        ({"kind": "plain", "k": 1}, "'k' is not active together with the other labels"),
        ({"z": 1}, "there is no label 'z'; known are x, y, kind, k, q"),
    ],
)
def test_a_point_outside_the_space_is_named_and_nothing_is_enqueued(point: Mapping[str, Any], words: str) -> None:
    with Study(SPACE) as study:
        with pytest.raises(UsageError) as caught:
            study.enqueue([{"x": 1}, point])
        assert str(caught.value).startswith("point 1: ")
        assert words in str(caught.value)
        assert len(study.trials) == 0


def test_nothing_is_enqueued_if_the_sampler_proposes_params_outside_the_space() -> None:
    class Outside:
        spans_space = True

        def __init__(self, subspace: Any, entropy: Any) -> None:
            pass

        def ask(self, n: int, pending: Any) -> list[dict[str, Any]]:
            return [{"x": 0.0, "y": 99.0, "kind": 0}]

        def tell(self, trials: Any) -> None:
            pass

    with Study(SPACE, sampler=Outside) as study:
        with pytest.raises(UsageError, match=r"'y': 99\.0 is outside uniform"):
            study.enqueue([{"x": 1, "y": 1, "kind": 0}, {"x": 2}])
        assert len(study.trials) == 0


def test_names_of_subspaces_fit_the_filled_params() -> None:
    names = {subspace.name: subspace for subspace in split(compile_space(SPACE))}
    with Study(SPACE, sampler="optuna:RandomSampler", seed=0) as study:
        study.enqueue([{"x": 1.0}] * 20)
        assert len({trial.subspace for trial in study.trials}) == 2
        assert all(names[trial.subspace].contains(trial.params) for trial in study.trials)


@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp", "grid"])
def test_a_point_that_was_rounded_is_tried_once(sampler: str) -> None:
    """0.3 is the grid's 3 * 0.1, which is another float."""
    with Study(hp.quniform("x", 0, 1, 0.1), seed=0, sampler=sampler) as study:
        study.enqueue([{"x": 0.3}, {"x": 0.6}])
        study.add([{"x": 0.7}], [0.0])
        study.run(lambda x: x, trials=11, progress=False)
        assert sorted(round(trial.params["x"] * 10) for trial in study.trials) == [*range(11)]


def test_points_that_break_the_bounds_between_params_are_refused_in_one_line() -> None:
    """A point that leaves labels out is completed so that it obeys them, if it can be."""

    def where(values: Any) -> bool:
        return bool(values["x"] < values["y"])

    with Study(SPACE, seed=0, where=where) as study:
        with pytest.raises(UsageError, match=r"^point 1: \{'x': 2, 'y': 1\} is refused by where"):
            study.enqueue([{"x": 4.9}, {"x": 2, "y": 1}])
        assert study.count() == 0
        study.enqueue([{"x": 4.9}, {"y": -4.9}, {"x": 1, "y": 2}])
        assert all(where(trial.values) for trial in study.trials)
        assert [trial.params.get("x") for trial in study.trials][::2] == [4.9, 1.0]
        with pytest.raises(UsageError, match=r"point 0: .* is refused by where"):
            study.add([{"x": 2, "y": 1}], [0.5])


def test_points_that_an_earlier_run_had_to_try_are_cancelled_if_new_bounds_refuse_them(tmp_path: Path) -> None:
    where: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/s.db", "study": "s"}
    with Study(SPACE, seed=0, **where) as study:
        study.enqueue([{"x": 2, "y": 1}, {"x": 1, "y": 2}])
    with Study(SPACE, resume=True, where=lambda values: values["x"] < values["y"], **where) as study:
        assert study.ask().number == 1
        assert study.trial(0).state == "CANCELLED"


@cases("sampler", ["random", "tpe", "auto", "grid"])
def test_as_many_first_trials_as_asked_for_also_if_a_subspace_has_fewer_points(sampler: str) -> None:
    space = {"opt": hp.choice("opt", ["adam", {"opt": "sgd", "layers": hp.randint("layers", 6)}])}
    found = known_points.first(Plan.of(compile_space(space), StudySettings(trials=9, sampler=sampler)), [], 0, 10)
    # A random search repeats points. The others have no more than these.
    assert len(found) == 10 if sampler == "random" else len({tuple(each.items()) for each in found}) == len(found) == 7


def test_failed_trials_are_those_that_were_not_tried_again() -> None:
    def trial(number: int, x: float, state: TrialState) -> Trial:
        return Trial(number=number, subspace="all", params={"x": x}, state=state)

    failed, complete = TrialState.FAILED, TrialState.COMPLETE
    trials = [trial(0, 1.0, failed), trial(1, 2.0, failed), trial(2, 3.0, complete), trial(3, 1.0, complete)]
    trials += [trial(4, 4.0, failed), trial(5, 4.0, failed), trial(6, 2.0, TrialState.WAITING)]
    assert [each.number for each in known_points.failed(trials, None)] == [5]


@cases("sampler", ["random", "qmc", "tpe", "auto", "grid", Fixed])
def test_the_first_trials_are_the_known_points_and_what_the_sampler_proposes(sampler: Any) -> None:
    plan = Plan.of(compile_space(SPACE), StudySettings(trials=9, sampler=sampler))
    found = known_points.first(plan, [{"x": 1.0}], 3, 5)
    assert len(found) == 5
    assert found[0]["x"] == 1.0
    for params in found:
        plan.space.check(params)
    assert known_points.first(plan, [{"x": 1.0}, {}, {}], 3, 2) == known_points.first(plan, [{"x": 1.0}, {}], 3, 2)
    if sampler == "random":
        # As a run with this seed would draw them, without the known point.
        with Study(SPACE, sampler=sampler, seed=3) as study:
            asked = [dict(study.ask().params) for _ in range(5)]
        drawn = known_points.first(plan, [], 3, 5)
        assert sorted(map(repr, drawn)) == sorted(map(repr, asked))
