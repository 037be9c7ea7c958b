"""Processes on this machine that form one gloo group and end with the trial that started them; used by other tasks."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

#: seconds without a message from the others after which a process gives up
TIMEOUT = 60.0

Job = TypeVar("Job")


@contextmanager
def processes(size: int, work: Callable[[int, Job, Connection], None], job: Job) -> Iterator[list[Connection]]:
    """Start `size` processes, yield a pipe from each, and end them.

    Process `rank` calls `work(rank, job, pipe)`, a function at the top level of a module, as a member of torch's
    default group.
    """
    # Children of a server that has imported what they need: they start fast and copy none of this process's threads.
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["torch", "hyperopt"])
    with ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="shadho-group-"))
        pipes: list[Connection] = []
        children: list[ForkServerProcess] = []
        ending.callback(_end, children)
        for rank in range(size):
            ours, theirs = start.Pipe(duplex=False)
            pipes.append(ending.enter_context(ours))
            with theirs:  # open only in the child, so that the pipe ends when the child does
                given = (_Group(size, folder), rank, theirs, work, job)
                children.append(start.Process(target=_join, args=given, daemon=True))
                children[-1].start()
        yield pipes


def received(pipe: Connection) -> Any:
    """The next message of a process. Raises RuntimeError if it has ended instead."""
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a process of the group ended early; its last output is on standard error") from None


@dataclass(frozen=True)
class _Group:
    size: int
    #: where its processes find one another
    folder: str


def _join(group: _Group, rank: int, pipe: Connection, work: Callable[[int, Job, Connection], None], job: Job) -> None:
    """Join the other processes, do the work with them, and leave when they have done theirs."""
    threading.Thread(target=_leave_with_parent, args=(group.folder,), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # there are enough processes
    dist.init_process_group(
        "gloo",
        init_method=f"file://{group.folder}/store",
        rank=rank,
        world_size=group.size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    work(rank, job, pipe)
    dist.barrier()
    dist.destroy_process_group()


def _leave_with_parent(folder: str) -> None:
    """End this process, and remove `folder`, when its parent has ended. If the parent was killed, nothing else
    would.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _end(children: list[ForkServerProcess]) -> None:
    """End those that have not ended by themselves."""
    for child in children:
        child.terminate()
    for child in children:
        child.join()
