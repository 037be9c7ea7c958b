"""Celery settings in force: the package's own, overridden by those of the working directory."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, resolve_transport

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
    urls.check(urls.BROKER, str(settings["broker_url"]))
    scheme, separator, _ = str(settings["broker_url"]).partition("://")
    # A scheme may say more after a plus: redis+socket.
    if separator and scheme.partition("+")[0] not in TRANSPORT_ALIASES:
        raise UsageError(f"CELERY_BROKER_URL begins with {scheme}://, as no broker's does; write amqp:// or redis://")
    try:
        resolve_transport(scheme.partition("+")[0] if separator else None)
    except ImportError as error:
        raise UsageError(
            f"CELERY_BROKER_URL begins with {scheme}://, whose library is missing ({error}); install it, or write "
            "amqp:// or redis://"
        ) from None
    # Only now is the broker known. Without these settings Celery would not verify its certificate.
    if secure := tls(settings["broker_url"]):
        settings.setdefault("broker_use_ssl", secure)
    return settings


def _settings(path: Path) -> dict[str, Any]:
    """Return the settings in a file: its public names in lower case that are no module and no class."""
    return {
        name: value
        for name, value in runpy.run_path(str(path)).items()
        if name[0] != "_" and name.islower() and not isinstance(value, (type, ModuleType))
    }
