"""Repair of a study that has trials which cannot be read or are missing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from shadho_celery.core.checks import listed
from shadho_celery.store.engine import copy_file, file_of
from shadho_celery.store.rows import FULL, UNREADABLE
from shadho_celery.store.tables import trials, unreadable

#: maximum number of trial numbers in a message
SHOWN = 10

#: number, problem and row of a trial that must be moved away; the row is None for a missing trial
Gone = tuple[object, str, dict[str, object] | None]


def move(connection: sa.Connection, key: str, gone: Sequence[Gone], now: float) -> str:
    """Move trials to the table `unreadable`, and list missing trials there. Return a text that says so."""
    for number, problem, row in gone:
        noted = {"study": key, "number": str(number), "problem": problem, "row": row, "at": now}
        connection.execute(sa.insert(unreadable).values(noted))
        if row is not None:
            connection.execute(sa.delete(trials).where(trials.c.study == key, trials.c.number == number))
    return f"trials {listed([number for number, *_ in gone], SHOWN)} are in its table unreadable now"


def find_gone(connection: sa.Connection, key: str) -> Iterator[Gone]:
    """Yield the trials to move away: unreadable and missing trials, and trials that continue such a trial.

    The rounds cannot place a promoted trial without the trial that it continues.
    """
    before = set(connection.scalars(sa.select(unreadable.c.number).where(unreadable.c.study == key)))
    gone: set[object] = {int(number) for number in before if number.isdecimal()}
    expected = 0
    # A number beyond `greatest` is itself damaged, so it does not mean that all lower numbers are missing.
    count = connection.scalar(sa.select(sa.func.count()).select_from(trials).where(trials.c.study == key)) or 0
    greatest = 2 * count + len(gone) + 1000
    for row in connection.execute(FULL.query.where(trials.c.study == key).order_by(trials.c.number)):
        number, problem = row[0], None
        is_number = isinstance(number, int) and 0 <= number <= greatest
        for missing in range(expected, number) if is_number else ():
            if missing not in gone:
                gone.add(missing)
                yield missing, "it was missing", None
        try:
            trial = FULL.trial(row)
        except UNREADABLE as error:
            problem = FULL.problem(error)
        else:
            if not is_number:
                problem = "its number is far beyond those of the others"
            elif trial.origin in gone:
                problem = f"it continues trial {trial.origin}, which is missing"
        if is_number:
            expected = number + 1
        if problem is not None:
            gone.add(number)
            yield number, problem, json.loads(json.dumps(dict(zip(FULL.columns, row, strict=True)), default=repr))


def copy(connection: sa.Connection, now: float) -> str:
    """Copy SQLite's file to a file beside it, or PostgreSQL's table `trials` to another table.

    Returns the copy's name.
    """
    moment = time.strftime("%Y%m%d_%H%M%S", time.gmtime(now))
    if connection.dialect.name != "sqlite":
        name = f"trials_{moment}"
        connection.execute(sa.text(f"CREATE TABLE {name} AS SELECT * FROM trials"))
        return f"the table {name}"
    path = file_of(connection.engine.url)
    copied = path.with_name(f"{path.name}.{moment}")
    # Call this before the transaction writes, because SQLite's copy would wait for the end of the transaction.
    copy_file(connection, copied)
    return copied.name
