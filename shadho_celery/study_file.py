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

from shadho_celery.errors import UsageError

#: What STUDY may say; the command line's options of the same names come before it.
SETTINGS: Mapping[str, str] = {
    "trials": "limit on the trials of the study",
    "seconds": "limit on the seconds of one run",
    "target": "a loss that is good enough",
    "sampler": "name of the sampler",
    "policy": "name of the placement policy",
    "shares": "how trials are shared out between subspaces",
    "cost": "seconds by subspace, or a function of params; only their proportions matter",
    "classes": "compute classes the study expects, the strongest first",
    "cores": "cores that one trial uses",
    "slots": "slots of one class that a trial takes: a number, a key of the params, or a function of them",
    "gang_wait_seconds": "seconds after which a trial whose slots do not come together waits again",
    "rungs": "a ladder of budgets: least, most and eta, such as 1, 9 and 3, and backups; a dict",
    "speculate": "whether late trials are copied to idle slots: True or False",
    "weight": "the study's part of the slots beside other studies",
    "trial_timeout": "seconds after which a trial is stopped, more than 0",
}


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """What a study file holds."""

    module: str
    space: Any
    objective: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)


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
    settings = vars(imported).get("STUDY", {})
    _check(name, settings)
    return StudyFile(module=name, space=imported.SPACE, objective=imported.objective, settings=settings)


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


def _check(name: str, settings: Any) -> None:
    if not isinstance(settings, Mapping):
        raise UsageError(f"STUDY of {name} is no dict")
    for key in settings:
        if key not in SETTINGS:
            raise UsageError(f"STUDY of {name} has an unknown key {key!r}; known are {', '.join(SETTINGS)}")
        if not _FORMS[key](settings[key]):
            raise UsageError(f"STUDY of {name} has {key!r}: {settings[key]!r}; it should be: {SETTINGS[key]}")


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message cannot be printed)"


def _where(error: BaseException, path: str) -> str:
    """The line of the file at `path` that led to `error`; "" where none did: a SyntaxError tells its own."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" ({path}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_name, value))


#: what each setting of STUDY must look like; what only its user can tell (is there such a sampler?) is asked there
_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "trials": _is_count,
    "seconds": _is_number,
    "target": _is_number,
    "sampler": _is_name,
    "policy": _is_name,
    "shares": _is_name,
    "cost": lambda value: callable(value) or isinstance(value, Mapping),
    "classes": _are_names,
    "cores": _is_count,
    "slots": lambda value: callable(value) or _is_name(value) or _is_count(value),
    "gang_wait_seconds": lambda value: _is_number(value) and value > 0,
    "rungs": lambda value: isinstance(value, Mapping),
    "speculate": lambda value: isinstance(value, bool),
    "weight": lambda value: _is_number(value) and value > 0,
    "trial_timeout": lambda value: _is_number(value) and value > 0,
}
