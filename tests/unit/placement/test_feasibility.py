"""Failing params are learned from failed trials: one option, one range, a product, for each compute class its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.samplers.avoidance import FailureModel, MemoryBound
from shadho_celery.space.compile import compile_space
from shadho_celery.space.features import features
from shadho_celery.space.split import Subspace, split

Params = Mapping[str, Any]
Fails = Callable[[Params], bool]

#: six labels, of which a limit concerns one, two or three
NUMBERS = {f"x{i}": hp.uniform(f"x{i}", 0, 1) for i in range(6)}
MIXED = {**NUMBERS, "option": hp.choice("option", ["a", "b", "c"])}
CLASSES = ["small", "middling", "large"]


def whole(space: Any) -> Subspace:
    """The undivided space as one subspace."""
    return split(compile_space(space), max_subspaces=1)[0]


class Case:
    """How the trials of one space ended, drawn by its law."""

    def __init__(self, space: Any, fails: Fails, seed: int = 0) -> None:
        self.subspace = whole(space)
        self.fails = fails
        self.failures = FailureModel(self.subspace.domains, 0.1)
        self.generator = np.random.default_rng(seed)

    def tell(self, trials: int) -> Case:
        for params in self.subspace.sample(self.generator, trials):
            self.failures.tell(params, self.fails(params))
        return self

    def right(self) -> float:
        """The share of fresh params that are judged as they would end."""
        fresh = self.subspace.sample(np.random.default_rng(1000), 300)
        judged = self.failures.chances(fresh) > 0.5
        return float(np.mean(judged == np.array([self.fails(params) for params in fresh])))


def chances(case: Case, *params: Params) -> list[float]:
    return case.failures.chances(params).tolist()


def test_nothing_is_thought_to_fail_as_long_as_nothing_has() -> None:
    case = Case(NUMBERS, lambda p: False).tell(200)
    assert not case.failures.any
    assert chances(case, dict.fromkeys(NUMBERS, 0.5)) == [0.0]


@pytest.mark.parametrize(
    ("space", "fails", "trials", "least"),
    [
        (MIXED, lambda p: p["option"] == 1, 60, 0.98),
        (NUMBERS, lambda p: p["x0"] > 0.8, 60, 0.9),
        (NUMBERS, lambda p: p["x0"] * p["x1"] > 0.3, 60, 0.85),
        (NUMBERS, lambda p: p["x0"] + p["x1"] + p["x2"] > 1.7, 60, 0.8),
        (MIXED, lambda p: p["x0"] + 0.5 * (p["option"] == 1) > 1.0, 60, 0.9),
    ],
    ids=["an option", "a range", "a product", "a sum", "an option or a range"],
)
def test_what_fails_is_told_from_what_does_not_among_six_labels(
    space: Any, fails: Fails, trials: int, least: float
) -> None:
    assert np.mean([Case(space, fails, seed).tell(trials).right() for seed in range(5)]) > least


def test_a_long_history_is_remembered_in_short() -> None:
    case = Case(NUMBERS, lambda p: p["x0"] * p["x1"] > 0.3).tell(700)
    assert case.right() > 0.9


def test_one_failure_says_nothing_of_what_is_far_away() -> None:
    case = Case({"x": hp.uniform("x", 0, 1)}, lambda p: True)
    case.failures.tell({"x": 0.95}, True)
    near, far = chances(case, {"x": 0.95}, {"x": 0.4})
    assert far < 0.5 < near


def test_failures_by_chance_condemn_little() -> None:
    luck = np.random.default_rng(7)
    case = Case(NUMBERS, lambda p: bool(luck.random() < 0.05)).tell(300)
    fresh = case.subspace.sample(np.random.default_rng(1), 300)
    assert np.mean(case.failures.chances(fresh) > 0.5) < 0.1


def test_where_everything_fails_everything_is_thought_to() -> None:
    case = Case(NUMBERS, lambda p: True).tell(20)
    assert case.right() == 1.0


def test_params_without_labels_fail_as_they_did() -> None:
    failures = FailureModel({}, 0.1)
    for failed in [True] * 20:
        failures.tell({}, failed)
    assert failures.chances([{}])[0] > 0.5
    for failed in [False] * 30:
        failures.tell({}, failed)
    assert failures.chances([{}])[0] < 0.5


def test_an_option_with_labels_of_its_own_is_judged_by_them() -> None:
    space = hp.choice("top", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.uniform("b", 0, 1)}])
    case = Case(space, lambda p: "b" in p and p["b"] > 0.5).tell(60)
    assert case.right() > 0.93


def test_an_inactive_label_has_no_value() -> None:
    space = hp.choice("top", [{"a": hp.uniform("a", 0, 2)}, {"b": hp.uniform("b", 0, 1)}])
    domains = whole(space).domains
    row = dict(zip(domains, features([{"top": 0, "a": 1.0}], domains, inactive=np.nan)[0], strict=True))
    assert (row["top"], row["a"]) == (0.0, 0.5)
    assert np.isnan(row["b"])


# The memory of compute classes


def bound_told(*told: tuple[float, str, bool]) -> MemoryBound:
    bound = MemoryBound(whole({"x": hp.uniform("x", 0, 1)}).domains)
    for x, name, fits in told:
        bound.tell({"x": x}, name, fits=fits)
    return bound


def test_what_ran_out_on_a_class_runs_out_on_smaller_ones_and_larger_ones_may_do() -> None:
    bound = bound_told((0.9, "middling", False))
    small, middling, large = (bound.chance({"x": 0.9}, name, CLASSES) for name in CLASSES)
    assert small == middling > 0.5
    assert large == 0.0


def test_what_fitted_a_class_fits_larger_ones_and_smaller_ones_may_not_do() -> None:
    bound = bound_told((0.5, "large", False), (0.6, "middling", True))
    without = bound_told((0.5, "large", False))
    for name, less in (("small", False), ("middling", True), ("large", True)):
        chance = bound.chance({"x": 0.5}, name, CLASSES)
        assert (chance < without.chance({"x": 0.5}, name, CLASSES)) == less


def test_a_class_seen_late_is_judged_by_what_was_told_before() -> None:
    bound = bound_told((0.9, "small", False), (0.2, "small", True))
    assert bound.chance({"x": 0.9}, "small", ["small"]) > 0.5
    assert bound.chance({"x": 0.9}, "tiny", ["small"]) == 0.0
    assert bound.chance({"x": 0.9}, "tiny", ["tiny", "small"]) > 0.5


@pytest.mark.parametrize(("labels", "most"), [(2, 0.08), (6, 0.18)])
def test_trials_are_seldom_sent_where_they_run_out_once_thirty_were(labels: int, most: float) -> None:
    """Of trials drawn by the law, those that are thought not to fit are not sent; 34 % of all do not."""
    subspace = whole({label: NUMBERS[label] for label in list(NUMBERS)[:labels]})
    sent = too_large_sent = fitting_left = 0
    for seed in range(5):
        bound = MemoryBound(subspace.domains)
        for place, params in enumerate(subspace.sample(np.random.default_rng(seed), 100)):
            too_large = params["x0"] * params["x1"] > 0.3
            is_sent = bound.chance(params, "small", CLASSES) <= 0.5
            if is_sent:
                bound.tell(params, "small", fits=not too_large)
            if place >= 30:
                sent += is_sent
                too_large_sent += is_sent and too_large
                fitting_left += not is_sent and not too_large
    assert too_large_sent / sent < most
    assert fitting_left / sent < 0.1


def test_a_class_is_not_left_for_ever_for_one_trial_too_large() -> None:
    bound = bound_told((0.95, "small", False))
    fresh = np.random.default_rng(0).random(100)
    assert np.mean([bound.chance({"x": x}, "small", CLASSES) > 0.5 for x in fresh]) < 0.5
