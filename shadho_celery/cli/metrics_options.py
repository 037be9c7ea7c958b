"""Options of a command whose process serves metrics."""

from __future__ import annotations

import click

from shadho_celery.cli.connection_options import F
from shadho_celery.metrics.server import HOST, LOOPBACK, PORT


def metrics_options(command: F) -> F:
    """Add the options --metrics-port and --metrics-host to a command."""
    command = click.option(
        "--metrics-host",
        metavar="ADDRESS",
        help=f"Address on which metrics are served: {LOOPBACK} for this machine alone, 0.0.0.0 for all. Anyone who "
        f"reaches it can read them.  [default: {LOOPBACK}; env of a worker: {HOST}]",
    )(command)
    return click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help=f"Serve metrics for Prometheus at /metrics on this port; 0 for a free one.  [env of a worker: {PORT}]",
    )(command)
