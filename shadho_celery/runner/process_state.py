"""State of a process that trials may change: a table of rules, each with a name, a reader and a writer.

`restore` compares each part of the state with its value at the start of the trial, and writes that value back. The
state of Python and of the system is recorded before the first trial. The state of a library is recorded right after the
library's import, so a library that is first imported in a trial is recorded without that trial's changes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import builtins
import codecs
import datetime
import faulthandler
import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeAlias

from shadho_celery.core.late_import import is_late

#: signals for which libraries and users set handlers
_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
#: names of resource limits by number; some limits have two names
_LIMITS = {getattr(resource, name): name for name in reversed(dir(resource)) if name.startswith("RLIMIT_")}
_STREAMS = ("stdin", "stdout", "stderr")

#: names in modules that are settings of the process: the module, then its names
_NAMES: Sequence[tuple[ModuleType, Sequence[str]]] = (
    (sys, ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "dont_write_bytecode", "tracebacklimit")),
    (threading, ("excepthook",)),
    (logging, ("raiseExceptions", "lastResort", "_logRecordFactory", "_loggerClass", "_warnings_showwarning")),
    (warnings, ("formatwarning", "showwarning")),
    (tempfile, ("tempdir",)),
    (datetime, ("date", "datetime")),
    (socket, ("socket", "create_connection", "getaddrinfo")),
    (json, ("dump", "dumps", "load", "loads")),
    (subprocess, ("Popen", "call", "check_call", "check_output", "run")),
)
#: modules whose functions user code may replace as in tests, for example by a clock that stands still
_PATCHED = (builtins, os, os.path, random, time)
_LISTS = ((sys, "path"), (sys, "meta_path"), (sys, "path_hooks"), (sys, "argv"), (gc, "callbacks"))
#: error handlers of Python's codecs, which a trial may replace
_HANDLERS = (
    *("strict", "ignore", "replace", "backslashreplace", "xmlcharrefreplace", "namereplace"),
    *("surrogateescape", "surrogatepass"),
)
_STREAM_SETTINGS = ("encoding", "errors", "line_buffering", "write_through")

#: settings of torch from version 2.9 on for products of float32 numbers, below `torch.backends`, the general ones first
_PRECISIONS = (
    *("fp32_precision", "cuda.matmul.fp32_precision"),
    *("cudnn.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision"),
    *("mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
)

#: value of a part of the state that does not exist or cannot be read
_ABSENT = object()

#: state of a logger that nothing has set up: its level, `propagate`, `disabled`, handlers and filters
_UNTOUCHED = [logging.NOTSET, True, False, (), ()]

#: name, reader and writer of a part of the state
_Rule: TypeAlias = "tuple[str, Callable[[], object], Callable[..., object]]"


class ProcessState:
    """All parts of this process's state, with their values at the start of each trial."""

    def __init__(self, spares: Sequence[int]) -> None:
        """Use copies of the three standard descriptors as `spares`."""
        self._rules: list[_Rule] = [
            *_of_interpreter(spares),
            # If each trial added a handler, a message would be written once for every trial so far.
            ("loggers", _loggers, self._restore_loggers),
            # This comes after the loggers, whose rule needs to know which modules the trial has imported. Only the
            # values are compared, because reading the names too takes several times as long.
            ("sys.modules", partial(list, sys.modules.values()), self._restore_modules),
            *_of_system(),
        ]
        self._reads = [read for _, read, _ in self._rules]
        self._initial: list[object] = []
        for library in [name for name in _LIBRARIES if name in sys.modules]:
            self._note_library(library)
        sys.meta_path.insert(0, self)
        self.note()

    def note(self) -> None:
        """Record the current state as the state at the start of each trial. Call this after the import of a study."""
        time.tzset()
        self._modules = dict(sys.modules)
        self._initial = [*map(_value, self._reads)]

    def restore(self) -> list[str]:
        """Restore what a trial has changed. Return the names of the parts that could not be restored."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        # faulthandler's timer thread, which cannot be found by other means, might end the process in a later trial.
        faulthandler.cancel_dump_traceback_later()
        try:
            # Most trials change nothing, and comparing all values at once takes a third of the time.
            is_as_before = [read() for read in self._reads] == self._initial
        except Exception:
            is_as_before = False
        left = [] if is_as_before else [*self._restore_changed()]
        # The C library caches the time zone of the environment, and has no function that returns it.
        time.tzset()
        return left

    def _restore_changed(self) -> Iterator[str]:
        """Write back the parts that have changed. Yield the names of the parts that could not be restored."""
        for place, (name, read, write) in enumerate(self._rules):
            if not _has(read, self._initial[place]):
                with suppress(Exception):
                    write(self._initial[place])
                if name in ("loggers", "sys.modules"):
                    # Loggers and modules that the trial has added stay.
                    self._initial[place] = read()
                elif not _has(read, self._initial[place]):
                    yield name

    def _restore_loggers(self, before: Sequence[Sequence[Any]]) -> None:
        known = {logger: state for logger, *state in before}
        imported = sys.modules.keys() - self._modules.keys()
        for logger, *state in _loggers():
            if logger not in known and logger.name.partition(".")[0] in imported:
                # A library sets up its own loggers at its import, which happens only once, so they are kept.
                continue
            if state != (wanted := known.get(logger, _UNTOUCHED)):
                level, logger.propagate, logger.disabled, handlers, filters = wanted
                logger.setLevel(level)
                logger.handlers[:], logger.filters[:] = handlers, filters

    def _restore_modules(self, _: object) -> None:
        """Restore the modules that a trial has replaced or removed. Modules that it has imported stay."""
        for name, module in self._modules.items():
            if sys.modules.get(name, _ABSENT) is not module and not is_late(module):
                sys.modules[name] = module
        # A value of None blocks the import of a module.
        modules: dict[str, ModuleType | None] = {**sys.modules}
        for name in [name for name, module in modules.items() if module is None and name not in self._modules]:
            del sys.modules[name]
        self._modules = dict(sys.modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let Python's import system record the settings of a library right after its import (a meta path finder)."""
        if fullname not in _LIBRARIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec else None
        if hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def execute_and_note(module: ModuleType) -> None:
                execute(module)
                self._note_library(fullname)

            # This loader object is used for this import only.
            loader.exec_module = execute_and_note
        return spec

    def _note_library(self, name: str) -> None:
        for rule in _LIBRARIES[name](sys.modules[name]):
            # Another version of the library may lack this setting.
            with suppress(Exception):
                initial = rule[1]()
                self._rules.append(rule)
                self._initial.append(initial)
                self._reads.append(rule[1])


def _of_interpreter(spares: Sequence[int]) -> Iterator[_Rule]:
    # This comes first: if the trial has set a low recursion limit, every other call here fails.
    yield "recursion limit", sys.getrecursionlimit, sys.setrecursionlimit
    for number, name in enumerate(_STREAMS):
        yield f"descriptor {number}", partial(identity, number), partial(_reopen, spares[number], number)
        yield _attribute(sys, name)
    settings = attrgetter(*(f"{stream}.{name}" for stream in _STREAMS[1:] for name in _STREAM_SETTINGS))
    yield "settings of sys.stdout", partial(settings, sys), _set_up_streams
    for module, names in _NAMES:
        yield from (_attribute(module, name) for name in names)
    for module, name in _LISTS:
        yield _list(module, name)
    for module in _PATCHED:
        yield f"names of {module.__name__}", vars(module).copy, partial(_refill, vars(module))
    handlers = lambda: [*map(codecs.lookup_error, _HANDLERS)]  # noqa: E731
    yield "error handlers of codecs", handlers, lambda before: [*map(codecs.register_error, _HANDLERS, before)]
    yield "logging.disable", partial(getattr, logging.root.manager, "disable"), logging.disable
    yield "gc", gc.isenabled, lambda before: (gc.enable if before else gc.disable)()
    yield "gc", gc.get_threshold, lambda before: gc.set_threshold(*before)
    yield "gc", gc.get_debug, gc.set_debug
    yield "socket time-out", socket.getdefaulttimeout, socket.setdefaulttimeout
    yield "locale", partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)
    for owner in (sys, threading):
        yield "trace function", owner.gettrace, owner.settrace
        yield "profile function", owner.getprofile, owner.setprofile
    yield "tracemalloc", tracemalloc.is_tracing, lambda before: (tracemalloc.start if before else tracemalloc.stop)()
    yield "flags of dlopen", sys.getdlopenflags, sys.setdlopenflags
    yield "switch interval", sys.getswitchinterval, sys.setswitchinterval
    yield "stack size of threads", threading.stack_size, threading.stack_size
    if hasattr(sys, "set_int_max_str_digits"):
        yield "digits of integers", sys.get_int_max_str_digits, sys.set_int_max_str_digits
    yield "faulthandler", faulthandler.is_enabled, lambda _: faulthandler.enable(spares[2])


def _of_system() -> Iterator[_Rule]:
    # os.getcwd and not Path.cwd, which costs more than reading everything else. It raises if the folder was deleted.
    yield "working directory", os.getcwd, os.chdir
    # Compare the bytes that os.environ keeps: decoding them takes longer than everything else in this function.
    restore = partial(_refill, os.environb)
    yield "environment", os.environ._data.copy, restore  # type: ignore[attr-defined]
    for number in _SIGNALS:
        # _signal.getsignal and not signal.getsignal, which takes several times as long because it creates enums.
        yield f"handler of {number.name}", partial(_signal.getsignal, number), partial(signal.signal, number)
    mask = _signal.pthread_sigmask
    yield "signal mask", partial(mask, signal.SIG_BLOCK, ()), partial(mask, signal.SIG_SETMASK)
    yield "umask", _umask, os.umask
    for number, name in _LIMITS.items():
        yield f"resource limit {name}", partial(resource.getrlimit, number), partial(resource.setrlimit, number)
    nice = partial(_for_all_threads, partial(os.setpriority, os.PRIO_PROCESS))
    yield "niceness", partial(os.getpriority, os.PRIO_PROCESS, 0), nice
    for ask in (os.getuid, os.geteuid, os.getgid, os.getegid, os.getgroups):
        yield "user and groups", ask, _cannot
    if sys.platform == "linux":
        affinity = partial(_for_all_threads, os.sched_setaffinity)
        yield "processor affinity", partial(os.sched_getaffinity, 0), affinity
        policy = partial(_for_all_threads, lambda thread, before: os.sched_setscheduler(thread, *before))
        yield "scheduling policy", lambda: (os.sched_getscheduler(0), os.sched_getparam(0)), policy


def _of_decimal(decimal: Any) -> Iterator[_Rule]:
    # This includes the context's flags: a trial may check whether a result was rounded.
    read = lambda: decimal.getcontext().__reduce__()  # noqa: E731
    yield "decimal context", read, lambda before: decimal.setcontext(before[0](*before[1]))


def _of_multiprocessing(multiprocessing: Any) -> Iterator[_Rule]:
    read = partial(multiprocessing.get_start_method, allow_none=True)
    yield "start method of multiprocessing", read, partial(multiprocessing.set_start_method, force=True)


def _of_numpy(numpy: Any) -> Iterator[_Rule]:
    yield "numpy.seterr", numpy.geterr, lambda before: numpy.seterr(**before)
    yield "numpy.seterrcall", numpy.geterrcall, numpy.seterrcall
    yield "numpy.set_printoptions", numpy.get_printoptions, lambda before: numpy.set_printoptions(**before)
    yield "numpy.random.set_bit_generator", numpy.random.get_bit_generator, numpy.random.set_bit_generator
    yield from _of_thread_pools("numpy")


def _of_sklearn(sklearn: Any) -> Iterator[_Rule]:
    yield "sklearn.set_config", sklearn.get_config, lambda before: sklearn.set_config(**before)
    yield from _of_thread_pools("sklearn")


def _of_torch(torch: Any) -> Iterator[_Rule]:
    def has_group() -> bool:
        distributed = torch.distributed
        return bool(distributed.is_available() and distributed.is_initialized())

    def leave_group(before: object) -> None:
        # NCCL might wait for the other ranks.
        if not before and torch.distributed.get_backend() == "gloo":
            torch.distributed.destroy_process_group()

    def default_device() -> object:
        # None unless a default device was set. torch loads this module when it is first set.
        return getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)

    def is_flushing() -> bool:
        smallest = sys.float_info.min
        return smallest / 2 == 0.0

    yield "process group of torch", has_group, leave_group
    yield "default dtype of torch", torch.get_default_dtype, torch.set_default_dtype
    yield "default device of torch", default_device, torch.set_default_device
    yield "grad mode of torch", torch.is_grad_enabled, torch.set_grad_enabled
    yield "inference mode of torch", torch.is_inference_mode_enabled, _cannot
    yield "threads of torch", torch.get_num_threads, torch.set_num_threads
    yield "inter-op threads of torch", torch.get_num_interop_threads, torch.set_num_interop_threads
    yield "deterministic mode of torch", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield "matmul precision of torch", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield "anomaly mode of torch", torch.is_anomaly_enabled, torch.set_anomaly_enabled
    yield "denormal numbers of torch", is_flushing, torch.set_flush_denormal
    processes = torch.multiprocessing
    yield "sharing strategy of torch", processes.get_sharing_strategy, processes.set_sharing_strategy
    for kind in ("cpu", "cuda"):
        set_autocast = partial(torch.set_autocast_enabled, kind)
        yield f"autocast of torch ({kind})", partial(torch.is_autocast_enabled, kind), set_autocast
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        cudnn = torch.backends.cudnn
        yield f"torch.backends.cudnn.{name}", partial(getattr, cudnn, name), partial(setattr, cudnn, name)
    # This comes after the older settings of precision, which set some of these.
    names = [name for name in _PRECISIONS if _value(partial(attrgetter(name), torch.backends)) is not _ABSENT]

    def set_precisions(before: Sequence[str]) -> None:
        for name, precision in zip(names, before, strict=True):
            holder, _, attribute = f"backends.{name}".rpartition(".")
            setattr(attrgetter(holder)(torch), attribute, precision)

    yield "float32 precision of torch", lambda: [attrgetter(name)(torch.backends) for name in names], set_precisions
    options = torch._tensor_str.PRINT_OPTS
    yield "print options of torch", vars(options).copy, vars(options).update


def _of_thread_pools(library: str) -> Iterator[_Rule]:
    """Yield a rule for the number of threads of each loaded pool (BLAS, OpenMP) that threadpoolctl finds."""
    from threadpoolctl import ThreadpoolController

    for pool in ThreadpoolController().lib_controllers:
        yield f"threads of {library}'s libraries", partial(getattr, pool, "num_threads"), pool.set_num_threads


_LIBRARIES: Mapping[str, Callable[[Any], Iterable[_Rule]]] = {
    "decimal": _of_decimal,
    "multiprocessing": _of_multiprocessing,
    # A loop that a trial has closed belongs to its policy. A new policy creates a new loop.
    "asyncio": lambda asyncio: [_attribute(asyncio.events, "_event_loop_policy")],
    # Often set as a workaround for failing downloads.
    "ssl": lambda ssl: [_attribute(ssl, "_create_default_https_context")],
    "numpy": _of_numpy,
    "sklearn": _of_sklearn,
    "torch": _of_torch,
}


def _value(read: Callable[[], object]) -> object:
    with suppress(Exception):
        return read()
    return _ABSENT


def _has(read: Callable[[], object], value: object) -> bool:
    """Return whether a part of the state has this value."""
    with suppress(Exception):
        return bool(read() == value)
    return value is _ABSENT


def _loggers() -> list[tuple[Any, ...]]:
    """Return all loggers and their states, with copies of their lists."""
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


def _attribute(module: ModuleType, name: str) -> _Rule:
    def write(before: object) -> None:
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)

    # vars(module).get and not getattr, which takes ten times as long for a missing name.
    return f"{module.__name__}.{name}", partial(vars(module).get, name, _ABSENT), write


def _list(module: ModuleType, name: str) -> _Rule:
    """Return a rule for a list in a module. It restores the list and its contents: a trial may replace either."""

    def read() -> tuple[list[Any], list[Any]]:
        entries = getattr(module, name)
        return entries, [*entries]

    def write(before: tuple[list[Any], list[Any]]) -> None:
        entries, entries[:] = before
        setattr(module, name, entries)

    return f"{module.__name__}.{name}", read, write


def _refill(names: MutableMapping[Any, Any], before: Mapping[Any, Any]) -> None:
    for name in names.keys() - before.keys():
        del names[name]
    names.update(before)


def _reopen(spare: int, number: int, _: object) -> None:
    os.dup2(spare, number)


def _set_up_streams(before: Sequence[Any]) -> None:
    count = len(_STREAM_SETTINGS)
    for stream, settings in ((sys.stdout, before[:count]), (sys.stderr, before[count:])):
        stream.reconfigure(**dict(zip(_STREAM_SETTINGS, settings, strict=True)))  # type: ignore[union-attr]


def _cannot(before: object) -> None:
    """Do nothing, as the writer of a rule whose value cannot be written."""


def _umask() -> int:
    # The umask can be read only by setting another one.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _for_all_threads(write: Callable[[int, Any], object], before: object) -> None:
    """Write a value for each thread. Threads of a library's pool have inherited the value from an earlier trial."""
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ["0"]:  # noqa: PTH208 -- names alone
        with suppress(ProcessLookupError):
            write(int(thread), before)
