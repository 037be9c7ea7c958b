"""Columns made for tests of charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shadho_celery.charts.columns import AttemptColumns, Codes, Label, Session, TrialColumns

NAN = math.nan


def codes_of(values: Iterable[str | None]) -> Codes:
    """Return a column of these texts. Its names are sorted."""
    texts = [*values]
    names = sorted({text for text in texts if text is not None})
    place: dict[str | None, int] = {name: index for index, name in enumerate(names)}
    return Codes(np.array([place.get(text, -1) for text in texts], np.int32), names)


def trials(
    rows: Sequence[Mapping[str, Any]],
    options: Mapping[str, Sequence[str]] | None = None,
    objectives: Mapping[str, str] | None = None,
    log: Sequence[str] = (),
    **more: Any,
) -> TrialColumns:
    """Return columns of these trials. By default a trial is COMPLETE, of class cpu, and takes a second."""

    def real(name: str, default: float = NAN) -> Any:
        return np.array([row.get(name, default) for row in rows], float)

    def whole(name: str, default: int) -> Any:
        return np.array([row.get(name, default) for row in rows], np.intp)

    def codes(name: str, default: str | None) -> Codes:
        return codes_of(row.get(name, default) for row in rows)

    labels = sorted({label for row in rows for label in row.get("params", {})})
    names = [*(objectives or {})]
    return TrialColumns(
        number=np.arange(len(rows)),
        state=codes("state", "COMPLETE"),
        loss=real("loss"),
        is_maximized=next(iter((objectives or {}).values()), "") == "maximize",
        seconds=real("seconds", 1.0),
        started_at=np.array([row.get("started_at", float(place)) for place, row in enumerate(rows)], float),
        finished_at=np.array([row.get("finished_at", place + 1.0) for place, row in enumerate(rows)], float),
        slots=real("slots", 1.0),
        subspace=codes("subspace", "all"),
        compute_class=codes("compute_class", "cpu"),
        host=codes("host", "one"),
        sampler=codes("sampler", "random"),
        code=codes("code", None),
        failure=codes("failure", None),
        failure_kind=codes_of(row.get("failure_kind", row.get("failure")) for row in rows),
        budget=real("budget"),
        rung=whole("rung", -1),
        origin=whole("origin", -1),
        violation=real("violation", 0.0),
        losses={name: real(name) for name in names},
        objectives=objectives or {},
        labels={
            label: Label(
                name=label,
                values=np.array([row.get("params", {}).get(label, NAN) for row in rows], float),
                options=(options or {}).get(label, ()),
                is_log=label in log,
            )
            for label in labels
        },
        **more,
    )


def attempts(rows: Sequence[Mapping[str, Any]], sessions: Sequence[Session] = (), now: float = 100.0) -> AttemptColumns:
    """Return columns of these attempts. By default each is of another trial, on slot 0 of worker w on machine one."""

    def real(name: str) -> Any:
        return np.array([row.get(name, NAN) for row in rows], float)

    return AttemptColumns(
        number=np.array([row.get("number", place) for place, row in enumerate(rows)], np.intp),
        attempt=np.array([row.get("attempt", 1) for row in rows], np.intp),
        compute_class=codes_of(row.get("compute_class", "cpu") for row in rows),
        host=codes_of(row.get("host", "one") for row in rows),
        worker=codes_of(row.get("worker", "w") for row in rows),
        slot=np.array([row.get("slot", 0) for row in rows], np.intp),
        queued_at=real("queued_at"),
        started_at=real("started_at"),
        ended_at=real("ended_at"),
        end=codes_of(row.get("end", "complete") for row in rows),
        is_copy=np.array([row.get("copy", False) for row in rows], bool),
        predicted=real("predicted"),
        sessions=sessions,
        now=now,
    )


def session(compute_class: str, slots: int = 1, since: float = 0.0, until: float | None = None, **more: Any) -> Session:
    """Return a session of worker w on machine one."""
    facts = {"worker": "w", "host": "one", **more}
    return Session(compute_class=compute_class, slots=slots, since=since, until=until, **facts)
