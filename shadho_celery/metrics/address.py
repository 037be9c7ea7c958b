"""Where a process serves its metrics. This module imports nothing heavy, because each command with options reads it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shadho_celery.core.checks import short
from shadho_celery.errors import UsageError

if TYPE_CHECKING:
    from shadho_celery.metrics.server import MetricsServer

#: address on which metrics are served unless another one is given: only this machine can read them
LOOPBACK = "127.0.0.1"

#: environment variables of a worker with the same meaning as its options
PORT, HOST = "SHADHO_METRICS_PORT", "SHADHO_METRICS_HOST"


def listen(port: int | None, host: str | None = None) -> MetricsServer | None:
    """Return a server that listens on a port, 0 for a free one; None without a port. Raises UsageError if it cannot."""
    if port is None:
        return None
    from shadho_celery.metrics.server import MetricsServer

    return MetricsServer(port, host or LOOPBACK)


def configured() -> MetricsServer | None:
    """Return the server of a worker's metrics that the environment asks for, or None. Raises UsageError."""
    port = os.environ.get(PORT)
    if not port:
        return None
    if not (port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 65536):
        raise UsageError(f"{PORT} is a port from 0 to 65535, not {short(port, 60)}")
    return listen(int(port), os.environ.get(HOST))
