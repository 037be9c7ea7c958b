"""Texts of numbers and durations, as tables, pictures and messages show them."""

from __future__ import annotations

import re
from itertools import dropwhile

#: seconds of each unit that people write in a duration
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [*dropwhile(lambda part: not part[0], ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")))]
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``10m``, ``4h``, ``1.5h`` or ``2d``; a number alone is seconds.

    Raises ValueError if it is not one, not above 0, or longer than 30 years.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d)?", text.strip(), re.ASCII)
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is not a duration; write it as 90s, 10m, 4h or 2d")
    if (seconds := float(found[1]) * UNITS[found[2] or "s"]) >= 1e9:
        raise ValueError(f"{text!r} is longer than 30 years")
    return seconds


def took(seconds: float | None) -> str:
    """Return a duration with three digits in s or ms, or if it is longer in its two largest units."""
    if not seconds:
        return "-" if seconds is None else "0 s"
    if seconds >= 99.95:
        return duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def digits(value: float) -> str:
    """Return a number with three significant digits, such as 0.0711, 2,180 or 1.5e-07."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def money(amount: float) -> str:
    """Return an amount of money, in any currency, with two decimals, or below 1 with two significant digits."""
    return f"{amount:,.2f}" if amount >= 0.995 or not amount else f"{amount:.2g}"


def cost_of(price: float, since: float, until: float) -> float:
    """Return the money that a time costs at a price an hour. Times of two clocks, in seconds, may be in wrong order."""
    return price * max(0.0, until - since) / 3600


def size_text(size: float) -> str:
    """Return a number of bytes in the largest unit of which there is at least one, such as "3.4 GB" or "12 kB"."""
    place = next((place for place in (4, 3, 2, 1) if size >= 1000**place), 0)
    return f"{size / 1000**place:.3g} {['bytes', 'kB', 'MB', 'GB', 'TB'][place]}"


def counted(number: int, one: str, several: str = "") -> str:
    """Return a number with what it counts, such as "1 trial has" or "1,200 trials have". By default an s is added."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
