"""Local processes for replicas: forked where that is safe, spawned where CUDA is in use; none outlives its parent."""

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
from typing import Literal, Protocol

import torch

from shadho_celery.context import ReplicaSeat
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.training.replica import Job, serve

#: seconds that replicas have to end by themselves
LEAVE_SECONDS = 2.0


class Child(Protocol):
    """A process that was started here."""

    @property
    def pid(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class Forked:
    """A process that began as a copy of this one."""

    def __init__(self, work: Callable[[], None], guard: int) -> None:
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Newer Pythons warn of forking beside threads. The child uses nothing that another thread may hold: one
            # thread of torch, sockets of its own, and it ends without any clean-up.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid: int | None = os.fork()
        if not self.pid:
            _be_a_child(work, guard)

    def is_alive(self) -> bool:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid or 0, os.WNOHANG)
            except ChildProcessError:
                self._code = -1
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is None

    def kill(self) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid or 0, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        until = time.monotonic() + (timeout if timeout is not None else 1e9)
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.005)


class Processes:
    """The replicas of one gang on this machine."""

    def __init__(self, method: Literal["fork", "spawn"] | None = None) -> None:
        """`method` is chosen by itself where it is None."""
        can_fork = hasattr(os, "fork") and sys.platform == "linux" and not torch.cuda.is_initialized()
        self.method = method or ("fork" if can_fork else "spawn")
        self.children: list[Child] = []
        self._guard: tuple[int, int] | None = None

    def start(self, seat: ReplicaSeat, job: Job, server: socket.socket) -> None:
        """Start a replica; it keeps no hold of the coordinator's listening socket."""
        if self.method == "fork":
            self._guard = self._guard or os.pipe()
            reading, writing = self._guard

            def work() -> None:
                os.close(writing)
                server.close()
                serve(seat, job)

            self.children.append(Forked(work, reading))
            return
        process = multiprocessing.get_context("spawn").Process(target=_spawned, args=(seat, job), daemon=True)
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            # What pickle says of a lambda or a local function.
            raise UsageError(
                f"a replica cannot be spawned, as it is where CUDA is in use: {error}; "
                "define the loss, the data's class and the model's by `def` or `class` at the top of a module"
            ) from error
        self.children.append(process)

    def alive(self) -> int:
        return sum(child.is_alive() for child in self.children)

    def close(self, seconds: float = LEAVE_SECONDS) -> None:
        """Wait for them to end, then end them."""
        until = time.monotonic() + seconds
        for child in self.children:
            child.join(max(0.0, until - time.monotonic()))
        for child in self.children:
            child.kill()
            child.join()
        if self._guard:
            for end in self._guard:
                os.close(end)
            self._guard = None


def _be_a_child(work: Callable[[], None], guard: int) -> None:
    """Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Ctrl-C goes to the whole group; the parent tells us what it makes of it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)
        threading.Thread(target=_end_with_parent, args=(guard,), daemon=True).start()
        work()
        code = 0
    except ShadhoError as error:
        print(f"replica: {error}", file=sys.stderr)  # noqa: T201 - all that is left of a process without clean-up
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with_parent(guard: int) -> None:
    # The parent never writes: this returns when its end of the pipe is closed, however it died.
    os.read(guard, 1)
    os._exit(1)


def _spawned(seat: ReplicaSeat, job: Job) -> None:
    """What a spawned process runs: on copies, since what multiprocessing hands over shares the parent's memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=end_with_parent, daemon=True).start()
    serve(seat, copy.deepcopy(job))
