"""Celery's settings: the package's own, overridden where allowed by a celeryconfig.py in the working directory."""

from __future__ import annotations

import os
import runpy
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import kombu
from kombu.transport import TRANSPORT_ALIASES, resolve_transport

from shadho_celery.core.checks import line_of, mask, short
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.urls import tls

#: settings, each with the environment variable that overrides it; the user or an option of the command sets the
#: variable
_NAMED: Mapping[str, str] = {
    "broker_url": urls.BROKER,
    "shadho_redis_url": urls.REDIS,
    "shadho_imports": "SHADHO_IMPORTS",
    "shadho_accept_code": "SHADHO_ACCEPT_CODE",
}

#: Celery's settings that a file may override: first word of the name -> the rest of the names. The other settings are
#: fixed, because they decide which messages exist, who may send them, how often they are delivered and where they run.
_FREE: Mapping[str, str] = {
    "broker": "url use_ssl transport_options login_method failover_strategy heartbeat heartbeat_checkrate pool_limit "
    "connection_timeout connection_retry connection_retry_on_startup connection_max_retries channel_error_retry",
    "worker": "concurrency prefetch_multiplier soft_shutdown_timeout enable_soft_shutdown_on_idle send_task_events "
    "hijack_root_logger redirect_stdouts redirect_stdouts_level log_color log_format log_datefmt task_log_format "
    "task_log_datefmt",
    "event": "exchange queue_durable queue_exclusive queue_expires queue_prefix queue_ttl",
    "control": "exchange queue_durable queue_exclusive queue_expires queue_ttl",
}


def configuration() -> dict[str, Any]:
    """Return the package's settings, overridden by a celeryconfig.py in the working directory (`file_of_folder`).

    Warns about settings in that file that are ignored. Raises UsageError if the file cannot be imported, or if Celery
    cannot use the broker's URL.
    """
    settings, origin = _settings(_packages_file()), urls.BROKER
    if file := file_of_folder():
        own = _taken(file, settings)
        settings |= own
        if "broker_url" in own:
            origin = f"broker_url of {file.name}"
    _check_broker(settings["broker_url"], origin)
    # This needs the final URL of the broker. Without these settings Celery would not verify the broker's certificate.
    if secure := tls(settings["broker_url"]):
        settings.setdefault("broker_use_ssl", secure)
    return settings


def file_of_folder() -> Path | None:
    """Return the path of the working directory's celeryconfig.py.

    Returns None if there is no such file, if it is the package's own, or if SHADHO_IGNORE_CELERYCONFIG is 1.
    """
    own = Path("celeryconfig.py").absolute()
    if os.environ.get(urls.IGNORE) == "1" or not own.exists() or own.samefile(_packages_file()):
        return None
    return own


def _packages_file() -> Path:
    package = Path(__file__).parents[1]
    # In an installed package the file is inside, in a checkout it is beside the package.
    files = (package / "celeryconfig.py", package.parent / "celeryconfig.py")
    return next(file for file in files if file.exists())


def _taken(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the working directory's file that override the package's. Warn about those that are
    ignored.
    """
    # Imported late: the import takes a second, and a scheduler needs nothing else from Celery.
    from celery.app.defaults import DEFAULTS

    own = _read(file)
    given = {name for name, variable in _NAMED.items() if os.environ.get(variable)}
    if "broker_url" in own.keys() & given and own["broker_url"] != settings["broker_url"]:
        # The file's other broker settings are for its own broker, which is not used.
        given |= {name for name in own if name.startswith("broker_")}
    fixed = sorted(name for name in own.keys() & DEFAULTS.keys() if not _is_free(name))
    if other := [name for name in fixed if own[name] != settings.get(name)]:
        warnings.warn(
            f"{file} is used without its settings {', '.join(other)}, which trials depend on; if the file belongs "
            f"to another project, set {urls.IGNORE}=1",
            stacklevel=2,
        )
    return {name: value for name, value in own.items() if name not in given and _is_free(name)}


def _is_free(name: str) -> bool:
    """Return whether the working directory's file may set `name`: it is in `_FREE`, or begins with shadho_."""
    kind, _, what = name.partition("_")
    return kind == "shadho" or what in _FREE.get(kind, "").split()


def _read(file: Path) -> dict[str, Any]:
    """Return the settings in the working directory's file. Raises UsageError with the file's name if that fails."""
    try:
        return _settings(file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UsageError(
            f"{file} cannot be imported: {type(error).__name__}: {short(error, 1000)}{line_of(error, str(file))}; "
            f"fix it, or set {urls.IGNORE}=1 if it belongs to another project"
        ) from error


def _check_broker(url: object, origin: str) -> None:
    """Raise UsageError for a URL that Celery cannot use. `origin` says where the URL comes from."""
    if not isinstance(url, str):
        raise UsageError(f"{origin} is not a text; write one URL, such as amqp://127.0.0.1")
    urls.check(origin, url)
    scheme, separator, _ = url.partition("://")
    # A scheme may continue after a plus: redis+socket.
    kind = scheme.partition("+")[0]
    if separator and kind not in TRANSPORT_ALIASES:
        raise UsageError(f"{origin} begins with {scheme}://, which is not a broker's scheme; write amqp:// or redis://")
    try:
        resolve_transport(kind if separator else None)
        kombu.Connection(url)
    except ImportError as error:
        raise UsageError(
            f"{origin} begins with {scheme}://, whose library is missing ({error}); install it, or write "
            "amqp:// or redis://"
        ) from None
    except (TypeError, ValueError):
        # The error's text is not shown, because it may contain part of the password. TypeError: an unknown option in
        # the query.
        raise UsageError(
            f"{origin} {mask(url)} cannot be read; write amqp://USER:PASSWORD@HOST:PORT/VHOST, "
            "with %40 for @ in the password"
        ) from None


def _settings(path: Path) -> dict[str, Any]:
    """Return the settings in a file: its public lower-case names, except modules and classes."""
    return {
        name: value
        for name, value in runpy.run_path(str(path)).items()
        if name[0] != "_" and name.islower() and not isinstance(value, (type, ModuleType))
    }
