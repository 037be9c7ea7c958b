"""Environment of a trial: that of its worker without the credentials of broker, Redis, store and signing key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from urllib.parse import unquote, urlsplit

#: prefixes of environment variables that trials do not get: our settings, and those with which clients of PostgreSQL,
#: Redis and RabbitMQ log in
_OURS = ("SHADHO_", "CELERY_", "PG", "REDIS", "AMQP", "RABBITMQ")
#: exceptions that trials get: addresses of gangs, and settings of the studies in tasks/
_ALLOWED = frozenset({"SHADHO_HOST", "SHADHO_LISTEN", "SHADHO_SVM_DATA"})
#: variables that each program may know, and that a password such as postgres may equal by chance
_PUBLIC = frozenset({"USER", "LOGNAME", "USERNAME", "HOSTNAME", "HOST", "HOME", "PATH", "SHELL", "LANG", "TERM"})
#: a password in a connection string, such as "host=db password=secret", or in the query of a URL
_KEYWORD = re.compile(r"\b(?:password|passwd|pwd)\s*=\s*['\"]?([^\s;&'\"]+)", re.IGNORECASE)
#: variable that names further variables for trials, joined by commas
PASS = "SHADHO_PASS"


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a trial: the worker's environment without our settings and other credentials.

    The few settings that a trial needs are kept, and those named in SHADHO_PASS. Any variable that contains one of the
    removed passwords is removed too.
    """
    passed = _ALLOWED | _passed(environment)
    ours = {name: value for name, value in environment.items() if name.startswith(_OURS) and name not in passed}
    secrets = {secret for name, value in ours.items() for secret in _passwords(name, value)}
    return _without(secrets, {name: value for name, value in environment.items() if name not in ours}, passed)


def without_passwords(urls: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that contain a password of these URLs.

    Our own settings and the variables named in SHADHO_PASS are kept.
    """
    secrets = {secret for url in urls for secret in _passwords("", url)}
    ours = {name for name in environment if name.startswith(_OURS)}
    return _without(secrets, environment, ours | _passed(environment))


def _without(secrets: set[str], environment: Mapping[str, str], kept: Collection[str]) -> dict[str, str]:
    """Return the environment without the variables that contain a secret, except those in `kept` and `_PUBLIC`."""
    return {
        name: value
        for name, value in environment.items()
        if name in kept or name in _PUBLIC or not (value in secrets or secrets.intersection(_passwords("", value)))
    }


def _passed(environment: Mapping[str, str]) -> set[str]:
    return {name.strip() for name in environment.get(PASS, "").split(",")}


def _passwords(name: str, value: str) -> set[str]:
    """Return the passwords in a variable, decoded and as they are written.

    They are those in its URLs and connection strings, and its whole value if its name ends like a password's.
    """
    found = {value} if name.endswith(("PASSWORD", "PASS", "AUTH")) else set()
    found.update(_KEYWORD.findall(value))
    # Several URLs of one broker are joined by semicolons.
    for part in value.split(";") if "://" in value else ():
        with suppress(ValueError):
            found.add(urlsplit(part).password or "")
    return {*found, *map(unquote, found)} - {""}
