"""Clocks, time limits of calls to servers, lines about outages, environment variables, threads, and late imports.

A clock is an argument, so the same code runs on the machine's clock and on a simulated clock. A clock has two readings.
Intervals are computed from `now`, a monotonic time. Records contain `wall`, the time of day, which may be set back or
forward at any time, by an administrator, by NTP or when a virtual machine is resumed.

A server may hang without closing its connections, for example because it is out of memory or disk space, because a
network drops its packets, or because another session holds a lock. Therefore each call waits at most for the seconds
given here, and then fails as if the server were down: a running study and its workers print a warning, wait, and try
again. A scheduler renews its locks at least every five seconds as long as its calls return, and its lock in Redis lasts
for twenty seconds (`fleet.channel.HOLD_SECONDS`). So no call of a scheduler may take more than ten seconds.

Most of the time to import hyperopt is spent on scipy.stats and scipy.special, which only hyperopt's own algorithms use.
Therefore the modules of these algorithms are imported when they are first used.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


class Clock(Protocol):
    """Gives the time, and waits for time to pass."""

    def now(self) -> float:
        """Return the seconds since an arbitrary time in the past. They never decrease (monotonic)."""

    def wall(self) -> float:
        """Return the seconds since the epoch, for records."""

    def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed on this clock."""


class SystemClock:
    """The machine's own clock, as the module `time` reads it."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
    sleep = staticmethod(time.sleep)


class ManualClock:
    """A clock that moves only on request, for tests and for the simulator. Both readings are the same."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    def advance_to(self, moment: float) -> None:
        """Set the clock forward to the time `moment`, in seconds. An earlier time changes nothing."""
        self._now = max(self._now, moment)


#: limits on the seconds of calls, by server. Broker: opening of a connection, and each step of its handshake
BROKER_CONNECT_SECONDS = 3.0

#: broker: each answer to the scheduler, to `status`, and to a worker that checks its queues for messages
BROKER_SECONDS = 5.0

#: broker: a worker replaces its connection to RabbitMQ after twice this number of seconds without a sign of life
BROKER_HEARTBEAT_SECONDS = 30.0

#: broker: an answer of rabbitmqctl to `doctor`; the start of Erlang takes several seconds
RABBITMQCTL_SECONDS = 20.0

#: Redis: opening of a connection; also each answer for which a user waits at the command line
REDIS_CONNECT_SECONDS = 3.0

#: Redis: all other answers, also those to Celery if Redis is the broker
REDIS_SECONDS = 10.0

#: PostgreSQL: opening of a connection
DATABASE_CONNECT_SECONDS = 5

#: PostgreSQL: wait of a statement for each lock (`lock_timeout`)
LOCK_WAIT_SECONDS = 4.0

#: PostgreSQL: each statement of a scheduler; each statement of a reader. After this time, the server cancels
#: the statement (`statement_timeout`)
STATEMENT_SECONDS, READ_SECONDS = 8.0, 30.0

#: PostgreSQL: each statement that deletes a whole study, while the study does not run
MAINTENANCE_SECONDS = 3600.0

#: PostgreSQL: seconds after a statement's limit for which a client waits before it closes the connection to a silent
#: server
GRACE_SECONDS = 2.0

#: PostgreSQL: idle time of a client within a transaction, which may lock rows for other clients
#: (`idle_in_transaction_session_timeout`)
IDLE_SECONDS = 20.0

#: SQLite: wait for a file that another program has locked
LOCKED_SECONDS = 8.0


#: modules of hyperopt that are loaded late, because they import scipy.stats and scipy.special
_OF_HYPEROPT = ("hyperopt.atpe", "hyperopt.tpe")


class _Late(ModuleType):
    """Placeholder for a module, which is loaded when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        # The import system, and tools that inspect `sys.modules`, look up such names. This must not load the module.
        # ``from MODULE import *`` looks up `__all__`.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        loaded = importlib.import_module(self.__name__)
        vars(self).update(vars(loaded))
        return getattr(loaded, name)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def load_late(modules: Iterable[str] = _OF_HYPEROPT) -> None:
    """Delay the loading of modules until their first use, unless they are already loaded."""
    for module in modules:
        sys.modules.setdefault(module, _Late(module))


@contextmanager
def placeholder(module: str) -> Iterator[None]:
    """Delay the loading of `module` for the modules that are imported in the block.

    It is loaded when one of them uses it. Later imports of `module`, and of its submodules, are not delayed. If it is
    already loaded, nothing changes.
    """
    late = sys.modules.setdefault(module, _Late(module))
    try:
        yield
    finally:
        if isinstance(late, _Late):
            del sys.modules[module]


@contextmanager
def without_collections() -> Iterator[None]:
    """Import modules in the block without garbage collections, which would take an eighth of the time.

    Modules exist until the end of the process, so all present objects are also left out of later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


#: an outage is over after this many seconds without an error. This is longer than the time between two tries of a call
OVER_SECONDS = 6.0


class Outage:
    """Determines from the errors of calls whether a server is available. Several threads may use it."""

    def __init__(self, server: str, over_seconds: float = OVER_SECONDS) -> None:
        self._server, self._over_seconds = server, over_seconds
        #: number of outages so far
        self.count = 0
        #: time of the first error of the current outage, None without an outage; time of the last error
        self._since: float | None = None
        self._until = 0.0
        self._lock = threading.Lock()

    def see(self, trouble: str | None, now: float) -> str | None:
        """Record that a call failed with the error `trouble`, or succeeded if this is None. Return a line or None.

        There is a line to show at the first error of an outage, and when the outage is over.
        """
        with self._lock:
            if trouble is not None:
                is_new, self._until = self._since is None, now
                self._since = now if self._since is None else self._since
                self.count += is_new
                return trouble if is_new else None
            if self._since is None or now - self._until < self._over_seconds:
                return None
            seconds, self._since = now - self._over_seconds - self._since, None
            return f"{self._server} answers again, after {seconds:.0f} s"


#: environment variable with the file that a living worker touches every second, also in an outage; for health checks
HEARTBEAT_FILE = "SHADHO_HEARTBEAT_FILE"


@contextmanager
def overridden(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in the block, and restore them after it.

    A variable with the value None is not set, only restored.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


class NoThread(OSError):
    """The system refuses another thread."""

    def __init__(self) -> None:
        super().__init__(
            "the system refuses another thread; raise the limit of processes and threads (ulimit -u, or that of the "
            "container)"
        )


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises NoThread instead of Python's RuntimeError if the system refuses it.

    So callers can handle the same error, OSError, for processes and threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread from error


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit linear algebra to one thread, in a with statement or as a decorator.

    The matrices of a scheduler are small, and its machine often runs trials, too. Several threads would wait for each
    other, and would take cores from the trials.
    """
    with _libraries().limit(limits=1, user_api="blas"):
        yield


@cache
def _libraries() -> ThreadpoolController:
    # The controller knows only libraries that are already loaded, so numpy's and scipy's are loaded first.
    import numpy as np  # noqa: F401
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
