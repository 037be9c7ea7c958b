"""The command `exporter`, which serves metrics of a whole fleet for Prometheus."""

from __future__ import annotations

import threading
from functools import partial
from urllib.parse import urlsplit

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.interrupts import Output
from shadho_celery.cli.messages import say
from shadho_celery.core.addresses import LOOPBACK
from shadho_celery.core.checks import one_line
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls
from shadho_celery.metrics.server import MetricsServer

#: default port. Those after it are the ones that examples give to runs and workers
EXPORTER_PORT = 9430


@shared_options.command(
    "exporter --url-file ~/fleet.urls",
    "exporter --url-file ~/fleet.urls --fleet lab --host 0.0.0.0 --port 9430",
    more="""In the configuration of Prometheus, see also deploy/prometheus.yml:
  - job_name: shadho-fleet
    static_configs: [{targets: ["HOST:9430"]}]
  - job_name: shadho
    http_sd_configs: [{url: "http://HOST:9430/sd"}]""",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=EXPORTER_PORT, show_default=True, help="Port; 0 for a free one."
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default=LOOPBACK,
    show_default=True,
    help="Address on which metrics are served; 0.0.0.0 for all. Anyone who reaches it can read them.",
)
@click.option(
    "--fleet", "name", metavar="NAME", help="Label of all its samples, if several fleets have one.  [default: of Redis]"
)
@shared_options.on_fleet
def exporter(port: int, host: str, name: str | None) -> None:
    """Serve metrics of a whole fleet for Prometheus, and at /sd the addresses of its runs and workers, until Ctrl-C."""
    Output.is_optional = True
    if not urls.is_fleet({}):
        raise UsageError(f"no fleet is named; give --broker and --redis, or set {urls.BROKER} and {urls.REDIS}")
    place = urlsplit(urls.url(urls.REDIS))
    with MetricsServer(port, host, option="--port") as server:
        # Imported here, because Celery's libraries take half a second to import, and read the environment.
        from shadho_celery.metrics.fleet import Exporter

        served = Exporter(name or f"{place.netloc.rpartition('@')[2]}{place.path}", partial(say, err=True))
        server.serve(served, {"/sd": served.targets})
        say(f"metrics: {one_line(server.url)}")
        threading.Event().wait()
