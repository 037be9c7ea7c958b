"""The commands ``shadho-celery fleet``: the server of a small fleet, which needs no Docker and no administrator."""

from __future__ import annotations

import shlex

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say

#: what `start` says about the network
NO_TLS = (
    "There is no TLS: a machine that reads the network gets the password, with which it can read, erase and block "
    "studies, but forge no results. On a network that you do not trust, or to give classes their own users, take "
    "RabbitMQ and Redis with TLS instead: deploy/README.md."
)


@shared_options.command(
    "fleet start",
    "fleet start --host 10.0.0.1          # the address by which the other machines reach this one",
    "fleet start | ssh gpu1 shadho-celery worker --join -",
)
@click.option("--host", metavar="ADDRESS", help="Address of this machine.  [default: the last one, or detected]")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of Redis.  [default: the last one, or 6390]")
def start(host: str | None, port: int | None) -> None:
    """Start the fleet's Redis, and print the line with which other machines join.

    Redis is the broker, too. It runs until fleet stop, listens on ADDRESS and 127.0.0.1, and keeps address, password,
    signing key and what is recorded in a folder of this user: after a reboot, start it again. If it runs already, its
    line is printed again.
    """
    from shadho_celery.embedded import server  # imports redis: not for --help
    from shadho_celery.fleet.access import ENVIRONMENT

    access, is_new = server.start(host, port)
    folder = server.own_folder()
    say(f"the fleet runs {'' if is_new else 'already '}on {access.address}, with its files in {folder}", err=True)
    if access.host.startswith("127."):
        say("Warning: other machines cannot reach this address; fleet stop, then fleet start --host ADDRESS", err=True)
    say(f"On this machine, in each shell: . {shlex.quote(str(folder / ENVIRONMENT))}", err=True)
    say("On each other machine, the line below, which has the password and the key:", err=True)
    say(f"shadho-celery worker --join {access.text()}")
    say(NO_TLS, err=True)


@shared_options.command("fleet stop")
def stop() -> None:
    """Stop the fleet's Redis. What is recorded stays; studies and workers wait until fleet start."""
    from shadho_celery.embedded import server  # imports redis: not for --help

    if (access := server.stop()) is None:
        say("no fleet of this user runs on this machine", err=True)
    else:
        say(f"the fleet on {access.address} has stopped; fleet start continues with what it has recorded", err=True)


@shared_options.command(
    "fleet start",
    "fleet stop",
    cls=click.Group,
    commands={"start": start, "stop": stop},
    context_settings={"help_option_names": ["-h", "--help"]},
)
def fleet() -> None:
    """Start and stop the server of a small fleet on this machine."""
