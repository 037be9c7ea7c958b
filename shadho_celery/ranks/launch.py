"""Launch: runs a function in several processes (ranks) on one worker, one for each of the trial's GPUs.

::

    def train(context, params):  # in each rank
        model = DistributedDataParallel(make_model().to(context.device))
        for step, batch in enumerate(batches):
            ...
            context.report(step, loss)  # counts in rank 0 only
            if context.should_stop():  # the answer of rank 0, in every rank
                break
        return loss  # the value of rank 0

    def objective(params, context):
        return context.launch(train, params)

The objective runs once. While it waits for the ranks, it answers their requests over pipes, and forwards the reports of
rank 0. The ranks find one another through a file that only their user can read, and connect on the loopback interface.
torch's default process group is initialised before the function is called. As under torchrun, MASTER_ADDR and
MASTER_PORT are the address of a store for scripts that read them. The trial's process opens it on the loopback
interface.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch has no list of its stores

from shadho_celery.core.addresses import LOOPBACK, interface_variables, listen
from shadho_celery.core.checks import short
from shadho_celery.core.hardware import THREAD_VARIABLES, thread_variables
from shadho_celery.core.system import overridden
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.call import gpu_peak, own_peak
from shadho_celery.objective.context import CURRENT, LocalContext, RankLost
from shadho_celery.ranks.children import CHECK_SECONDS, begin_child, end_children, how_ended
from shadho_celery.ranks.rendezvous import LOST_CONNECTION, open_store

#: maximum seconds of a collective, and of the ranks' initialisation
TIMEOUT_SECONDS = 1800.0
#: seconds to wait for the error that is the cause, after a rank has failed only because it lost a connection
CAUSE_SECONDS = 2.0
#: seconds that ranks have to exit after they have returned, before they are killed
LEAVE_SECONDS = 30.0
#: reasons to stop, whose index is broadcast; the first one means no reason
_REASONS = ("", "stopped", "timeout", "preempted")
#: ranks are new interpreters, because CUDA cannot be used in a fork
SPAWN = multiprocessing.get_context("spawn")
#: attributes of the trial's context that are copied to the contexts of the ranks
_FACTS = (
    *("study", "trial", "attempt", "seed", "budget", "checkpoints", "device", "compute_class", "slot", "slots", "gpus"),
    *("is_copy", "encrypted", "timeout", "objectives"),
)


class RankFailed(ShadhoError):
    """A rank of the trial has raised an error, or has ended."""


class RankTraceback(Exception):
    """Traceback of the error that a rank has raised; the cause of a RankFailed."""


@dataclass(kw_only=True)
class RankContext(LocalContext):
    """Context of one rank. `rank` and `size` are its rank in the process group and the group's size; `device` is its
    device.

    Reports count in rank 0 only. Each rank must call `should_stop` at the same step.
    """

    rank: int = 0
    size: int = 1
    #: connection to the process of the objective
    pipe: Connection | None = None
    #: held by the thread that uses the connection
    lock: threading.Lock = field(default_factory=threading.Lock)
    _reason: str = ""

    def report(self, step: int, loss: float | Mapping[str, float]) -> None:
        # The call only checks the arguments.
        super().report(step, loss)
        if not self.rank:
            self._ask("report", step, loss)

    def should_stop(self) -> bool:
        """Return whether the trial should stop. Rank 0 decides for all ranks. All ranks must call this at the same
        step.
        """
        told = "" if self.rank else self._ask("stop_reason")
        number = torch.tensor([_REASONS.index(told)], dtype=torch.uint8)
        dist.broadcast(number, 0)
        self._reason = _REASONS[int(number.item())]
        return bool(self._reason)

    @property
    def stop_reason(self) -> str:
        """Reason to stop at the last call of `should_stop`, or ""."""
        return self._reason

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        raise UsageError("a rank cannot launch ranks; call context.launch in the objective")

    def _ask(self, *request: Any) -> Any:
        assert self.pipe is not None
        with self.lock:
            # Pickle tensors by value, because torch's own way to send them through a pipe opens a socket.
            self.pipe.send_bytes(pickle.dumps(request))
            return self.pipe.recv()


class _Rank:
    """One rank, as the process of the objective sees it: the process, its pipe, and its result."""

    def __init__(self, number: int, variables: Mapping[str, str], facts: Mapping[str, Any], *arguments: Any) -> None:
        """Start the process with additional environment variables. `facts` and `arguments` are passed to `_run`."""
        self._number = number
        self.pipe, theirs = SPAWN.Pipe()
        # The process is not daemonic, so that it may have children, such as the workers of a DataLoader.
        self.process = SPAWN.Process(target=_run, args=({**facts, "rank": number, "pipe": theirs}, *arguments))
        with theirs, overridden(variables):
            self.process.start()
        #: the value that the rank has returned, in a tuple; () until then
        self.returned: tuple[Any, ...] = ()
        #: if the rank has failed: class and message of the trial's error, and the rank's traceback
        self.failed: tuple[type[ShadhoError], str, str] | None = None

    def look(self, context: LocalContext) -> None:
        """Answer the requests that the rank has sent, and record its end."""
        # Read the exit code first: if there is one, everything that the process has sent is already in the pipe.
        code = self.process.exitcode
        try:
            while not self.has_ended and self.pipe.poll():
                self._hear(context, *self.pipe.recv())
        except (EOFError, OSError):
            # The process has ended, or has closed its descriptors.
            self.pipe.close()
        if code is not None and not self.has_ended:
            how = how_ended(self._number, code)
            self.failed = (RankLost, how, "") if code < 0 else (RankFailed, f"{how} before it returned", "")

    @property
    def has_ended(self) -> bool:
        return bool(self.returned or self.failed)

    def _hear(self, context: LocalContext, what: str, *values: Any) -> None:
        if what == "returned":
            self.returned = values
        elif what == "failed":
            self.failed = RankFailed, f"rank {self._number} failed: {values[0]}", values[1]
        elif what == "stop_reason":
            self.pipe.send(context.stop_reason)
        else:
            context.report(*values)
            self.pipe.send(None)


def launch(context: LocalContext, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call ``function(context, *arguments)`` in ``context.gpus`` processes. Return the value that rank 0 returns.

    The process group uses NCCL if each process has a GPU of its own, else gloo on the CPU. Raises RankFailed if a rank
    raises an error (with its traceback) or exits, and RankLost if a rank is killed; the trial is then tried again.
    Raises UsageError unless function and arguments can be pickled.
    """
    if context.replica is not None:
        raise UsageError("context.launch is for the process of the trial itself; check context.replica first")
    remedy = "give a function at the top level of a module, and plain values"
    _pickled((function, arguments), "its function or arguments to other processes", remedy)
    # For each rank: peak of its resident memory, and of its GPU memory.
    peaks = SPAWN.RawArray("q", 2 * context.gpus)
    facts = {name: getattr(context, name) for name in _FACTS} | {"size": context.gpus}
    server = listen(LOOPBACK)
    store = open_store(0, LOOPBACK, server.getsockname()[1], server)
    ranks: list[_Rank] = []
    seconds = 0.0
    with tempfile.TemporaryDirectory(prefix="shadho-ranks-", ignore_cleanup_errors=True) as folder:
        try:
            for number in range(context.gpus):
                variables = _variables(context, number, store.port)
                ranks.append(_Rank(number, variables, facts, folder, peaks, function, tuple(arguments)))
            _await(ranks, context)
            # Close the pipe, because a thread of rank 0 may still wait for an answer.
            ranks[0].pipe.close()
            seconds = LEAVE_SECONDS
        finally:
            end_children([rank.process for rank in ranks], seconds)
            context.on_ranks(*_together(peaks))
    return ranks[0].returned[0]


def _await(ranks: Sequence[_Rank], context: LocalContext) -> None:
    """Answer the ranks' requests until all ranks have returned. Raises the error of the first rank that fails.

    A rank that fails because it has lost its connection to another rank is not the cause, so its error is raised only
    if no other rank fails within CAUSE_SECONDS.
    """
    until = math.inf
    while not all(rank.returned for rank in ranks):
        wait([rank.pipe for rank in ranks if not rank.has_ended and not rank.pipe.closed], CHECK_SECONDS)
        for rank in ranks:
            rank.look(context)
        for kind, message, trace in filter(None, [rank.failed for rank in ranks]):
            # A lost connection is only a consequence of another rank's end.
            if not LOST_CONNECTION.search(message) or time.monotonic() > until:
                raise kind(message) from (RankTraceback(f"\n{trace.rstrip()}") if trace else None)
            until = min(until, time.monotonic() + CAUSE_SECONDS)


def _variables(context: LocalContext, rank: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank, with the names that torchrun uses."""
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank) | {"MASTER_PORT": port}
    numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), context.gpus)
    numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    # With the last variable, rank 0 of a script uses our store instead of opening one on all addresses.
    names = {"MASTER_ADDR": LOOPBACK, "ROLE_NAME": "rank", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    names |= {"TORCHELASTIC_RUN_ID": f"{context.study or 'trial'}-{context.trial}.{context.attempt}"}
    variables = names | {name: str(number) for name, number in numbers.items()} | interface_variables(LOOPBACK)
    if (threads := os.environ.get(THREAD_VARIABLES[0], "")).isdecimal():
        # Divide the trial's cores among the ranks.
        variables |= thread_variables(max(1, int(threads) // context.gpus))
    return variables


def _together(peaks: Sequence[int]) -> tuple[int, int]:
    """Return the sum of the ranks' resident memory, and the maximum over the GPUs of the ranks' memory, in bytes."""
    cards = Counter[int]()
    count = torch.cuda.device_count() or len(peaks)
    for rank, gpu in enumerate(peaks[1::2]):
        cards[rank % count] += gpu
    return sum(peaks[::2]), max(cards.values())


def _run(
    facts: Mapping[str, Any],
    folder: str,
    peaks: MutableSequence[int],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    """In a rank: call the function within the process group, and send the value that rank 0 returns, or the error."""
    # Write the peaks regularly, because a rank that is killed cannot write them at its end.
    note = partial(_note_peaks, peaks, facts["rank"])
    begin_child(os.getppid(), note, torch.get_num_threads())
    context = RankContext(**facts)
    CURRENT.set(context)
    try:
        told = _call(context, Path(folder), function, arguments)
    except BaseException as error:
        told = pickle.dumps(("failed", f"{type(error).__name__}: {short(error, 10_000)}", traceback.format_exc()))
    note()
    with context.lock:
        facts["pipe"].send_bytes(told)


def _call(context: RankContext, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Join the process group and call the function. Return the message with its value (None except in rank 0)."""
    gpus = torch.cuda.device_count() if context.device == "cuda" else 0
    backend = "cpu:gloo,cuda:nccl" if gpus >= context.size and dist.is_nccl_available() else "gloo"
    if gpus:
        context.device = f"cuda:{context.rank % gpus}"
        torch.cuda.set_device(context.rank % gpus)
    random.seed(context.seed)
    np.random.seed(context.seed % 2**32)
    torch.manual_seed(context.seed)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store = FileStore(str(folder / "store"), context.size)
    store.set_timeout(timeout)
    dist.init_process_group(backend, timeout=timeout, rank=context.rank, world_size=context.size, store=store)
    # Wait for all ranks, because a rank that leaves the group at once would cut connections of ranks that still join.
    store.set(f"joined {context.rank}", "")
    store.wait([f"joined {rank}" for rank in range(context.size)])
    try:
        returned = function(context, *arguments)
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r}); return instead") from error
    value = None if context.rank else returned
    told = _pickled(("returned", value), "what rank 0 returns to the objective", "return plain values")
    # The function may have destroyed the group, or created another one.
    if dist.is_initialized():
        # Wait for all ranks, because a faster rank would cut the connections of the others.
        dist.barrier()
        dist.destroy_process_group()
    return told


def _pickled(value: object, what: str, remedy: str) -> bytes:
    """Return a value as bytes. Raises UsageError if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise UsageError(f"context.launch cannot send {what} ({type(error).__name__}: {error}); {remedy}") from error


def _note_peaks(peaks: MutableSequence[int], rank: int) -> None:
    peaks[2 * rank] = own_peak()
    if torch.cuda.is_initialized():
        peaks[2 * rank + 1] = gpu_peak(rank % torch.cuda.device_count())
