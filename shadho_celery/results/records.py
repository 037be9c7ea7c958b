"""The records of a study's attempts, workers and machines as columns, from which pictures are drawn.

Reading takes no lock. A store of an earlier version has no such records: every column is then empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, to_builtins

from shadho_celery.core.records import AttemptRecord, MachineRecord, SessionRecord, unpack

#: values by the name of the column; all lists have the same length
Columns = Mapping[str, list[Any]]


class RecordStore(Protocol):
    """A store that keeps such records."""

    def attempts(self, key: str, numbers: Collection[int] | None = None) -> Iterable[AttemptRecord]:
        """Return the attempts of all trials, or of those with these numbers, in the order of both numbers."""

    def sessions(self, key: str) -> Sequence[SessionRecord]:
        """Return the sessions in the order of their beginnings."""

    def machines(self, key: str) -> Sequence[MachineRecord]:
        """Return the machines in the order of their names."""

    def class_order(self, key: str) -> Sequence[str]:
        """Return the names of the study's compute classes in the order of `AttemptRecord.placed`."""


class Records:
    """The records of one study as the store has them at the time of each call."""

    def __init__(self, store: RecordStore, key: str) -> None:
        """`key` is the study's key."""
        self._store, self._key = store, key

    def attempts(self, numbers: Collection[int] | None = None) -> Columns:
        """Return the attempts of all trials, or of those with these numbers, in the order of both numbers.

        The columns are the fields of `AttemptRecord`. `placed` has by compute class a tuple of the predicted seconds,
        the backlog in seconds and the price, each None if it was not known; {} for an attempt without a prediction.
        """
        columns = _columns(AttemptRecord, self._store.attempts(self._key, numbers))
        # Read after the attempts, because classes are added while the study runs.
        order = self.class_order()
        columns["placed"] = [unpack(packed, order) for packed in columns["placed"]]
        columns["end"] = [None if end is None else str(end) for end in columns["end"]]
        return columns

    def class_order(self) -> Sequence[str]:
        """Return the names of the study's compute classes in the order of `AttemptRecord.placed`."""
        return self._store.class_order(self._key)

    def of_trial(self, number: int) -> list[dict[str, Any]]:
        """Return the attempts of one trial, each with the names of the columns."""
        columns = self.attempts([number])
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def sessions(self) -> Columns:
        """Return the times in which workers could run trials of the study: the fields of `SessionRecord`."""
        columns = _columns(SessionRecord, self._store.sessions(self._key))
        columns["reason"] = [None if reason is None else str(reason) for reason in columns["reason"]]
        return columns

    def machines(self) -> Columns:
        """Return the machines of these workers: the fields of `MachineRecord`, with GPUs as mappings."""
        columns = _columns(MachineRecord, self._store.machines(self._key))
        columns["gpus"] = [[*map(to_builtins, gpus)] for gpus in columns["gpus"]]
        return columns


def _columns(kind: type[Struct], records: Iterable[Struct]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in kind.__struct_fields__}
    appends = [(name, column.append) for name, column in columns.items()]
    for record in records:
        for name, append in appends:
            append(getattr(record, name))
    return columns
