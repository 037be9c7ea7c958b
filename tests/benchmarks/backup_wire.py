"""How fast a vector goes from one process to another over loopback: by a bare socket, and by the bus of training."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from shadho_celery.core.addresses import listen, make_token
from shadho_celery.training.coordinator.listener import Arrived, Joined, Listener, Terms
from shadho_celery.training.wire.connection import (
    CHUNK,
    SOCKET_BUFFER,
    Frame,
    Header,
    Hello,
    Kind,
    Large,
    Wire,
    control_frame,
    say_hello,
)

#: seconds within which the other process must have come
JOIN_SECONDS = 60.0

#: sends a vector to the other process or has it send one, and comes back when all of it has arrived
Way = Callable[[], None]
Vector = np.ndarray[Any, Any]


def megabytes_per_second(parameters: int, rounds: int) -> dict[str, list[float]]:
    """By way, the rate of each vector; the ways take turns, so that all of them meet the machine in the same mood."""
    vector = np.random.default_rng(0).standard_normal(parameters, np.float32)
    with _raw(vector) as raw, _bus(vector) as clear, _bus(vector, encrypted=True) as encrypted:
        pairs = {"raw": raw, "bus": clear, "encrypted bus": encrypted}
        ways = {f"{name} {to}": way for name, both in pairs.items() for to, way in both.items()}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                # The first round also touches memory for the first time.
                if number:
                    rates[name].append(vector.nbytes / (time.perf_counter() - began) / 1e6)
    return rates


@contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    forkserver = multiprocessing.get_context("forkserver")
    process = forkserver.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.join(10)
        process.kill()


@contextmanager
def _raw(vector: Vector) -> Iterator[Mapping[str, Way]]:
    back = memoryview(np.empty_like(vector)).cast("B")
    with socket.create_server(("127.0.0.1", 0)) as server, _process(_raw_other_end, server.getsockname(), len(back)):
        server.settimeout(JOIN_SECONDS)
        connection, _ = server.accept()

        def out() -> None:
            connection.sendall(b"o")
            _send(connection, memoryview(vector).cast("B"))
            connection.recv(1)

        def into() -> None:
            connection.sendall(b"i")
            _fill(connection, back)

        with connection:
            _options(connection)
            yield {"out": out, "in": into}


def _raw_other_end(address: tuple[str, int], size: int) -> None:
    buffer = memoryview(bytearray(size))
    with socket.create_connection(address, timeout=JOIN_SECONDS) as connection:
        _options(connection)
        while wish := connection.recv(1):
            if wish == b"o":
                _fill(connection, buffer)
                connection.sendall(b"x")
            else:
                _send(connection, buffer)


def _options(connection: socket.socket) -> None:
    """The bus's own: the comparison is of what it does beyond copying."""
    connection.settimeout(None)  # with one, every call asks first whether it may
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)


def _send(connection: socket.socket, buffer: memoryview) -> None:
    """In the bus's own pieces: larger ones are slower, since they leave the cores' caches."""
    for at in range(0, len(buffer), CHUNK):
        connection.sendall(buffer[at : at + CHUNK])


def _fill(connection: socket.socket, buffer: memoryview) -> None:
    while len(buffer):
        size = connection.recv_into(buffer[:CHUNK])
        if not size:
            raise EOFError("the other process has gone")
        buffer = buffer[size:]


@contextmanager
def _bus(vector: Vector, *, encrypted: bool = False) -> Iterator[Mapping[str, Way]]:
    token, most = make_token(), vector.nbytes
    server = listen("127.0.0.1")
    terms = Terms(token=token, epoch=1, digest="", max_bytes=most, places=1, encrypted=encrypted)
    listener = Listener(server, terms)
    listener.start()
    params = Frame(Header(kind=Kind.PARAMS, epoch=1), memoryview(vector))
    if not encrypted:
        # The coordinator sums it once a step, for all replicas.
        params.checksummed()
    with _process(_bus_other_end, server.getsockname(), token, most, encrypted):
        joined = listener.inbox.get(timeout=JOIN_SECONDS)
        assert isinstance(joined, Joined), joined

        def answered() -> None:
            event = listener.inbox.get(timeout=JOIN_SECONDS)
            assert isinstance(event, Arrived), event
            event.peer.release_payload()

        def out() -> None:
            joined.peer.publish(params)
            answered()

        def into() -> None:
            joined.peer.notify(control_frame(Kind.STEP, epoch=1))
            answered()

        try:
            yield {"out": out, "in": into}
        finally:
            listener.close("measured")


def _bus_other_end(address: tuple[str, int], token: str, size: int, encrypted: bool) -> None:
    wire = Wire(socket.create_connection(address, timeout=JOIN_SECONDS))
    say_hello(wire, token, Hello(rank=0, digest="", encrypted=encrypted))
    buffer = memoryview(bytearray(size))
    params = Large(Kind.PARAMS, size, lambda header: buffer)
    grad = Header(kind=Kind.GRAD, epoch=1)
    while True:
        header, _ = wire.receive(Kind.STEP, Kind.PING, Kind.QUIT, large=params)
        if header.kind is Kind.QUIT:
            return
        if header.kind is Kind.PARAMS:
            wire.send(Frame(grad, b"x"))
        elif header.kind is Kind.STEP:
            wire.send(Frame(grad, buffer))
