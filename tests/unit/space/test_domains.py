"""A domain draws, is mapped onto [0, 1], is counted and describes itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from services.cases import cases

from shadho_celery.errors import SpaceError
from shadho_celery.space.domains import (
    Categorical,
    Domain,
    LogNormal,
    LogUniform,
    Normal,
    QLogNormal,
    QLogUniform,
    QNormal,
    QUniform,
    RandInt,
    Uniform,
    make_domain,
    validate,
)

ALL = [
    Uniform(-5, 15),
    QUniform(-4.999, 5, 1),
    LogUniform(-3, 2),
    QLogUniform(0, 4, 2),
    Normal(3, 2),
    QNormal(0, 3, 0.5),
    LogNormal(0, 1),
    QLogNormal(1, 1, 1),
    RandInt(3, 9),
    RandInt(0, 2**40),
    Categorical.uniform(5),
    Categorical((0.2, 0.0, 0.8)),
]


@pytest.mark.parametrize(
    ("domain", "interval"),
    [
        (Uniform(-5, 15), (-4.99, 14.99)),
        (LogUniform(-5, 15), (-4.99, 14.99)),
        (QUniform(-5, 15, 3), (-4.99, 14.99)),
        (Normal(1, 2), (1 - 2 * 3.290527, 1 + 2 * 3.290527)),
        (LogNormal(1, 2), (1 - 2 * 3.290527, 1 + 2 * 3.290527)),
        (RandInt(0, 10), (0, 9)),
        (RandInt(0, 10_000), (5, 9994)),
        (Categorical.uniform(4), (0, 3)),
    ],
)
def test_the_central_interval_is_that_of_the_unscaled_law(domain: Domain, interval: tuple[float, float]) -> None:
    assert domain.central_interval(0.999) == pytest.approx(interval)


@cases(
    "domain, count",
    [
        (Uniform(0, 1), None),
        (LogNormal(0, 1), None),
        (RandInt(3, 9), 6),
        (RandInt(0, 2**40), 2**40),
        (Categorical.uniform(13), 13),
        (QUniform(-4.999, 5, 1), 11),
        (QUniform(0, 63, 1), 64),
        (QUniform(0, 64, 1), None),
        (QUniform(0, 1, 10), 1),
        (QNormal(0, 1, 1), 7),
        (QLogUniform(0, math.log(10), 1), 10),
        (QLogUniform(0, 700, 1e-3), None),
    ],
)
def test_a_grid_counts_as_discrete_up_to_64_values(domain: Domain, count: int | None) -> None:
    assert domain.cardinality(0.999) == count


@cases("domain", ALL)
def test_every_draw_lies_in_its_domain_and_in_the_unit_interval(domain: Domain) -> None:
    drawn = domain.sample(np.random.default_rng(0), 2000)
    assert drawn.shape == (2000,)
    assert drawn.dtype in (np.dtype("int64"), np.dtype("float64"))
    units = domain.to_unit(drawn)
    assert units.min() >= 0
    assert units.max() <= 1
    assert all(map(domain.contains, drawn.tolist()))
    back = domain.from_unit(units)
    assert back.dtype == drawn.dtype
    inner = (units > 0) & (units < 1)
    assert np.allclose(back[inner], drawn[inner], rtol=1e-9)


@cases("domain", ALL)
def test_any_point_of_the_unit_interval_becomes_a_value(domain: Domain) -> None:
    for values in (domain.from_unit([0.0, 0.3, 1.0]), domain.quantile([0.0, 0.3, 1.0])):
        assert np.isfinite(values).all()
        assert all(map(domain.contains, values.tolist()))


def test_the_ends_of_a_grid_are_drawn() -> None:
    drawn = QUniform(-4.999, 5, 1).sample(np.random.default_rng(0), 5000)
    assert set(drawn) == set(range(-5, 6))


@pytest.mark.parametrize(
    ("domain", "ends"),
    [
        (QUniform(0.5, 3.5, 1), (1, 3)),
        (QUniform(1.5, 4.5, 1), (2, 4)),
        (QUniform(-2.5, -0.5, 1), (-2, -1)),
        (QUniform(0.05, 1.05, 0.1), (0.1, 1.0)),
        (QLogUniform(math.log(0.5), math.log(3.5), 1), (1, 3)),
        (QUniform(0, 1, 5), (0, 0)),
    ],
)
def test_a_value_beyond_a_bound_in_the_middle_of_two_is_not_drawn(domain: QUniform, ends: tuple[float, float]) -> None:
    assert tuple(domain.from_unit([0, 1])) == tuple(domain.quantile([0, 1])) == pytest.approx(ends)
    grid = domain.steps()
    assert grid is not None
    assert (grid[0][0] * grid[1], grid[0][-1] * grid[1]) == pytest.approx(ends)


def test_a_log_law_is_mapped_in_log_scale() -> None:
    assert LogUniform(0, 2).to_unit([1.0, math.e, math.e**2]) == pytest.approx([0, 0.5, 1])
    assert QLogUniform(-1, 4, 5).to_unit([0.0]) == pytest.approx([0])


def test_a_law_narrower_than_the_floats_around_it_is_mapped_without_a_division_by_zero() -> None:
    domain = Normal(1e9, 1e-9)
    assert domain.to_unit([1e9]).tolist() == [0.0]
    assert domain.from_unit([0.0, 1.0]).tolist() == [1e9, 1e9]


def test_an_index_is_mapped_by_its_place() -> None:
    assert Categorical.uniform(5).to_unit([0, 1, 4]) == pytest.approx([0, 0.25, 1])
    assert Categorical.uniform(1).to_unit([0]) == pytest.approx([0])
    assert RandInt(3, 8).to_unit([3, 4, 7]) == pytest.approx([0, 0.25, 1])


def test_a_choice_has_no_axis_and_a_randint_has() -> None:
    assert not Categorical.uniform(3).is_numeric
    assert RandInt(0, 3).is_numeric
    assert Uniform(0, 1).is_numeric


@pytest.mark.parametrize(
    ("domain", "text"),
    [
        (Uniform(-5, 15.0), "uniform(-5, 15)"),
        (QUniform(-4.999, 5, 1), "quniform(-4.999, 5, 1)"),
        (LogUniform(math.log(1e-4), 0.1), "loguniform(-9.210340371976182, 0.1)"),
        (Normal(0, 1e20), "normal(0, 1e+20)"),
        (RandInt(0, 2**40), "randint(0, 1099511627776)"),
        (Categorical.uniform(13), "choice(13)"),
        (Categorical((0.3, 0.7)), "pchoice(0.3, 0.7)"),
    ],
)
def test_a_description_is_hyperopts_call(domain: Domain, text: str) -> None:
    assert domain.describe() == text


def test_probabilities_are_renormalised() -> None:
    domain = make_domain("x", "categorical", {"p": (1 / 3 + 4e-7, 1 / 3, 1 / 3)})
    assert isinstance(domain, Categorical)
    assert math.fsum(domain.probabilities) == pytest.approx(1, abs=1e-15)


def test_an_option_of_probability_0_is_never_drawn() -> None:
    domain = Categorical((0.0, 0.5, 0.0, 0.5, 0.0))
    assert set(domain.sample(np.random.default_rng(0), 5000)) == {1, 3}
    assert set(domain.quantile([0.0, 1.0])) == {1, 3}


@pytest.mark.parametrize("domain", [Uniform(1, 0), Normal(0, 0), QNormal(0, 1, 0), RandInt(0, 0), Categorical(())])
def test_validating_a_domain_names_the_label(domain: Domain) -> None:
    with pytest.raises(SpaceError, match=r"'my label'.*;"):
        validate("my label", domain)


@cases("domain", ALL)
def test_a_good_domain_is_valid(domain: Domain) -> None:
    validate("x", domain)
