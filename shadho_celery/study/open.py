"""Start of a new study in a store, or of the next run of an earlier study; both lock the study."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shadho_celery.core.checks import listed, short
from shadho_celery.core.columns import Summary
from shadho_celery.core.files import COMMANDS, SWEEPS, new_key
from shadho_celery.core.settings import Resume, as_options
from shadho_celery.core.system import Clock, SystemClock
from shadho_celery.core.trial import COUNTED, Params, Trial
from shadho_celery.core.units import counted
from shadho_celery.core.users import own_user
from shadho_celery.errors import (
    ShadhoError,
    SpaceChanged,
    StoreError,
    StudyError,
    StudyExists,
    StudyNotFound,
    UsageError,
)
from shadho_celery.space.stored import read_schema
from shadho_celery.store.base import DEFAULT_STORE, StudyRecord, Turn, holder_name
from shadho_celery.store.memory import LateStore, database
from shadho_celery.study.state import RENEW_SECONDS, StudyState

if TYPE_CHECKING:
    from shadho_celery.store.sql import SqlStore

#: maximum number of bytes of a study's name, so that it fits into a line of a table
MAX_NAME = 200

#: least number of characters of the study's key in a generated name
SHORT = 4


def open_study(
    store: SqlStore | LateStore,
    space: Mapping[str, str],
    *,
    module: str = "",
    name: str | None = None,
    key: str | None = None,
    resume: Resume = False,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    in_force: Mapping[str, Any] | None = None,
    tree: Mapping[str, Any] | None = None,
    given: Callable[[Params], str | None] | None = None,
    clock: Clock | None = None,
    warm_start: Sequence[Trial] = (),
) -> StudyState:
    """Start a new study, or resume an earlier one. Lock the study and return its state.

    `space` is `Space.describe()`, and `tree` is the machine-readable form of the space, which is recorded. `given`
    makes the record of a trial's values from its params. `name` and `resume` are as in `earlier_study`. `key` is the
    key of a new study, from `new_key`; by default a new one is made. `settings` (JSON values) are added to the settings
    of earlier runs in the study's record. `in_force` are all settings of this run, which are also recorded.

    The trials of a `warm_start` are recorded with a new study, and its samplers learn from them in every run.

    Raises StudyLocked, StudyExists, UsageError (another seed, or a new limit on trials that has been passed),
    StoreError, and what `earlier_study` raises.
    """
    clock, user = clock or SystemClock(), own_user()
    before = earlier_study(store, space, module=module, name=name, resume=resume, settings=settings, tree=tree)
    if before is None:
        record = _new_record(space, module, name, seed, clock, key=key or new_key())
        record = replace(record, settings=settings or {}, in_force=in_force or {}, tree=tree, owner=user)
        record = _create(store, record, is_named=name is not None, warm_start=warm_start)
    else:
        if seed not in (None, before.seed):
            raise UsageError(f"study {before.name!r} was begun with seed {before.seed}; leave out seed to resume it")
        now = before.in_force if in_force is None else in_force
        record = replace(before, settings={**before.settings, **(settings or {})}, in_force=now)
    fence = store.lock(record.key, holder_name(), clock.wall())
    try:
        if before is None:
            study = StudyState(store, record, fence, (), clock, warm_start=warm_start, given=given)
        else:
            study = _resumed(database(store), before, record, fence, clock=clock, given=given)
    except ShadhoError:
        with suppress(StoreError):
            store.unlock(record.key, fence)
        raise
    study.recorder.owner = user
    return study


def _resumed(
    store: SqlStore,
    before: StudyRecord,
    record: StudyRecord,
    fence: int,
    *,
    clock: Clock,
    given: Callable[[Params], str | None] | None,
) -> StudyState:
    """Record the changed settings of a locked study, and return its state."""
    _refuse_fewer_trials(store, before, record)
    if record != before:
        store.record_settings(record.key, fence, record.settings, record.in_force)
    trials, taught = _earlier_trials(store, record.key, fence, clock), store.warm_start(record.key)
    # If the row of the last trial was deleted, its number is not used again, because attempts, reports and checkpoints
    # may exist under this number.
    first = store.last_attempted(record.key) + 1
    study = StudyState(store, record, fence, trials, clock, first_number=first, warm_start=taught, given=given)
    study.recorder.spent.update(store.spent(record.key))
    study.recorder.recall(store.sessions(record.key))
    for attempt in store.attempts(record.key, {each.number for each in study.attempts}):
        study.recorder.charge(attempt)
    return study


def earlier_study(
    store: SqlStore | LateStore,
    space: Mapping[str, str],
    *,
    module: str = "",
    name: str | None = None,
    resume: Resume = False,
    settings: Mapping[str, Any] | None = None,
    tree: Mapping[str, Any] | None = None,
) -> StudyRecord | None:
    """Return the record of the study to resume, or None if a new study is to be started.

    If `resume` is True, this is the study called `name`, or the latest study of the module if `name` is None. If
    `resume` is "if-exists" and there is no study with exactly this name, None is returned. The other arguments are as
    in `open_study`.

    Raises StudyNotFound, SpaceChanged, StudyError (another version), UsageError or StoreError.
    """
    if name is not None:
        _check_name(name)
    if not resume:
        return None
    store = database(store)
    try:
        record = store.find(name) if name else store.latest(module)
    except StudyNotFound:
        if resume is True:
            raise
        return None
    if resume is not True and name and record.name != name:
        # `find` also accepts the beginning of a name. That is not enough here, because the new study may get this name.
        return None
    check_continues(record.name, is_simulated=record.is_simulated)
    if tree is not None and (record.tree or {}).get("version") != tree.get("version"):
        # Spaces recorded by different versions cannot be compared.
        raise StudyError(
            f"study {record.name!r} was begun by another version of shadho_celery; begin another study (leave out "
            "resume), or resume it with the version that began it"
        )
    if record.module != module:
        other = f"is one of {record.module or 'no module'}, not of {module}"
        if record.command and module.startswith((f"{COMMANDS}/", f"{SWEEPS}/")):
            other = f"was begun with another command, --loss or domains: {short(record.command)}; give the same ones"
        raise StudyNotFound(f"study {record.name!r} {other}")
    is_asked = read_schema(tree) is not None
    if tree is not None and is_asked is not (read_schema(record.tree) is not None):
        ways = "a declared space", "an objective that asks for its labels, without a space"
        began, now = ways if is_asked else ways[::-1]
        raise SpaceChanged(f"study {record.name!r} was begun with {began}, not with {now}; begin another study")
    # A schema, which has the labels for which objectives have asked, grows while the study runs. So it may differ.
    changes = [
        f"{label} (was {record.space.get(label, 'absent')}, is {space.get(label, 'absent')})"
        for label in {**record.space, **space}
        if record.space.get(label) != space.get(label) and not is_asked
    ]
    if changes:
        asked = replace(record, settings={**record.settings, **(settings or {})})
        raise SpaceChanged(
            f"study {record.name!r} searches another space: {listed(changes, 5)}; restore the space, or begin a "
            f"study that learns from this one: {_successor(asked, store.safe_url)}"
        )
    return record


def _refuse_fewer_trials(store: SqlStore, before: StudyRecord, now: StudyRecord) -> None:
    """Raise UsageError if a study gets a new limit on trials that is below the number of its ended trials."""
    limit = now.in_force.get("trials")
    if limit is None or limit == before.in_force.get("trials"):
        return
    ended = sum(count for state, count in store.tally(now.key, "state").items() if state in COUNTED)
    if limit < ended:
        raise UsageError(
            f"trials: {limit} is too few, because {counted(ended, 'trial', 'trials')} of study {now.name!r} have "
            f"ended; give a number above {ended} to continue it"
        )


def _earlier_trials(store: SqlStore, key: str, fence: int, clock: Clock) -> Iterator[Trial | Summary]:
    """Yield the trials of earlier runs. Meanwhile the lock on the study is renewed, because this may take long."""
    renewed_at = clock.now()
    for trial in store.earlier(key):
        if trial.number % 1000 == 0 and clock.now() - renewed_at >= RENEW_SECONDS:
            renewed_at = clock.now()
            store.write(key, fence, clock.wall(), Turn())
        yield trial


def _new_record(
    space: Mapping[str, str], module: str, name: str | None, seed: int | None, clock: Clock, *, key: str
) -> StudyRecord:
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed: {short(seed, 60)} is not allowed; a whole number from 0 to 2**63 - 1")
    if name is None:
        name = _short_name(module, key, SHORT)
    return StudyRecord(key=key, name=name, module=module, seed=seed, space=dict(space), created_at=clock.wall())


def _short_name(module: str, key: str, length: int) -> str:
    """Return a name that is easy to type: the last part of the study's name, and the first characters of the key."""
    last = re.sub(r"^.*/|\.(toml|pickle)$", "", module).rpartition(".")[2]
    last = last.encode()[: MAX_NAME - 1 - len(key)].decode(errors="ignore")
    return f"{last or 'study'}-{key[:length]}"


def _create(
    store: SqlStore | LateStore, record: StudyRecord, *, is_named: bool, warm_start: Sequence[Trial]
) -> StudyRecord:
    """Add a new study to the store, and return its record.

    A generated name is made longer until no other study in the store has it.
    """
    for length in range(SHORT, len(record.key) + 1):
        try:
            store.create(record, warm_start)
            return record
        except StudyExists:
            if is_named or length == len(record.key):
                raise
            record = replace(record, name=_short_name(record.module, record.key, length + 1))
    return record


def _check_name(name: str) -> None:
    """Raise UsageError for a name that cannot be shown, typed or recorded."""
    is_odd = any(ord(char) < 32 or char in "/\\" or 0xD800 <= ord(char) < 0xE000 for char in name)
    if is_odd or not name.strip() or name[0] in ".-" or len(name.encode()) > MAX_NAME:
        raise UsageError(
            f"study: {name[:60]!a} cannot name a study; use up to {MAX_NAME} bytes of UTF-8, no slash, no dot or "
            "dash first"
        )


def check_continues(name: str, *, is_simulated: bool) -> None:
    """Raise UsageError for a simulated study, because it cannot be resumed."""
    if is_simulated:
        raise UsageError(f"study {name} was simulated, and cannot continue; simulate it for longer instead")


def _successor(record: StudyRecord, store: str) -> str:
    """Return the command or call that begins a study with the settings of `record`, and learns from its trials."""
    if not record.module:
        # The study was begun by a Python program.
        return f"minimize(..., store={store!r}, warm_start={record.name!r})"
    where = [] if store == DEFAULT_STORE else ["--store", store]
    command = ["shadho-celery", "run", record.module, *where, *as_options(record.settings), "--warm-start", record.name]
    return shlex.join(command)
