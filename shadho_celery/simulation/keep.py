"""Copy a simulated study to a store, so that the dashboard and reports show it like any other study."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from msgspec import Struct, structs

from shadho_celery.core.folders import new_key
from shadho_celery.core.trial import Trial
from shadho_celery.errors import StoreError
from shadho_celery.simulation.simulation import Simulation
from shadho_celery.space.stored import ValuesRecord
from shadho_celery.store.base import StudyRecord, Turn
from shadho_celery.store.lock import holder_name
from shadho_celery.store.sql import SqlStore

S = TypeVar("S", bound=Struct)

#: number of trials, or of attempts, that are written in one transaction
PAGE = 5000

#: maximum number of characters of the title, and number of those of the study's key, in its name
MAX_TITLE, KEY_LENGTH = 40, 6

#: characters that a title in a name has not
_UNUSUAL = re.compile(r"[^\w.-]")

#: fields of records that are moments
MOMENTS = ("asked_at", "queued_at", "started_at", "ended_at", "finished_at", "since", "until")


def keep(found: Simulation, store: SqlStore, title: str, ended_at: float) -> StudyRecord:
    """Write a simulated study to a store, and return its record there.

    It is called ``simulated-TITLE-POLICY-`` and some characters of its key. Characters of `title` that names of studies
    should not have are replaced. `ended_at`, in seconds since the epoch, is the moment at which the simulated time
    ends. It must not lie in the future, because readers assume that nothing has happened after the time of reading.
    Raises StoreError.
    """
    began_at, given = ended_at - found.seconds, ValuesRecord(found.plan.space)
    key = new_key()
    name = f"simulated-{_UNUSUAL.sub('-', title)[:MAX_TITLE]}-{found.policy}-{key[:KEY_LENGTH]}"
    kept = found.study.record
    plan = kept.money_plan and structs.replace(kept.money_plan, deadline=kept.money_plan.deadline + began_at)
    in_force = {**kept.in_force, "simulated": True}
    record = replace(kept, key=key, name=name, created_at=began_at, in_force=in_force, money_plan=plan)
    store.create(record)
    fence = store.lock(key, holder_name(), ended_at)
    try:
        sessions = [_shifted(each, began_at) for each in found.store.sessions()]
        store.write(key, fence, ended_at, Turn(seen=[*sessions, *found.store.machines()]))
        for trials in _pages(found.store.trials()):
            store.write(key, fence, ended_at, Turn(new=[_shifted_trial(given, each, began_at) for each in trials]))
        for attempts in _pages(found.store.attempts()):
            store.write(key, fence, ended_at, Turn(attempted=[_shifted(each, began_at) for each in attempts]))
    except BaseException:
        # A part of a study would look like all of it.
        with suppress(StoreError):
            store.delete(key, fence)
        raise
    store.unlock(key, fence)
    return record


def _pages(records: Iterable[S]) -> Iterator[list[S]]:
    left = iter(records)
    while page := [*islice(left, PAGE)]:
        yield page


def _shifted(record: S, by: float) -> S:
    """Return a record whose moments are later by this many seconds."""
    moments = {name: at + by for name in MOMENTS if (at := getattr(record, name, None)) is not None}
    return structs.replace(record, **moments)


def _shifted_trial(given: ValuesRecord, trial: Trial, by: float) -> Trial:
    live = trial.live and tuple(_shifted(each, by) for each in trial.live)
    return structs.replace(_shifted(trial, by), live=live, given=given.of(trial.params))
