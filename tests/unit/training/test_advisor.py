"""Advisor: it fits the measured widths, and refuses widths far beyond them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shadho_celery.errors import UsageError
from shadho_celery.training.advisor import (
    Advice,
    Iterations,
    Profile,
    StepSeconds,
    advise,
    fit,
    fit_iterations,
    profile,
)
from shadho_celery.training.backups import Array
from shadho_celery.training.log import Log, Step
from shadho_celery.training.report import Report

TRUE = (0.02, 0.001, 0.005, 0.002)
SIZE = 64.0


def seconds(m: int, size: float = SIZE) -> float:
    a, b, c, d = TRUE
    return a + b * size / m + c * math.log(m) + d * m


def profiles(*widths: int, noise: float = 0.0) -> list[Profile]:
    generator = np.random.default_rng(0)
    return [
        Profile(replicas=m, size=SIZE, seconds=seconds(m) * (1 + noise * generator.standard_normal())) for m in widths
    ]


def test_exact_profiles_give_the_coefficients_back() -> None:
    assert fit(profiles(1, 2, 3, 4, 6, 8)).coefficients == pytest.approx(TRUE, rel=1e-6)


def test_noisy_profiles_are_right_within_a_few_percent_at_twice_the_widest() -> None:
    fitted = fit(profiles(1, 1, 2, 2, 3, 3, 4, 4, 6, 6, 8, 8, noise=0.02))
    assert fitted.at(16, SIZE) == pytest.approx(seconds(16), rel=0.15)
    assert min(fitted.coefficients) >= 0


@pytest.mark.parametrize(("width", "fine"), [(8, True), (9, False), (16, False)])
def test_more_than_twice_the_widest_profile_is_refused(width: int, fine: bool) -> None:
    fitted = fit(profiles(1, 2, 4))
    if fine:
        assert fitted.at(width, SIZE) > 0
    else:
        with pytest.raises(UsageError, match=rf"widest profile \(4\); measure .* with {math.ceil(width / 2)} or more"):
            fitted.at(width, SIZE)


def test_machines_beyond_twice_the_widest_profile_are_refused_even_where_fewer_would_be_best() -> None:
    with pytest.raises(UsageError, match="widest profile"):
        advise({"gpu": fit(profiles(1, 2, 4))}, Iterations(limit=100, slope=0, widest=8), batch=8, machines={"gpu": 9})


def test_steps_are_predicted_up_to_twice_the_widest_training_only() -> None:
    fitted = fit_iterations({1: 900.0, 4: 300.0})
    assert fitted.at(8) > 0
    with pytest.raises(UsageError, match=r"widest training to the target \(4\); train .* with 5 or more"):
        fitted.at(9)


def test_by_default_no_width_beyond_twice_the_widest_training_is_advised() -> None:
    steps = {"gpu": fit(profiles(1, 2, 4, 8))}
    assert advise(steps, Iterations(limit=1, slope=1e6, widest=3), batch=8).replicas == 6
    with pytest.raises(UsageError, match="widest training"):
        advise(steps, Iterations(limit=1, slope=1e6, widest=3), batch=8, machines={"gpu": 7})


def test_a_width_below_one_is_refused() -> None:
    fits = [fit(profiles(1, 2)), Iterations(limit=10, slope=1, widest=2)]
    for ask in (lambda: fits[0].at(0, SIZE), lambda: fits[1].at(0)):  # type: ignore[union-attr, call-arg]
        with pytest.raises(UsageError, match="one or more"):
            ask()


@pytest.mark.parametrize("steps", [{0: 10, 2: 5}, {1: 0, 2: 5}, {1: math.inf, 2: 5}, {1: math.nan, 2: 5}])
def test_steps_of_no_training_are_refused(steps: dict[int, float]) -> None:
    with pytest.raises(UsageError, match="at least one replica and more than 0 steps"):
        fit_iterations(steps)


def test_the_prior_decides_what_the_profiles_leave_open() -> None:
    """At one width, b and d cannot be separated; a prior predicts another width."""
    plain, with_prior = (fit(profiles(4, 4), prior) for prior in (None, (TRUE[1], TRUE[3])))
    assert with_prior.at(8, SIZE) == pytest.approx(seconds(8), rel=0.3)
    assert abs(with_prior.at(8, SIZE) - seconds(8)) < abs(plain.at(8, SIZE) - seconds(8))


def test_a_prior_gives_way_to_profiles() -> None:
    fitted = fit(profiles(1, 2, 3, 4, 6, 8), (TRUE[1] * 3, TRUE[3] / 3))
    assert fitted.at(8, SIZE) == pytest.approx(seconds(8), rel=0.05)


def test_iterations_by_width_are_fitted() -> None:
    fitted = fit_iterations({m: 500 * (1 + 6 / m) for m in (1, 2, 4, 8)})
    assert fitted.limit == pytest.approx(500)
    assert fitted.slope == pytest.approx(6)
    assert fitted.at(16) == pytest.approx(500 * (1 + 6 / 16))


def test_steps_that_halve_with_every_doubling_are_fitted_too() -> None:
    fitted = fit_iterations({1: 800.0, 2: 400.0, 4: 200.0})
    assert [fitted.at(m) for m in (1, 2, 4)] == pytest.approx([800, 400, 200], rel=0.02)


def best(**options: object) -> Advice:
    steps = {"gpu": fit(profiles(1, 2, 4, 8))}
    return advise(steps, Iterations(limit=100, slope=6, widest=8), batch=8, **options)  # type: ignore[arg-type]


def test_the_advised_width_is_the_one_with_the_least_seconds() -> None:
    by_hand = {m: seconds(m, 8.0 * m) * 100 * (1 + 6 / m) for m in range(1, 17)}
    advice = best()
    assert advice.replicas == min(by_hand, key=lambda m: by_hand[m])
    assert advice.seconds == pytest.approx(min(by_hand.values()), rel=1e-3)
    assert advice.backups == 0


def test_the_least_machine_seconds_take_fewer_replicas() -> None:
    thrifty = best(least="machine_seconds")
    assert thrifty.replicas < best().replicas
    assert thrifty.machine_seconds == pytest.approx(thrifty.seconds * thrifty.replicas)


def test_the_faster_class_is_advised() -> None:
    fast = StepSeconds(coefficients=(0.01, 0.0, 0.0, 0.0), widest=4)
    slow = StepSeconds(coefficients=(0.02, 0.0, 0.0, 0.0), widest=4)
    assert (
        advise({"slow": slow, "fast": fast}, Iterations(limit=10, slope=1, widest=4), batch=1).compute_class == "fast"
    )


def test_stragglers_are_worth_backups_out_of_the_same_slots() -> None:
    def law(generator: np.random.Generator, runs: int, n: int) -> Array:
        return np.where(generator.random((runs, n)) < 0.05, 8.0, 1.0)

    advice = best(machines={"gpu": 8}, law=law, cancel_seconds=0.1)
    assert advice.backups >= 1
    assert advice.replicas + advice.backups <= 8
    assert advice.seconds < best(machines={"gpu": 8}).seconds


@pytest.mark.parametrize("machines", [{}, {"cpu": 2}, {"gpu": 0}])
def test_machines_without_profiles_or_slots_are_refused(machines: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="machines must name"):
        best(machines=machines)


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(UsageError, match="no profile"):
        fit([])
    with pytest.raises(UsageError, match="more than 0 seconds"):
        fit([Profile(replicas=2, seconds=0.0, size=1)])
    with pytest.raises(UsageError, match="two widths"):
        fit_iterations({4: 100})


def test_a_training_is_a_profile_of_its_width() -> None:
    steps = [Step(step=n, accepted=(0, 1), loss=1.0, seconds=seconds) for n, seconds in enumerate((0.1, 0.3))]
    report = Report(replicas=2, backups=0, log=Log(steps=steps))
    assert profile(report, batch=16) == Profile(replicas=2, seconds=0.2, size=32.0)
    with pytest.raises(UsageError, match="train for a few steps"):
        profile(Report(replicas=2, backups=0, log=Log()), batch=16)
