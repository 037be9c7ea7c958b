"""Call of an objective: every return value and every exception becomes an outcome.

`PeakMemory` measures how much memory the call uses. `exhausted` recognises errors whose cause is that GPU memory or RAM
ran out. `check_objective` and `wants_context` inspect the objective's signature.
"""

from __future__ import annotations

import errno
import gc
import inspect
import os
import re
import resource
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from shadho_celery.core.checks import accepts
from shadho_celery.core.hardware import AUTO, SLOTS_PER_GPU
from shadho_celery.core.names import elsewhere
from shadho_celery.core.system import Clock, SystemClock
from shadho_celery.core.trial import Memory, Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.objective.context import CURRENT, LocalContext, RankLost
from shadho_celery.objective.result import Unreadable, read, read_metrics

_RESET = Path("/proc/self/clear_refs")
_NUMBER = re.compile(rb"^(\w+):?\s+(\d+)", re.MULTILINE)

#: error messages about RAM: those of torch on the CPU, of numpy and of a Python process; then those of joblib,
#: DataLoader and subprocess about a child process that was killed by the system
_OF_HOST = re.compile(
    r"can't allocate memory|unable to allocate|cannot allocate memory|(?m:^MemoryError\b)"
    r"|SIGKILL\(-9\)|killed by signal: Killed|died with <Signals.SIGKILL",
    re.IGNORECASE,
)
#: error messages of CUDA's libraries; then those of CUDA itself, torch and JAX. JAX does not say which memory ran out
_OF_LIBRARY = re.compile(r"CU\w+_STATUS_ALLOC_FAILED", re.IGNORECASE)
_OF_ANY = re.compile(r"out.of.memory", re.IGNORECASE)
_GPU = re.compile(r"cuda|\bhip\b|gpu|\bmps\b", re.IGNORECASE)


class PeakMemory:
    """Measures peaks since its creation: the GPU memory of torch's tensors, and the resident memory of this process.

    Memory of other processes is included only if it is passed to `add`. No method raises.
    """

    def __init__(self, shared: int = 0) -> None:
        """`shared` is the number of bytes that this process shares with other processes. They are subtracted."""
        self._shared = shared
        #: peaks of the trial's other processes
        self._beside = dict.fromkeys(Memory, 0)
        #: bytes of torch's tensors on GPUs at the beginning
        self._held = 0
        # If an earlier trial has broken torch or the GPU, the error of this trial's objective describes that better.
        with suppress(Exception):
            if (cuda := _cuda()) is not None:
                for device in range(cuda.device_count()):
                    cuda.reset_peak_memory_stats(device)
                self._held = _allocated(cuda)
        # Writing 5 to this file of Linux sets the peak to the current resident memory.
        self._was_reset = False
        with suppress(OSError):
            # `os.open` is used, because `open` takes several times as long for each trial.
            descriptor = os.open(_RESET, os.O_WRONLY)
            try:
                os.write(descriptor, b"5")
                self._was_reset = True
            finally:
                os.close(descriptor)

    def add(self, host: int, gpu: int) -> None:
        """Include the peaks of other processes of the trial: their resident bytes, and the most bytes on one GPU.

        After several calls, only the largest value of each is included.
        """
        for memory, peak in ((Memory.HOST, host), (Memory.GPU, gpu)):
            self._beside[memory] = max(self._beside[memory], peak)

    def read(self, memory: Memory) -> int | None:
        """Return the peak of a kind of memory in bytes, or None if it was not measured.

        GPU memory is not measured if torch uses no GPU. RAM is not measured if the system cannot reset the peak of the
        process.
        """
        if memory is Memory.HOST:
            if not self._was_reset:
                return None
            own = max(0, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._shared)
            return own + self._beside[Memory.HOST]
        return (gpu_peak() + self._beside[Memory.GPU]) or None

    def release(self) -> None:
        """Free the tensors that the trial has left on GPUs, if nothing refers to them any more. Never raises.

        If trials share GPUs, torch's allocator also returns the memory that it keeps for later tensors.
        """
        with suppress(Exception):
            if (cuda := _cuda()) is not None:
                if _allocated(cuda) > self._held:
                    # Tensors in a cycle of references, as of a trainer and its callbacks, would stay for a while.
                    gc.collect()
                if _shares():
                    cuda.empty_cache()


def gpu_peak(device: int | None = None) -> int:
    """Return the peak bytes of torch's tensors on a GPU, or the largest peak of all GPUs; 0 if torch uses none.

    If trials share GPUs, return the peak of the memory that torch's allocator holds, which is more than the tensors
    take.
    """
    with suppress(Exception):
        # If trials do not share GPUs, the reserved memory would be wrong: the allocator keeps it from trial to trial.
        # The peak was not reset for the first trial on the GPU, but no earlier trial has contributed to it either.
        if (cuda := _cuda()) is not None:
            peak = cuda.max_memory_reserved if _shares() else cuda.max_memory_allocated
            devices = range(cuda.device_count()) if device is None else [device]
            return max((int(peak(each)) for each in devices), default=0)
    return 0


def _allocated(cuda: Any) -> int:
    """Return the bytes of torch's tensors on all GPUs."""
    return sum(int(cuda.memory_allocated(device)) for device in range(cuda.device_count()))


def _shares() -> bool:
    """Return whether this worker's trials share GPUs: as many trials run on a GPU as its memory has room for."""
    return os.environ.get(SLOTS_PER_GPU) == AUTO


def own_peak() -> int:
    """Return the peak bytes of this process's resident memory, without mapped files such as libraries; 0 if unknown.

    `getrusage` is not used, because its peak may be that of the process that has started this one.
    """
    found = _numbers("/proc/self/status")
    return 1024 * max(0, found[b"VmHWM"] - found[b"RssFile"])


def shared_memory() -> int:
    """Return the bytes of memory that this process shares with the process that forked it; 0 if unknown.

    Mapped files, such as libraries, are not included.
    """
    return 1024 * _numbers("/proc/self/smaps_rollup")[b"Shared_Dirty"]


def system_kills() -> int:
    """Return the number of processes that the system has killed so far because memory ran out; 0 if unknown."""
    return _numbers("/proc/vmstat")[b"oom_kill"]


def _numbers(path: str) -> Mapping[bytes, int]:
    """Return the numbers in a file of the system by name, with 0 for unknown ones. Sizes are in kB."""
    with suppress(OSError):
        return Counter({name: int(number) for name, number in _NUMBER.findall(Path(path).read_bytes())})
    return Counter()


def _cuda() -> Any:
    """Return torch.cuda if torch uses a GPU in this process, else None. torch is not imported for this."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def exhausted(error: BaseException) -> Memory | None:
    """Return the kind of memory that ran out, if `error` or one of its causes says so, else None."""
    cause: BaseException | None = error
    with suppress(Exception):
        # A chain of causes may be circular.
        for _ in range(10):
            if cause is None:
                break
            if (memory := _told_by(cause)) is not None:
                return memory
            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _told_by(error: BaseException) -> Memory | None:
    # Compared by name, because torch is not imported for this, and defines the exception in various modules, by its
    # version. CuPy's exception of this name is a MemoryError.
    if any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return Memory.GPU
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Memory.HOST
    text = _text(error)
    if _OF_LIBRARY.search(text):
        return Memory.GPU
    if _OF_HOST.search(text):
        return Memory.HOST
    if _OF_ANY.search(text):
        # In a slot without GPUs, the variable is empty.
        has_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
        is_of_gpu = _GPU.search(text) or (has_gpu and not isinstance(error, MemoryError))
        return Memory.GPU if is_of_gpu else Memory.HOST
    return Memory.HOST if isinstance(error, MemoryError) else None


def _text(error: BaseException) -> str:
    """Return the message of an error; "" if reading it fails, or if `error` is not an Exception."""
    with suppress(Exception):
        return str(error)[:10_000] if isinstance(error, Exception) else ""
    return ""


Objective = Callable[..., Any]

#: folder of this package
_PACKAGE = Path(__file__).parent.parent

#: maximum number of characters of a traceback; its end is kept
MAX_ERROR = 8000

#: maximum number of chained exceptions in a traceback, and of frames of each exception; the last ones are kept
MAX_CAUSES, MAX_FRAMES = 20, 50


def call(
    objective: Objective,
    make_params: Callable[[], object],
    context: LocalContext,
    clock: Clock | None = None,
    *,
    takes_context: bool | None = None,
    fatal: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    objectives: Mapping[str, str] | None = None,
) -> Outcome:
    """Call `objective` with the params that `make_params` returns, and return the outcome.

    `takes_context` is the result of `wants_context(objective)`. If it is None, `wants_context` is called, which takes
    longer than the rest. `objectives` are the directions of the study's losses by name, if they have names. An
    exception of a `fatal` type, by default that of Ctrl-C, is raised again. Any other one becomes a FAILED outcome.
    """
    clock = clock or SystemClock()
    began = clock.now()
    outer = CURRENT.set(context)
    try:
        params = make_params()
        if takes_context is None:
            takes_context = wants_context(objective)
        try:
            returned = objective(params, context) if takes_context else objective(params)
            seconds = max(0.0, clock.now() - began)
            outcome = read(returned, objectives)
        except Unreadable:
            # `Suggesting` reads the return value of its objective, which does not count if the trial was stopped.
            if not (context.stopped() or context.was_told):
                raise
            outcome, seconds = Outcome(state=TrialState.CANCELLED), max(0.0, clock.now() - began)
        if context.stopped() or context.was_told:
            outcome = outcome.cancelled(seconds)
        elif context.timed_out():
            cut_off = f"stopped at its time limit of {context.timeout or 0:g} s"
            outcome = replace(outcome, warning=joined(cut_off, outcome.warning), seconds=seconds)
        else:
            outcome = replace(outcome, seconds=seconds)
    except fatal:
        raise
    except BaseException as error:
        outcome = _failed(error, context, max(0.0, clock.now() - began))
    finally:
        CURRENT.reset(outer)
    return with_notes(outcome, context)


def with_notes(outcome: Outcome, context: LocalContext) -> Outcome:
    """Return an outcome with what its trial has noted in its context: labels, facts and warnings."""
    warnings = [context.reports.warning, *dict.fromkeys(context.warnings)]
    if context.asked is not None:
        noted = read_metrics(context.facts)
        outcome = replace(outcome, asked=context.asked, metrics={**noted.metrics, **outcome.metrics})
        warnings.append(noted.warning)
    return replace(outcome, warning=joined(outcome.warning, *warnings)) if any(warnings) else outcome


def _failed(error: BaseException, context: LocalContext, seconds: float) -> Outcome:
    # An unreadable return value needs no traceback, which would only show this package's code.
    text = str(error) if isinstance(error, Unreadable) else describe(error)
    missing = str(error.name) if isinstance(error, AttributeError) else ""
    here = elsewhere(missing if missing.startswith("suggest_") else type(error).__name__, ())
    if here and here not in text:
        text = f"{text.rstrip()}; here it is {here}"
    if context.timed_out():
        text = f"timed out after {context.timeout or 0:g} s (trial timeout)\n{text}"
    return Outcome(
        state=TrialState.FAILED,
        error=text,
        seconds=seconds,
        out_of_memory=exhausted(error),
        rank_lost=isinstance(error, RankLost),
    )


def joined(*warnings: str | None) -> str | None:
    """Return the warnings that are not None, joined by semicolons. Return None if all are None or empty."""
    return "; ".join(filter(None, warnings)) or None


def check_objective(objective: object, name: str) -> None:
    """Raise UsageError if `objective` cannot be called with the params of a trial. The error calls it `name`."""
    if not callable(objective):
        raise UsageError(f"{name} is not a function but {type(objective).__name__}")
    if _is_suspended(objective):
        raise UsageError(
            f"{name} is a coroutine or a generator, whose call returns no loss; write a function that runs it, such as "
            "lambda params: asyncio.run(f(params))"
        )
    if accepts(objective, 2 if wants_context(objective) else 1):
        return
    signature = inspect.signature(objective)
    if not signature.parameters:
        raise UsageError(f"{name} takes no argument, but it gets the values of a trial; write objective(params)")
    raise UsageError(
        f"{name} takes {signature}, but it is called with the values of a trial as its one argument, or with a context "
        "as the second; write objective(params), or pass lambda params: f(**params)"
    )


def _is_suspended(objective: Any) -> bool:
    """Return whether a call of `objective` only creates a coroutine or a generator."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(function) for kind in kinds for function in (objective, type(objective).__call__))


def wants_context(objective: Objective) -> bool:
    """Return whether to pass the context: the second parameter is named context or has no default."""
    try:
        parameters = inspect.signature(objective).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].name == "context" or positional[1].default is inspect.Parameter.empty)


def describe(error: BaseException) -> str:
    """Return the error's message with its traceback. Never raises.

    If the text is too long, the first frames and the middle of the message are left out.
    """
    try:
        _cut_short(error)
        trace = _from_the_user(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES))
        message = "".join(traceback.format_exception_only(type(error), error))
    except BaseException:  # its own __str__ may do anything
        text = f"{type(error).__name__} (its message cannot be printed)"
        message = text
    text = text if len(text) <= MAX_ERROR else _shortened(text, message)
    # An unpaired surrogate cannot be printed or sent.
    return text.encode("utf-8", "replace").decode()


def _shortened(text: str, message: str) -> str:
    """Shorten a traceback to about MAX_ERROR characters. Keep its last frames, and start and end of its message."""
    if not text.endswith(message):
        # The traceback of an exception group ends with its members.
        return "..." + text[-MAX_ERROR:]
    frames, most = text[: -len(message)], MAX_ERROR // 2
    if len(message) > most:
        head, tail = message[: most // 2], message[-most // 2 :]
        message = f"{head}\n... ({len(message) - most} characters are left out)\n{tail}"
    rest = MAX_ERROR - len(message)
    return (frames if len(frames) <= rest else "..." + frames[-rest:]) + message


def _from_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the leading frames that are in this package, unless all its frames are."""
    rest = trace
    while rest is not None and Path(rest.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
        rest = rest.tb_next
    return rest or trace


def _cut_short(error: BaseException) -> None:
    """Remove all causes of an error after the first MAX_CAUSES.

    The time to format a chain of causes grows with the square of its length.
    """
    for _ in range(MAX_CAUSES):
        cause = error.__cause__ or error.__context__
        if cause is None:
            return
        error = cause
    error.__cause__ = error.__context__ = None
