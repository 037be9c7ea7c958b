"""The chance that params are feasible: its slopes are its derivatives, and 0 stays the limit."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from shadho_celery.samplers.gaussian_process import ConstraintModel, scaled


def learned() -> ConstraintModel:
    generator = np.random.default_rng(0)
    rows = generator.random((40, 2))
    told = [
        {"a": 100 * (x - 0.5) + noise, **({"b": y - 0.7 + noise / 50} if place % 2 else {})}
        for place, (x, y, noise) in enumerate(np.column_stack([rows, generator.normal(size=40)]))
    ]
    model = ConstraintModel([True, True])
    model.learn(rows, told, fit=True)
    return model


def test_what_keeps_to_all_constraints_is_likely_feasible_and_what_breaks_one_is_not() -> None:
    model = learned()
    chances = np.exp(model.log_chances(np.array([[0.2, 0.3], [0.8, 0.3], [0.2, 0.95]])))
    assert chances[0] > 0.9
    assert chances[1:].max() < 0.1


def test_the_slopes_are_the_derivatives_of_the_chance() -> None:
    model = learned()
    for row in (np.array([0.45, 0.6]), np.array([0.55, 0.3]), np.array([0.9, 0.9])):
        value, slopes = model.slopes(row)
        assert value == pytest.approx(float(model.log_chances(row[None])[0]))
        numeric = approx_fprime(row, lambda at: float(model.log_chances(at[None])[0]), 1e-6)
        assert slopes == pytest.approx(numeric, rel=1e-2, abs=1e-3)


def test_before_the_first_constraint_everything_is_feasible() -> None:
    model = ConstraintModel([True, True])
    model.learn(np.random.default_rng(0).random((3, 2)), [{}, {}, {}], fit=True)
    assert not model.any
    assert model.log_chances(np.zeros((2, 2))).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("values", [[1.0, -1.0, 1e300], [0.0, 0.0], [3.0], [-1e-300, 2e-300]])
def test_values_of_any_size_keep_their_side_of_the_limit(values: list[float]) -> None:
    found, limit = scaled(np.array(values))
    assert np.isfinite([*found, limit]).all()
    assert [value <= 0 for value in values] == [value <= limit + 1e-12 for value in found]
