"""Launch: one process for each of a trial's GPUs.

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

The objective runs once. It waits for the ranks, answers them over a pipe, and passes on what rank 0 reports. The ranks
meet in a file that only their user can read, and are connected on the loopback interface. torch's default process group
is initialised before the function is called. A script that reads MASTER_ADDR and MASTER_PORT finds a store there, which
this process has opened on the loopback interface, as torchrun does.
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
from shadho_celery.objective.context import LocalContext, RankLost
from shadho_celery.ranks.children import CHECK_SECONDS, begin_child, end_children, how_ended
from shadho_celery.ranks.rendezvous import LOST_CONNECTION, open_store

#: seconds that a collective may take, and that the ranks may take to meet
TIMEOUT_SECONDS = 1800.0
#: seconds in which a rank must tell its own error, after another one has lost its connection to it
CAUSE_SECONDS = 2.0
#: seconds in which ranks that have returned must exit; then they are killed
LEAVE_SECONDS = 30.0
#: reasons to stop, as they are broadcast; the first one is for no reason
_REASONS = ("", "stopped", "timeout", "preempted")
#: a rank is a new interpreter, because CUDA cannot be used in a fork
SPAWN = multiprocessing.get_context("spawn")
#: facts of the trial's context that a rank gets
_FACTS = (
    *("study", "trial", "attempt", "seed", "budget", "checkpoints", "device", "compute_class", "slot", "slots", "gpus"),
    *("is_copy", "encrypted", "timeout", "objectives"),
)


class RankFailed(ShadhoError):
    """A rank of the trial has raised an error, or has ended."""


class RankTraceback(Exception):
    """Traceback of the error that a rank has raised."""


@dataclass(kw_only=True)
class RankContext(LocalContext):
    """Context of one rank. `rank` and `size` are those of the process group, and `device` is the rank's own.

    Reports count in rank 0 only. Each rank must call `should_stop` at the same step.
    """

    rank: int = 0
    size: int = 1
    #: connection to the objective
    pipe: Connection | None = None
    #: allows one thread at a time to use the connection
    lock: threading.Lock = field(default_factory=threading.Lock)
    _reason: str = ""

    def report(self, step: int, loss: float) -> None:
        # Here it is only checked.
        super().report(step, loss)
        if not self.rank:
            self._ask("report", step, loss)

    def should_stop(self) -> bool:
        """Return whether the trial should stop, as rank 0 knows it. Each rank must call this at the same step."""
        told = "" if self.rank else self._ask("stop_reason")
        number = torch.tensor([_REASONS.index(told)], dtype=torch.uint8)
        dist.broadcast(number, 0)
        self._reason = _REASONS[int(number.item())]
        return bool(self._reason)

    @property
    def stop_reason(self) -> str:
        """Reason that the last `should_stop` has found."""
        return self._reason

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        raise UsageError("a rank cannot launch ranks; call context.launch in the objective")

    def _ask(self, *request: Any) -> Any:
        assert self.pipe is not None
        with self.lock:
            # Tensors are sent by value. Their own way through a pipe opens a socket.
            self.pipe.send_bytes(pickle.dumps(request))
            return self.pipe.recv()


class _Rank:
    """Process of one rank, as the objective sees it."""

    def __init__(self, number: int, variables: Mapping[str, str], facts: Mapping[str, Any], *arguments: Any) -> None:
        """Start the process with further environment variables. `facts` and `arguments` are for `_run`."""
        self._number = number
        self.pipe, theirs = SPAWN.Pipe()
        # Not daemonic: it may have children, which load the data.
        self.process = SPAWN.Process(target=_run, args=({**facts, "rank": number, "pipe": theirs}, *arguments))
        with theirs, overridden(variables):
            self.process.start()
        #: the value that it has returned; () until then
        self.returned: tuple[Any, ...] = ()
        #: error of the trial, its message, and the traceback, if the rank has failed
        self.failed: tuple[type[ShadhoError], str, str] | None = None

    def look(self, context: LocalContext) -> None:
        """Answer what the rank has asked, and note its end."""
        # The exit code is read first: then all that the process has sent is in the pipe.
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
    """Call ``function(context, *arguments)`` in ``context.gpus`` processes. Return what it returns in rank 0.

    A process with a GPU of its own uses NCCL, otherwise gloo on the CPU. Raises RankFailed for a rank that raises an
    error, with its traceback, or that exits, and RankLost for one that is killed: the trial is then tried again. Raises
    UsageError unless function and arguments can be pickled.
    """
    if context.replica is not None:
        raise UsageError("context.launch is for the process of the trial itself; check context.replica first")
    remedy = "give a function at the top level of a module, and plain values"
    _pickled((function, arguments), "its function or arguments to other processes", remedy)
    # By rank: peak of its resident memory, and of that of its GPU.
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
            # A thread of rank 0 may still wait for an answer.
            ranks[0].pipe.close()
            seconds = LEAVE_SECONDS
        finally:
            end_children([rank.process for rank in ranks], seconds)
            context.on_ranks(*_together(peaks))
    return ranks[0].returned[0]


def _await(ranks: Sequence[_Rank], context: LocalContext) -> None:
    """Answer the ranks until all have returned. Raises the error of the first one that fails by itself."""
    until = math.inf
    while not all(rank.returned for rank in ranks):
        wait([rank.pipe for rank in ranks if not rank.has_ended and not rank.pipe.closed], CHECK_SECONDS)
        for rank in ranks:
            rank.look(context)
        for kind, message, trace in filter(None, [rank.failed for rank in ranks]):
            # A rank that has lost its connection to another one shows that this one has ended.
            if not LOST_CONNECTION.search(message) or time.monotonic() > until:
                raise kind(message) from (RankTraceback(f"\n{trace.rstrip()}") if trace else None)
            until = min(until, time.monotonic() + CAUSE_SECONDS)


def _variables(context: LocalContext, rank: int, port: int) -> dict[str, str]:
    """Return the environment variables of a rank, which are those of torchrun."""
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank) | {"MASTER_PORT": port}
    numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), context.gpus)
    numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    # Without the agent's store, rank 0 of a script that reads these would open one, on all addresses.
    names = {"MASTER_ADDR": LOOPBACK, "ROLE_NAME": "rank", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    names |= {"TORCHELASTIC_RUN_ID": f"{context.study or 'trial'}-{context.trial}.{context.attempt}"}
    variables = names | {name: str(number) for name, number in numbers.items()} | interface_variables(LOOPBACK)
    if (threads := os.environ.get(THREAD_VARIABLES[0], "")).isdecimal():
        # The ranks share the cores of the trial.
        variables |= thread_variables(max(1, int(threads) // context.gpus))
    return variables


def _together(peaks: Sequence[int]) -> tuple[int, int]:
    """Return the resident bytes of all ranks, and the most bytes that ranks have on one GPU."""
    cards = Counter[int]()
    count = _cards() or len(peaks)
    for rank, gpu in enumerate(peaks[1::2]):
        cards[rank % count] += gpu
    return sum(peaks[::2]), max(cards.values())


def _cards() -> int:
    """Return the number of GPUs of the trial; 0 without a GPU. This process need not use one itself."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return torch.cuda.device_count() if visible is None else len([name for name in visible.split(",") if name.strip()])


def _run(
    facts: Mapping[str, Any],
    folder: str,
    peaks: MutableSequence[int],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    """In a rank: call the function in the process group, and send what it returns in rank 0, or its error."""
    # A rank that is killed cannot note its peaks at its end.
    note = partial(_note_peaks, peaks, facts["rank"])
    begin_child(os.getppid(), note, torch.get_num_threads())
    context = RankContext(**facts)
    try:
        told = _call(context, Path(folder), function, arguments)
    except BaseException as error:
        told = pickle.dumps(("failed", f"{type(error).__name__}: {short(error, 10_000)}", traceback.format_exc()))
    note()
    with context.lock:
        facts["pipe"].send_bytes(told)


def _call(context: RankContext, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Join the process group and call the function. Return the message with its value in rank 0, else with None."""
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
    # A rank that leaves the group at once would cut the connections of those that still join it.
    store.set(f"joined {context.rank}", "")
    store.wait([f"joined {rank}" for rank in range(context.size)])
    try:
        returned = function(context, *arguments)
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r}); return instead") from error
    value = None if context.rank else returned
    told = _pickled(("returned", value), "what rank 0 returns to the objective", "return plain values")
    # The function may have left the group, or made another one.
    if dist.is_initialized():
        # Otherwise a rank that is quicker would cut the connections of the others.
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
