"""A study file: an ordinary module with SPACE, `objective`, and optionally STUDY."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shadho_celery.core.checks import misfit, plain, short
from shadho_celery.core.settings import StudySettings
from shadho_celery.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """What a study file holds."""

    module: str
    space: Any
    objective: Callable[..., Any]
    #: what STUDY says; the command line's options of the same names come before it
    stated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> StudySettings:
        """The settings with what STUDY says."""
        return StudySettings(**self.stated)


def load(module: str) -> StudyFile:
    """Import `module` and read it. Raises UsageError, naming cause and remedy, where it is no study file."""
    name = module_name(module)
    # The folder first: looking for a module in one that is missing raises.
    if _spec(name.partition(".")[0]) is None or _spec(name) is None:
        raise UsageError(f"there is no module {name} here; run from the folder that holds it, or set PYTHONPATH")
    here = Path.cwd()
    try:
        imported = importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} cannot be imported: {error}; install what it needs") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = _where(error, str(_spec(name).origin))
        raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {_words(error)}{where}") from error
    finally:
        # Store and state lie where the command was given, wherever the file goes for its data.
        os.chdir(here)
    # Not hasattr: a module may make up its attributes, and fail at it.
    missing = [part for part in ("SPACE", "objective") if part not in vars(imported)]
    if missing:
        raise UsageError(f"{name} is no study file: it lacks {' and '.join(missing)}; see the README's first study")
    if not callable(imported.objective):
        raise UsageError(f"objective of {name} is no function but {type(imported.objective).__name__}")
    stated = _checked(name, vars(imported).get("STUDY", {}))
    return StudyFile(module=name, space=imported.SPACE, objective=imported.objective, stated=stated)


def module_name(given: str) -> str:
    """`given` as a module's name: ``tasks/svm.py`` is ``tasks.svm``."""
    if given.endswith(".py"):
        path = Path(given)
        given = ".".join(Path(os.path.relpath(path)).with_suffix("").parts)
    return given.strip(".")


def cores_per_trial(modules: Iterable[str]) -> int:
    """The most cores that STUDY["cores"] asks for in any of `modules`, read without importing them; else 1.

    A worker's own process imports no study: it would cost it the memory and the start-up time of torch and its like.
    """
    cores = 1
    for name in modules:
        spec = _spec(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            cores = max(cores, _literal_cores(Path(spec.origin)))
    return cores


def _literal_cores(path: Path) -> int:
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return 1
    for node in body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "STUDY" for target in targets):
            return _cores_in(value)
    return 1


def _cores_in(settings: ast.expr) -> int:
    if isinstance(settings, ast.Dict):
        for key, value in zip(settings.keys, settings.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "cores" and isinstance(value, ast.Constant):
                return value.value if isinstance(value.value, int) else 1
    return 1


def _spec(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _checked(name: str, stated: Any) -> dict[str, Any]:
    """Return what STUDY says, as settings have it. Raises UsageError, naming the key, where it does not fit."""
    if not isinstance(stated, Mapping):
        raise UsageError(f"STUDY of {name} is no dict")
    try:
        settings = msgspec.convert(plain(dict(stated)), StudySettings)
        return {key: getattr(settings, key) for key in stated}
    except msgspec.ValidationError as error:
        known = StudySettings.__struct_fields__
        if unknown := [key for key in stated if key not in known]:
            words = f"has an unknown key {short(unknown[0], 60)}; known are {', '.join(known)}"
            raise UsageError(f"STUDY of {name} {words}") from None
        key = misfit(error, stated, StudySettings)[0].partition(".")[0]
        should = StudySettings.meaning(key)
        raise UsageError(f"STUDY of {name} has {key!r}: {short(stated[key])}; it should be: {should}") from None


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be printed)"


def _where(error: BaseException, path: str) -> str:
    """The line of the file at `path` that led to `error`; "" where none did: a SyntaxError tells its own."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" ({path}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
