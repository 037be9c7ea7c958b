"""What an executor makes of the errors of its Redis: it restarts or is cut off for a while, or it is of no use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from shadho_celery.errors import ServiceError
from shadho_celery.registry import is_outage


@contextmanager
def outages_pass() -> Iterator[None]:
    """Redis restarts or is cut off for a while: nothing is known to have happened, and nothing is lost.

    Raises ServiceError where it is of no use.
    """
    try:
        yield
    except redis.RedisError as error:
        if not is_outage(error):
            raise unusable(error) from error


def unusable(error: redis.RedisError) -> ServiceError:
    """The error of Redis with its remedy."""
    cause = " ".join(str(error).split())[:200]
    return ServiceError(f"Redis cannot be used at the moment ({cause}); see to its server, its memory and its disk")
