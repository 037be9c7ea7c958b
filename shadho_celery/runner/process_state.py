"""State of a process that libraries and users often change, as a table of rules.

A rule is the name of a part of the state, with functions that read and write it.

`restore` compares each part of the state with its value at the start of the trial, and writes that value back. The
state of a library is recorded right after its import, so without the changes of a trial that first imports it. The
random generators are seeded for each trial (`seed_generators`), and `child` keeps the filters of warnings. Anything
else that a trial changes is its own business.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import faulthandler
import logging
import os
import random
import resource
import signal
import sys
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

#: names in modules that are settings of the process; `captureWarnings` sets the last two
_NAMES = (
    *((sys, "stdin"), (sys, "stdout"), (sys, "stderr")),
    *((warnings, "showwarning"), (logging, "_warnings_showwarning")),
)
#: names of resource limits by number; some limits have two names
_LIMITS = {getattr(resource, name): name for name in reversed(dir(resource)) if name.startswith("RLIMIT_")}
#: settings in `torch.backends`, a general setting before the ones that it sets; `fp32_precision` exists from torch 2.9
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
        # Loggers are restored because otherwise, if each trial added a handler, a message would be written many times.
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
