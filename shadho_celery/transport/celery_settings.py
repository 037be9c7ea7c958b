"""Celery settings in force: those that came with the package, and the working directory's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from kombu.transport import TRANSPORT_ALIASES

from shadho_celery.errors import UsageError
from shadho_celery.transport.tls import tls


def configuration() -> dict[str, Any]:
    """Return the settings that came with the package, overridden by those of a celeryconfig.py in the working directory.

    Raises UsageError where a file that they name cannot be read, or the broker is of no kind that there is.
    """
    package = Path(__file__).parents[1]
    installed = next(
        path for path in (package / "celeryconfig.py", package.parent / "celeryconfig.py") if path.exists()
    )
    settings = _settings(_load(installed))
    own = Path("celeryconfig.py").absolute()
    if own.exists() and own != installed:
        settings.update(_settings(_load(own)))
    scheme, separator, _ = str(settings["broker_url"]).partition("://")
    # A scheme may say more after a plus: redis+socket.
    if separator and scheme.partition("+")[0] not in TRANSPORT_ALIASES:
        raise UsageError(f"CELERY_BROKER_URL begins with {scheme}://, as no broker's does; write amqp:// or redis://")
    # Now that the broker is known. Celery itself would not verify whom it talks to.
    if secure := tls(settings["broker_url"]):
        settings.setdefault("broker_use_ssl", secure)
    return {name: value for name, value in settings.items() if not isinstance(value, (type, ModuleType))}


def _settings(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name[0] != "_" and name.islower()}


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("shadho_celeryconfig", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
