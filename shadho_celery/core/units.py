"""Texts of numbers, durations and money in tables, charts and messages."""

from __future__ import annotations

import re
from itertools import dropwhile

#: by unit of a duration: its seconds
UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration(seconds: float) -> str:
    """Return a duration as text in its two largest units, such as "2 h 10 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [*dropwhile(lambda part: not part[0], ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")))]
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``10m``, ``4h``, ``1.5h`` or ``2d``; a number alone is seconds.

    Raises ValueError if the text is not a duration, or if the duration is 0 or longer than 30 years.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|d)?", text.strip(), re.ASCII)
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is not a duration; write it as 90s, 10m, 4h or 2d")
    if (seconds := float(found[1]) * UNITS[found[2] or "s"]) >= 1e9:
        raise ValueError(f"{text!r} is longer than 30 years")
    return seconds


def took(seconds: float | None) -> str:
    """Return a duration below 100 s with three digits, in s or ms, and a longer one in its two largest units."""
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
    """Return an amount of money without its currency: with two decimals; below 1, with two significant digits."""
    return f"{amount:,.2f}" if amount >= 0.995 or not amount else f"{amount:.2g}"


def cost_of(price: float, since: float, until: float) -> float:
    """Return the money for the time from `since` to `until` at a price per hour.

    Both times are in seconds. If they are from different clocks, `until` may be before `since`. The result is then 0.
    """
    return price * max(0.0, until - since) / 3600


def size_text(size: float) -> str:
    """Return a number of bytes in the largest unit of which there is at least one, such as "3.4 GB" or "12 kB"."""
    place = next((place for place in (4, 3, 2, 1) if size >= 1000**place), 0)
    return f"{size / 1000**place:.3g} {['byte' if size == 1 else 'bytes', 'kB', 'MB', 'GB', 'TB'][place]}"


def counted(number: int, one: str, several: str = "") -> str:
    """Return a number with a noun, such as "1 trial" or "1,200 trials". By default, the plural has an s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
