"""Arrays that grow while a study runs, filled with the rows of a store. What a store has may be of any type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shadho_celery.charts.chart import Array, Indices, shortened
from shadho_celery.charts.columns import Codes
from shadho_celery.core.checks import one_line

Integers = NDArray[np.int64]


class Grown:
    """Array that grows at its end. It takes no memory before its first value is put in."""

    def __init__(self, fill: float, kind: type[np.generic]) -> None:
        """`fill` stands for values that are missing."""
        self._fill = np.array(fill, kind)
        self._values: NDArray[Any] = np.empty(0, kind)

    def put(self, places: Indices, values: NDArray[Any], count: int) -> None:
        """Put in values at some places of the first `count`."""
        if count > len(self._values):
            room = np.full(max(count, 2 * len(self._values), 1024) - len(self._values), self._fill)
            self._values = np.concatenate([self._values, room])
        self._values[places] = values

    def is_unused_by(self, column: Sequence[object]) -> bool:
        """Return whether a column has no value, as all columns before it, so that it need not be put in."""
        return not len(self._values) and column.count(None) == len(column)

    def first(self, count: int) -> NDArray[Any]:
        """Return the first `count` values, a view if there are any."""
        if not len(self._values):
            return np.broadcast_to(self._fill, count)
        self.put(np.empty(0, np.intp), np.empty(0, self._values.dtype), count)
        return self._values[:count]


class Keys:
    """Places of rows by their keys, which are whole numbers from 0. Most rows arrive in the order of their keys."""

    def __init__(self) -> None:
        self._keys = Grown(-1, np.int64)
        self._count, self._greatest = 0, -1
        #: places in the order of the keys; None if the places themselves have this order
        self._order: Indices | None = None

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._count

    @property
    def values(self) -> Integers:
        """The keys by place."""
        return self._keys.first(self._count)

    @property
    def order(self) -> Indices | slice:
        """The places in the order of the keys."""
        return slice(0, self._count) if self._order is None else self._order

    def known(self, keys: Integers) -> Indices:
        """Return the place of each key, and -1 for an unknown one."""
        if not self._count:
            return np.full(len(keys), -1, np.intp)
        ranks = np.searchsorted(self.values, keys, sorter=self._order)
        ranks = np.minimum(ranks, self._count - 1)
        found = ranks if self._order is None else self._order[ranks]
        return np.where(self.values[found] == keys, found, -1)

    def places(self, keys: Integers) -> Indices:
        """Return the place of each key. Each new key gets the next place."""
        if len(keys) and keys[0] > self._greatest and bool((keys[1:] > keys[:-1]).all()):
            return self._add(keys)
        new = np.unique(keys[self.known(keys) < 0])
        if len(new):
            is_last = new[0] > self._greatest
            self._add(new)
            if not is_last:
                self._order = np.argsort(self.values, kind="stable")
        return self.known(keys)

    def _add(self, keys: Integers) -> Indices:
        """Add new keys that are sorted, and return their places."""
        places = np.arange(self._count, self._count + len(keys))
        self._count += len(keys)
        self._keys.put(places, keys, self._count)
        self._greatest = max(self._greatest, int(keys[-1]))
        if self._order is not None:
            self._order = np.append(self._order, places)
        return places


class Names:
    """Column of texts, each as the index of its name."""

    def __init__(self) -> None:
        self._codes = Grown(-1, np.int32)
        #: by value of the store, a text or its bytes: index of the name; -1 for what is not a text
        self._known: dict[object, int] = {None: -1}
        self._places: dict[str, int] = {}

    def put(self, places: Indices, values: Sequence[object], count: int) -> None:
        """Put in texts at some places of the first `count`."""
        if self._codes.is_unused_by(values):
            return
        try:
            codes = [*map(self._known.__getitem__, values)]
        except (KeyError, TypeError):
            codes = [*map(self._code, values)]
        self._codes.put(places, np.array(codes, np.int32), count)

    def first(self, count: int, order: Indices | slice) -> Codes:
        """Return the first `count` texts in this order, with sorted names, so that they do not depend on the order."""
        names = [*self._places]
        sorted_ = sorted(range(len(names)), key=names.__getitem__)
        new = np.full(len(names) + 1, -1, np.int32)
        new[sorted_] = np.arange(len(names))
        return Codes(new[self._codes.first(count)[order]], [shortened(one_line(names[place])) for place in sorted_])

    def _code(self, value: object) -> int:
        if not isinstance(value, str | bytes):
            return -1
        if value not in self._known:
            self._known[value] = self._places.setdefault(text_of(value), len(self._places))
        return self._known[value]


def text_of(value: str | bytes) -> str:
    """Return a text as it is, or from its bytes, which may be damaged."""
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


def reals(column: Sequence[object], *, is_finite: bool = True, most: float = math.inf) -> Array:
    """Return a column as numbers. What is not a number, or not finite where it must be, becomes NaN.

    So does a number whose size is above `most`.
    """
    try:
        found = np.array(column, float)
    except (TypeError, ValueError):
        found = np.array([value if isinstance(value, (int, float)) else math.nan for value in column], float)
    if is_finite:
        found[np.isinf(found)] = math.nan
    if most < math.inf:
        found[np.abs(found) > most] = math.nan
    return found


def integers(column: Sequence[object], least: int, most: int) -> Integers:
    """Return a column as whole numbers. What is not a whole number between `least` and `most` becomes -1."""
    if {*map(type, column)} != {int}:
        column = [value if type(value) is int else -1 for value in column]
    # A database's own integers have at most 64 bits.
    found = np.array(column, np.int64)
    return np.where((found >= least) & (found <= most), found, -1)


def columns_of(rows: Iterable[Sequence[Any]], names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return rows as columns by name; empty columns if there are no rows."""
    return dict(zip(names, [*zip(*rows, strict=True)] or [()] * len(names), strict=True))
