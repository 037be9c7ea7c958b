"""The commands ``shadho-celery fleet``: the server of a small fleet, and the users of any fleet, their keys and policy.

The server needs no Docker and no administrator.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.core.addresses import is_loopback
from shadho_celery.core.checks import printable
from shadho_celery.core.files import read_text
from shadho_celery.core.units import counted
from shadho_celery.core.users import ADMINS_FILE, USER_KEY_FILE, own_user
from shadho_celery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadho_celery.fleet.policy import Policy
    from shadho_celery.fleet.redis import Redis

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
    if is_loopback(access.host):
        say("Warning: other machines cannot reach this address; fleet stop, then fleet start --host ADDRESS", err=True)
    say(f"On this machine, in each shell: . {shlex.quote(str(folder / ENVIRONMENT))}", err=True)
    say("On each other machine, the line below, which has the password and the key:", err=True)
    say(f"shadho-celery worker --join {access.text()}")
    say(NO_TLS, err=True)


@shared_options.command("fleet stop")
def stop() -> None:
    """Stop the fleet's Redis. What is recorded stays; studies and workers wait until fleet start."""
    from shadho_celery.embedded import server  # imports redis: not for --help

    stopped = "the fleet has stopped; fleet start continues with what it has recorded"
    say(stopped if server.stop() else "no fleet of this user runs on this machine", err=True)


@shared_options.command("fleet key ~/.shadho-user.key")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
def key(path: Path) -> None:
    """Make a key pair of this user, and print the lines about it for the policy.

    The private key is written to FILE, which only this user can read; SHADHO_USER_KEY_FILE names it for all commands.
    If FILE has a key, its lines are printed again. Give the lines to an admin of the fleet.
    """
    from shadho_celery.core.system import overridden
    from shadho_celery.fleet.policy import UserKey

    try:
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="ascii") as file:
            file.write(f"{secrets.token_hex(32)}\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    with overridden({USER_KEY_FILE: str(path)}):
        found = UserKey.configured()
    assert found is not None
    # A name may have a backslash, such as DOMAIN\login. JSON and TOML escape it alike.
    say(f'[users.{json.dumps(own_user(), ensure_ascii=False)}]\nkey = "{found.public}"')


@contextmanager
def _redis() -> Iterator[Redis]:
    """Yield a client of the fleet's Redis. Raises ServiceError, and UsageError if no fleet is named."""
    from shadho_celery.fleet import urls
    from shadho_celery.fleet.redis import connect, refusals

    if not urls.is_fleet({}):
        raise UsageError(f"no fleet is named; give --redis, or set {urls.REDIS}")
    with connect(urls.url(urls.REDIS)) as client, refusals():
        yield client


def _in_force(client: Redis) -> tuple[Policy, str] | None:
    """Return the policy in Redis and its text, or None. Raises UsageError unless it is good.

    If this machine has no file of admins, any signature counts.
    """
    from shadho_celery.fleet import policy

    text = client.getrange(policy.KEY, 0, policy.MAX_SIGNED)
    named = os.environ.get(ADMINS_FILE)
    admins = policy.read_admins(Path(named).expanduser()) if named else policy.ANYBODY
    return policy.opened(text, admins) if text else None


@shared_options.command("fleet policy show")
@shared_options.on_fleet
def show() -> None:
    """Print the policy of a fleet, as an admin has written it."""
    with _redis() as client:
        found = _in_force(client)
    if found is None:
        say("this fleet has no policy; an admin sets one: shadho-celery fleet policy set FILE", err=True)
    else:
        say(printable(found[1]).rstrip())


@shared_options.command("fleet policy set policy.toml", name="set")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@shared_options.on_fleet
def set_policy(path: Path) -> None:
    """Put the policy in FILE into force, signed with the key of this user, who must be an admin (SHADHO_ADMINS_FILE).

    FILE is a TOML file. Its number must be above that of the policy in force.

    \b
      number = 2
      [users.anna]
      key = "5f1d..."       # of shadho-celery fleet key, run by anna
      weight = 2            # slots are shared with other users by weight; 1 if it is left out
      slots = 8             # most slots of all of her studies; no limit if it is left out
      [users.root]
      key = "07c2..."
      admin = true          # may act on studies of others, on workers and on folders
    """  # noqa: D301 -- click keeps the lines after this character
    from shadho_celery.core.checks import encoded
    from shadho_celery.fleet import policy

    name, mine = f"the policy {path}", policy.UserKey.configured()
    text = read_text(path, name)
    new = policy.read_policy(text, name)
    if mine is None:
        raise UsageError(f"{name} must be signed; name the key file of an admin in {USER_KEY_FILE}")
    if not (named := os.environ.get(ADMINS_FILE)):
        raise UsageError(f"name the file with the public keys of the admins in {ADMINS_FILE}")
    if mine.public not in policy.read_admins(Path(named).expanduser()):
        raise UsageError(f"the key in {USER_KEY_FILE} is not one of the admins' in {named}")
    signed = policy.Signed(text=text, key=mine.public, proof=mine.sign(f"{policy.KEY} {text}"))

    def replace(pipe: Redis) -> None:
        try:
            before = _in_force(pipe)
        except UsageError as error:
            say(f"Warning: {error}; it is replaced", err=True)
            before = None
        if before is not None and new.number <= before[0].number:
            raise UsageError(f"{name} has number {new.number}; give it one above {before[0].number}, which is in force")
        pipe.multi()
        pipe.set(policy.KEY, encoded(signed).decode())

    with _redis() as client:
        # If another admin sets a policy at this moment, the transaction is repeated.
        client.transaction(replace, policy.KEY)
    say(f"policy {new.number} is in force within seconds: {counted(len(new.users), 'user')}")


_HELP = {"help_option_names": ["-h", "--help"]}


@shared_options.command(
    "fleet policy show",
    "fleet policy set policy.toml",
    name="policy",
    cls=click.Group,
    commands={"show": show, "set": set_policy},
    context_settings=_HELP,
)
def policy_group() -> None:
    """Show or set the users of a fleet, with their keys, weights and limits."""


@shared_options.command(
    "fleet start",
    "fleet stop",
    "fleet key ~/.shadho-user.key",
    "fleet policy set policy.toml",
    cls=click.Group,
    commands={"start": start, "stop": stop, "key": key, "policy": policy_group},
    context_settings=_HELP,
)
def fleet() -> None:
    """Start and stop the server of a small fleet on this machine; and set the users of a fleet."""
