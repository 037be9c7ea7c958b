"""Texts of numbers and durations."""

from __future__ import annotations

import pytest

from shadho_celery.core.units import counted, digits, duration, money, seconds_of, size_text, took


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (0.4, "0 s"), (59.6, "1 min"), (90, "1 min 30 s"), (7260, "2 h 1 min"), (2 * 86400 + 1, "2 d")],
)
def test_a_duration_has_its_two_largest_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (0.000193, "0.193 ms"),
        (0.9996, "1 s"),
        (13.5, "13.5 s"),
        (99.96, "1 min 40 s"),
        (7260.0, "2 h 1 min"),
    ],
)
def test_a_time_has_its_unit(seconds: float | None, shown: str) -> None:
    assert took(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.07111, "0.0711"), (-2180.8, "-2,181"), (999.6, "1,000"), (1.5e-7, "1.5e-07"), (1e300, "1e+300")],
)
def test_a_number_has_three_digits(value: float, shown: str) -> None:
    assert digits(value) == shown


def test_one_thing_is_not_several() -> None:
    assert [counted(number, "trial") for number in (0, 1, 1200)] == ["0 trials", "1 trial", "1,200 trials"]
    assert [counted(number, "study is", "studies are") for number in (1, 2)] == ["1 study is", "2 studies are"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0), (" 2 d ", 172_800.0)]
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-1s", "soon", "1e3", "nan", "4 weeks", "99999d", "9" * 12])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|is longer than 30 years"):
        seconds_of(text)


@pytest.mark.parametrize(("amount", "shown"), [(0.0, "0.00"), (0.0123, "0.012"), (0.999, "1.00"), (1234.5, "1,234.50")])
def test_money_has_two_decimals_or_two_digits(amount: float, shown: str) -> None:
    assert money(amount) == shown


def test_one_byte_is_not_in_the_plural() -> None:
    assert [*map(size_text, (0, 1, 5, 3400))] == ["0 bytes", "1 byte", "5 bytes", "3.4 kB"]
