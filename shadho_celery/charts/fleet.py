"""The share of busy slots in the last day, over all studies of a store."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from shadho_celery.charts.chart import Array, Axis, Chart, Mark, Scale, Series
from shadho_celery.store.sql import Occupied, SqlStore

#: seconds for which the shares are shown, and the number of intervals: quarters of an hour
DAY_SECONDS, QUARTERS = 86400.0, 96
#: maximum number of classes that are shown
MOST_CLASSES = 50
_HOW = (
    "A strip shows the share of the live workers' slots that ran trials of studies in this store, by quarters of an "
    "hour. Empty: no slot was busy, or no worker was live."
)


def day(store: SqlStore, now: float) -> Chart:
    """Return the share of busy slots in the day before `now`, as a timeline with a row for each class."""
    since, width = now - DAY_SECONDS, DAY_SECONDS / QUARTERS
    edges = since + width * np.arange(QUARTERS + 1)
    busy, live = _by_class(store.occupied(since, now, width)), _by_class(_live(store, since, now, width))
    names = sorted(live)[:MOST_CLASSES]
    series, used = [], []
    for row, name in enumerate(names):
        own = np.minimum(busy[name], live[name])
        used.append(float(own.sum() / max(live[name].sum(), 1e-9)))
        is_shown = own > 0
        # The ends of the day are always there, so that the axis covers the whole day.
        is_shown[[0, -1]] = True
        [parts] = np.nonzero(is_shown)
        shares = own[parts] / np.maximum(live[name][parts], 1e-9)
        columns = {"y": [row] * len(parts), "start": edges[parts], "end": edges[parts + 1], "busy": shares}
        series.append(Series.of(f"{name}, busy", Mark.SPANS, f"class {name}", "strip", **columns))
    idle = {"y": range(len(names)), "idle": [1.0 - share for share in used], "class": names}
    words = ", ".join(f"{100 * share:.0f} % in {name}" for share, name in zip(used, names, strict=True))
    return Chart(
        name="timeline",
        title=f"Busy slots in the last day: {words}" if names else "Busy slots in the last day",
        axes=(Axis(name="time", scale=Scale.TIME), Axis(name="class", scale=Scale.CATEGORY, categories=names)),
        series=[*series, Series.of("idle", Mark.SPANS, "idle", **idle)] if names else (),
        how=_HOW,
        empty="" if names else "No worker of a study in this store was live.",
    )


def _live(store: SqlStore, since: float, now: float, width: float) -> Iterator[Occupied]:
    """Yield the live time of workers' slots. A worker that several studies have recorded counts once."""
    until: defaultdict[str, float] = defaultdict(lambda: since)
    for worker, compute_class, start, end, slots in store.live(since, now):
        began, ended = ((moment - since) / width for moment in (max(start, until[worker]), end))
        if began < ended:
            until[worker] = end
            yield Occupied(
                str(compute_class), math.floor(began), math.floor(ended), slots, slots * began, slots * ended
            )


def _by_class(found: Iterable[Occupied]) -> defaultdict[str, Array]:
    """Return the mean number of slots in each interval, by class."""
    slots: defaultdict[str, Array] = defaultdict(lambda: np.zeros(QUARTERS))
    for each in found:
        first, last = (min(max(int(part), 0), QUARTERS - 1) for part in (each.first, each.last))
        of_class = slots[each.compute_class]
        if first == last:
            of_class[first] += each.ended - each.began
        else:
            of_class[first] += each.slots * (first + 1) - each.began
            of_class[first + 1 : last] += each.slots
            of_class[last] += each.ended - each.slots * last
    return slots
