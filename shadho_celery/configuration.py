"""The Celery settings in force: those that came with the package, and the working directory's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from shadho_celery.errors import UsageError


def configuration() -> dict[str, Any]:
    """The settings that came with the package, overridden by those of a celeryconfig.py in the working directory."""
    package = Path(__file__).parent
    installed = next(
        path for path in (package / "celeryconfig.py", package.parent / "celeryconfig.py") if path.exists()
    )
    settings = _settings(_load(installed))
    own = Path("celeryconfig.py").absolute()
    if own.exists() and own != installed:
        settings.update(_settings(_load(own)))
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
