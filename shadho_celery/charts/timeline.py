"""Timeline of the attempts by class, machine and slot (a Gantt chart), and the busy and idle time of slots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shadho_celery.charts.chart import MOST, Array, Axis, Cell, Chart, Indices, Mark, Scale, Series
from shadho_celery.charts.columns import AttemptColumns, Session
from shadho_celery.charts.registry import StudyChart
from shadho_celery.core.records import Leaving
from shadho_celery.core.units import counted, took
from shadho_celery.placement.model import preemption_rate

#: a row is a slot for up to MOST_SLOTS slots, a machine for up to MOST_HOSTS machines, and otherwise a class
MOST_SLOTS, MOST_HOSTS = 60, 600
#: maximum number of attempts of which each has its own bar, however short
MOST_BARS = 4000
#: width of the chart in pixels; with more than MOST_BARS attempts, bars narrower than a pixel are joined
PIXELS = 1200
#: form of an attempt's bar by the way in which the attempt ended; bars of all other attempts are `light`
FORMS = {
    "complete": "filled",
    "running": "pointed",
    "failed": "crossed",
    "retried": "crossed",
    "lost": "hatched",
    "superseded": "outlined",
}
#: what each form of a bar means
MEANINGS = {
    "filled": "filled: complete",
    "pointed": "with a point: running",
    "light": "light: pruned, cancelled or given back",
    "crossed": "with a cross: failed",
    "hatched": "hatched: lost with its worker",
    "outlined": "outlined: a copy of a late trial, or replaced by another attempt",
}
#: number of times between which busy and idle seconds are summed for a text; difference below which neighbouring shares
#: of a strip count as equal; shares up to this are rounding errors
MOMENTS, EQUAL_SHARE, ROUNDING = 61, 1e-3, 1e-6
#: names of the parts of a row's key
PARTS = ("class", "machine", "worker", "slot")

#: reasons why a session ended early: its worker was preempted or lost; maximum number of classes in a note
_PREEMPTED, MOST_NAMED = (Leaving.PREEMPTED.value, Leaving.LOST.value), 8

# Numbers with more digits are sorted as text.
_NUMBER = re.compile(r"(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class Rows:
    """The rows of a timeline."""

    #: key of each row: class, machine, worker and slot for a row per slot; class and machine for a row per machine; or
    #: only the class
    keys: Sequence[tuple[Any, ...]]
    #: number of slots of each row
    slots: Sequence[int]
    #: row of each attempt; -1 for one that has not started
    of: Indices

    @property
    def names(self) -> list[str]:
        """Names of the rows, all different."""
        parts = [[*map(_part, key)] for key in self.keys]
        return [", ".join([*each[:3], *(f"slot {slot}" for slot in each[3:])]) for each in parts]

    def sessions(self, attempts: AttemptColumns) -> Iterator[tuple[Session, list[int]]]:
        """Yield the sessions in the order of their starts, each with the rows of its slots."""
        place_of, depth = {key: place for place, key in enumerate(self.keys)}, len(self.keys[0])
        for session in sorted(attempts.sessions, key=lambda each: each.since):
            slots = range(session.slots if depth == len(PARTS) else 1)
            keys = ((session.compute_class, session.host, session.worker, slot)[:depth] for slot in slots)
            yield session, [place_of[key] for key in keys]

    @property
    def parts(self) -> dict[str, list[Cell]]:
        """Columns with the parts of the rows' names."""
        return {name: [*map(_part, parts)] for name, parts in zip(PARTS, zip(*self.keys, strict=True), strict=False)}


@StudyChart(section="Machines", place=1)
def timeline(attempts: AttemptColumns) -> Chart:
    """Return the attempts as bars in the rows of their slots.

    The last series has the share of idle time of each row, and the parts of the row's name. In a large fleet, a row is
    a machine or a class. If a row has several slots, its attempts are joined to strips, whose column `busy` is the
    share of busy slots. If there are more than `MOST_BARS` bars, bars narrower than a pixel are joined, too.
    """
    axes = Axis(name="time", scale=Scale.TIME), Axis(name="slot", scale=Scale.CATEGORY)
    known = np.isfinite(attempts.started_at)
    if not known.any():
        return Chart(title="Which slot ran which trial", axes=axes, empty="No attempt has started yet.")
    start, end = _span(attempts)
    rows = make_rows(attempts)
    width = (end - start) / PIXELS
    # In a row with several slots, bars would cover each other.
    is_joined = (np.array(rows.slots) > 1)[rows.of]
    if int((known & ~is_joined).sum()) > MOST_BARS:
        is_joined |= attempts.until - attempts.started_at < width
    bars = np.flatnonzero(known & ~is_joined)
    if len(bars) > (MOST_BARS if not (known & is_joined).any() else MOST // 2):
        is_joined[bars] = True
        bars = bars[:0]
    series = [*_bars(attempts, rows, bars)]
    strips = np.flatnonzero(known & is_joined)
    forms = {each.form for each in series}
    meanings = "; ".join(words for form, words in MEANINGS.items() if form in forms)
    how = f"Bars: {meanings}; empty: idle. " if forms else ""
    # The number of parts is limited, so that strips, outages and bars together are at most MOST marks.
    kinds = bool(len(strips)) + attempts.has_others
    parts = max(1, min(PIXELS, (MOST - MOST // 10 - len(bars)) // max(1, kinds * len(rows.keys))))
    edges = np.linspace(start, end, parts + 1)
    use = Use.of(attempts, rows, edges)
    if len(strips):
        busy = _busy(attempts, rows, strips, edges)
        for name in sorted({key[0] for key in rows.keys}):
            of_class = np.array([key[0] == name for key in rows.keys])[:, None]
            series += _strips(rows, busy * of_class, edges, f"{name}, busy", f"class {name}")
        how += f"{len(strips):,} attempts are joined to strips: a strip shows the share of its slots that were busy. "
    if found := [*_strips(rows, use.others, edges, "other studies", "other")]:
        series += found
        how += "Grey: the share of the slots that ran trials of other studies. "
    if len(outages := _outages(attempts, rows, start, end, width)):
        series.append(outages)
        how += "Hatched grey: no worker that could run the study. "
    if (known & attempts.end.is_in("lost")).any():
        how += "Lost attempts do not count as busy time."
    series.append(Series.of("idle", Mark.SPANS, "idle", y=range(len(rows.keys)), idle=use.idle, **rows.parts))
    title = f"{counted(int(known.sum()), 'attempt')}; the slots {use.words}"
    axes = axes[0], Axis(name=PARTS[len(rows.keys[0]) - 1], scale=Scale.CATEGORY, categories=rows.names)
    return Chart(title=title, axes=axes, series=series, note=_preemptions(attempts), how=how.strip())


def _preemptions(attempts: AttemptColumns) -> str:
    """Return a sentence with the number of preempted and lost workers by class, and the expected time between them.

    Returns "" if there are none.
    """
    found = []
    for name in attempts.classes:
        own = [each for each in attempts.sessions if each.compute_class == name]
        hours = sum((attempts.now if each.until is None else each.until) - each.since for each in own) / 3600
        counts = {reason: sum(each.reason == reason for each in own) for reason in _PREEMPTED}
        if any(counts.values()):
            said = " and ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
            mean = took(3600 / preemption_rate(sum(counts.values()), hours))
            found.append(f"{name} {said} (placement expects one in {mean} of a worker)")
    return f"Workers that left early: {'; '.join(found[:MOST_NAMED])}." if found else ""


def busy_words(attempts: AttemptColumns) -> str | None:
    """Return the text about busy slots in the title of the timeline; None if no attempt has started."""
    if not np.isfinite(attempts.started_at).any():
        return None
    return Use.of(attempts, make_rows(attempts), np.linspace(*_span(attempts), MOMENTS)).words


def _span(attempts: AttemptColumns) -> tuple[float, float]:
    """Return the first start and the last end of an attempt."""
    start = float(np.nanmin(attempts.started_at))
    return start, max(float(np.nanmax(attempts.until)), start + 1e-3)


def make_rows(attempts: AttemptColumns) -> Rows:
    """Return the rows: one for each slot, or for each machine if there are many slots, or for each class."""
    known = np.flatnonzero(np.isfinite(attempts.started_at))
    named = attempts.compute_class, attempts.host, attempts.worker
    # A process that is no worker has one slot, which it does not name.
    slot = np.maximum(attempts.slot, 0)
    # Attempts in the same slot are of one kind. To sort rows of several columns would take seconds per million.
    kinds = np.zeros(len(known), np.int64)
    for column in (*(names.codes[known] for names in named), slot[known]):
        kinds = np.unique(kinds * (int(column.max(initial=0)) + 2) + column + 1, return_inverse=True)[1]
    first = np.unique(kinds, return_index=True)[1]
    keys = [(*(names[place] or "" for names in named), int(slot[place])) for place in known[first].tolist()]
    slots = {*keys}
    for session in attempts.sessions:
        slots |= {(session.compute_class, session.host, session.worker, slot) for slot in range(session.slots)}
    hosts = {key[:2] for key in slots}
    depth = len(PARTS) if len(slots) <= MOST_SLOTS else 2 if len(hosts) <= MOST_HOSTS else 1
    shown: list[tuple[Any, ...]] = sorted({key[:depth] for key in slots}, key=_natural)
    place_of = {key: place for place, key in enumerate(shown)}
    sizes = [0] * len(shown)
    for key in slots:
        sizes[place_of[key[:depth]]] += 1
    of = np.full(len(attempts), -1, np.intp)
    of[known] = np.array([place_of[key[:depth]] for key in keys], np.intp)[kinds]
    return Rows(keys=shown, slots=sizes, of=of)


@dataclass(frozen=True)
class Use:
    """Slot seconds of each row in each interval between neighbouring times, arrays of shape (rows, times - 1)."""

    #: slot seconds with a live worker
    live: Array
    #: slot seconds in which attempts of the study ran, except lost attempts, because it is not known when their workers
    #: stopped
    own: Array
    #: slot seconds in which trials of other studies ran
    others: Array

    @classmethod
    def of(cls, attempts: AttemptColumns, rows: Rows, edges: Array) -> Use:
        """Return the slot seconds between `edges`, which are at equal distances.

        A row without a session counts as live all the time. The slots in which a worker ran other studies are not
        recorded, so the seconds of these studies are divided among its slots in proportion to the time left free.
        """
        shape = len(rows.keys), len(edges) - 1
        live, others = np.zeros(shape), np.zeros(shape)
        own = _busy(attempts, rows, np.flatnonzero((rows.of >= 0) & ~attempts.end.is_in("lost")), edges)
        for session, places in rows.sessions(attempts):
            seconds = np.tile(session.seconds(edges, attempts.now), (len(places), 1))
            live[places] += seconds * (session.slots / max(1, len(places)))
            if session.others:
                free = np.maximum(seconds - own[places], 0.0) + 1e-9
                others[places] += session.others_seconds(edges, attempts.now) * free / free.sum(axis=0)
        whole = np.outer(np.array(rows.slots, float), np.diff(edges))
        live[~live.any(axis=1)] = whole[~live.any(axis=1)]
        return cls(live, own, np.minimum(others, np.maximum(live - own, 0.0)))

    @property
    def idle(self) -> Array:
        """Share of the live time in which the slots of each row were idle, shape (rows,)."""
        used = (self.own + self.others).sum(axis=1) / np.maximum(self.live.sum(axis=1), 1e-9)
        return np.asarray(np.clip(1.0 - used, 0.0, 1.0))

    @property
    def words(self) -> str:
        """Text with the shares of the live time in which the slots were busy."""
        live = max(float(self.live.sum()), 1e-9)
        own, others = (f"{100 * min(1.0, float(part.sum()) / live):.0f} %" for part in (self.own, self.others))
        more = f", and for {others} with trials of other studies" if self.others.any() else ""
        return f"were busy for {own} of the time{more}"


def _outages(attempts: AttemptColumns, rows: Rows, start: float, end: float, least: float) -> Series:
    """Return the periods of more than `least` seconds in which a row had no worker that could run the study."""
    found: list[tuple[int, float, float]] = []
    reached: dict[int, float] = {}
    for session, places in rows.sessions(attempts):
        for place in places:
            found.append((place, reached.get(place, start), min(session.since, end)))
            until = attempts.now if session.until is None else session.until
            reached[place] = max(reached.get(place, start), until)
    found = [
        each for each in (*found, *((place, at, end) for place, at in reached.items())) if each[2] - each[1] > least
    ]
    found = sorted(found, key=lambda each: each[1] - each[2])[: MOST // 10]
    columns = {name: [each[part] for each in found] for part, name in enumerate(("y", "start", "end"))}
    return Series.of("no worker", Mark.SPANS, "other", "hatched", **columns)


def _natural(key: tuple[Any, ...]) -> list[list[tuple[int, str]]]:
    """Return a sort key by which numbers in names are compared as numbers: machine 2 comes before machine 10."""
    return [[(int(each) if each.isdecimal() else -1, each) for each in _NUMBER.split(str(part))] for part in key]


def _part(part: object) -> str:
    """Return a part of a row's key as text."""
    return "unknown" if part == "" else str(part)


def _bars(attempts: AttemptColumns, rows: Rows, bars: Indices) -> Iterator[Series]:
    """Yield the bars of single attempts, in one series for each class and end; copies have separate series."""
    for end, ended in [("running", bars[attempts.end.codes[bars] < 0]), *attempts.end.places(bars)]:
        for name, places in attempts.compute_class.places(ended):
            for is_copy in (False, True):
                own = places[attempts.is_copy[places] == is_copy]
                if not len(own):
                    continue
                columns = {"y": rows.of[own], "start": attempts.started_at[own], "end": attempts.until[own]}
                columns |= {"number": attempts.number[own], "attempt": attempts.attempt[own]}
                label, form = (", copy", "outlined") if is_copy else ("", FORMS.get(end, "light"))
                yield Series.of(f"{name}, {end}{label}", Mark.SPANS, f"class {name}", form, **columns)


def _busy(attempts: AttemptColumns, rows: Rows, places: Indices, edges: Array) -> Array:
    """Return the slot seconds of the attempts at `places` by row and interval between `edges`, which are at equal
    distances.
    """
    parts, start, end, width = len(edges) - 1, edges[0], edges[-1], edges[1] - edges[0]
    busy = np.zeros((len(rows.keys), parts))
    began = (np.clip(attempts.started_at[places], start, end) - start) / width
    ended = np.maximum((np.clip(attempts.until[places], start, end) - start) / width, began)
    first = np.minimum(began.astype(np.intp), parts - 1)
    last = np.minimum(ended.astype(np.intp), parts - 1)
    row = rows.of[places]
    is_within = first == last
    np.add.at(busy, (row, first), np.where(is_within, ended - began, first + 1 - began))
    np.add.at(busy, (row[~is_within], last[~is_within]), (ended - last)[~is_within])
    # Attempts that cover an interval as a whole are counted by the cumulative sums of a difference array.
    whole = np.zeros((len(rows.keys), parts + 1))
    long = last - first > 1
    np.add.at(whole, (row[long], first[long] + 1), 1.0)
    np.add.at(whole, (row[long], last[long]), -1.0)
    return np.asarray(width * (busy + np.cumsum(whole, axis=1)[:, :-1]))


def _strips(rows: Rows, seconds: Array, edges: Array, name: str, colour: str) -> Iterator[Series]:
    """Yield a series of the share of busy slots of each row between `edges`, unless no slot was busy.

    Neighbouring intervals with equal shares are joined.
    """
    busy = np.minimum(seconds / np.outer(np.array(rows.slots, float), np.diff(edges)), 1.0)
    own, part = np.nonzero(busy > ROUNDING)
    if len(own):
        share = busy[own, part]
        differs = (np.diff(own) != 0) | (np.diff(part) != 1) | (np.abs(np.diff(share)) > EQUAL_SHARE)
        first = np.flatnonzero(np.append(True, differs))
        ends = part[np.append(first[1:], len(own)) - 1] + 1
        columns = {"y": own[first], "start": edges[part[first]], "end": edges[ends], "busy": share[first]}
        yield Series.of(name, Mark.SPANS, colour, "strip", **columns)
