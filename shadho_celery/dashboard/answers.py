"""Answers of the dashboard, as plain values for JSON: studies, trials, charts, logs, actions and the fleet.

They are computed from the columns of a study (`cache`) and from the store. The ends of logs are kept in memory, so that
each log is read at most once a second, however many pages are open. A button of a page sends the same request to a
running study or a worker as the command with its name.
"""

from __future__ import annotations

import hashlib
import io
import math
import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shadho_celery.charts import fleet as fleet_charts
from shadho_celery.charts.chart import Array, Cell, Indices
from shadho_celery.charts.columns import Codes, Depth, TrialColumns
from shadho_celery.charts.losses import on_front
from shadho_celery.charts.registry import CHARTS
from shadho_celery.charts.study import MOST_CHARACTERS, ON_PAGES, chart_by_name, in_order_of_colours, packed
from shadho_celery.cli.control import points_in
from shadho_celery.core.checks import one_line, printable, short
from shadho_celery.core.records import ACTIONS, Answer, Enqueue, OfStudy, OfWorker, name_of
from shadho_celery.core.settings import CHANGEABLE, SETTINGS
from shadho_celery.core.system import Clock
from shadho_celery.core.trial import COUNTED, TrialState, shown_limit
from shadho_celery.core.units import counted
from shadho_celery.dashboard.cache import Cache, CachedStudy
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.results.study import StudyResults, plain_json, trial_json
from shadho_celery.results.trial import TrialResult, given
from shadho_celery.session.control import Control, TrialLogs
from shadho_celery.store.base import DEFAULT_STORE
from shadho_celery.store.sql import SqlStore

#: maximum number of bytes at the end of a log that are kept and sent
MOST_BYTES = 100_000
#: maximum number of logs that are kept; the least recently requested ones are dropped
MOST_LOGS = 20
#: seconds between two readings of a log
FRESH_SECONDS = 1.0
#: seconds to wait for a worker's answer; a worker checks for requests every two seconds
ANSWER_SECONDS = 5.0


class _End(NamedTuple):
    """The end of a log, as it was read last."""

    data: bytes = b""
    #: position of the end in the whole log; and the worker that has sent it
    position: int = 0
    source: str | None = None
    #: reason why the log could not be read, or ""
    why: str = ""


class _Kept:
    """The end of one log, and when it was read."""

    def __init__(self) -> None:
        self.end = _End()
        self.read_at = -math.inf
        #: held by the thread that reads the log; meanwhile other threads answer with `end`
        self.reading = threading.Lock()


class LogEnds:
    """The ends of logs that pages show. Any thread may call the methods."""

    def __init__(self, logs: TrialLogs, clock: Clock) -> None:
        self._logs, self._clock = logs, clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, int], _Kept] = OrderedDict()

    def read(self, study: StudyResults, number: int, asked: Mapping[str, str]) -> dict[str, Any]:
        """Return the part of a log after a position. If its start is no longer kept, return all that is kept.

        `asked` may have `attempt`, by default the latest attempt, and `after`, which is `end` of the previous answer.
        In the answer, `start` is the position in the log at which the text begins. Raises UsageError for a trial or an
        attempt that does not exist.
        """
        # The trial is read before its log, so that the log of a trial that has ended is complete.
        trial = study.trial(number)
        attempt, after = (_whole(asked, name) for name in ("attempt", "after"))
        attempt = attempt or trial.attempts
        if attempt > trial.attempts:
            raise UsageError(f"trial {number} has {counted(trial.attempts, 'attempt')}; choose one of them")
        facts = {"attempt": attempt, "attempts": trial.attempts, "is_live": not trial.state.is_finished}
        if not attempt:
            why = f"trial {number} has not been sent to a worker yet"
            return facts | {"text": "", "start": 0, "end": 0, "why": why}
        end = self._end(study, trial, attempt)
        if not end.position and trial.log and attempt == trial.attempts:
            why = f"{end.why}; these last lines of its output were sent with its result"
            return facts | {"text": trial.log, "start": 0, "end": 0, "why": why}
        start, data = max(0, end.position - len(end.data)), end.data
        if start <= after <= end.position:
            start, data = after, data[after - start :]
        return facts | {"text": data.decode(errors="replace"), "start": start, "end": end.position, "why": end.why}

    def _end(self, study: StudyResults, trial: TrialResult, attempt: int) -> _End:
        """Return the end of a log. The log is read again after FRESH_SECONDS, unless another thread is reading it."""
        key = study.key, trial.number, attempt
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            self._kept.move_to_end(key)
            while len(self._kept) > MOST_LOGS:
                self._kept.popitem(last=False)
        if self._clock.now() - kept.read_at >= FRESH_SECONDS and kept.reading.acquire(blocking=False):
            try:
                kept.end = self._read(study, trial, attempt, kept.end)
                kept.read_at = self._clock.now()
            finally:
                kept.reading.release()
        return kept.end

    def _read(self, study: StudyResults, trial: TrialResult, attempt: int, before: _End) -> _End:
        try:
            found, source = self._logs.read(study, trial, attempt, before.position, before.source)
        except (ServiceError, UsageError) as error:
            # The text that was read before is kept.
            return before._replace(why=str(error))
        if found.end < before.position:
            # The log is shorter than before, because the attempt was started again with a new log.
            return self._read(study, trial, attempt, _End())
        data = before.data + found.text.encode(errors="replace")
        if len(data) > MOST_BYTES:
            # The kept text begins with a whole line.
            data = data[-MOST_BYTES:].partition(b"\n")[2]
        return _End(data, found.end, source)


def _whole(asked: Mapping[str, str], name: str, default: int = 0) -> int:
    text = asked.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise UsageError(f"{name}={short(text)} is not a whole number")
    return int(text)


class _Points(Struct, frozen=True, tag_field="action", tag=name_of(Enqueue), forbid_unknown_fields=True):
    """Request to run known points. They are a text in the format of a file for the command `enqueue`."""

    points: str


_ON_STUDY = msgspec.json.Decoder[Any](reduce(or_, {_Points, *get_args(OfStudy)} - {Enqueue}))
_ON_WORKER = msgspec.json.Decoder[Any](OfWorker)


def act(control: Control, body: bytes, study: str = "") -> Answer:
    """Carry out the action in the JSON `body`, on a running study, or on the worker named in it. Return the answer.

    Raises ShadhoError if the action is not valid, or if the study or worker does not answer.
    """
    try:
        deed = (_ON_STUDY if study else _ON_WORKER).decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"there is no such action: {one_line(error)}") from None
    if isinstance(deed, _Points):
        deed = Enqueue(points_in(deed.points, "the points"))
    return control.act(deed, study)


def buttons(scope: str, *, is_held: bool = False, **named: Any) -> list[dict[str, Any]]:
    """Return the buttons for the actions on a study, a trial or a worker (`scope`).

    `named` are the known arguments of the actions. `is_held` is True if the study is paused or the worker drained.

    A button has a text, a question, the request that it sends, and the name of the argument that the user fills in, if
    any.
    """
    made = []
    for name, kind in sorted(ACTIONS.items(), key=lambda each: each[1].while_held is None):
        if kind.scope == scope and kind.while_held in {None, is_held}:
            question = kind.question.format(**named)
            given = {each: named[each] for each in kind.__struct_fields__ if each in named}
            field = next((each for each in kind.__struct_fields__ if each not in named), None)
            request = {"action": name, **given}
            made.append({"text": kind.button or name, "question": question, "request": request, "field": field})
    return made


#: default and maximum number of trials on a page; and maximum number of studies in the list
PAGE, MOST_PAGE, MOST_STUDIES = 50, 200, 500
#: the current rate is computed from the times at which the latest RATE_TRIALS trials ended. Times that are more than
#: RATE_SECONDS before the latest time do not count, because a study may have paused, unless fewer than RATE_LEAST times
#: would be left
RATE_TRIALS, RATE_SECONDS, RATE_LEAST = 50, 120.0, 10
#: seconds of the time for which the page of the fleet shows what studies have used
WEEK_SECONDS = 7 * 86400.0
#: maximum number of trials that a page downloads
MOST_EXPORTED = 20_000
#: maximum length of a search text; maximum number of notes on a page
MOST_SEARCH, MOST_NOTES = 200, 100

#: facts of a study that the list of studies and the study's page show
FACTS = ("name", "owner", "module", "command", "created_at", "asked")

Json = dict[str, Any]


def studies(cache: Cache) -> Json:
    """Return the studies of the store, the latest first."""
    records = cache.records()
    return {
        "store": cache.store.safe_url,
        "first": _command(cache.store.safe_url, "run", "tasks.svm", "--trials", "40"),
        "studies": plain_json(cache.listed(records[:MOST_STUDIES], _listed)),
        "left_out": max(0, len(records) - MOST_STUDIES),
    }


def _command(store: str, *words: str) -> str:
    """Return a command line for a store whose URL has no password."""
    return shlex.join(["shadho-celery", *words, *([] if store == DEFAULT_STORE else ["--store", store])])


def _listed(study: StudyResults) -> Json:
    """Return the entry of a study in the list of studies."""
    found = {name: getattr(study, name) for name in (*FACTS, "running_on", "state", "counts")}
    found["asked"] = shown_limit(study.asked, sum(found["counts"].get(str(state), 0) for state in COUNTED))
    return {**found, "loss": next(iter(study.objectives), "loss"), "best": study.best_loss}


def summary(cached: CachedStudy) -> Json:
    """Return the data for the top of a study's page, and its buttons."""
    # The change number is read first, so that the data may be newer than this number, but not older.
    change = cached.look()
    study, trials = cached.study, cached.trials(Depth.LOSSES)
    running_on, state, found = study.running_on, study.state, _best(cached, trials)
    best = None if found is None else _with_text(found)
    if best is not None and (repeated := study.repeated) is not None:
        best |= {"loss": repeated.mean, "text": f"{best['text']} ({repeated.words})"}
    counts = {name: len(places) for name, places in trials.state.places()}
    ended = sum(counts.get(state.value, 0) for state in COUNTED)
    return {
        **{name: getattr(study, name) for name in (*FACTS, "store", "seed")},
        "running_on": running_on,
        "state": state,
        "counts": counts,
        "ended": ended,
        "asked": shown_limit(study.asked, ended),
        "actions": [] if state == "stopping" else buttons("study", is_held=state == "paused", study=study.name),
        "notes": plain_json(study.notes()[-MOST_NOTES:]),
        "note": buttons("note", study=study.name),
        "changeable": [*map(partial(_changeable, cached), CHANGEABLE)],
        "a_minute": None if running_on is None else rate_a_minute(cached.latest_ends()),
        "best": best,
        "objectives": dict(study.objectives),
        "labels": [{"key": label_key(label), "text": one_line(label, MOST_CHARACTERS)} for label in study.space],
        "of_machines": [each.name for each in ON_PAGES if each.section == "Machines"],
        "classes": in_order_of_colours({*trials.compute_class.names}),
        "ran_on": [*trials.compute_class.names],
        "sampler": study.in_force.get("sampler"),
        "money": sum(study.money.values()),
        "settings": plain_json(study.settings),
        "change": change,
    }


def _changeable(cached: CachedStudy, name: str) -> Json:
    """Return a setting that may be changed while the study runs, with its help, and its value if that is a number."""
    setting, recorded = SETTINGS[name], cached.study.settings
    value = cached.study.asked if name == "trials" else recorded.get(name, setting.default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"name": name, "help": setting.help, "value": plain_json(value) if is_number else None}


def label_key(label: str) -> str:
    """Return a digest of 16 digits. It replaces a label in a URL, because the length of a URL is limited."""
    return hashlib.blake2b(label.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _label_of(cached: CachedStudy, key: str) -> str:
    """Return the label with this key, or `key` itself, if it is a label or unknown."""
    keys = {label_key(label): label for label in cached.study.space if key not in cached.study.space}
    return keys.get(key, key)


def chart(cached: CachedStudy, name: str, asked: Mapping[str, str]) -> Json:
    """Return a chart by its name. Its argument `label` may be a label or the key of a label (`label_key`).

    Raises UsageError for an unknown chart or a bad argument.
    """
    texts = dict(asked)
    if "label" in texts:
        texts["label"] = _label_of(cached, texts["label"])
    found = chart_by_name(cached, name, texts)
    return {**packed(found), "is_shown": CHARTS[name].is_shown(cached.trials(Depth.LOSSES), found)}


def _with_text(trial: TrialResult) -> Json:
    """Return a trial, with its values as a text like that of the command line. A long text is cut."""
    text = printable(given(trial))
    cut = text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
    found: Json = plain_json({**trial_json(trial), "text": cut})
    return found


def _best(cached: CachedStudy, trials: TrialColumns) -> TrialResult | None:
    """Return the best trial, or None. Columns are faster here than the database, which would sort all trials."""
    if cached.study.has_repeats:
        return cached.study.best_or_none
    best = (on_front(cached.trials()) if len(cached.study.objectives) > 1 else [])[:1]
    best = best or ([] if trials.best is None else [trials.best])
    return next(iter(cached.numbered(best)), None)


def rate_a_minute(ends: Array) -> float | None:
    """Return how many trials end per minute, computed from the latest ends, or None if there are too few."""
    ends = np.sort(ends)[-RATE_TRIALS:]
    recent = ends[ends >= ends[-1] - RATE_SECONDS] if len(ends) else ends
    ends = recent if len(recent) >= RATE_LEAST else ends[-RATE_LEAST:]
    if len(ends) < 2 or ends[-1] <= ends[0]:
        return None
    return float(60.0 * (len(ends) - 1) / (ends[-1] - ends[0]))


#: columns by which the table is sorted
SORTED = ("number", "seconds", "started_at", "finished_at", "budget")
#: name of a filter -> the text column to which it applies
FILTERS = {name: name for name in ("state", "host", "subspace", "sampler", "failure")} | {"class": "compute_class"}


def trials_page(cached: CachedStudy, asked: Mapping[str, str]) -> Json:
    """Return one page of the trials that match the filters.

    `asked` may have: `page` from 0, `size`, `columns` (keys of labels whose values are the `cells` of trials), and what
    `_numbers` knows. Raises UsageError for anything else.
    """
    found = _numbers(cached, asked)
    labels = [_label_of(cached, key) for key in asked.get("columns", "").split(",") if key]
    part, page = _page(asked, len(found))
    shown = cached.numbered(found[part].tolist())
    cells = ({"cells": [_cell(cached, trial, label) for label in labels]} for trial in shown)
    return page | {"trials": [_with_text(trial) | each for trial, each in zip(shown, cells, strict=True)]}


def _page(asked: Mapping[str, str], count: int) -> tuple[slice, Json]:
    """Return the part of `count` rows that is asked for with `page`, from 0, and `size`; and what says which it is."""
    size = max(1, min(_whole(asked, "size", PAGE), MOST_PAGE))
    page = min(_whole(asked, "page"), max(0, count - 1) // size)
    return slice(page * size, (page + 1) * size), {"count": count, "page": page, "size": size}


def trials_csv(cached: CachedStudy, asked: Mapping[str, str]) -> str:
    """Return the trials that match the filters as CSV. Raises UsageError if there are more than MOST_EXPORTED."""
    numbers, file = _numbers(cached, asked), io.StringIO()
    if len(numbers) > MOST_EXPORTED:
        raise UsageError(
            f"{len(numbers):,} trials are too many for a page; use shadho-celery export {cached.study.name}"
        )
    cached.study.write_csv(file, cached.numbered(numbers.tolist()))
    return file.getvalue()


def _cell(cached: CachedStudy, trial: TrialResult, label: str) -> Cell:
    """Return the value of a label as a table shows it, None where it is inactive."""
    found = cached.study.option(label, trial.params[label]) if label in trial.params else None
    return found if isinstance(found, (int, float)) or found is None else one_line(found, MOST_CHARACTERS)


def _numbers(cached: CachedStudy, asked: Mapping[str, str]) -> Indices:
    """Return the numbers of the trials that match the filters, in their order.

    `asked` may have: `sort` (one of SORTED, "loss" or the key of a label, with "-" in front for the reverse order),
    `search` (a trial's number, or a part of a text column), `numbers` of trials, `within` (ranges such as KEY:0.1:0.5,
    where KEY is "loss" or the key of a label), and any of FILTERS. Raises UsageError for anything else.
    """
    known = {*FILTERS, "page", "size", "columns", "sort", "search", "numbers", "within"}
    if unknown := {*asked} - known:
        raise UsageError(f"trials have no filter {short(min(unknown))}; filters: {', '.join(sorted(known))}")
    trials = cached.trials(_depth(asked))
    sort = asked.get("sort", "-number")
    by = sort.removeprefix("-")
    is_fit = _fits(trials, asked)
    for part in filter(None, asked.get("within", "").split(",")):
        key, *ends = part.split(":")
        values = _values(cached, trials, key)
        try:
            least, most = map(float, ends)
        except ValueError:
            values = None
        if values is None:
            raise UsageError(f"within={short(part)} is not a range of the loss or of a param")
        is_fit &= (values >= least) & (values <= most)
    places = _order(trials, sort, None if by in SORTED else _values(cached, trials, by))
    return trials.number[places[is_fit[places]]]


def _values(cached: CachedStudy, trials: TrialColumns, key: str) -> Array | None:
    """Return the losses for the key "loss", the drawn values for the key of a label, and None for any other key."""
    label = _label_of(cached, key)
    if key == "loss" or label not in cached.study.space:
        return trials.loss if key == "loss" else None
    return trials.labels[label].values if label in trials.labels else np.full(len(trials), math.nan)


def _depth(asked: Mapping[str, str]) -> Depth:
    """Return the depth to which all trials must be read to find the requested ones."""
    sort = asked.get("sort", "number").removeprefix("-")
    if asked.keys() & {"search", "failure", "within"} or sort not in {*SORTED, "loss"}:
        return Depth.PARAMS
    is_brief = sort in {"number", "loss"}
    return Depth.FACTS if asked.keys() & {"host", "subspace"} or not is_brief else Depth.LOSSES


def _order(trials: TrialColumns, sort: str, drawn: Array | None) -> Indices:
    """Return the places of the trials in an order. `drawn` are the values of the label `sort`, if it is one."""
    name = sort.removeprefix("-")
    values: Array | Indices = trials.loss
    if name == "loss":
        places = trials.ranking
    elif name in SORTED or drawn is not None:
        values = getattr(trials, name) if drawn is None else drawn
        places = np.argsort(values, kind="stable")
    else:
        raise UsageError(f"trials cannot be sorted by {short(name)}; sort by loss, {', '.join(SORTED)}")
    if not sort.startswith("-"):
        return places
    # Trials without a value come last in both orders.
    places = places[::-1]
    is_missing = np.isnan(values[places])
    return np.concatenate([places[~is_missing], places[is_missing]])


def _fits(trials: TrialColumns, asked: Mapping[str, str]) -> NDArray[np.bool_]:
    found = np.ones(len(trials), bool)
    if "numbers" in asked:
        found &= np.isin(trials.number, [int(each) for each in asked["numbers"].split(",") if each.isdecimal()])
    columns: dict[str, Codes] = {name: getattr(trials, column) for name, column in FILTERS.items()}
    for name, codes in columns.items():
        if name in asked:
            found &= codes.is_in(asked[name])
    if text := asked.get("search", "")[:MOST_SEARCH].lower():
        is_found = trials.number == int(text) if text.isdecimal() and len(text) < 10 else np.zeros(len(trials), bool)
        for codes in columns.values():
            is_found = is_found | codes.is_in(*(name for name in codes.names if text in name.lower()))
        found &= is_found
    return found


def trial(cached: CachedStudy, number: int) -> Json:
    """Return the data for a trial's page. Raises UsageError if there is no such trial."""
    found = cached.study.trial(number)
    rows = cached.study.records.of_trial(number)
    machines = cached.study.records.machines()
    at = machines["host"].index(found.host) if found.host in machines["host"] else None
    study, key = cached.study, (cached.study.name, str(number))
    again = {"Run its values again": _command(study.store, "again", *key)} if study.module else {}
    where = f"Copy its checkpoint_dir, if it has left files there ({found.folder} on {found.host})"
    fetch = {where: _command(study.store, "fetch", *key, "-o", f"trial{number}")} if found.host else {}
    return {
        "trial": plain_json(trial_json(found)),
        "commands": again | fetch,
        "attempts": plain_json([{name: value for name, value in row.items() if name != "placed"} for row in rows]),
        "machine": None if at is None else plain_json({name: column[at] for name, column in machines.items()}),
        "is_live": not TrialState(found.state).is_finished,
        "actions": buttons("trial", study=cached.study.name, number=number),
        "notes": plain_json(cached.study.notes(number)[-MOST_NOTES:]),
        "note": buttons("note", study=f"trial {number} of {cached.study.name}", trial=number),
        # The page computes durations with this time, because the clock of its machine may differ.
        "now": time.time(),
    }


def week(store: SqlStore, now: float) -> Json:
    """Return what the studies of the store have used in the last week, and the chart of the last day."""
    chart = fleet_charts.day(store, now)
    classes = in_order_of_colours({*chart.axes[1].categories})
    return {"uses": store.used(now - WEEK_SECONDS), "day": packed(chart), "classes": classes}


def workers_page(place: Json, asked: Mapping[str, str]) -> Json:
    """Return a fleet or an embedded study as `status` shows it, with one page of its workers, which have buttons.

    `asked` may have `class`, `search` (a part of the name of a worker, of a study that it runs, or of an owner), and
    what `_page` knows.
    """
    text = asked.get("search", "")[:MOST_SEARCH].lower()
    found = [
        each
        for each in place.get("workers", ())
        if asked.get("class", each["class"]) == each["class"] and text in _names_in(each).lower()
    ]
    part, page = _page(asked, len(found))
    shown = [
        each | {"actions": buttons("worker", is_held=each["state"] in {"draining", "drained"}, worker=each["name"])}
        for each in found[part]
    ]
    return place | page | {"workers": shown}


def _names_in(worker: Json) -> str:
    return "\n".join([worker["name"], *(f"{run['study']}\n{run['owner'] or ''}" for run in worker["runs"])])
