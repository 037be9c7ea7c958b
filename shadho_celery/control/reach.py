"""The Redis servers on which requests are sent: that of the fleet, or those of the embedded fleets of this folder."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from shadho_celery.embedded.plan import CONTROL_KEY, reached, running
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.transport import urls
from shadho_celery.transport.redis import Redis, connect
from shadho_celery.transport.signing import Signer, read_key

NO_FLEET = (
    "no study runs in this folder with its own workers, and no fleet is named; run this command in the study's folder, "
    f"or name the fleet's Redis in {urls.REDIS}"
)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A Redis of running studies and workers."""

    client: Redis
    #: signs announcements
    signer: Signer
    #: signs requests
    control: Signer
    #: True for the Redis of a fleet, False for that of an embedded one
    is_fleet: bool


@contextmanager
def reaches(redis: str | None = None) -> Iterator[Sequence[Reach]]:
    """Yield the fleet's Redis if there is one: at the URL `redis`, else the one that the environment names.

    Otherwise yield those of the embedded fleets of this folder, except those that are starting or ending. Raises
    ServiceError if the fleet's Redis cannot be reached.
    """
    signer = Signer.configured()
    with ExitStack() as stack:
        if redis or urls.is_fleet({}):
            client = stack.enter_context(connect(redis or urls.url(urls.REDIS)))
            yield [Reach(client=client, signer=signer, control=signer, is_fleet=True)]
            return
        found = []
        for folder in running():
            # Without a socket or a key, the study is starting or ending.
            with suppress(ServiceError, UsageError):
                named = stack.enter_context(reached(folder))
                client = stack.enter_context(connect(named[urls.REDIS]))
                control = Signer(read_key(folder / CONTROL_KEY))
                found.append(Reach(client=client, signer=signer, control=control, is_fleet=False))
        yield found


def requester() -> str:
    """Return who sends requests from this process: user and host."""
    # Without an entry in the system's list of users, as in some containers, Python raises one of these.
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:255]
