"""Ranks of a test: forked processes of this machine, which start at once, in place of workers or new interpreters."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, TypeVar

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.objective.context import LocalContext, ReplicaDone
from shadho_celery.ranks.children import begin_child, end_children

T = TypeVar("T")


class Fork(ForkProcess):
    """A forked process, also of a process with threads, of which newer Pythons warn."""

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            super().start()


class Forking(ForkContext):
    """Starts processes as forks: torch is imported already. None of them may use CUDA."""

    Process = Fork


def in_slots(slots: int, objective: Callable[[LocalContext], T], **facts: Any) -> T:
    """Return what the objective returns in rank 0 of a trial with several slots. Each other rank is a fork.

    The forks run the objective too, once its process group calls them, as the workers of a fleet do. Those that have
    not ended with rank 0 are killed.
    """
    facts["slots"] = slots
    pipes, forks = [], []
    for _ in range(1, slots):
        ours, theirs = Pipe()
        forks.append(Fork(target=_take_part, args=(theirs, objective, facts)))
        forks[-1].start()
        pipes.append(ours)

    def call(address: str, token: str, backups: int) -> None:
        for rank, pipe in enumerate(pipes, 1):
            pipe.send(ReplicaSeat(address=address, token=token, rank=rank))

    try:
        return objective(LocalContext(on_call_replicas=call, **facts))
    finally:
        end_children(forks, 0.0)


def _take_part(pipe: Connection, objective: Callable[[LocalContext], object], facts: dict[str, Any]) -> None:
    begin_child(os.getppid())
    with suppress(ReplicaDone):
        objective(LocalContext(replica=pipe.recv(), **facts))
