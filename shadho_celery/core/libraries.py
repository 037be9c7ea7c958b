"""Files that hide a library: Python imports a `redis.py` in the working directory instead of Redis's client.

This module imports little, because such a file may be the reason why other modules cannot be imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: modules of Python that no library imports, so a user's module may have one of these names
_UNUSED = frozenset({"antigravity", "idlelib", "test", "this", "turtle", "turtledemo"})


def library_named(name: str) -> str | None:
    """Return a description of the library that an `import` of this name should find; None if there is none."""
    if name in sys.stdlib_module_names - _UNUSED:
        return f"Python's own module {name}"
    file = installed_file(name)
    return f"the library {name} ({file})" if file else None


def installed_file(name: str) -> Path | None:
    """Return the file of an installed module; None if it is not installed."""
    return next((file for folder in _installed() if (file := module_in(folder, name))), None)


def module_in(folder: str, name: str) -> Path | None:
    """Return the file in a folder that an import of `name` would use; None if there is none."""
    path = Path(folder, *name.split("."))
    return next((file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()), None)


def is_installed(file: str | Path) -> bool:
    """Return whether a file is part of Python or of an installed package."""
    # Paths are resolved, because they may contain links.
    path = Path(file).resolve()
    return any(path.is_relative_to(Path(folder).resolve()) for folder in (_STANDARD, *_installed()))


def is_library_folder(folder: str) -> bool:
    """Return whether a folder of Python's search path has Python's own modules or installed packages."""
    return bool(folder) and (is_installed(folder) or Path(folder).suffix == ".zip")


def hides(file: str | Path, library: str) -> str:
    """Return the error message for a file that hides a library."""
    path = Path(file)
    path = path.parent if path.name == "__init__.py" else path
    text = f"{path} has the name of {library}, and is imported instead of it; rename it, such as to my_{path.name}"
    return text if text.isprintable() else ascii(text)


def is_import(error: BaseException) -> bool:
    """Return whether an exception was raised while the body of a module was run by an import."""
    frames = [name for name, _, _ in _frames(error)]
    # The first such frame may be the body of the program itself. So there must be a second one, or the last frame must
    # be one.
    return frames.count(_BODY) > 1 or frames[-1:] == [_BODY]


def failed_import(error: BaseException) -> str | None:
    """Return the error message for a file that hides a library, if this may be why an import failed; else None."""
    if not isinstance(error, (ImportError, AttributeError, TypeError)):
        return None
    # A module whose import has failed is not in `sys.modules`, so the frames of the traceback are searched, too.
    modules = [(name, file) for code, name, file in _frames(error) if code == _BODY]
    modules += [(name, getattr(module, "__file__", None)) for name, module in [*sys.modules.items()]]
    for name, file in modules:
        if "." in name or name == _OURS or not isinstance(file, str) or is_installed(file):
            continue
        if library := library_named(name):
            return hides(file, library)
    return None


def _frames(error: BaseException) -> list[tuple[str, str, str | None]]:
    """Return for each frame of an exception's traceback: the name of its code, its module, and its file."""
    found, trace = [], error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        found.append((frame.f_code.co_name, str(frame.f_globals.get("__name__")), frame.f_globals.get("__file__")))
        trace = trace.tb_next
    return found


def _installed() -> list[str]:
    """Return the folders on Python's search path that contain installed packages."""
    return [each for each in sys.path if Path(each).name in {"site-packages", "dist-packages"}]


#: name of this package, which is not searched, because a checkout of it may be the working directory
_OURS = __name__.partition(".")[0]

#: name of the code of a module's body
_BODY = "<module>"

#: folder of Python's own modules
_STANDARD = str(Path(os.__file__).parent)
