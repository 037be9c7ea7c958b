"""Rendezvous of a process group: all ranks join, tell their versions and addresses, and check that they are reachable.

Rank 0 has a TCPStore, which the ranks also use for torch's own rendezvous. Its keys begin with the token of the gang,
so that a rank of an earlier attempt cannot be taken for one of this attempt. torch does not authenticate connections.

torch's collectives notice a closed connection, but not a machine that is silent or a rank that waits elsewhere. Each
rank therefore records heartbeats in the store. Rank 0 looks at them and records the end of the group. A `Watch` ends
its own rank's waiting for a rank that has died or failed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import CodeType
from typing import Any, Literal

import msgspec
import psutil
import torch
from msgspec import Struct
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]  # torch has no list of them

from shadho_celery.core.addresses import close_socket, listen, own_address
from shadho_celery.core.checks import one_line
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import RankLost

#: seconds between two looks into the store
TICK = 0.1
#: seconds in which a machine must accept a connection
REACH_SECONDS = 10.0
#: time limit of one request to the store
REQUEST = timedelta(seconds=60)

#: messages of gloo and NCCL about lost connections; torch raises RuntimeError for those of gloo
LOST_CONNECTION = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|TCPStore", re.IGNORECASE)

Backend = Literal["nccl", "gloo"]


class End(Struct, frozen=True, kw_only=True):
    """End of a process group before its ranks have left it."""

    reason: str
    #: True if a rank was lost, and False if one has failed
    is_loss: bool


class Card(Struct, frozen=True, kw_only=True):
    """What a rank says of itself when it joins."""

    #: address at which the other ranks connect to it once, as ``host:port``
    address: str
    #: versions of Python, torch and the calling code, which must be equal
    version: str
    #: name of its own GPU; None if it has no GPU, or shares it
    gpu: str | None = None


class Terms(Struct, frozen=True, kw_only=True):
    """What rank 0 says once all ranks have joined."""

    addresses: list[str]
    backend: Backend


def version_of(code: CodeType) -> str:
    """Return the versions that all ranks must share; the last one is a digest of `code`."""
    digest = hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:12]
    python = ".".join(map(str, sys.version_info[:2]))
    return f"Python {python}, torch {torch.__version__.partition('+')[0]}, code {digest}"


class Rendezvous:
    """One rank's view of the store.

    `stop` is called while the rank waits, and may raise. All methods raise torch's errors if rank 0 has ended.
    """

    def __init__(self, store: TCPStore, token: str, rank: int, size: int, stop: Callable[[], None]) -> None:
        self.rank, self.size = rank, size
        self._stop = stop
        #: store for torch's own rendezvous
        self.store = PrefixStore(token, store)
        self._plain, self._token = store, token

    def copy(self) -> Rendezvous:
        """Return a view over another connection, for another thread. A request blocks the connection of its thread."""
        store = self._plain.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        return Rendezvous(store, self._token, self.rank, self.size, self._stop)

    def end(self, end: End) -> End:
        """Record the end of the group, unless it is recorded already. Return the recorded end."""
        first = self.store.compare_set("end", "", msgspec.json.encode(end).decode())
        return msgspec.json.decode(first, type=End)

    def ended(self) -> End | None:
        """Return the recorded end of the group, or None."""
        return msgspec.json.decode(self.store.get("end"), type=End) if self.store.check(["end"]) else None

    def beat(self) -> None:
        """Record that this rank is alive."""
        self.store.add(f"beat/{self.rank}", 1)

    def beats(self, rank: int) -> int:
        """Return a number that increases while a rank is alive."""
        return self.store.add(f"beat/{rank}", 0)

    def leave(self) -> None:
        """Record that this rank has left its block."""
        self.store.set(f"left/{self.rank}", "1")

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left its block."""
        return self.store.check([f"left/{rank}"])

    def take_place(self) -> None:
        """Take the rank's place in the group. Raises ShadhoError if another process has taken it."""
        if self.store.add(f"joined/{self.rank}", 1) > 1:
            raise ShadhoError(
                f"an earlier process has the place of rank {self.rank}, and torch cannot replace it; if that process "
                "was killed, the trial is tried again within 30 s"
            )

    def meet(self, version: str, gpu: str | None, wanted: Backend | None, seconds: float, host: str) -> Terms:
        """Wait until all ranks have joined and reach one another. Return the terms, which are equal in all ranks.

        `version` and `gpu` are those of this rank's card, and `host` is the host of its address, to listen on. Raises
        ShadhoError if a rank never joins, or two ranks cannot reach one another; UsageError if their versions differ or
        NCCL is not possible.
        """
        server = listen(host, for_others=not host.startswith("127."))
        try:
            card = Card(address=f"{host}:{server.getsockname()[1]}", version=version, gpu=gpu)
            self.store.set(f"card/{self.rank}", msgspec.json.encode(card).decode())
            if self.rank == 0:
                terms = self._terms(card, wanted, seconds)
                self.store.set("terms", msgspec.json.encode(terms).decode())
            else:
                self._wait(lambda: self.store.check(["terms"]))
                terms = msgspec.json.decode(self.store.get("terms"), type=Terms)
            self._reach(terms.addresses)
            self.store.add("reached", 1)
            # Nobody closes a server that another rank has not reached yet.
            self._wait(lambda: self.store.add("reached", 0) >= self.size)
        finally:
            close_socket(server)
        return terms

    def _terms(self, own: Card, wanted: Backend | None, seconds: float) -> Terms:
        cards = {0: own}
        until = time.monotonic() + seconds

        def complete() -> bool:
            for rank in range(1, self.size):
                if rank not in cards and self.store.check([f"card/{rank}"]):
                    cards[rank] = msgspec.json.decode(self.store.get(f"card/{rank}"), type=Card)
                    _check_card(rank, cards[rank], own)
            if len(cards) < self.size and time.monotonic() > until:
                missing = [rank for rank in range(self.size) if rank not in cards]
                raise ShadhoError(
                    f"{_ranks(missing)} of {self.size} did not join within {seconds:g} s; look for an error in the "
                    f"output of the others, check that workers are free and reach {own.address.rpartition(':')[0]}, "
                    "or give a larger start_seconds"
                )
            return len(cards) == self.size

        self._wait(complete)
        ordered = [cards[rank] for rank in range(self.size)]
        return Terms(addresses=[card.address for card in ordered], backend=_backend(ordered, wanted))

    def _reach(self, addresses: Sequence[str]) -> None:
        """Connect to every other rank once. Raises ShadhoError with both addresses if that fails."""
        for rank, address in enumerate(addresses):
            if rank != self.rank:
                self._stop()
                reach(f"rank {self.rank}", addresses[self.rank], f"rank {rank}", address)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition. Raises ShadhoError if the group ends instead."""
        while not ready():
            self._stop()
            if (end := self.ended()) is not None:
                raise RankLost(end.reason) if end.is_loss else ShadhoError(end.reason)
            time.sleep(TICK)


def open_store(rank: int, host: str, port: int, server: socket.socket | None = None) -> TCPStore:
    """Return the store of rank 0, which takes its listening socket over. Other ranks connect to it.

    Raises ShadhoError with both addresses, of which `host` is that of rank 0, if that fails.
    """
    if server is None:
        reach(f"rank {rank}", own_address(host), "rank 0", f"{host}:{port}")
    descriptor = None if server is None else server.detach()
    return TCPStore(host, port, None, server is not None, REQUEST, wait_for_workers=False, master_listen_fd=descriptor)


def reach(whose: str, own: str, other: str, address: str) -> None:
    """Connect to the address of another rank once. Raises ShadhoError with both addresses if that fails."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except OSError as error:
        remedy = "open the ports between these machines, or set SHADHO_HOST there to the address that others can reach"
        if isinstance(error, ConnectionRefusedError) and own.partition(":")[0] == host:
            # On one machine there is no firewall in between.
            remedy = f"{other} has ended"
        raise ShadhoError(f"{whose} at {own} cannot reach {other} at {address} ({error}); {remedy}") from error


def _check_card(rank: int, card: Card, own: Card) -> None:
    if card.version != own.version:
        raise UsageError(
            f"rank {rank} at {card.address} is of another version than rank 0: {card.version}, not {own.version}; "
            "install the same versions and start its worker again"
        )


def _backend(cards: Sequence[Card], wanted: Backend | None) -> Backend:
    """Return the backend: NCCL if each rank has a GPU of its own, else gloo. Raises UsageError if it cannot be used."""
    gpus = [card.gpu for card in cards]
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    is_possible = dist.is_nccl_available() and not without and len({*gpus}) == len(gpus)
    if wanted == "nccl" and not is_possible:
        if not dist.is_nccl_available():
            cause = "this torch is built without NCCL"
        elif without:
            cause = f"{_ranks(without)} of {len(cards)} " + ("has none" if len(without) == 1 else "have none")
        else:
            cause = "two ranks share one GPU"
        raise UsageError(f"NCCL needs a GPU of its own for each rank, but {cause}; leave backend out, or give 'gloo'")
    return wanted or ("nccl" if is_possible else "gloo")


def _ranks(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def describe(error: BaseException) -> str:
    """Return an error in one short line, for the other ranks."""
    return one_line(f"{type(error).__name__}: {error}", 500)


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
