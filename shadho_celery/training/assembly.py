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
