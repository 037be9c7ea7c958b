"""State of a slot's process: restore what a trial has changed, and end the processes that it left behind.

The state that libraries and users often change is described by rules. A rule is the name of a part of the state, with
functions that read and write this part.

`restore` compares each part of the state with its value at the start of the trial, and writes that value back. The
state of a library is recorded right after its import, before the trial that imports the library can change it. The
random generators are seeded for each trial (`seed_generators`), and `child` restores the filters of warnings. Other
changes by a trial are not undone.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import faulthandler
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeAlias

from shadho_celery.core.hardware import DEVICE
from shadho_celery.runner.process_tree import adopt_orphans, descendants, kill_all

#: names in modules that are settings of the process; `captureWarnings` sets the last two
_NAMES = (
    *((sys, "stdin"), (sys, "stdout"), (sys, "stderr")),
    *((warnings, "showwarning"), (logging, "_warnings_showwarning")),
)
#: names of resource limits by number; some limits have two names
_LIMITS = {getattr(resource, name): name for name in reversed(dir(resource)) if name.startswith("RLIMIT_")}
#: settings in `torch.backends`. A setting that changes others comes before them. `fp32_precision` exists from torch 2.9
#: on
_FLAGS = (
    *("cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32", "fp32_precision"),
    *("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
)

#: value for a part of the state that does not exist or cannot be read
_ABSENT = object()
#: state of a new logger: level, `propagate`, `disabled`, handlers and filters
_UNTOUCHED = [logging.NOTSET, True, False, (), ()]

#: name, reader and writer of a part of the state
_Rule: TypeAlias = "tuple[str, Callable[[], object], Callable[..., object]]"


class ProcessState:
    """The rules of a process, with the value that each part of the state has at the start of a trial."""

    def __init__(self, spares: Sequence[int]) -> None:
        """Record the current state. `spares` are copies of the three standard descriptors."""
        # Loggers are restored, because if each trial added a handler, a message would be written many times.
        self._rules: list[_Rule] = [*_of_process(spares), ("loggers", _loggers, self._restore_loggers)]
        self._initial: list[object] = []
        for library in [name for name in _LIBRARIES if name in sys.modules]:
            self._note_library(library)
        sys.meta_path.insert(0, self)
        self.note()

    def note(self) -> None:
        """Record the current state as the state at the start of each trial. Call this after a study was imported."""
        time.tzset()
        self._modules = set(sys.modules)
        self._initial = [_value(read) for _, read, _ in self._rules]

    def restore(self) -> list[str]:
        """Restore what a trial has changed. Return the names of the parts that could not be restored."""
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        # faulthandler's timer cannot be found by other means. It might end the process in a later trial.
        faulthandler.cancel_dump_traceback_later()
        left = []
        for place, (name, read, write) in enumerate(self._rules):
            if _value(read) != self._initial[place]:
                with suppress(Exception):
                    write(self._initial[place])
                if name == "loggers":
                    # Loggers that the trial has created remain.
                    self._initial[place] = read()
                elif _value(read) != self._initial[place]:
                    left.append(name)
        # The C library caches the time zone of the environment. No function returns it, so always set it again.
        time.tzset()
        return left

    def _restore_loggers(self, before: Sequence[Sequence[Any]]) -> None:
        known = {logger: state for logger, *state in before}
        imported = sys.modules.keys() - self._modules
        for logger, *state in _loggers():
            if logger not in known and logger.name.partition(".")[0] in imported:
                # A library configures its own loggers only once, at its import, so keep their state.
                continue
            if state != (wanted := known.get(logger, _UNTOUCHED)):
                level, logger.propagate, logger.disabled, handlers, filters = wanted
                logger.setLevel(level)
                logger.handlers[:], logger.filters[:] = handlers, filters
        self._modules |= imported

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """As a meta path finder, record the settings of a library in `_LIBRARIES` after its import."""
        if fullname not in _LIBRARIES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        loader: Any = spec.loader if spec else None
        if hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def execute_and_note(module: ModuleType) -> None:
                execute(module)
                self._note_library(fullname)

            # Python uses this loader object for this import only, so it can be changed.
            loader.exec_module = execute_and_note
        return spec

    def _note_library(self, name: str) -> None:
        # Another version of the library may lack a setting.
        rules = [rule for rule in _LIBRARIES[name](sys.modules[name]) if _value(rule[1]) is not _ABSENT]
        self._rules += rules
        self._initial += [_value(read) for _, read, _ in rules]


def _of_process(spares: Sequence[int]) -> Iterator[_Rule]:
    yield "standard descriptors", lambda: [*map(identity, range(3))], lambda _: [*map(os.dup2, spares, range(3))]
    for module, name in _NAMES:
        yield f"{module.__name__}.{name}", partial(getattr, module, name), partial(setattr, module, name)
    yield "sys.path or sys.argv", lambda: ([*sys.path], [*sys.argv]), _set_lists
    # Path.cwd would cost more than reading everything else. os.getcwd raises if the folder was deleted.
    yield "working directory", os.getcwd, os.chdir
    # Read the bytes in os.environ: decoding them would take longer than everything else in this function.
    yield "environment", os.environ._data.copy, _set_environment  # type: ignore[attr-defined]
    # The functions of `signal` take several times as long as those of `_signal`, because they create enums.
    for number in signal.valid_signals():
        yield f"handler of signal {number}", partial(_signal.getsignal, number), partial(signal.signal, number)
    mask = _signal.pthread_sigmask
    yield "signal mask", partial(mask, signal.SIG_BLOCK, ()), partial(mask, signal.SIG_SETMASK)
    yield "umask", _umask, os.umask
    for limit, name in _LIMITS.items():
        yield f"resource limit {name}", partial(resource.getrlimit, limit), partial(resource.setrlimit, limit)
    yield "logging.disable", partial(getattr, logging.root.manager, "disable"), logging.disable


def _of_torch(torch: Any) -> Iterator[_Rule]:
    def leave_group(before: object) -> None:
        # A group of NCCL is not destroyed, because NCCL might wait for the other ranks.
        if not before and torch.distributed.get_backend() == "gloo":
            torch.distributed.destroy_process_group()

    has_group = lambda: torch.distributed.is_available() and torch.distributed.is_initialized()  # noqa: E731
    yield "process group of torch", has_group, leave_group
    # torch loads this module when a default device is set for the first time; until then there is none.
    device = lambda: getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)  # noqa: E731
    yield "default device of torch", device, torch.set_default_device
    for name in ("default_dtype", "num_threads", "deterministic_debug_mode", "float32_matmul_precision"):
        yield f"{name} of torch", getattr(torch, f"get_{name}"), getattr(torch, f"set_{name}")
    for name in ("grad", "anomaly"):
        yield f"{name} mode of torch", getattr(torch, f"is_{name}_enabled"), getattr(torch, f"set_{name}_enabled")
    # Restore these flags after the matmul precision, which sets some of them.
    for flag in _FLAGS:
        holder, _, name = f"backends.{flag}".rpartition(".")
        write = lambda before, holder=holder, name=name: setattr(attrgetter(holder)(torch), name, before)  # noqa: E731
        yield f"torch.backends.{flag}", partial(attrgetter(f"backends.{flag}"), torch), write


_LIBRARIES: Mapping[str, Callable[[Any], Iterable[_Rule]]] = {
    "multiprocessing": lambda multi: [
        ("start method", partial(multi.get_start_method, True), lambda how: multi.set_start_method(how, force=True))
    ],
    "numpy": lambda numpy: [("numpy.seterr", numpy.geterr, lambda before: numpy.seterr(**before))],
    "torch": _of_torch,
}


def _value(read: Callable[[], object]) -> object:
    with suppress(Exception):
        return read()
    return _ABSENT


def _loggers() -> list[tuple[Any, ...]]:
    """Return all loggers, each with its state (see `_UNTOUCHED`)."""
    return [
        (each, each.level, each.propagate, each.disabled, (*each.handlers,), (*each.filters,))
        for each in (logging.root, *logging.root.manager.loggerDict.values())
        if isinstance(each, logging.Logger)
    ]


def identity(descriptor: int) -> tuple[int, int] | None:
    """Return the device and inode of an open descriptor, or None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _set_lists(before: tuple[list[str], list[str]]) -> None:
    sys.path[:], sys.argv[:] = before


def _set_environment(before: Mapping[bytes, bytes]) -> None:
    for name in os.environb.keys() - before.keys():
        del os.environb[name]
    os.environb.update(before)


def _umask() -> int:
    # The umask can be read only by setting another one.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def seed_generators(seed: int) -> None:
    """Seed the global random generators, so that no trial continues the random stream of another."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        if os.environ.get(DEVICE, "cpu") == "cpu":
            # torch.manual_seed is avoided: it takes a fifth of a millisecond without a GPU.
            torch.default_generator.manual_seed(seed)
        else:
            # This includes the generators of a GPU that is not in use yet.
            torch.manual_seed(seed)


#: seconds that a trial's threads have to end, and that killed children have to disappear
GRACE_SECONDS = 0.3

#: child processes that a library starts once and keeps, each as a module, an object in it, and the attribute of the
#: object with the process id
_HELPERS = (
    ("multiprocessing.resource_tracker", "_resource_tracker", "_pid"),
    ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"),
    ("joblib.externals.loky.backend.resource_tracker", "_resource_tracker", "_pid"),
)

#: classes of threads that a library starts once and keeps, such as tqdm's monitor of its progress bars
_HELPER_THREADS = {"TMonitor"}


class Cleanup(ProcessState):
    """Records the state of this process when created, and restores that state after each trial."""

    def __init__(self) -> None:
        #: copies of the standard descriptors, above the low numbers that trials may close
        self.spares = [os.dup(number) for number in range(3)]
        self._output = identity(self.spares[1])
        super().__init__(self.spares)
        self._threads = set(threading.enumerate())
        self._count = _thread._count()
        adopt_orphans()
        self._children = set() if _is_childless() else set(descendants(os.getpid()))
        self._free = _free_descriptor()

    def clear(self) -> list[str]:
        """Restore the state after a trial. Return descriptions of what could not be undone and needs a new process."""
        left = [f"a changed {name}" for name in self.restore()]
        if not _is_childless() or _thread._count() > self._count:
            left += [*self._end_children(), *self._await_threads()]
        if _free_descriptor() - self._free > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 > 0:
            left.append("so many open files that later trials may lack them")
        try:
            # Output that is still buffered belongs to this trial.
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            # The trial has closed the streams, or the disk has no room for its output.
            left.append("a closed sys.stdout")
        return list(dict.fromkeys(left))

    def divide_output(self, boundary: bytes) -> None:
        """Write a boundary into the output pipe, which separates the output of two trials."""
        with suppress(OSError):
            # A trial may have closed the descriptor and opened its own file under the same number.
            if identity(self.spares[1]) == self._output:
                # Any process that has the pipe may have made it non-blocking, which affects all processes.
                os.set_blocking(self.spares[1], True)
                os.write(self.spares[1], boundary)

    def _end_children(self) -> list[str]:
        """Kill the trial's child processes and their descendants. Return a list with one phrase that names them, or [].

        The libraries that started these processes may not work afterwards, so the caller replaces this process.
        """
        if self._left():
            _stop_loky()
            # Some objects, such as a DataLoader, end their children themselves when they are collected.
            gc.collect()
        # A signal handler that a library has set might raise an exception here.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        names = kill_all(self._left, GRACE_SECONDS)
        _reap(self._children | _helpers())
        signal.signal(signal.SIGCHLD, handler)
        return [f"child processes ({', '.join(sorted(names))[:200]})"] if names else []

    def _left(self) -> dict[int, str]:
        kept = self._children | _helpers()
        return {pid: name for pid, name in descendants(os.getpid()).items() if pid not in kept}

    def _await_threads(self) -> list[str]:
        """Wait up to GRACE_SECONDS for a trial's threads to end. Return a list with one phrase that names the rest, or
        [].
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := self._left_threads()) and time.monotonic() < deadline:
            time.sleep(0.002)
        if left:
            return [f"threads ({', '.join(left)[:200]})"]
        self._threads = set(threading.enumerate())
        self._count = _thread._count()
        return []

    def _left_threads(self) -> list[str]:
        """Return the names of the threads that the trial has started and that still run."""
        running = threading.enumerate()
        helpers = {thread for thread in running if type(thread).__name__ in _HELPER_THREADS}
        # `_DummyThread` is a thread of a C library that has called Python once. It is left out, because it cannot be
        # ended.
        new = [
            thread.name
            for thread in running
            if thread not in self._threads | helpers and not isinstance(thread, threading._DummyThread)
        ]
        unnamed = _thread._count() - self._count - len(new) - len(helpers - self._threads)
        return new + ["without a name"] * max(0, unnamed)


def _free_descriptor() -> int:
    """Return the smallest unused descriptor, which is about the number of open files."""
    try:
        number = os.dup(0)
    except OSError:
        return sys.maxsize
    os.close(number)
    return number


def _is_childless() -> bool:
    """Return whether this process has no children. Then it has no descendants, because it adopts orphans."""
    if sys.platform != "linux":
        # On other systems, init adopts orphans, and the reaper ends children.
        return True
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return False
    return True


def _helpers() -> set[int]:
    """Return the process ids of the children that libraries keep (`_HELPERS`)."""
    holders = [(getattr(sys.modules.get(module), name, None), attribute) for module, name, attribute in _HELPERS]
    return {getattr(holder, attribute, None) or 0 for holder, attribute in holders}


def _stop_loky() -> None:
    """Stop the process pool that joblib keeps for its next call. It may still compute for the ended trial."""
    pool = getattr(sys.modules.get("joblib.externals.loky.reusable_executor"), "_executor", None)
    if pool is not None:
        pool.shutdown(wait=True, kill_workers=True)


def _reap(helpers: set[int]) -> None:
    """Collect the exit status of ended children, mostly adopted orphans. Stop at an ended helper, because its library
    waits for it.
    """
    if not hasattr(os, "waitid"):
        # macOS before Python 3.13. Nothing needs to be collected: init adopts orphans there.
        return
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in helpers:
                break
            os.waitpid(ended.si_pid, 0)
