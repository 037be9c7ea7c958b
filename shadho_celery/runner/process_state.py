"""State of a process that trials may change. Each part is declared once, with its reader and writer.

`restore` compares what can be read with its value before the first trial, and writes that value back. State of Python
and the system is recorded at the start. State of a library is recorded right after the library's import, so a library
that is first imported in a trial is recorded without that trial's changes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import builtins
import datetime
import faulthandler
import gc
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from shadho_celery.core.late_import import is_late

#: signals for which libraries and users set handlers
_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH),
)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
#: by number, because some have two names
_LIMITS = {getattr(resource, name): name for name in dir(resource) if name.startswith("RLIMIT_")}
_STREAMS = ("stdin", "stdout", "stderr")

#: names in modules that are settings of the process: the module, then its names
_NAMES: Sequence[tuple[ModuleType, Sequence[str]]] = (
    (sys, ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "dont_write_bytecode", "tracebacklimit")),
    (threading, ("excepthook",)),
    (logging, ("raiseExceptions", "lastResort", "_logRecordFactory", "_loggerClass")),
    (warnings, ("formatwarning",)),
    (tempfile, ("tempdir",)),
    (datetime, ("date", "datetime")),
    (socket, ("socket", "create_connection", "getaddrinfo")),
)
#: modules in which tests replace functions, for example by a clock that stands still
_PATCHED = (builtins, os, os.path, random, time)
_LISTS = ("path", "meta_path", "path_hooks", "argv")

_ABSENT = object()


class _Part:
    """A part of the process's state: how it is read and written, and its value at the start of each trial."""

    def __init__(self, name: str, read: Callable[[], object], write: Callable[..., object]) -> None:
        self.name = name
        self.read = read
        self._write = write
        self.note()

    def note(self) -> None:
        """Record the current value as that at the start of each trial."""
        self.initial = self.read()

    def restore(self) -> bool:
        """Write the value back if it has changed. Return whether that succeeded."""
        if self._is_as_before():
            return True
        with suppress(Exception):
            self._write(self.initial)
        return self._is_as_before()

    def _is_as_before(self) -> bool:
        with suppress(Exception):
            return bool(self.read() == self.initial)
        return False


class ProcessState:
    """All parts of this process's state."""

    def __init__(self, spares: Sequence[int]) -> None:
        """Use copies of the three standard descriptors as `spares`."""
        self._parts = [*_of_interpreter(spares), *_of_system()]
        for library in [name for name in _LIBRARIES if name in sys.modules]:
            self._note_library(library)
        sys.meta_path.insert(0, _Libraries(self._note_library))
        self.note()

    def note(self) -> None:
        """Record the current state as that at the start of each trial: after the import of a study."""
        time.tzset()
        for part in self._parts:
            part.note()
        self._list()

    def restore(self) -> list[str]:
        """Restore what has changed. Return the names of what could not be restored."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        # Its thread, which cannot be found otherwise, might end the process during another trial.
        faulthandler.cancel_dump_traceback_later()
        is_as_before = self._is_as_before()
        left = [] if is_as_before else [part.name for part in self._parts if not part.restore()]
        # The C library caches the time zone of the environment, and has no function that returns it.
        time.tzset()
        if not is_as_before:
            # Imported modules are another value.
            self._list()
        return left

    def _list(self) -> None:
        self._reads = [part.read for part in self._parts]
        self._initial = [part.initial for part in self._parts]

    def _is_as_before(self) -> bool:
        """Return whether nothing has changed. Most trials change nothing, and this takes a third of the time."""
        with suppress(Exception):
            return [read() for read in self._reads] == self._initial and len(self._reads) == len(self._parts)
        return False

    def _note_library(self, name: str) -> None:
        for label, read, write in _LIBRARIES[name](sys.modules[name]):
            # Another version of the library may lack one of them.
            with suppress(Exception):
                self._parts.append(_Part(label, read, write))


_Rule = tuple[str, Callable[[], object], Callable[..., object]]


def _of_interpreter(spares: Sequence[int]) -> Iterator[_Part]:
    # First: if the trial has set a low limit, every other call here fails.
    yield _Part("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    for number, name in enumerate(_STREAMS):
        yield _Part(f"descriptor {number}", partial(identity, number), partial(_reopen, spares[number], number))
        yield _attribute(sys, name)
    yield _Part("settings of sys.stdout", _stream_settings, _set_up_streams)
    for module, names in _NAMES:
        yield from (_attribute(module, name) for name in names)
    for name in _LISTS:
        yield _list(sys, name)
    yield _list(gc, "callbacks")
    for module in _PATCHED:
        yield _Part(f"names of {module.__name__}", partial(dict, vars(module)), partial(_refill, vars(module)))
    # A handler that each trial adds would write each message once for every trial so far.
    modules = _Modules()
    yield _Loggers(modules)
    yield _Part("logging.disable", lambda: logging.root.manager.disable, logging.disable)
    # catch_warnings, within which a trial runs, restores only one half of it.
    yield _Part("logging.captureWarnings", _captures_warnings, logging.captureWarnings)
    # After the loggers, which need the modules imported since.
    yield modules
    yield _Part("gc", lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()), _set_up_gc)
    yield _Part("socket time-out", socket.getdefaulttimeout, socket.setdefaulttimeout)
    yield _Part("locale", partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL))
    yield _Part("trace function", lambda: (sys.gettrace(), threading.gettrace()), _set_trace)
    yield _Part("profile function", lambda: (sys.getprofile(), threading.getprofile()), _set_profile)
    yield _Part("tracemalloc", tracemalloc.is_tracing, lambda was: (tracemalloc.start if was else tracemalloc.stop)())
    yield _Part("flags of dlopen", sys.getdlopenflags, sys.setdlopenflags)
    yield _Part("switch interval", sys.getswitchinterval, sys.setswitchinterval)
    yield _Part("stack size of threads", threading.stack_size, threading.stack_size)
    if hasattr(sys, "set_int_max_str_digits"):
        yield _Part("digits of integers", sys.get_int_max_str_digits, sys.set_int_max_str_digits)
    yield _Part("faulthandler", faulthandler.is_enabled, lambda _: faulthandler.enable(spares[2]))


def _of_system() -> Iterator[_Part]:
    yield _Part("working directory", _folder, os.chdir)
    # Compare the bytes that os.environ keeps: decoding them takes longer than everything else here.
    yield _Part("environment", lambda: dict(os.environ._data), _restore_environment)  # type: ignore[attr-defined]
    for number in _SIGNALS:
        # Not with signal.getsignal, which takes several times as long because it creates enums.
        yield _Part(f"handler of {number.name}", partial(_signal.getsignal, number), partial(signal.signal, number))
    mask = _signal.pthread_sigmask
    yield _Part("signal mask", partial(mask, signal.SIG_BLOCK, ()), partial(mask, signal.SIG_SETMASK))
    yield _Part("umask", _umask, os.umask)
    for number, name in _LIMITS.items():
        yield _Part(f"resource limit {name}", partial(resource.getrlimit, number), partial(resource.setrlimit, number))
    nice = partial(_for_all_threads, partial(os.setpriority, os.PRIO_PROCESS))
    yield _Part("niceness", partial(os.getpriority, os.PRIO_PROCESS, 0), nice)
    rights = (os.getuid, os.geteuid, os.getgid, os.getegid, os.getgroups)
    yield _Part("user and groups", lambda: [ask() for ask in rights], _cannot)
    if sys.platform == "linux":
        affinity = partial(_for_all_threads, os.sched_setaffinity)
        yield _Part("processor affinity", partial(os.sched_getaffinity, 0), affinity)
        policy = (lambda: (os.sched_getscheduler(0), os.sched_getparam(0)), _set_scheduler)
        yield _Part("scheduling policy", *policy)


def _of_decimal(decimal: Any) -> Iterator[_Rule]:
    def write(before: tuple[Any, tuple[Any, ...]]) -> None:
        make, arguments = before
        decimal.setcontext(make(*arguments))

    # Includes its flags: a trial may check whether a result was rounded.
    yield "decimal context", lambda: decimal.getcontext().__reduce__(), write


def _of_multiprocessing(multiprocessing: Any) -> Iterator[_Rule]:
    read = partial(multiprocessing.get_start_method, allow_none=True)
    yield "start method of multiprocessing", read, partial(multiprocessing.set_start_method, force=True)


def _of_asyncio(asyncio: Any) -> Iterator[_Rule]:
    # A loop that a trial has closed belongs to its policy. A new policy creates a new loop.
    events, name = asyncio.events, "_event_loop_policy"
    yield "event loop policy of asyncio", partial(getattr, events, name, None), partial(setattr, events, name)


def _of_ssl(ssl: Any) -> Iterator[_Rule]:
    # Often set as a workaround for failing downloads.
    name = "_create_default_https_context"
    yield "default context of ssl", partial(getattr, ssl, name), partial(setattr, ssl, name)


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
    def default_device() -> object:
        # None unless it was set. Its module is loaded when it is first set.
        return getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)

    def is_flushing() -> bool:
        smallest = sys.float_info.min
        return smallest / 2 == 0.0

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
    strategy = torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy
    yield "sharing strategy of torch", *strategy
    for kind in ("cpu", "cuda"):
        set_autocast = partial(torch.set_autocast_enabled, kind)
        yield f"autocast of torch ({kind})", partial(torch.is_autocast_enabled, kind), set_autocast
    for name in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        cudnn = torch.backends.cudnn
        yield f"torch.backends.cudnn.{name}", partial(getattr, cudnn, name), partial(setattr, cudnn, name)
    options = torch._tensor_str.PRINT_OPTS
    yield "print options of torch", lambda: dict(vars(options)), lambda before: vars(options).update(before)


def _of_thread_pools(library: str) -> Iterator[_Rule]:
    """Yield the threads of the loaded pools (BLAS, OpenMP), found by threadpoolctl."""
    from threadpoolctl import ThreadpoolController

    pools = ThreadpoolController().lib_controllers

    def write(before: Sequence[int]) -> None:
        for pool, threads in zip(pools, before, strict=True):
            pool.set_num_threads(threads)

    yield f"threads of {library}'s libraries", lambda: [pool.num_threads for pool in pools], write


_LIBRARIES: Mapping[str, Callable[[Any], Iterator[_Rule]]] = {
    "decimal": _of_decimal,
    "multiprocessing": _of_multiprocessing,
    "asyncio": _of_asyncio,
    "ssl": _of_ssl,
    "numpy": _of_numpy,
    "sklearn": _of_sklearn,
    "torch": _of_torch,
}


class _Libraries(MetaPathFinder):
    """Records the settings of a library right after its import, wherever it is imported."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _LIBRARIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec else None
        if hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def execute_and_note(module: ModuleType) -> None:
                execute(module)
                self._note(fullname)

            # This loader is used for this one import.
            loader.exec_module = execute_and_note
        return spec


class _Modules(_Part):
    """Imported modules: a trial may import more of them, but not replace or remove any."""

    def __init__(self) -> None:
        # The names are left out, because reading them takes several times as long.
        super().__init__("sys.modules", lambda: [*sys.modules.values()], _cannot)

    def note(self) -> None:
        super().note()
        self._known = dict(sys.modules)

    def restore(self) -> bool:
        for name, module in self._known.items():
            if sys.modules.get(name, _ABSENT) is not module and not is_late(module):
                sys.modules[name] = module
        # A module that is None blocks its import.
        modules: dict[str, ModuleType | None] = {**sys.modules}
        for name in [name for name, module in modules.items() if module is None and name not in self._known]:
            del sys.modules[name]
        self.note()
        return True

    def new_names(self) -> set[str]:
        """Return the names of modules imported since."""
        return sys.modules.keys() - self._known.keys()


class _Loggers(_Part):
    """Levels, handlers and filters of all loggers."""

    def __init__(self, modules: _Modules) -> None:
        self._modules = modules
        super().__init__("loggers", lambda: [*map(_logger_state, _loggers())], _cannot)

    def note(self) -> None:
        # Each with copies of its lists, because the loggers' own lists change.
        self._known = {logger: _copied(_logger_state(logger)) for logger in _loggers()}
        self.initial = [*self._known.values()]

    def restore(self) -> bool:
        imported = self._modules.new_names()
        for logger in _loggers():
            if logger not in self._known and logger.name.partition(".")[0] in imported:
                # A library sets up its own loggers when it is imported, which happens once.
                continue
            before = self._known.get(logger, _UNTOUCHED)
            if _logger_state(logger) != before:
                level, logger.propagate, logger.disabled, handlers, filters = before
                logger.setLevel(level)
                logger.handlers[:], logger.filters[:] = handlers, filters
        self.note()
        return True


_LoggerState = tuple[int, bool, bool, list[Any], list[Any]]
#: state of a logger that nothing has set up
_UNTOUCHED: _LoggerState = (logging.NOTSET, True, False, [], [])


def _loggers() -> list[logging.Logger]:
    loggers = logging.root.manager.loggerDict.values()
    return [logging.root, *(each for each in loggers if isinstance(each, logging.Logger))]


def _logger_state(logger: logging.Logger) -> _LoggerState:
    return logger.level, logger.propagate, logger.disabled, logger.handlers, logger.filters


def _copied(state: _LoggerState) -> _LoggerState:
    level, propagate, disabled, handlers, filters = state
    return level, propagate, disabled, [*handlers], [*filters]


def identity(descriptor: int) -> tuple[int, int] | None:
    """Return device and inode of an open descriptor, or None if it is closed."""
    with suppress(OSError):
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino
    return None


def _attribute(module: ModuleType, name: str) -> _Part:
    def write(before: object) -> None:
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)

    # Not with getattr, which takes ten times as long for a missing name.
    return _Part(f"{module.__name__}.{name}", partial(vars(module).get, name, _ABSENT), write)


def _list(module: ModuleType, name: str) -> _Part:
    """Return a list in a module and its contents: a trial may replace either."""

    def read() -> tuple[list[Any], int, list[Any]]:
        entries = getattr(module, name)
        return entries, id(entries), [*entries]

    def write(before: tuple[list[Any], int, list[Any]]) -> None:
        entries, _, content = before
        entries[:] = content
        setattr(module, name, entries)

    return _Part(f"{module.__name__}.{name}", read, write)


def _refill(names: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in names.keys() - before.keys():
        del names[name]
    names.update(before)


def _reopen(spare: int, number: int, _: object) -> None:
    os.dup2(spare, number)


def _stream_settings() -> list[dict[str, Any]]:
    names = ("encoding", "errors", "line_buffering", "write_through")
    return [{name: getattr(stream, name, None) for name in names} for stream in (sys.stdout, sys.stderr)]


def _set_up_streams(before: Sequence[Mapping[str, Any]]) -> None:
    for stream, settings in zip((sys.stdout, sys.stderr), before, strict=True):
        stream.reconfigure(**settings)  # type: ignore[union-attr]


def _captures_warnings() -> bool:
    return getattr(logging, "_warnings_showwarning", None) is not None


def _set_up_gc(before: tuple[bool, tuple[int, int, int], int]) -> None:
    is_enabled, threshold, debug = before
    (gc.enable if is_enabled else gc.disable)()
    gc.set_threshold(*threshold)
    gc.set_debug(debug)


def _set_trace(before: tuple[Any, Any]) -> None:
    sys.settrace(before[0])
    threading.settrace(before[1])


def _set_profile(before: tuple[Any, Any]) -> None:
    sys.setprofile(before[0])
    threading.setprofile(before[1])


def _folder() -> str | None:
    with suppress(OSError):
        return os.getcwd()  # noqa: PTH109 -- Path costs more than everything else that is read
    return None


def _restore_environment(before: dict[bytes, bytes]) -> None:
    os.environb.clear()
    os.environb.update(before)


def _cannot(before: object) -> None:
    """Do nothing: it cannot be written."""


def _umask() -> int:
    # It can be read only by writing it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _set_scheduler(before: tuple[int, Any]) -> None:
    _for_all_threads(partial(_set_scheduler_of, before[0]), before[1])


def _set_scheduler_of(policy: int, thread: int, param: Any) -> None:
    os.sched_setscheduler(thread, policy, param)


def _for_all_threads(write: Callable[[int, Any], object], before: object) -> None:
    """Write a value for each thread: threads of a library's pool have inherited that of the trial that started the
    pool.
    """
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ["0"]:  # noqa: PTH208 -- names alone
        with suppress(ProcessLookupError):
            write(int(thread), before)
