"""Launch: one process for each of a trial's GPUs, started by torch's elastic launcher.

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

The objective runs once. It waits for the ranks, and passes on what rank 0 reports. The ranks meet on the loopback
interface, where torch's default process group is initialised before the function is called.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shadho_celery.core.addresses import LOOPBACK, gloo_variables
from shadho_celery.core.hardware import THREAD_VARIABLES, thread_variables
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import LocalContext, RankLost
from shadho_celery.objective.memory import gpu_peak, own_peak
from shadho_celery.ranks.children import CHECK_SECONDS, end_with_parent
from shadho_celery.ranks.rendezvous import LOST_CONNECTION

#: seconds that a collective may take, and that the ranks may take to meet
TIMEOUT_SECONDS = 1800.0
#: seconds that the other ranks have to end after one has failed; then they are killed
END_SECONDS = 2
#: reasons to stop, as they are broadcast; the first one is for no reason
_REASONS = ("", "stopped", "timeout", "preempted")
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
    #: connection of rank 0 to the objective; None in the other ranks
    pipe: Connection | None = None
    #: allows one thread at a time to use the connection
    lock: threading.Lock = field(default_factory=threading.Lock)
    _reason: str = ""

    def report(self, step: int, loss: float) -> None:
        if self.pipe is None:
            # It is only checked.
            super().report(step, loss)
        elif (error := self._ask("report", step, loss)) is not None:
            raise error

    def should_stop(self) -> bool:
        """Return whether the trial should stop, as rank 0 knows it. Each rank must call this at the same step."""
        told = self._ask("stop_reason") if self.pipe is not None else ""
        number = torch.tensor([_REASONS.index(told)], dtype=torch.uint8)
        dist.broadcast(number, 0)
        self._reason = _REASONS[int(number.item())]
        return bool(self._reason)

    should_prune = should_stop

    @property
    def stop_reason(self) -> str:
        """Reason that the last `should_stop` has found."""
        return self._reason

    def launch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        raise UsageError("a rank cannot launch ranks; call context.launch in the objective")

    def _ask(self, *request: Any) -> Any:
        assert self.pipe is not None
        with self.lock:
            self.pipe.send(request)
            return self.pipe.recv()


def launch(context: LocalContext, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call ``function(context, *arguments)`` in ``context.gpus`` processes. Return what it returns in rank 0.

    A process with a GPU of its own uses NCCL, otherwise gloo on the CPU. Raises RankFailed with the traceback of a rank
    that raises an error, and RankLost for one that is killed: the trial is then tried again. Raises UsageError unless
    function and arguments can be pickled.
    """
    if context.replica is not None:
        raise UsageError("context.launch is for the process of the trial itself; check context.replica first")
    try:
        pickle.dumps((function, arguments))
    except Exception as error:
        raise UsageError(
            f"context.launch cannot send its function or arguments to other processes ({type(error).__name__}: "
            f"{error}); give a function at the top level of a module, and plain values"
        ) from error
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    # By rank: peak of its resident memory, and of that of its GPU.
    peaks = spawn.RawArray("q", 2 * context.gpus)
    answering = threading.Thread(target=_answer, args=(ours, context), name="rank-reports", daemon=True)
    facts = {name: getattr(context, name) for name in _FACTS} | {"size": context.gpus}
    try:
        answering.start()
        with tempfile.TemporaryDirectory(prefix="shadho-ranks-") as folder, _environment(context.gpus):
            # torch replaces the handler of SIGTERM, see `_environment`.
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=context.gpus,
                run_id=f"{context.study or 'trial'}-{context.trial}.{context.attempt}",
                role="rank",
                rdzv_backend="c10d",
                rdzv_endpoint=f"{LOOPBACK}:0",
                rdzv_configs={"timeout": int(TIMEOUT_SECONDS)},
                local_addr=LOOPBACK,
                max_restarts=0,
                monitor_interval=CHECK_SECONDS,
                signals_to_handle="SIGTERM",
                shutdown_timeout=END_SECONDS,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            # torch configures this logger once in a process, and what a trial changes in logging is undone after it.
            events = logging.getLogger("torchelastic-events-null")
            events.propagate = False
            events.handlers = events.handlers or [logging.NullHandler()]
            returned = elastic_launch(config, _run)(facts, theirs, peaks, function, tuple(arguments))
    except ChildFailedError as error:
        end, trace = _failure(error)
        raise end from trace
    except SignalException as error:
        # As without a launcher: the process ends, unless it is a worker's, which leaves the signal to the worker.
        os.kill(os.getpid(), error.sigval)
        raise RankLost(f"the ranks were ended by {error.sigval.name}") from None
    finally:
        theirs.close()
        answering.join(END_SECONDS)
        ours.close()
        context.on_ranks(*_together(peaks))
    return returned[0]


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


def _answer(pipe: Connection, context: LocalContext) -> None:
    """In the trial's process: answer the calls of rank 0 until it ends."""
    with suppress(EOFError, OSError):
        while True:
            what, *values = pipe.recv()
            answer: object = None
            if what == "stop_reason":
                answer = context.stop_reason
            else:
                try:
                    context.report(*values)
                except (TypeError, ValueError) as error:
                    answer = error
            pipe.send(answer)


def _run(
    facts: Mapping[str, Any],
    pipe: Connection,
    peaks: MutableSequence[int],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> Any:
    """In a rank: join the process group and call the function. Return its value in rank 0, else None."""
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # A rank that is killed cannot note its peaks at its end.
    end_with_parent(os.getppid(), partial(_note_peaks, peaks, rank, local))
    context = RankContext(**{**facts, "rank": rank}, pipe=None if rank else pipe)
    gpus = torch.cuda.device_count() if context.device == "cuda" else 0
    is_nccl = gpus >= context.size and dist.is_nccl_available()
    if gpus:
        context.device = f"cuda:{local % gpus}"
        torch.cuda.set_device(local % gpus)
    random.seed(context.seed)
    np.random.seed(context.seed % 2**32)
    torch.manual_seed(context.seed)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_nccl else "gloo", timeout=timeout)
    try:
        returned = function(context, *arguments)
        returned = None if rank else _sendable(returned)
    except SystemExit as error:
        # The launcher would take an exit code of 0 for the end of the function.
        raise RuntimeError(f"it called sys.exit({error.code!r}); return instead") from error
    finally:
        _note_peaks(peaks, rank, local)
    # Otherwise a rank that is quicker would cut the connections of the others.
    dist.barrier()
    dist.destroy_process_group()
    return returned


def _sendable(value: Any) -> Any:
    """Return a value that can be pickled. Raises UsageError for another one."""
    try:
        pickle.dumps(value)
    except Exception as error:
        raise UsageError(
            f"context.launch cannot send what rank 0 returns to the objective ({type(error).__name__}: {error}); "
            "return plain values"
        ) from error
    return value


def _note_peaks(peaks: MutableSequence[int], rank: int, local: int) -> None:
    peaks[2 * rank] = own_peak()
    if torch.cuda.is_initialized():
        peaks[2 * rank + 1] = gpu_peak(local % torch.cuda.device_count())


@contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """Set the variables of the ranks, and restore them and the signal handler that torch replaces."""
    changed = gloo_variables(LOOPBACK)
    if (threads := os.environ.get(THREAD_VARIABLES[0], "")).isdecimal():
        # The ranks share the cores of the trial.
        changed |= thread_variables(max(1, int(threads) // ranks))
    is_main = threading.current_thread() is threading.main_thread()
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if is_main:
            signal.signal(signal.SIGTERM, handler)


def _failure(error: ChildFailedError) -> tuple[ShadhoError, RankTraceback | None]:
    """Return the error of a trial whose rank has failed, and the traceback of that rank.

    Other ranks may have failed as a consequence.
    """
    failures = error.failures.items()
    rank, failure = min(failures, key=lambda each: (_is_consequence(each[1]), each[1].timestamp, each[0]))
    recorded = _recorded(failure)
    trace = recorded.get("extraInfo", {}).get("py_callstack")
    end: ShadhoError = RankFailed(f"rank {rank} ended with exit code {failure.exitcode}")
    if failure.exitcode < 0:
        end = RankLost(f"rank {rank} was ended by signal {failure.signal_name()}")
    elif recorded:
        end = RankFailed(f"rank {rank} failed: {recorded.get('message')}")
    return end, None if trace is None else RankTraceback(f"\n{str(trace).rstrip()}")


def _is_consequence(failure: ProcessFailure) -> bool:
    if failure.exitcode < 0:
        # The launcher ends the other ranks by SIGTERM.
        return -failure.exitcode == signal.SIGTERM
    return bool(LOST_CONNECTION.search(str(_recorded(failure).get("message"))))


def _recorded(failure: ProcessFailure) -> Mapping[str, Any]:
    """Return what torch has recorded of a rank's error: its message and traceback; {} if the rank raised none."""
    recorded = failure.error_file_data.get("message")
    return recorded if isinstance(recorded, dict) else {}
