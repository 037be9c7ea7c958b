"""The forecast of losses at the top from the trials that ran on neighbouring rungs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shadho_celery.study.forecast import AGREEING, Forecast


def results(number: int, promoted: int, *, error: float, scale: float = 3.0) -> list[dict[int, float]]:
    """Losses of two rungs: those above are ``10 + scale * loss`` of all trials below that are the best, with errors."""
    draw = np.random.default_rng(0)
    low = {origin: float(loss) for origin, loss in enumerate(draw.normal(size=number))}
    best = sorted(low, key=low.__getitem__)[:promoted]
    return [low, {origin: 10 + scale * low[origin] + error * float(draw.normal()) for origin in best}]


def test_a_line_is_found_although_only_the_best_trials_ran_on_both_rungs() -> None:
    forecast = Forecast(results(300, 100, error=0.3))
    assert forecast.top_loss(0, -1.0) == pytest.approx(7.0, abs=0.3)
    assert forecast.top_loss(0, 0.0) == pytest.approx(10.0, abs=0.6)
    assert forecast.top_loss(1, 5.0) == 5.0


def test_the_trust_is_the_correlation_of_all_trials_although_only_the_best_were_promoted() -> None:
    """Of all trials it is 3 / sqrt(9 + error squared), and of the best third alone much less."""
    low, high = results(3000, 60, error=3.0)
    alone = np.corrcoef([low[origin] for origin in high], [*high.values()])[0, 1]
    assert alone < 0.5
    assert Forecast([low, high]).trust(0) == pytest.approx(1 / math.sqrt(2), abs=0.15)


def test_trust_is_lost_where_the_rungs_have_nothing_in_common() -> None:
    draw = np.random.default_rng(1)
    low, high = (dict(enumerate(draw.normal(size=10 * AGREEING).tolist())) for _ in range(2))
    assert Forecast([low, high]).trust(0) < 0.3


def test_the_first_pairs_do_not_decide() -> None:
    """Three trials in the opposite order leave most of the trust, because of the AGREEING ones."""
    low = {origin: float(origin) for origin in range(9)}
    assert Forecast([low, {0: 3.0, 1: 2.0, 2: 1.0}]).trust(0) > 0.3


@pytest.mark.parametrize("loss", [1e30, math.inf, -1e30])
def test_an_outlier_does_not_move_the_line_of_the_others(loss: float) -> None:
    low, high = results(300, 100, error=0.0)
    ordinary = Forecast([low, high]).top_loss(0, -1.0)
    if loss > 0:
        assert Forecast([{**low, 999: loss}, high]).top_loss(0, -1.0) == pytest.approx(ordinary, abs=0.1)
        assert Forecast([{**low, 999: 0.0}, {**high, 999: loss}]).top_loss(0, -1.0) == pytest.approx(ordinary, abs=1.5)
    assert math.isfinite(Forecast([{**low, 999: loss}, high]).top_loss(0, -1.0))


def test_without_results_above_losses_are_taken_as_they_are() -> None:
    forecast = Forecast([{0: 1.0, 1: 2.0}, {}, {}])
    assert forecast.top_loss(0, 1.0) == 1.0
    assert forecast.trust(0) == 1.0
    assert forecast.errors[0] > 0 == forecast.errors[2]


@pytest.mark.parametrize("low", [{0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 2.0}])
def test_equal_losses_have_a_line(low: dict[int, float]) -> None:
    forecast = Forecast([low, {0: 5.0, 1: 5.0, 2: 5.0}])
    assert forecast.top_loss(0, 1.0) == pytest.approx(5.0, abs=0.5)
    assert all(math.isfinite(error) for error in forecast.errors)


def test_losses_of_two_values_have_a_correlation() -> None:
    """Half of the losses are the best one, so its distance to the median is 0."""
    low = {origin: float(origin % 2) for origin in range(20)}
    same, other = ({origin: float((origin + turn) % 2) for origin in range(20)} for turn in (0, 1))
    assert Forecast([low, same]).trust(0) == pytest.approx(1.0)
    assert Forecast([low, other]).trust(0) < 0.3


def test_a_rung_on_which_all_trials_failed_is_not_trusted() -> None:
    assert Forecast([{0: math.inf, 1: math.inf}, {}]).trust(0) == 0.0
