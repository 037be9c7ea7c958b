"""Rendezvous of a process group, in which all ranks meet, and the watch that detects lost ranks.

All ranks join, exchange their versions and addresses, and check that they can reach one another. Rank 0 has a TCPStore,
which torch also uses for its own rendezvous. The store's keys begin with the token of the gang, so that a rank of an
earlier attempt is not mistaken for a rank of this attempt. torch does not authenticate connections.

A collective of torch fails at once if a connection closes. But it waits, up to its time limit, for a machine that has
stopped responding, and for a rank that is alive but will not call the collective, for instance because it has failed.
Therefore each rank records heartbeats in the store. Rank 0 checks them, and records in the store that the group has
ended. In each rank, a `Watch` then interrupts the main thread if it still waits for the lost rank.
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

#: seconds between two checks of the store
TICK = 0.1
#: seconds that a machine has to accept a connection
REACH_SECONDS = 10.0
#: time limit of one request to the store
REQUEST = timedelta(seconds=60)

#: messages of gloo and NCCL about lost connections; for gloo, torch raises them as RuntimeError
LOST_CONNECTION = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|TCPStore", re.IGNORECASE)

Backend = Literal["nccl", "gloo"]


class End(Struct, frozen=True, kw_only=True):
    """Record of the end of a process group before its ranks have left it."""

    reason: str
    #: True if a rank was lost, False if a rank has failed
    is_loss: bool


class Card(Struct, frozen=True, kw_only=True):
    """Description of itself that a rank records when it joins."""

    #: address to which the other ranks connect once, as a test, as ``host:port``
    address: str
    #: versions of Python, torch and the calling code, which must be equal in all ranks
    version: str
    #: name that identifies the rank's own GPU; None if it has no GPU
    gpu: str | None = None


class Terms(Struct, frozen=True, kw_only=True):
    """Addresses and backend, which rank 0 records once all ranks have joined."""

    addresses: list[str]
    backend: Backend


def version_of(code: CodeType) -> str:
    """Return the versions that must be equal in all ranks, as text: Python, torch, and a digest of `code`."""
    digest = hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:12]
    python = ".".join(map(str, sys.version_info[:2]))
    return f"Python {python}, torch {torch.__version__.partition('+')[0]}, code {digest}"


class Rendezvous:
    """One rank's access to the store of rank 0.

    While the rank waits, it calls `stop`, which may raise an exception. All methods raise torch's errors if rank 0 has
    ended.
    """

    def __init__(self, store: TCPStore, token: str, rank: int, size: int, stop: Callable[[], None]) -> None:
        self.rank, self.size = rank, size
        self._stop = stop
        #: store for torch's own rendezvous
        self.store = PrefixStore(token, store)

    def end(self, end: End) -> End:
        """Record the end of the group, unless an end is already recorded. Return the recorded end."""
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
        """Record that this rank has left its `with` block."""
        self.store.set(f"left/{self.rank}", "1")

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left its `with` block."""
        return self.store.check([f"left/{rank}"])

    def take_place(self) -> None:
        """Register as this rank. Raises ShadhoError if another process has already registered as it."""
        if self.store.add(f"joined/{self.rank}", 1) > 1:
            raise ShadhoError(
                f"an earlier process has the place of rank {self.rank}, and torch cannot replace it; if that process "
                "was killed, the trial is tried again within 30 s"
            )

    def meet(self, version: str, gpu: str | None, wanted: Backend | None, seconds: float, host: str) -> Terms:
        """Wait until all ranks have joined and can reach one another. Return the terms, which are equal in all ranks.

        `version` and `gpu` are recorded in this rank's `Card`; `host` is the address on which it listens. Raises
        ShadhoError if a rank does not join within `seconds`, or if two ranks cannot reach one another. Raises
        UsageError if versions differ, or if NCCL is `wanted` but not possible.
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
            # Do not close the server before all ranks have reached it.
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
        """Connect to every other rank once. If that fails, raises ShadhoError with both addresses."""
        for rank, address in enumerate(addresses):
            if rank != self.rank:
                self._stop()
                reach(f"rank {self.rank}", addresses[self.rank], f"rank {rank}", address)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready` returns True. Raises ShadhoError if the group ends before that."""
        while not ready():
            self._stop()
            if (end := self.ended()) is not None:
                raise RankLost(end.reason) if end.is_loss else ShadhoError(end.reason)
            time.sleep(TICK)


def open_store(rank: int, host: str, port: int, server: socket.socket | None = None) -> TCPStore:
    """Return the store. In rank 0 it uses the listening socket `server`; other ranks connect to rank 0 at `host`.

    If that fails, raises ShadhoError with both addresses.
    """
    if server is None:
        reach(f"rank {rank}", own_address(host), "rank 0", f"{host}:{port}")
    descriptor = None if server is None else server.detach()
    return TCPStore(host, port, None, server is not None, REQUEST, wait_for_workers=False, master_listen_fd=descriptor)


def reach(whose: str, own: str, other: str, address: str) -> None:
    """Connect to the address of another rank once. If that fails, raises ShadhoError with both addresses."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except OSError as error:
        remedy = "open the ports between these machines, or set SHADHO_HOST there to the address that others can reach"
        if isinstance(error, ConnectionRefusedError) and own.partition(":")[0] == host:
            # Both are on one machine, so a firewall is not the cause.
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
    """Return an error as one short line, to show it in other ranks."""
    return one_line(f"{type(error).__name__}: {error}", 500)


logger = logging.getLogger(__name__)

#: seconds between two heartbeats
BEAT_SECONDS = 0.5
#: seconds after the end of the group after which a rank that has not noticed it gets an exception; after as many more,
#: it exits
GRACE_SECONDS = 4.0

#: descriptor of a connection, and the addresses of both ends
Opened = tuple[int, Any, Any]


class Watch:
    """Thread that sends one rank's heartbeats and watches for the end of its group, until `close`."""

    def __init__(self, rendezvous: Rendezvous, deadline: float) -> None:
        """Only the thread may use `rendezvous`. A rank that is silent for `deadline` seconds counts as lost."""
        self._rendezvous, self._deadline = rendezvous, deadline
        #: end of the group, once this rank knows it
        self.end: End | None = None
        self._ended = threading.Event()
        self._closing = threading.Event()
        self._is_done = False
        #: held while an exception is raised in the main thread, and while `pacify` prevents that
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        #: connections that gloo has opened
        self.opened: set[Opened] = set()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> End | None:
        """Wait for the end of the group, and return it. Return None if it has not ended within `seconds`."""
        self._ended.wait(seconds)
        return self.end

    def pacify(self) -> None:
        """Raise no exception in the main thread from now on. Heartbeats continue."""
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
                # Rank 0, which has the store, has ended.
                end = End(reason=f"rank 0 has ended ({str(error).splitlines()[0][:200]})", is_loss=True)
            if end is not None and not self._is_done:
                self.end = end
                self._ended.set()
                self._break_off()
                return
            time.sleep(BEAT_SECONDS)

    def _look(self, seen: dict[int, tuple[int, float]]) -> End | None:
        """In rank 0: if a rank is silent, record the end of the group and return it."""
        now = time.monotonic()
        for rank in range(1, self._rendezvous.size):
            beats = self._rendezvous.beats(rank)
            before, since = seen.get(rank, (-1, now))
            seen[rank] = (beats, now) if beats != before else (before, since)
            # A rank without any heartbeat has not joined yet; `meet` waits for it.
            if beats and now - seen[rank][1] > self._deadline and not self._rendezvous.has_left(rank):
                return self._rendezvous.end(
                    End(reason=f"rank {rank} was silent for {self._deadline:g} s", is_loss=True)
                )
        return None

    def _break_off(self) -> None:
        """Make the main thread leave the group.

        First end the operations for which it may wait, then raise an exception in it, and at last exit, unless this is
        rank 0.
        """
        with self._lock:
            if self._closing.is_set():
                return
            with suppress(Exception):
                # Groups with NCCL also have gloo, for tensors on the CPU.
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
    """Return this process's TCP connections with their descriptors, or nothing if the system does not list them."""
    with suppress(OSError, psutil.Error):
        return {(each.fd, each.laddr, each.raddr) for each in psutil.Process().net_connections("tcp") if each.raddr}
    return set()


def shut(opened: set[Opened]) -> None:
    """Shut down those of the `opened` connections that are still open.

    This is the only way to end a call of gloo that waits for a silent machine. gloo's listening socket, which has no
    peer, is not included: gloo aborts the process if that socket fails.
    """
    for descriptor, *_ in opened & connections():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
