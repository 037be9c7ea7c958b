"""Complexity reproduces the paper's numbers; performance tells flat, noisy, smooth and rough losses apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from numpy.typing import NDArray
from services.cases import cases

from shadho_celery.placement.paper import START_VALUE, performance
from shadho_celery.space.domains import Categorical, Domain, LogUniform, Normal, QUniform, RandInt, Uniform
from shadho_celery.space.features import complexity, features

Array = NDArray[np.float64]
Loss = Callable[[Array, np.random.Generator], Array]

C, GAMMA = Uniform(-5, 15), Uniform(-3, 3)

SEEDS = range(3)


def noise(points: Array, generator: np.random.Generator) -> Array:
    return generator.normal(size=len(points))


def linear(points: Array, generator: np.random.Generator) -> Array:
    slope: Array = 3.0 * points.sum(axis=1)
    return slope


def noisy_linear(points: Array, generator: np.random.Generator) -> Array:
    return linear(points, generator) + 0.1 * noise(points, generator)


def rough(points: Array, generator: np.random.Generator) -> Array:
    waves: Array = np.sin(2 * np.pi * 4 * points[:, 0])  # four periods
    return waves


def noisy_rough(points: Array, generator: np.random.Generator) -> Array:
    return rough(points, generator) + 0.1 * noise(points, generator)


@cache
def score(loss: Loss, seed: int, leaves: int = 2, trials: int = 150) -> float:
    generator = np.random.default_rng(seed)
    points = generator.random((trials, leaves))
    return performance(points, loss(points, generator), generator)


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        (Categorical.uniform(1), 1.0),
        (RandInt(7, 8), 1.0),
        (Categorical.uniform(4), 1.75),
        (RandInt(0, 1000), 2 - 1 / 1000),
        (LogUniform(-4, 6), 2 + 0.999 * 10),
        (Normal(5.0, 2.0), 2 + 2 * 3.2905267 * 2.0),
        (QUniform(0, 9, 1), 1.9),
        (QUniform(0, 1000, 1), 2 + 0.999 * 1000),
    ],
    ids=str,
)
def test_each_kind_of_domain_has_its_factor(domain: Domain, expected: float) -> None:
    assert complexity([domain]) == pytest.approx(expected)


def test_complexity_of_no_leaves_is_one() -> None:
    assert complexity([]) == 1.0


def test_features_are_unit_columns_in_the_order_of_the_domains() -> None:
    rows = features([{"k": 2, "C": -5.0}, {"C": 15.0, "k": 0}], {"C": C, "k": Categorical.uniform(3)})
    np.testing.assert_allclose(rows, [[0.0, 1.0], [1.0, 0.0]])


def test_an_inactive_label_gets_the_middle() -> None:
    rows = features([{"C": -5.0}, {"gamma": 3.0}], {"C": C, "gamma": GAMMA})
    np.testing.assert_allclose(rows, [[0.0, 0.5], [0.5, 1.0]])


def test_features_of_nothing_have_the_right_shape() -> None:
    assert features([], {"C": C, "gamma": GAMMA}).shape == (0, 2)
    assert features([{}, {}, {}], {}).shape == (3, 0)


@cases("seed", SEEDS)
@cases("level", [0.0, 0.1, -1e300, 5e-324])
def test_a_constant_loss_scores_exactly_zero(level: float, seed: int) -> None:
    assert score(lambda points, _: np.full(len(points), level), seed) == 0.0


def test_a_loss_constant_but_for_rounding_scores_zero() -> None:
    assert score(lambda points, _: 0.1 + 1e-16 * points[:, 0], seed=0) == 0.0


@pytest.mark.slow
@cases("seed", SEEDS)
@cases("leaves", [1, 2])
def test_noise_scores_below_linear_and_linear_below_rough(leaves: int, seed: int) -> None:
    assert 0.0 <= score(noise, seed, leaves) < score(linear, seed, leaves) < score(rough, seed, leaves)


@pytest.mark.slow
@cases("seed", SEEDS)
@cases("leaves", [1, 2])
def test_the_order_survives_noise_on_the_signals(leaves: int, seed: int) -> None:
    assert score(noise, seed, leaves) < score(noisy_linear, seed, leaves) < score(noisy_rough, seed, leaves)


@pytest.mark.slow
@cases("seed", SEEDS)
@cases("leaves", [5, 10])
def test_noise_scores_below_linear_with_many_leaves(leaves: int, seed: int) -> None:
    assert score(noise, seed, leaves) < score(noisy_linear, seed, leaves)


def test_the_unit_and_offset_of_the_loss_do_not_matter() -> None:
    plain = score(noisy_rough, 0)
    for scale in (1e-200, 1e-3, 1e200):
        rescaled = partial(lambda factor, x, g: factor * (5 + noisy_rough(x, g)), scale)
        assert score(rescaled, 0) == pytest.approx(plain)


@pytest.mark.parametrize("loss", [noise, linear, noisy_rough])
def test_the_score_depends_on_the_generator_alone(loss: Loss) -> None:
    points = np.random.default_rng(0).random((200, 3))
    losses = loss(points, np.random.default_rng(1))
    first, second = (performance(points, losses, np.random.default_rng(7)) for _ in range(2))
    assert first == second


def test_a_subspace_keeps_the_start_value_until_it_has_ten_losses() -> None:
    points = np.random.default_rng(0).random((12, 1))
    losses = np.array([*points[:9, 0], np.nan, np.inf, -np.inf])
    for n in range(13):
        assert performance(points[:n], losses[:n], np.random.default_rng(0)) == START_VALUE
    assert performance(points[:10], points[:10, 0], np.random.default_rng(0)) != START_VALUE


def test_failed_trials_are_left_out() -> None:
    points = np.random.default_rng(0).random((40, 2))
    losses = rough(points, np.random.default_rng(0))
    padded = np.vstack([points, points[:5]]), np.append(losses, [np.nan, np.inf, -np.inf, np.nan, np.inf])
    assert performance(*padded, np.random.default_rng(3)) == performance(points, losses, np.random.default_rng(3))


def test_without_leaves_nothing_can_vary() -> None:
    assert performance(np.empty((20, 0)), np.arange(20.0), np.random.default_rng(0)) == 0.0


def test_repeated_params_are_no_obstacle() -> None:
    points = np.repeat(np.random.default_rng(0).random((5, 2)), 20, axis=0)
    assert performance(points, points.sum(axis=1), np.random.default_rng(0)) > 0.0


def test_a_diverged_trial_does_not_break_the_fit() -> None:
    losses = np.append(np.linspace(0.0, 1.0, 49), 1e308)
    assert np.isfinite(performance(np.linspace(0, 1, 50)[:, None], losses, np.random.default_rng(0)))
