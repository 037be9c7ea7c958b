"""The record of a chart, and the rules by which large charts are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shadho_celery.core.units import counted

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
#: a value of a column; None is a gap
Cell = float | int | str | None

#: maximum number of marks of a chart
MOST = 5000
#: maximum number of categories of an axis, and of labels that a chart compares
MOST_CATEGORIES = 60
#: ratio of the greatest to the median value, or of the median to the least, above which an axis is logarithmic
LOG_RATIO = 100.0
#: greatest number of a chart: ECharts cannot draw an axis with values beyond this
FAR = 1e290
#: maximum length of a text in a chart
MOST_CHARACTERS = 200


class Scale(str, Enum):
    """Scale of an axis."""

    LINEAR = "linear"
    LOG = "log"
    #: seconds since the epoch
    TIME = "time"
    #: values are indices of the axis's categories
    CATEGORY = "category"


class Mark(str, Enum):
    """Form in which a series is drawn."""

    POINTS = "points"
    LINE = "line"
    #: a line that keeps its value until the next point
    STEPS = "steps"
    #: bars from 0, or from the column `base`
    BARS = "bars"
    #: bars from `start` to `end` in the row `y`
    SPANS = "spans"
    #: cells of a square grid around `x` and `y`, sorted from the worst to the best
    CELLS = "cells"
    #: a line over all axes for each row: parallel coordinates
    POLYLINES = "polylines"


class Axis(Struct, frozen=True, kw_only=True):
    """An axis of a chart: the quantity, its unit, and its scale."""

    name: str
    #: unit of the values, such as "s"; "" if they have none
    unit: str = ""
    scale: Scale = Scale.LINEAR
    categories: Sequence[str] = ()
    #: greatest possible value, such as 1 for a share; None if there is none
    most: float | None = None
    #: ends of the range that pages show first, such as that of the better half of the losses; () for all values
    focus: Sequence[float] = ()


class Series(Struct, frozen=True, kw_only=True):
    """Marks of one kind and colour."""

    name: str
    mark: Mark
    #: meaning of the colour, such as "class gpu_small", "state FAILED" or "best"; pages choose the colour by this text
    colour: str
    #: how a point is drawn: filled, hollow, cross, dash or mean; how a bar is drawn: filled, light, hatched or outlined
    form: str = "filled"
    #: columns by name, each with one value per mark. `x` and `y` are positions; lines of parallel coordinates have
    #: `axis 0`, `axis 1` and so on. `number` is the number of the trial that a click on the mark opens
    columns: Mapping[str, Sequence[Cell]]

    @classmethod
    def of(cls, name: str, mark: Mark, colour: str, form: str = "filled", /, **columns: Any) -> Series:
        """Return marks with these columns, each an array or a sequence of `Cell`."""
        return cls(name=name, mark=mark, colour=colour, form=form, columns={n: cells(c) for n, c in columns.items()})

    def __len__(self) -> int:
        """Return the number of marks."""
        return len(next(iter(self.columns.values()), ()))


class Chart(Struct, frozen=True, kw_only=True):
    """A chart: its axes and series, with a title that says what it shows."""

    #: identifier, such as "history", set by `registry.StudyChart.draw`
    name: str = ""
    #: sentence that says what the chart shows
    title: str
    #: the axes of x and y; of parallel coordinates, one axis for each column
    axes: Sequence[Axis]
    series: Sequence[Series] = ()
    #: True if the forms of class-coloured marks are states of trials: filled, hollow, cross and dash mean complete,
    #: pruned, failed and infeasible
    has_states: bool = False
    #: sentence about marks that were joined or left out
    note: str = ""
    #: how the chart is computed, which pages show on request
    how: str = ""
    #: sentence that is shown instead of marks, and says why the chart has no marks; "" if it has marks
    empty: str = ""

    def __len__(self) -> int:
        """Return the number of marks."""
        return sum(map(len, self.series))


def cells(values: Array | Indices | Sequence[Cell]) -> list[Cell]:
    """Return a column as a list. Infinite numbers and NaN in arrays become gaps, because JSON cannot represent them.

    Numbers beyond FAR are replaced by it.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind == "i":
        return [*(values.tolist() if isinstance(values, np.ndarray) else values)]
    near = np.clip(values, -FAR, FAR).tolist()
    return [value if finite else None for value, finite in zip(near, np.isfinite(values), strict=True)]


def shortened(value: object) -> str:
    """Return a value as text that UTF-8 can encode, with its middle cut out if it is long."""
    found = str(value).encode("utf-8", "backslashreplace").decode()
    half = MOST_CHARACTERS // 2
    return found if len(found) <= MOST_CHARACTERS else f"{found[:half]}...{found[3 - half :]}"


def scale_of(values: Array) -> Scale:
    """Return the logarithmic scale for positive values of very different sizes, else the linear scale."""
    known = values[np.isfinite(values)]
    if not len(known) or known.min() <= 0:
        return Scale.LINEAR
    least, median, most = known.min(), np.median(known), known.max()
    return Scale.LOG if most > LOG_RATIO * median or median > LOG_RATIO * least else Scale.LINEAR


def thin_points(x: Array, y: Array, most: int = MOST) -> tuple[Indices, str]:
    """Return the indices of at most `most` points, in order of x, and the rule by which they were chosen.

    The points are divided into intervals with equally many points. The points with the least and the greatest y of each
    interval are kept, so that no outlier is lost. Points that are not finite are left out.
    """
    shown = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    shown = shown[np.argsort(x[shown], kind="stable")]
    lost = len(x) - len(shown)
    note = f"{counted(lost, 'point')} without a finite value left out. " if lost else ""
    if len(shown) > most:
        parts = np.array_split(shown, most // 2)
        note += f"Of {len(shown):,} points, the least and the greatest of each of {len(parts):,} intervals are drawn."
        shown = np.unique([place for part in parts for place in (part[y[part].argmin()], part[y[part].argmax()])])
        shown = shown[np.argsort(x[shown], kind="stable")]
    return shown, note.strip()


def thin_rows(count: int, most: int, is_kept: NDArray[np.bool_] | None = None) -> tuple[Indices, str]:
    """Return the indices of at most `most` of `count` rows, and a sentence about rows that were left out, or "".

    Rows with `is_kept` are chosen first, then other rows at equal distances.
    """
    if count <= most:
        return np.arange(count), ""
    is_chosen = np.zeros(count, bool)
    if is_kept is not None:
        is_chosen[np.flatnonzero(is_kept)[:most]] = True
    others = np.flatnonzero(~is_chosen)
    is_chosen[others[np.linspace(0, len(others) - 1, most - int(is_chosen.sum())).astype(np.intp)]] = True
    return np.flatnonzero(is_chosen), f"{most:,} of {count:,} are drawn, at equal distances."


def thin_steps(x: Array, y: Array, most: int = MOST) -> Indices:
    """Return at most `most` indices of the points of a step line: where its value changes, and its last point."""
    if not len(x):
        return np.empty(0, np.intp)
    changes = np.flatnonzero(np.append(True, y[1:] != y[:-1]))
    changes = np.union1d(changes, [len(x) - 1])
    return changes[thin_rows(len(changes), most)[0]]
