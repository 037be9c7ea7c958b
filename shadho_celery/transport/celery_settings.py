"""Celery settings in force: the package's own, overridden by those of the working directory."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import kombu
from kombu.transport import TRANSPORT_ALIASES, resolve_transport

from shadho_celery.core.checks import mask
from shadho_celery.errors import UsageError
from shadho_celery.transport import urls
from shadho_celery.transport.tls import tls


def configuration() -> dict[str, Any]:
    """Return the package's settings, overridden by those of a celeryconfig.py in the working directory.

    Raises UsageError if a file that they name cannot be read, or if no broker's URL begins like theirs.
    """
    package = Path(__file__).parents[1]
    # An installed package has the file inside, a checkout beside it.
    files = (package / "celeryconfig.py", package.parent / "celeryconfig.py")
    settings = _settings(next(file for file in files if file.exists()))
    own = Path("celeryconfig.py").absolute()
    if own.exists():
        settings |= _settings(own)
    _check_broker(str(settings["broker_url"]))
    # Only now is the broker known. Without these settings Celery would not verify its certificate.
    if secure := tls(settings["broker_url"]):
        settings.setdefault("broker_use_ssl", secure)
    return settings


def _check_broker(url: str) -> None:
    """Raise UsageError for a URL that Celery cannot use."""
    urls.check(urls.BROKER, url)
    scheme, separator, _ = url.partition("://")
    # A scheme may say more after a plus: redis+socket.
    kind = scheme.partition("+")[0]
    if separator and kind not in TRANSPORT_ALIASES:
        raise UsageError(f"CELERY_BROKER_URL begins with {scheme}://, as no broker's does; write amqp:// or redis://")
    try:
        resolve_transport(kind if separator else None)
        kombu.Connection(url)
    except ImportError as error:
        raise UsageError(
            f"CELERY_BROKER_URL begins with {scheme}://, whose library is missing ({error}); install it, or write "
            "amqp:// or redis://"
        ) from None
    except (TypeError, ValueError):
        # Not their text, which may have a part of the password. TypeError: an option of the query is no option.
        raise UsageError(
            f"CELERY_BROKER_URL {mask(url)} cannot be read; write amqp://USER:PASSWORD@HOST:PORT/VHOST, "
            "with %40 for @ in the password, and so on"
        ) from None


def _settings(path: Path) -> dict[str, Any]:
    """Return the settings in a file: its public names in lower case that are no module and no class."""
    return {
        name: value
        for name, value in runpy.run_path(str(path)).items()
        if name[0] != "_" and name.islower() and not isinstance(value, (type, ModuleType))
    }
