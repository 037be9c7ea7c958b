"""Sources of a study, which are read once, digested, and imported as they were read; version of a function.

A study's own sources are its module and the modules that it imports from the working directory or from the folder of
the study. They are found by the import statements in them, including those inside functions. Python compiles them from
the bytes that were digested. The files are not read again, because they may have been edited meanwhile. Cached bytecode
is not used, because an edit within the same second that keeps the size does not invalidate it.

A function that runs in the process that defines it may be in a script or a notebook, whose text changes with each run.
Its version therefore depends on its compiled code, and on the functions and plain values of its own module that it
uses. Lists, and variables that the function itself writes, are not included, because they may collect results.
"""

from __future__ import annotations

import ast
import dis
import functools
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, resolve_name, spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from msgspec.structs import replace

from shadho_celery.core.code import CodeVersion, Digest, digest_of

#: folders of installed libraries
_INSTALLED = {"site-packages", "dist-packages"}

#: name of this package, which is not the user's code, even if a checkout of it is in the folder of the studies
_OURS = __name__.partition(".")[0]


def read(module: str, origin: str) -> CodeVersion:
    """Read the sources of the study `module`, whose own file is `origin`. Imports then use these sources.

    The version does not include the space. A file that cannot be read has the digest ""; its import will give the
    reason.
    """
    path = Path(origin).absolute()
    # The folder from which the module is imported: the one that contains the file or folder of its first name.
    root = path.parents[module.count(".") + (path.name == "__init__.py")]
    # If the study has a folder of its own, it may also import from there.
    return _read([module], [*_below(root), root, path.parent], root, module, _finder().content)


def read_own(modules: Iterable[str], root: Path, *, are_imported: bool) -> CodeVersion:
    """Read those of these modules that are in the folder `root` and are not libraries, and what they import there.

    They are the modules that a function uses. The version does not include the function. If they `are_imported` here,
    their imports use these sources.
    """
    content = _finder().content if are_imported else lambda _, path: _content(path)
    return _read(modules, [*_below(root), root], root, "", content)


def _read(
    modules: Iterable[str],
    places: Iterable[Path],
    root: Path,
    study: str,
    content_of: Callable[[str, Path], bytes | None],
) -> CodeVersion:
    """Read these modules, and what they import, from these folders. `study` is the module of the study, or ""."""
    folders = [*dict.fromkeys(places)]
    files: dict[str, str] = {}
    waiting, seen = [name for module in modules for name in _with_parents(module)], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.endswith(".*"):
            waiting += (each for folder in folders for each in _all_of(name.removesuffix(".*"), folder))
            continue
        source = next(filter(None, (_path(name, folder, root, study) for folder in folders)), None)
        if source is not None:
            content = content_of(name, source)
            files[Path(os.path.relpath(source, root)).as_posix()] = "" if content is None else digest_of(content)
            waiting += _imported(name, source, content or b"")
    return CodeVersion(root=str(root), files=files)


def contents(code: CodeVersion) -> dict[str, bytes]:
    """Return the content of each source of `code` that this process has read, by its path below ``code.root``."""
    known = dict(_finder().sources())
    return {
        name: known[path] for name in code.files if (path := Path(os.path.normpath(Path(code.root, name)))) in known
    }


def edited_since_import(code: CodeVersion) -> str | None:
    """Return the path of the first source of `code` that was edited after this process imported it, or None.

    Call it right after `read` has returned `code`.
    """
    imported = _finder().imported
    files = {name: digest for name, digest in code.files.items() if Path(code.root, name) in imported}
    return DiskWatch().edited(replace(code, files=files))


def absent(module: str) -> CodeVersion:
    """Return the version of a module that does not exist. It lists the file in which the module was expected."""
    return CodeVersion(root=str(Path.cwd()), files={f"{module.replace('.', '/')}.py": ""})


class DiskWatch:
    """Finds source files whose content has changed. A file is not read again while its times and size stay the same."""

    def __init__(self) -> None:
        #: times, size and inode of a file when its content had a digest, by path and digest; None if it was missing
        self._same: dict[tuple[Path, str], tuple[int, ...] | None] = {}

    def edited(self, code: CodeVersion) -> str | None:
        """Return the path of the first file whose content differs from its digest in `code`, or None."""
        for name, digest in code.files.items():
            path = Path(code.root, name)
            state = None
            with suppress(OSError):
                found = os.stat(path)  # noqa: PTH116 -- called every second
                state = found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
            if (path, digest) in self._same and self._same[path, digest] == state:
                continue
            content = _content(path)
            if digest != ("" if content is None else digest_of(content)):
                return str(path)
            self._same[path, digest] = state
        return None


class _Loader(SourceFileLoader):
    """Loads a module from bytes that were read before."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType = self.source_to_code(self._content, self.path)
        return code

    def get_source(self, fullname: str) -> str | None:
        return decode_source(self._content)


class _Finder(MetaPathFinder):
    """Import finder for modules whose sources were read. It is used only where Python's search finds the same file."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Path, bytes]] = {}
        #: files whose module was already imported when `content` was last called for it
        self.imported: set[Path] = set()

    def sources(self) -> Iterable[tuple[Path, bytes]]:
        """Return the path and the content of each file that was read."""
        return self._sources.values()

    def content(self, name: str, path: Path) -> bytes | None:
        """Return the source that an imported module has: as it was imported, otherwise as it is read now.

        Return None if the file cannot be read, or if it was edited after Python itself imported the module.
        """
        known, module = self._sources.get(name), sys.modules.get(name)
        self.imported.discard(path)
        if module is not None and getattr(module, "__file__", None) == str(path):
            self.imported.add(path)
            if known is not None and known[0] == path:
                return known[1]
            if _is_edited_since_compiled(module, path):
                return None
        content = _content(path)
        if content is not None:
            self._sources[name] = path, content
        return content

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._sources:
            return None
        source, content = self._sources[fullname]
        if target is not None and (edited := _content(source)) is not None:
            # importlib.reload should read the file again.
            content = edited
            self._sources[fullname] = source, content
        found = PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None or Path(found.origin).absolute() != source:
            return None
        loader = _Loader(fullname, found.origin, content)
        folders = found.submodule_search_locations
        return spec_from_file_location(fullname, found.origin, loader=loader, submodule_search_locations=folders)


def _finder() -> _Finder:
    """Return this process's finder. If there is none yet, add one in front of Python's finder for files."""
    for each in sys.meta_path:
        if isinstance(each, _Finder):
            return each
    finder = _Finder()
    # Behind the finders for built-in modules, and behind those that tools such as pytest add.
    place = next((n for n, each in enumerate(sys.meta_path) if each is PathFinder), len(sys.meta_path))
    sys.meta_path.insert(place, finder)
    return finder


def _below(root: Path) -> Iterator[Path]:
    """Yield the folders on Python's search path that are in the working directory or in `root`.

    Folders of libraries are left out, unless `root` itself is one.
    """
    places = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    libraries = places | {Path(sys.base_prefix, "lib", f"python{sys.version_info[0]}{sys.version_info[1]}.zip")}
    for folder in dict.fromkeys(Path(entry).absolute() for entry in sys.path):
        if any(folder.is_relative_to(each) for each in libraries):
            continue
        within = [folder.relative_to(base).parts for base in (root, Path.cwd()) if folder.is_relative_to(base)]
        if any(not _INSTALLED.intersection(parts) for parts in within):
            yield folder


def _path(name: str, folder: Path, root: Path, study: str) -> Path | None:
    """Return the path of a module's source in `folder`, or None if it is not there or not part of the study.

    `root` is the folder from which the module `study` is imported.
    """
    top = name.partition(".")[0]
    if top == _OURS or (root.name in _INSTALLED and top != study.partition(".")[0]):
        return None
    base = folder.joinpath(*name.split("."))
    for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
        if path.is_file() and not _INSTALLED.intersection(path.relative_to(folder).parts):
            return path
    return None


def _imported(name: str, path: Path, content: bytes) -> Iterator[str]:
    """Yield the modules that a source may import, each after its parent packages."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    with warnings.catch_warnings():
        # Python shows these warnings when it compiles the source.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            # The import of the source will show the error.
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            with suppress(ImportError, ValueError):
                base = resolve_name("." * node.level + base, package) if node.level else base
                for alias in node.names:
                    # The name may be that of a module, or of an object in the module `base`.
                    yield from _with_parents(f"{base}.{alias.name}")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield from _with_parents(node.args[0].value)


def _all_of(package: str, folder: Path) -> Iterator[str]:
    """Yield the modules in the folder of a package that a star import may load: all, if the package has ``__all__``."""
    base = folder.joinpath(*package.split("."))
    if b"__all__" in (_content(base / "__init__.py") or b""):
        yield from (f"{package}.{path.stem}" for path in sorted(base.glob("*.py")) if path.stem != "__init__")


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _is_edited_since_compiled(module: ModuleType, path: Path) -> bool:
    """Return whether the bytecode that Python cached when it imported a module is from an earlier state of the file.

    Return False if that is not known: without a cache, or after another process has compiled the file again.
    """
    cached = getattr(module.__spec__, "cached", None)
    if cached is None or sys.dont_write_bytecode or not os.access(cached, os.W_OK):
        return False
    with suppress(OSError), Path(cached).open("rb") as file:
        # PEP 552: a magic number, flags, then time and size of the source, each of 4 bytes.
        header, state = file.read(16), path.stat()
        flags, *compiled = (int.from_bytes(header[start : start + 4], "little") for start in (4, 8, 12))
        return flags == 0 and compiled != [int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF]
    return False


def _content(path: Path) -> bytes | None:
    with suppress(OSError):
        return path.read_bytes()
    return None


#: types whose values are fully described by their repr
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
#: bytecode instructions that write a variable or attribute outside of the function
_WRITES = frozenset({"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"})


def function_version(function: Callable[..., Any]) -> Digest:
    """Return the digest of a function's compiled code, or "" if it is not written in Python."""
    parts = [*_parts(function, set())]
    return digest_of("\n".join(parts).encode("utf-8", "surrogatepass")) if parts else ""


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield texts that describe a value. Yield nothing for a value of a type that is not included, such as a list.

    `seen` are the ids of the objects that were described before.
    """
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple):
        yield from (part for each in value for part in _parts(each, seen))
    elif id(value) in seen:
        return
    else:
        seen.add(id(value))
        if isinstance(value, functools.partial):
            yield from _parts((value.func, value.args, *sorted(value.keywords.items())), seen)
        elif isinstance(value, MethodType):
            yield from _parts((value.__func__, *_state(value.__self__, value.__func__)), seen)
        elif isinstance(value, FunctionType):
            yield from _of_function(value, seen)
        elif isinstance(value, type):
            methods = (each for _, each in sorted(vars(value).items()) if isinstance(each, FunctionType))
            yield from _parts((*methods,), seen)
        elif isinstance(called := getattr(type(value), "__call__", None), FunctionType):  # noqa: B004 -- of its type
            yield from _parts((called, *_state(value, called)), seen)


def _state(value: object, method: object) -> list[tuple[str, object]]:
    """Return the attributes, with their values, of an object whose `method` is called.

    Attributes that the method writes are left out.
    """
    if isinstance(value, type):
        return []
    written = _written(method.__code__) if isinstance(method, FunctionType) else ()
    return sorted(each for each in getattr(value, "__dict__", {}).items() if each[0] not in written)


def _of_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield from _of_code(function.__code__, function.__doc__)
    yield from _parts((function.__defaults__, *sorted((function.__kwdefaults__ or {}).items())), seen)
    written = _written(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # The cell of a variable is empty until it is assigned, as for a function that is defined further down.
        with suppress(ValueError):
            yield from () if name in written else _parts(cell.cell_contents, seen)
    for name in names_of(function.__code__):
        if name in written:
            continue
        found = function.__globals__.get(name)
        # Functions of other modules are left out: those modules are libraries, or have versions of their own.
        if isinstance(found, (*_PLAIN, tuple)) or getattr(found, "__module__", None) == function.__module__:
            yield from _parts(found, seen)


def _of_code(code: CodeType, documentation: str | None = None) -> Iterator[str]:
    """Yield the instructions and constants of compiled code. Its name, line numbers and docstring are left out."""
    yield code.co_code.hex()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        elif documentation is None or constant != documentation:
            # The order of a set of texts differs between processes.
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
    yield " ".join(code.co_names)


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that compiled code uses."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


def _written(code: CodeType) -> set[str]:
    """Return the outer variables and attributes that a function writes, such as a counter of its calls."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in _WRITES}
    return found.union(*(_written(constant) for constant in code.co_consts if isinstance(constant, CodeType)))
