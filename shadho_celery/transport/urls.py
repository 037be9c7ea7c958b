"""URLs of the broker and Redis from the environment, whether a file may name another broker, and TLS.

TLS for ``amqps://`` and ``rediss://`` has the same rules for the scheduler, the workers' Celery and the channel. A
server's certificate must be valid for the host name in its URL. It is verified with the system's certificate
authorities, or with the one in SHADHO_TLS_CA.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
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

CA, CERTIFICATE, KEY = "SHADHO_TLS_CA", "SHADHO_TLS_CERT", "SHADHO_TLS_KEY"

#: name of a failed verification in the errors of every library
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"


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


def tls(url: str) -> dict[str, Any]:
    """Return kombu's `ssl`, or redis-py's keyword arguments, for `url`. Empty without TLS, or if the URL has its own
    options.

    Raises UsageError for a file that cannot be read.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("amqps", "rediss"):
        return {}
    if "ssl_" in urlsplit("//" + rest).query:
        if scheme == "amqps":
            raise UsageError(f"an amqps:// URL takes no ssl_ options; name the certificate authority in {CA}")
        return {}
    # Imported here because it takes time, and most servers are asked without TLS.
    import ssl

    found = {name: _file(variable) for name, variable in _FILES.items() if os.environ.get(variable)}
    if "keyfile" in found and "certfile" not in found:
        raise UsageError(f"{KEY} is set without {CERTIFICATE}; name the certificate of this key there")
    if scheme == "rediss":
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED, **{f"ssl_{name}": path for name, path in found.items()}}
    # None means the host name in the URL. Without this entry no name would be checked.
    return {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None, **found}


def remedy(cause: str, variable: str) -> str:
    """Return the remedy for a server that cannot be used because of `cause`. `variable` holds its URL."""
    if _UNTRUSTED in cause:
        return (
            f"name the server's certificate authority in {CA}, and in {variable} a host name that the certificate has"
        )
    if "CERTIFICATE_REQUIRED" in cause:
        return f"name a certificate that the server accepts in {CERTIFICATE}, and its key in {KEY}"
    return f"start it, or check {variable}"


def is_untrusted(error: BaseException) -> bool:
    """Return whether the server's certificate was rejected."""
    return _UNTRUSTED in str(error)


_FILES = {"ca_certs": CA, "certfile": CERTIFICATE, "keyfile": KEY}


def _file(variable: str) -> str:
    path = Path(os.environ[variable]).expanduser()
    try:
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"{variable}: {path} cannot be read: {error.strerror}") from None
    return str(path)
