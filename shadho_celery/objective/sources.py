"""Versions of a study's code: digests of its source files, or of one function.

A study's sources are its module and the modules that it imports from the working directory or from the folder of the
study. They are found by their import statements, including those inside functions. Each file is read once and digested,
and Python compiles the bytes that were digested, because the file may have been edited since. Cached bytecode is not
used: Python does not notice an edit within the same second that keeps the file's size.

A search without workers calls its function in its own process. Such a function may be in a script or a notebook, whose
text changes between runs. Its version therefore depends on its compiled code, and on the functions and plain values of
its own module that it uses. Lists, and variables that the function itself writes, are left out, because they may
collect results.
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
    """Read the sources of the study `module`, whose file is `origin`, and return their version, without the space.

    Later imports in this process use the sources as they were read. A file that cannot be read has the digest "". Its
    import then raises an error that gives the reason.
    """
    path = Path(origin).absolute()
    # The folder from which the module is imported: the one that contains the file or folder of its first name.
    root = path.parents[module.count(".") + (path.name == "__init__.py")]
    # A study in a subfolder may also import from that subfolder.
    return _read([module], [*_below(root), root, path.parent], root, module, _finder().content)


def read_own(modules: Iterable[str], root: Path, *, are_imported: bool) -> CodeVersion:
    """Read the modules that a function uses, and what they import, if they are in `root` and are not libraries.

    The version does not include the function itself. If the modules `are_imported` in this process, their imports use
    these sources.
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
    """Read `modules`, and what they import, from the folders `places`. `study` is the study's module, or ""."""
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
    """Return the content of each file of `code`, by its path relative to ``code.root``.

    The content is what this process has imported, or what is on the disk. A file is left out if neither has its digest
    in `code`.
    """
    known = dict(_finder().sources.values())
    paths = {name: Path(os.path.normpath(Path(code.root, name))) for name in code.files}
    found = ((name, each) for name, path in paths.items() for each in (known.get(path), _content(path)))
    return {name: each for name, each in found if each is not None and digest_of(each) == code.files[name]}


def edited_since_import(code: CodeVersion) -> str | None:
    """Return the path of the first file of `code` that was edited after this process imported it, or None.

    Call it right after `read` has returned `code`.
    """
    imported = _finder().imported
    files = {name: digest for name, digest in code.files.items() if Path(code.root, name) in imported}
    return DiskWatch().edited(replace(code, files=files))


def absent(module: str) -> CodeVersion:
    """Return the version of a module that does not exist. Its only file is the missing one, with the digest ""."""
    return CodeVersion(root=str(Path.cwd()), files={f"{module.replace('.', '/')}.py": ""})


class DiskWatch:
    """Finds source files whose content has changed. A file is read only if its size or one of its times has changed."""

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
    """Import finder that loads modules from the bytes that `content` has read, if Python finds the same file."""

    def __init__(self) -> None:
        #: by module: path and content of each file that was read
        self.sources: dict[str, tuple[Path, bytes]] = {}
        #: files whose module was already imported when `content` was last called for it
        self.imported: set[Path] = set()

    def content(self, name: str, path: Path) -> bytes | None:
        """Return the source of the module `name` in the file `path`.

        If this finder has already loaded the module, return the source that was loaded, else the source as it is now.
        Return None if the file cannot be read. Return None also if Python's own finder has imported the module, and the
        file was edited since.
        """
        known, module = self.sources.get(name), sys.modules.get(name)
        self.imported.discard(path)
        if module is not None and getattr(module, "__file__", None) == str(path):
            self.imported.add(path)
            if known is not None and known[0] == path:
                return known[1]
            if _is_edited_since_compiled(module, path):
                return None
        content = _content(path)
        if content is not None:
            self.sources[name] = path, content
        return content

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.sources:
            return None
        source, content = self.sources[fullname]
        if target is not None and (edited := _content(source)) is not None:
            # importlib.reload should read the file again.
            content = edited
            self.sources[fullname] = source, content
        found = PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None or Path(found.origin).absolute() != source:
            return None
        loader = _Loader(fullname, found.origin, content)
        folders = found.submodule_search_locations
        return spec_from_file_location(fullname, found.origin, loader=loader, submodule_search_locations=folders)


def _finder() -> _Finder:
    """Return this process's `_Finder`. If there is none yet, add one in front of Python's finder for files."""
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

    Folders that belong to installed libraries, such as ``site-packages`` in them, are left out.
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
    """Return the path of the source of module `name` in `folder`, or None if it is not there or not part of the study.

    `root` is the folder from which the study's module `study` is imported.
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
    """Yield the names of the modules that a source may import, each after its parent packages."""
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
    """Yield the modules that a star import of `package` may load: if it has ``__all__``, all modules in its folder."""
    base = folder.joinpath(*package.split("."))
    if b"__all__" in (_content(base / "__init__.py") or b""):
        yield from (f"{package}.{path.stem}" for path in sorted(base.glob("*.py")) if path.stem != "__init__")


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _is_edited_since_compiled(module: ModuleType, path: Path) -> bool:
    """Return whether a file was edited after Python imported it as `module`.

    Python's cached bytecode contains the time and size of the file that was compiled. Return False if this is not
    known: there is no cached bytecode, or another process has compiled the edited file.
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
    """Return a digest of a function's compiled code and of what it uses; "" if it is not written in Python."""
    parts = [*_parts(function, set())]
    return digest_of("\n".join(parts).encode("utf-8", "surrogatepass")) if parts else ""


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield texts that describe a value. Yield nothing for values that are left out, such as lists.

    `seen` has the ids of the objects that were already described.
    """
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple):
        yield from (part for each in value for part in _parts(each, seen))
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, functools.partial):
            yield from _parts((*used(value),), seen)
        elif isinstance(value, MethodType):
            yield from _parts((value.__func__, *_state(value.__self__, value.__func__)), seen)
        elif isinstance(value, FunctionType):
            is_ours = value.__globals__.get("__name__", "").partition(".")[0] == _OURS
            # If this package has wrapped a user's function, the user's function is described.
            wrapped = getattr(value, "__wrapped__", None) if is_ours else None
            yield from _of_function(value, seen) if wrapped is None else _parts(wrapped, seen)
        elif isinstance(value, type):
            methods = (each for _, each in sorted(vars(value).items()) if isinstance(each, FunctionType))
            yield from _parts((*methods,), seen)
        elif isinstance(called := getattr(type(value), "__call__", None), FunctionType):  # noqa: B004 -- of its type
            yield from _parts((called, *_state(value, called)), seen)


def _state(value: object, method: object) -> list[tuple[str, object]]:
    """Return names and values of an object's attributes, except those that its called `method` writes."""
    if isinstance(value, type):
        return []
    written = _written(method.__code__) if isinstance(method, FunctionType) else ()
    return sorted(each for each in getattr(value, "__dict__", {}).items() if each[0] not in written)


def _of_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    """Describe a function by its instructions, constants and names, without line numbers, and by what it uses."""
    for code in codes_in(function.__code__):
        yield code.co_code.hex()
        for constant in code.co_consts:
            if constant != function.__doc__ and not isinstance(constant, CodeType):
                # The order of a set of texts differs between processes.
                yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        yield " ".join(code.co_names)
    written = _written(function.__code__)
    for where, value in used(function):
        kind, _, name = where.partition(" ")
        # Functions of other modules are left out: those modules are libraries, or have versions of their own.
        is_own = isinstance(value, (*_PLAIN, tuple)) or getattr(value, "__module__", None) == function.__module__
        if name not in written and (is_own or kind != "global"):
            yield from _parts(value, seen)


def used(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the objects that a function uses, each after a text such as "global data" that says where."""
    if isinstance(value, functools.partial):
        yield "function", value.func
        arguments = [*enumerate(value.args), *sorted(value.keywords.items())]
        yield from ((f"argument {name}", each) for name, each in arguments)
    elif isinstance(value, MethodType):
        yield "object", value.__self__
    elif isinstance(value, FunctionType):
        names = dict.fromkeys(name for code in codes_in(value.__code__) for name in code.co_names)
        yield from ((f"global {name}", value.__globals__[name]) for name in names if name in value.__globals__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            # The cell of a variable is empty until it is assigned, as for a function that is defined further down.
            with suppress(ValueError):
                yield f"variable {name}", cell.cell_contents
        defaults = [*enumerate(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
        yield from ((f"default {name}", each) for name, each in defaults)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield compiled code, and that of the functions and classes that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the bytecode instructions of all `codes_in` compiled code."""
    return (each for code in codes_in(code) for each in dis.get_instructions(code))


def _written(code: CodeType) -> set[str]:
    """Return the names of outer variables and attributes that a function writes, such as a counter of its calls."""
    return {str(each.argval) for each in instructions(code) if each.opname in _WRITES}
