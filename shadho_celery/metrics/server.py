"""HTTP server of metrics. It takes its port before there is anything to serve, so a wrong port is known at once."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from socketserver import ThreadingTCPServer
from typing import Any

from shadho_celery.core.failures import headline
from shadho_celery.errors import UsageError

#: seconds for which a client may be silent
CLIENT_SECONDS = 10.0

#: number of requests at a time; further ones wait
MOST_REQUESTS = 4


class MetricsServer(ThreadingTCPServer):
    """Answers each request for /metrics with the present metrics, once `serve` is called; until then, requests wait."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, host: str) -> None:
        """Listen on a port, 0 for a free one. Raises UsageError if that is not possible, or without the library."""
        if find_spec("prometheus_client") is None:
            raise UsageError('--metrics-port needs the extra metrics; in the checkout: pip install -e ".[metrics]"')
        self._host = host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(MOST_REQUESTS)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"--metrics-port: {host} port {port} cannot be used: {reason}; give another port, or 0 for a free one"
            ) from None
        #: the metrics; None before `serve`
        self.registry: Any = None

    @property
    def url(self) -> str:
        """Address of the metrics."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_address[1]}/metrics"

    def serve(self, collector: Any) -> None:
        """Answer requests from now on, in other threads, with the metrics of `collector`."""
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(collector)
        threading.Thread(target=self.serve_forever, name="shadho-metrics", daemon=True).start()

    def close(self) -> None:
        """Answer no more requests."""
        if self.registry is not None:
            self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # The system refuses the thread. The request is then closed, and the server goes on.
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client has gone."""


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:
        from prometheus_client.exposition import choose_encoder

        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.registry)
        except Exception as error:
            # Prometheus shows the status beside the target.
            self.send_error(500, explain=headline(f"{type(error).__name__}: {error}"))
            return
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing: a run and a worker have other things to say."""
