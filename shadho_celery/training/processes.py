"""Replica processes on this machine: forked if that is safe, spawned if CUDA is in use. None outlives its parent."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NoReturn, Protocol

import torch

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.training.replica import Workload, serve

#: seconds for replicas to exit before they are killed
LEAVE_SECONDS = 2.0


class Child(Protocol):
    """Process started here; `multiprocessing.Process` is one."""

    @property
    def pid(self) -> int | None:
        """Process id; None before the start."""

    def is_alive(self) -> bool:
        """Return True until the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process to end, for `timeout` seconds at most."""


class Forked:
    """Process forked from this one, which runs `work` and exits. It also exits when the pipe `lifeline` closes."""

    def __init__(self, work: Callable[[], None], lifeline: int) -> None:
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Newer Pythons warn about a fork in a process with threads. This child takes no lock that another thread
            # may hold: it has one torch thread and its own sockets, and exits without clean-up.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid: int | None = os.fork()
        if not self.pid:
            _run_child(work, lifeline)

    def is_alive(self) -> bool:
        """Return True until the process has ended."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid or 0, os.WNOHANG)
            except ChildProcessError:
                self._code = -1
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is None

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid or 0, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process to end, for `timeout` seconds at most."""
        until = time.monotonic() + (timeout if timeout is not None else 1e9)
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.005)


class Processes:
    """Replica processes of one gang on this machine."""

    def __init__(self, method: Literal["fork", "spawn"] | None = None) -> None:
        """Start processes by `method`; None chooses "fork" on Linux without CUDA, else "spawn"."""
        can_fork = hasattr(os, "fork") and sys.platform == "linux" and not torch.cuda.is_initialized()
        self.method = method or ("fork" if can_fork else "spawn")
        self.children: list[Child] = []
        #: pipe without any data, which closes when this process ends for any reason
        self._lifeline: tuple[int, int] | None = None

    def start(self, seat: ReplicaSeat, workload: Workload, server: socket.socket) -> None:
        """Start a replica, which closes its copy of the listening socket. Raises UsageError if it cannot be spawned."""
        if self.method == "fork":
            self._lifeline = self._lifeline or os.pipe()
            reading, writing = self._lifeline

            def work() -> None:
                os.close(writing)
                server.close()
                serve(seat, workload)

            self.children.append(Forked(work, reading))
            return
        process = multiprocessing.get_context("spawn").Process(target=_run_spawned, args=(seat, workload), daemon=True)
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            # Raised by pickle for a lambda or a local function.
            raise UsageError(
                f"the replica cannot be sent to a spawned process, which is needed if CUDA is in use: {error}; "
                "define the loss and the classes of data and model by `def` or `class` at the top level of a module"
            ) from error
        self.children.append(process)

    def alive(self) -> int:
        """Return how many processes have not ended."""
        return sum(child.is_alive() for child in self.children)

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Wait `seconds` for the processes to exit, then kill those that are left."""
        until = time.monotonic() + seconds
        for child in self.children:
            child.join(max(0.0, until - time.monotonic()))
        for child in self.children:
            child.kill()
            child.join()
        if self._lifeline:
            for end in self._lifeline:
                os.close(end)
            self._lifeline = None


def _run_child(work: Callable[[], None], lifeline: int) -> NoReturn:
    """Run `work` in a forked process, and exit."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Ctrl-C reaches the whole process group; only the parent decides what follows.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        work()
        code = 0
    except ShadhoError as error:
        print(f"replica: {error}", file=sys.stderr)  # noqa: T201 - the only output of a process without clean-up
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with_parent(lifeline: int) -> None:
    # Nothing is ever written: this returns when the parent's end is closed, even if the parent was killed.
    os.read(lifeline, 1)
    os._exit(1)


def _run_spawned(seat: ReplicaSeat, workload: Workload) -> None:
    """Run a replica in a spawned process, on copies: tensors received by multiprocessing share the parent's memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=end_with_parent, daemon=True).start()
    serve(seat, copy.deepcopy(workload))
