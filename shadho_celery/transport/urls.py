"""URLs of the broker and Redis from the environment, and whether a file may name another broker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from shadho_celery.core.checks import mask
from shadho_celery.errors import UsageError

BROKER = "CELERY_BROKER_URL"
REDIS = "SHADHO_REDIS_URL"
#: comes before BROKER, which may be another application's
OWN_BROKER = "SHADHO_BROKER_URL"
#: is 1 if the working directory's celeryconfig.py is not to be read
IGNORE = "SHADHO_IGNORE_CELERYCONFIG"
DEFAULTS: Mapping[str, str] = {BROKER: "amqp://127.0.0.1", REDIS: "redis://127.0.0.1/0"}


def prefer_own() -> None:
    """Let the project's own variable override Celery's, which Celery itself reads."""
    if own := os.environ.get(OWN_BROKER):
        os.environ[BROKER] = own


def url(variable: str) -> str:
    """Return the URL in the environment variable, or its default."""
    return os.environ.get(variable) or DEFAULTS[variable]


def is_fleet(given: Mapping[str, str]) -> bool:
    """Return True if `given` URLs by variable, or the environment, name a broker or Redis."""
    return any(variable in given or os.environ.get(variable) for variable in DEFAULTS)


def check(variable: str, url: str) -> None:
    """Raise UsageError unless a URL can be parsed. Several URLs may be joined by semicolons.

    Python's own message is left out, because it shows the supposed port, which may be part of the password.
    """
    for part in url.split(";"):
        try:
            is_url = bool(part.strip()) and urlsplit(part if "://" in part else f"//{part}").port is not False
        except ValueError:
            is_url = False
        if not is_url:
            raise UsageError(
                f"{variable} is not a URL: {mask(url)!r}; write it as amqp://USER:PASSWORD@HOST:PORT, with a port from "
                "0 to 65535, square brackets around an IPv6 address, and %23, %2F, %3B, %3F for # / ; ? in a password"
            )
