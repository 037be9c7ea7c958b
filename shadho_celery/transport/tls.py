"""TLS for ``amqps://`` and ``rediss://``, with the same rules for the scheduler, the workers' Celery and the channel.

A server's certificate must be valid for the host name in its URL. It is verified with the system's certificate
authorities, or with the one in SHADHO_TLS_CA.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shadho_celery.errors import UsageError

CA, CERTIFICATE, KEY = "SHADHO_TLS_CA", "SHADHO_TLS_CERT", "SHADHO_TLS_KEY"

#: name of a failed verification in the errors of every library
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"


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
