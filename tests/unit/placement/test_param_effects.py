"""The effects of params on seconds are found from few noisy trials, by class, and not where there are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from numpy.typing import NDArray

from shadho_celery.core.trial import Params
from shadho_celery.placement.effects import LEAST_NEW, MOST, Basis, ParamEffects
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split

Array = NDArray[np.float64]
#: log seconds of params on two classes
Law = Callable[[Params], tuple[float, float]]

NOISE = 0.4
OPTIONS = np.random.default_rng(1).normal((3.0, 4.0), 0.8, (40, 2))


def flat(**labels: Any) -> Subspace:
    return split(compile_space(labels))[0]


ONE = flat(w=hp.uniform("w", 0, 1))
TWO = flat(w=hp.uniform("w", 0, 1), d=hp.uniform("d", 0, 1))
BATCH = flat(b=hp.qloguniform("b", math.log(8), math.log(512), 8))
MANY = flat(**{f"u{place}": hp.uniform(f"u{place}", 0, 1) for place in range(8)}, w=hp.uniform("w", 0, 1))
MODELS = flat(m=hp.choice("m", [f"m{place}" for place in range(40)]))


def by_one(params: Params) -> tuple[float, float]:
    return math.log(20 + 10 * params["w"]), math.log(20 + 400 * params["w"])


def by_two(params: Params) -> tuple[float, float]:
    product = params["w"] * params["d"]
    return math.log(20 + 15 * product), math.log(15 + 600 * product)


def by_batch(params: Params) -> tuple[float, float]:
    batch = max(params["b"], 8.0)
    return math.log(10 + 2000 / batch), math.log(5 + 60 / batch**0.5 + batch / 2)


def by_model(params: Params) -> tuple[float, float]:
    return float(OPTIONS[params["m"]][0]), float(OPTIONS[params["m"]][1])


def nothing(params: Params) -> tuple[float, float]:
    return 3.0, 4.0


def learned(subspace: Subspace, law: Law, trials: int, seed: int = 0) -> tuple[ParamEffects, Array]:
    """Effects that have read so many noisy trials on two classes, and the centres that they are beside."""
    generator = np.random.default_rng(seed)
    effects, told = ParamEffects(subspace), np.zeros((2, 2))
    for params in subspace.sample(generator, trials):
        column = int(generator.integers(2))
        value = law(params)[column] + float(generator.normal(0, NOISE))
        told[:, column] += (1, value)
        if effects.tell(params, column, value):
            effects.read(told[1] / np.maximum(told[0], 1))
    return effects, told[1] / told[0]


def test_trials_that_run_unusually_long_show_what_is_slow_before_they_end() -> None:
    effects, centres = learned(ONE, nothing, 60)
    slow, quick = ({"w": 0.95}, {"w": 0.05})

    def after(running: list[tuple[Params, int, float, bool]]) -> list[list[float]]:
        """What the slow params add on each class after this was seen of the running trials."""
        is_due = effects.suppose(running, 2)
        effects.read(centres)
        found = effects.departures([quick, slow], 2)
        return [is_due, *(found[1] - found[0]).tolist()]

    assert not after([(slow, 1, centres[1] - 5.0, False)])[0], "it has just begun"
    before = after([])
    is_due, on_other, on_own = after([(slow, 1, centres[1] + 4.0, False)] * 5)
    assert is_due
    assert on_own > before[2] + 1.0
    assert on_own > on_other
    is_due, _, on_own = after([])
    assert is_due, "what was supposed is to be forgotten"
    assert on_own == pytest.approx(before[2], abs=0.3)


def test_extrapolated_trials_count_like_ended_ones_as_long_as_they_run() -> None:
    (effects, centres), (other, _) = learned(ONE, nothing, 60), learned(ONE, nothing, 60)
    probes = [{"w": 0.05}, {"w": 0.95}]
    for params, value in (({"w": 0.95}, centres[1] + 1.0), ({"w": 0.05}, centres[1] - 1.0)):
        assert effects.suppose([(params, 1, value, True)] * 5, 2)
        for _ in range(5):
            other.tell(params, 1, value)
        effects.read(centres)
        other.read(centres)
        assert effects.departures(probes, 2) == pytest.approx(other.departures(probes, 2), abs=1e-6)
        (effects, _), (other, _) = learned(ONE, nothing, 60), learned(ONE, nothing, 60)


def test_params_of_which_no_trial_has_ended_on_a_class_take_at_least_as_long_as_these_have_run() -> None:
    generator = np.random.default_rng(4)
    effects, so_far = ParamEffects(ONE), 3.5
    running: list[tuple[Params, int, float, bool]] = []
    for place in range(160):
        params, column = {"w": 0.95 if place % 2 else 0.05}, int(place % 4 > 1)
        if place % 4 == 3:
            running.append((params, column, so_far, False))
        else:
            effects.tell(params, column, 2.0 + float(generator.normal(0, NOISE)))
    probes = [{"w": 0.05}, {"w": 0.95}]

    def slower(running: list[tuple[Params, int, float, bool]], fits: int) -> float:
        """How many log seconds more the running params are expected to take than the others on their class."""
        for _ in range(fits):
            effects.suppose(running, 2)
            effects.read(np.array([2.0, 2.0]))
        quick, slow = effects.departures(probes, 2)
        return float((slow - quick)[1])

    assert slower([], 5) < 0.5
    found = slower(running, 30)
    assert so_far - 2.0 - NOISE < found < so_far - 2.0 + 3 * NOISE
    assert slower(running, 1) == pytest.approx(found, abs=0.1), "it has converged"


def ratio_error(subspace: Subspace, law: Law, trials: int) -> tuple[float, float]:
    """Standard deviation of the error in the log ratio of the classes' seconds, and of that ratio itself."""
    effects, _ = learned(subspace, law, trials)
    fresh = subspace.sample(np.random.default_rng(99), 300)
    departures = effects.departures(fresh, 2)
    found = departures[:, 0] - departures[:, 1]
    true = np.array([law(params)[0] - law(params)[1] for params in fresh])
    return float(np.std(found - true)), float(np.std(true))


@pytest.mark.parametrize(
    ("subspace", "law", "trials"),
    [(ONE, by_one, 100), (TWO, by_two, 150), (BATCH, by_batch, 100), (MANY, by_one, 400), (MODELS, by_model, 600)],
    ids=["one number", "a product of two", "log-scaled", "one of nine", "forty options"],
)
def test_the_ratio_of_two_classes_seconds_is_learned_from_few_trials(subspace: Subspace, law: Law, trials: int) -> None:
    error, spread = ratio_error(subspace, law, trials)
    assert error < 0.4 * spread


@pytest.mark.parametrize("subspace", [ONE, MANY, MODELS], ids=["one", "nine", "forty options"])
def test_where_params_tell_nothing_nearly_nothing_is_believed_of_them(subspace: Subspace) -> None:
    error, spread = ratio_error(subspace, nothing, 600)
    assert spread == 0.0
    assert error < 0.15


def test_before_any_trial_all_params_are_alike() -> None:
    effects = ParamEffects(TWO)
    assert not effects.departures(TWO.sample(np.random.default_rng(0), 5), 3).any()


def test_a_class_without_trials_takes_what_is_common_to_all() -> None:
    effects, _ = learned(ONE, lambda params: (5 * params["w"], 5 * params["w"]), 200)
    low, high = effects.departures([{"w": 0.1}, {"w": 0.9}], 3)[:, 2]
    assert high - low > 2.0


def test_stragglers_move_little() -> None:
    effects, _ = learned(ONE, by_one, 300)
    before = effects.departures([{"w": 0.5}], 2)
    for _ in range(LEAST_NEW):
        effects.tell({"w": 0.5}, 0, 30.0)
    effects.read(np.array([3.2, 4.9]))
    after = effects.departures([{"w": 0.5}], 2)
    assert np.abs(after - before).max() < 0.5


def test_functions_do_not_depend_on_what_was_told_nor_on_the_process() -> None:
    params = MANY.sample(np.random.default_rng(3), 7)
    effects, _ = learned(MANY, by_one, 50)
    assert (effects.functions(params) == ParamEffects(MANY).functions(params)).all()
    assert ParamEffects(MANY).functions(params[:1]) == pytest.approx(effects.functions(params)[:1])


def test_an_inactive_label_and_a_space_of_very_many_labels_are_no_obstacle() -> None:
    tree = hp.choice("k", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.choice("b", list("xyz")), "c": hp.randint("c", 9)}])
    whole = split(compile_space({"t": tree, "n": hp.normal("n", 0, 1)}), max_subspaces=1)[0]
    effects, _ = learned(whole, lambda params: (1.0 + params["k"], 2.0), 200)
    draws = whole.sample(np.random.default_rng(5), 50)
    found = effects.departures(draws, 2)
    slow = np.array([params["k"] == 1 for params in draws])
    assert found[slow, 0].mean() - found[~slow, 0].mean() > 0.5
    draws = np.random.default_rng(0).uniform(size=(100, 200))
    assert 0 < Basis(draws, [True] * 200).size <= MOST


def test_without_params_there_is_nothing_to_learn() -> None:
    bare = split(compile_space({"c": hp.choice("c", [1])}))[0]
    effects, _ = learned(bare, lambda params: (1.0, 2.0), 20)
    assert effects.departures([{"c": 0}], 2).shape == (1, 2)
