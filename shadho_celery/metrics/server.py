"""Families of metrics, the collector that reads their samples when Prometheus asks for them, and the HTTP server.

`Kept` computes values in a thread, so that a scrape does not wait for a server that hangs.
The server opens its port before there is anything to serve, so that an invalid port is reported at once.
This module imports no large libraries, because several commands import it to declare their options.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from importlib.util import find_spec
from socketserver import BaseRequestHandler, ThreadingTCPServer
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shadho_celery.core.addresses import LOOPBACK, PLACE, is_loopback
from shadho_celery.core.checks import one_line, short
from shadho_celery.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import Metric


import time

#: environment variables of a worker for its options --metrics-port and --metrics-host
PORT, HOST = "SHADHO_METRICS_PORT", "SHADHO_METRICS_HOST"

#: maximum number of connections at a time; a further connection closes the oldest one, whose client may be stuck
MOST_CONNECTIONS = 50


class MetricsServer(ThreadingTCPServer):
    """Answers requests with the current metrics once `serve` was called; until then, requests wait.

    Its threads are daemons, because a slow client must not delay the end of the process.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(
        self, port: int, host: str | None = None, *, most: int = MOST_CONNECTIONS, option: str = "--metrics-port"
    ) -> None:
        """Listen on a port (0 for a free port), with at most `most` connections at a time.

        Raises UsageError with the name of the `option` if the port cannot be used, or if prometheus_client is not
        installed.
        """
        if find_spec("prometheus_client") is None:
            raise UsageError(f'{option} needs the extra metrics; in the checkout: pip install -e ".[metrics]"')
        self._host = host or LOOPBACK
        self.address_family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        #: the latest connections, the oldest first; some may be closed already
        self._latest: deque[Any] = deque(maxlen=most)
        try:
            super().__init__((self._host, port), BaseRequestHandler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{option}: {self._host} port {port} cannot be used: {reason}; give another port, or 0 for a free "
                "one, or another host"
            ) from None

    @classmethod
    def configured(cls) -> MetricsServer | None:
        """Return the server for a worker's metrics if the environment names a port, else None. Raises UsageError."""
        port = os.environ.get(PORT)
        if not port:
            return None
        if not (port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 65536):
            raise UsageError(f"{PORT} is a port from 0 to 65535, not {short(port, 60)}")
        return cls(int(port), os.environ.get(HOST))

    @property
    def url(self) -> str:
        """Address of the metrics."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_address[1]}/metrics"

    def place(self, address: str) -> str:
        """Return HOST:PORT of the metrics for announcements, or "" if Prometheus cannot reach them.

        `address` is the address by which the fleet's other machines reach this one. If it is a loopback address, the
        fleet's servers are on this machine, and Prometheus is assumed to be here too.
        """
        host = address if self._host in {"0.0.0.0", "::"} else self._host
        found = f"{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"
        is_reached = is_loopback(address) or not is_loopback(host)
        return found if is_reached and re.match(PLACE, found) else ""

    def serve(self, collector: Any, lists: Mapping[str, Callable[[], object | None]] = MappingProxyType({})) -> None:
        """Answer requests from now on, in other threads, with the metrics of `collector`.

        `lists` are functions by path. Their results are answered as JSON; None means that there is no answer now.
        """
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import MetricsHandler

        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)

        class Handler(MetricsHandler.factory(registry)):  # type: ignore[misc]  # its class is made by the library
            def do_GET(self) -> None:  # noqa: N802 -- the library's name
                make = lists.get(self.path.partition("?")[0])
                if make is None:
                    super().do_GET()
                    return
                found = make()
                self.send_response(200 if found is not None else 503)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

        self.RequestHandlerClass = Handler
        threading.Thread(target=self.serve_forever, name="shadho-metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._latest) == self._latest.maxlen:
            with suppress(OSError):
                self._latest[0].shutdown(socket.SHUT_RDWR)
        self._latest.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing. The client notices that it gets no answer."""


T = TypeVar("T")

#: value of a sample; for a summary, the count and the sum
Number = float | tuple[float, float]
#: values of a family's labels -> the sample
Samples = Mapping[tuple[str, ...], Number]

#: maximum number of samples of a family; further samples, in the order of their labels, are left out
MOST = 10_000

#: maximum number of characters of a label's value
MOST_CHARACTERS = 255

#: maximum number of times that a family is read if its data change during the reading
TRIES = 10


class Kind(Enum):
    """Prometheus's type of a family, with the suffixes of its samples' names."""

    GAUGE = ("",)
    #: a number that only grows while the process lives
    COUNTER = ("_total",)
    #: the count and the sum of measurements
    SUMMARY = ("_count", "_sum")


@dataclass(frozen=True)
class Family(Generic[T]):
    """A family of metrics that is read from an object of type T, such as a run."""

    #: name without the suffix ``_total`` of a counter
    name: str
    help: str
    _: KW_ONLY
    #: function that returns the samples; any thread may call it
    read: Callable[[T], Samples]
    labels: Sequence[str] = ()
    kind: Kind = Kind.GAUGE

    @property
    def names(self) -> Sequence[str]:
        """Names of the family's samples, as Prometheus shows them."""
        return [self.name + suffix for suffix in self.kind.value]


class Collector(Generic[T]):
    """Collector for prometheus_client: reads families from one object, such as a run, at each scrape."""

    def __init__(self, families: Iterable[Family[T]], of: T, labels: Mapping[str, str]) -> None:
        """`labels` are added to each sample, such as the name of the study."""
        self._families, self._of = [*families], of
        self._names, self._values = [*labels], tuple(labels.values())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their current samples."""
        from prometheus_client import Metric

        for family in self._families:
            metric = Metric(family.name, family.help, family.kind.name.lower())
            for labels, number in self._samples(family).items():
                named = dict(zip([*self._names, *family.labels], labels, strict=True))
                for name, each in zip(family.names, number if isinstance(number, tuple) else (number,), strict=True):
                    metric.add_sample(name, named, each)
            yield metric

    def _samples(self, family: Family[T]) -> Samples:
        """Return the samples of a family that are not infinite, with printable labels."""
        return {
            tuple(one_line(each, MOST_CHARACTERS) for each in (*self._values, *labels)): number
            for labels, number in sorted(_read(family, self._of).items())[:MOST]
            if number != math.inf
        }


def _read(family: Family[T], of: T) -> Samples:
    """Return the samples of a family. If another thread changes a dictionary meanwhile (RuntimeError), read again."""
    for _ in range(TRIES):
        with suppress(RuntimeError):
            return family.read(of)
    return {}


#: maximum seconds for which a scrape waits for a new value
WAIT_SECONDS = 2.0


class Kept(Generic[T]):
    """Caches the result of `make`. The first `get` after `seconds` computes it again, in a separate thread.

    A result is used for at most `most_seconds`.
    """

    def __init__(self, make: Callable[[], T], seconds: float, most_seconds: float = math.inf) -> None:
        self._make, self._seconds, self._most_seconds = make, seconds, most_seconds
        self._made_at = -math.inf
        self._found: T | None = None
        self._lock = threading.Lock()
        self._making: threading.Thread | None = None

    def get(self) -> T | None:
        """Return the result. If a new one is not ready within WAIT_SECONDS, return the previous one, or None if there
        is none.
        """
        with self._lock:
            is_due = self._found is None or time.monotonic() - self._made_at >= self._seconds
            if is_due and (self._making is None or not self._making.is_alive()):
                self._making = threading.Thread(target=self._renew, daemon=True)
                self._making.start()
            making = self._making
        if making is not None:
            making.join(WAIT_SECONDS)
        return self._found if time.monotonic() - self._made_at <= self._most_seconds else None

    def _renew(self) -> None:
        self._found, self._made_at = self._make(), time.monotonic()
