"""URLs of the broker and of Redis from the environment, and the TLS options for them.

TLS for ``amqps://`` and ``rediss://`` follows the same rules in every process. A server's certificate must be valid for
the host name in its URL. It is verified with the system's certificate authorities, or with the one in SHADHO_TLS_CA.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shadho_celery.core.checks import mask
from shadho_celery.core.files import read_bytes
from shadho_celery.errors import UsageError

BROKER = "CELERY_BROKER_URL"
REDIS = "SHADHO_REDIS_URL"
#: overrides BROKER, which may have been set for another application
OWN_BROKER = "SHADHO_BROKER_URL"
#: set to 1 if the working directory's celeryconfig.py should not be read
IGNORE = "SHADHO_IGNORE_CELERYCONFIG"
#: set to 1 for an embedded worker, whose broker ends with its fleet
EMBEDDED = "SHADHO_EMBEDDED"
DEFAULTS: Mapping[str, str] = {BROKER: "amqp://127.0.0.1", REDIS: "redis://127.0.0.1/0"}

CA, CERTIFICATE, KEY = "SHADHO_TLS_CA", "SHADHO_TLS_CERT", "SHADHO_TLS_KEY"

#: text in every library's error for a certificate that could not be verified
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"


def prefer_own() -> None:
    """Copy the project's own variable for the broker's URL to Celery's variable, because Celery reads that one."""
    if own := os.environ.get(OWN_BROKER):
        os.environ[BROKER] = own


def url(variable: str) -> str:
    """Return the URL in the environment variable, or its default."""
    return os.environ.get(variable) or DEFAULTS[variable]


def is_fleet(given: Mapping[str, str]) -> bool:
    """Return whether the URL of the broker or of Redis is set, in the environment or in `given` (variable -> URL)."""
    return any(variable in given or os.environ.get(variable) for variable in DEFAULTS)


def default_broker(used: str) -> str | None:
    """Return a hint how to name a broker if none is named, so that `used` is the default. Otherwise return None."""
    if os.environ.get(BROKER) or used != DEFAULTS[BROKER]:
        return None
    return f"no broker is named, so the default {used} is used; to name another one, give --broker or set {BROKER}"


def check(variable: str, url: str) -> None:
    """Raise UsageError unless a URL can be parsed. Several URLs may be joined by semicolons.

    Python's own error message is not shown, because it contains the text after the colon, which may be part of the
    password.
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
    """Return the TLS options for `url`: kombu's `ssl` for AMQP, redis-py's keyword arguments for Redis.

    They are empty if the URL does not use TLS, or if it is a Redis URL that contains TLS options itself. Raises
    UsageError if a file cannot be read, or if the options cannot be used together.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("amqps", "rediss"):
        return {}
    if "ssl_" in urlsplit("//" + rest).query:
        if scheme == "amqps":
            raise UsageError(f"an amqps:// URL takes no ssl_ options; name the certificate authority in {CA}")
        return {}
    # Imported here, because the import takes time, and most servers are used without TLS.
    import ssl

    found = {name: _file(variable) for name, variable in _FILES.items() if os.environ.get(variable)}
    if "keyfile" in found and "certfile" not in found:
        raise UsageError(f"{KEY} is set without {CERTIFICATE}; name the certificate of this key there")
    if scheme == "rediss":
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED, **{f"ssl_{name}": path for name, path in found.items()}}
    # A `server_hostname` of None means the host name in the URL. Without this entry no host name would be checked.
    return {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None, **found}


def remedy(cause: str, variable: str) -> str:
    """Return the remedy for a server that cannot be used because of `cause`. Its URL is in `variable`."""
    if UNTRUSTED in cause:
        return (
            f"name the server's certificate authority in {CA}, and in {variable} a host name that the certificate has"
        )
    if "CERTIFICATE_REQUIRED" in cause:
        return f"name a certificate that the server accepts in {CERTIFICATE}, and its key in {KEY}"
    return f"start it, or check {variable}"


_FILES = {"ca_certs": CA, "certfile": CERTIFICATE, "keyfile": KEY}


def _file(variable: str) -> str:
    path = Path(os.environ[variable]).expanduser()
    read_bytes(path, f"{variable}: {path}")
    return str(path)
