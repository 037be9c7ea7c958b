"""Watch of a rank: notices that another rank has died or failed, and ends this rank's own waiting for it.

torch's collectives notice a closed connection, but not a machine that is silent or a rank that waits elsewhere. Each
rank therefore records heartbeats in the store. Rank 0 looks at them and records the end of the group.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
from torch.distributed import distributed_c10d

from shadho_celery.objective.context import RankLost
from shadho_celery.ranks.rendezvous import End, Rendezvous

logger = logging.getLogger(__name__)

#: seconds between two heartbeats
BEAT_SECONDS = 0.5
#: seconds after which a rank that has not noticed the end of its group gets an exception, and as many later it exits
GRACE_SECONDS = 4.0

#: descriptor of a connection, and the addresses of its two ends
Opened = tuple[int, Any, Any]


class Watch:
    """Thread that watches over one rank's group until `close`."""

    def __init__(self, rendezvous: Rendezvous, deadline: float) -> None:
        """`rendezvous` is for the thread alone. A rank that is silent for `deadline` seconds is lost."""
        self._rendezvous, self._deadline = rendezvous, deadline
        #: end of the group, once this rank knows it
        self.end: End | None = None
        self._ended = threading.Event()
        self._closing = threading.Event()
        self._is_done = False
        #: held while an exception is raised in the main thread, and while that must not happen
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        #: connections of gloo
        self.opened: set[Opened] = set()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> End | None:
        """Wait for the end of the group, and return it. Return None if it has not ended within `seconds`."""
        self._ended.wait(seconds)
        return self.end

    def pacify(self) -> None:
        """Raise no exception in the main thread from now on. Heartbeats go on."""
        with self._lock:
            self._closing.set()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), None)

    def close(self) -> None:
        """End the thread."""
        self.pacify()
        self._is_done = True
        self._thread.join(BEAT_SECONDS + 1.0)

    def _run(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        while not self._is_done:
            try:
                self._rendezvous.beat()
                end = self._rendezvous.ended() or (self._look(seen) if self._rendezvous.rank == 0 else None)
            except RuntimeError as error:
                # Rank 0 has the store. If it has ended, nothing more is said.
                end = End(reason=f"rank 0 has ended ({str(error).splitlines()[0][:200]})", is_loss=True)
            if end is not None and not self._is_done:
                self.end = end
                self._ended.set()
                self._break_off()
                return
            time.sleep(BEAT_SECONDS)

    def _look(self, seen: dict[int, tuple[int, float]]) -> End | None:
        """Return the end of the group if a rank is silent, after recording it."""
        now = time.monotonic()
        for rank in range(1, self._rendezvous.size):
            beats = self._rendezvous.beats(rank)
            before, since = seen.get(rank, (-1, now))
            seen[rank] = (beats, now) if beats != before else (before, since)
            # A rank that has not joined yet has no heartbeat, and is waited for elsewhere.
            if beats and now - seen[rank][1] > self._deadline and not self._rendezvous.has_left(rank):
                return self._rendezvous.end(
                    End(reason=f"rank {rank} was silent for {self._deadline:g} s", is_loss=True)
                )
        return None

    def _break_off(self) -> None:
        """End what the main thread waits for; then raise an exception in it; then exit, unless this is rank 0."""
        with self._lock:
            if self._closing.is_set():
                return
            with suppress(Exception):
                # The group also has gloo, for tensors on the CPU, so `get_backend` names both.
                if "nccl" in distributed_c10d.get_backend_config():
                    distributed_c10d._abort_process_group()
            shut(self.opened)
        if self._closing.wait(GRACE_SECONDS):
            return
        with self._lock:
            if not self._closing.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), ctypes.py_object(RankLost))
        if not self._closing.wait(GRACE_SECONDS) and self._rendezvous.rank:
            logger.error("rank %d exits, because its group has ended: %s", self._rendezvous.rank, self.end)
            os._exit(1)


def connections() -> set[Opened]:
    """Return this process's TCP connections, with their descriptors. Empty if the system does not list them."""
    with suppress(OSError, psutil.Error):
        return {(each.fd, each.laddr, each.raddr) for each in psutil.Process().net_connections("tcp") if each.raddr}
    return set()


def shut(opened: set[Opened]) -> None:
    """Shut connections down that are still open. gloo has no other way to end a call that waits for a silent machine.

    Its listening socket, which has no peer, is left alone: gloo aborts the process if that fails.
    """
    for descriptor, *_ in opened & connections():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
