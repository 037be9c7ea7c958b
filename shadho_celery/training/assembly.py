"""What a gang is put together from: its width, what must be equal at both ends, an address to be found at."""

from __future__ import annotations

import hashlib
import socket
from contextlib import suppress

from shadho_celery.errors import UsageError
from shadho_celery.training.codecs import Codec
from shadho_celery.training.strategies import MOST_REPLICAS, Strategy
from shadho_celery.training.vectors import MOST_PARAMETERS, Shape

#: connections that wait to be accepted
BACKLOG = 64


def most_backups(strategy: Strategy) -> int:
    """b; for "auto" as many as are tried out: a third of N, rounded up."""
    return -(-strategy.replicas // 3) if strategy.backups == "auto" else strategy.backups


def setup_of(shape: Shape, strategy: Strategy, codec: Codec, data: str, number: int) -> str:
    """Digest of what must be equal in coordinator and replicas; `number` is that of the trial's gang."""
    return hashlib.sha256(f"{shape.digest}:{strategy!r}:{codec!r}:{data}:{number}".encode()).hexdigest()[:16]


def beyond_limits(places: int, size: int) -> list[str]:
    """What to tell of a gang that is larger than one coordinator is made for."""
    told = []
    if places > MOST_REPLICAS:
        told.append(f"{places} replicas are more than the {MOST_REPLICAS} that one coordinator is made for")
    if size > MOST_PARAMETERS:
        told.append(
            f"{size / 1e6:.0f} million parameters are more than the {MOST_PARAMETERS / 1e6:.0f} million that one "
            "coordinator is made for; DistributedDataParallel will be faster"
        )
    return told


def own_address() -> str:
    """The address of this machine on the way to the outside; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket; any free port for 0. Raises UsageError where it cannot be had."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        raise UsageError(f"cannot listen on {host or 'any address'}:{port}: {error.strerror}; give another") from error
    return server


def close_socket(server: socket.socket) -> None:
    """Close a listening socket so that a thread in `accept` comes back."""
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def check_settings(strategy: object, codec: object, token: object, port: object, on_few: object) -> None:
    """Raise UsageError for what can only be a slip."""
    for what, value, has, example in (
        ("strategy", strategy, "lockstep", "Average(replicas=4)"),
        ("codec", codec, "encoder", "Quantize(4)"),
    ):
        if value is not None and (isinstance(value, type) or not hasattr(value, has)):
            raise UsageError(f"{what} is {value!r}; give an object such as {example}")
    if on_few not in ("shrink", "wait", "fail"):
        raise UsageError(f"on_few is {on_few!r}; it must be 'shrink', 'wait' or 'fail'")
    if not (isinstance(port, int) and 0 <= port < 2**16):
        raise UsageError(f"port is {port!r}; give a number below 65536, or 0 for any that is free")
    if token is not None and not (isinstance(token, str) and token):
        raise UsageError("token must be a text that is not empty; without one it is made up")


def check_seconds(**given: float | None) -> None:
    """Raise UsageError for a time, by its name, that is not above 0; one of None is none."""
    for name, seconds in given.items():
        if seconds is not None and not seconds > 0:
            raise UsageError(f"{name}_seconds is {seconds!r}; give a number of seconds above 0")
