"""Version of an objective that runs in the process that defines it: a digest that changes when its code changes.

For a study file, the version is the digest of its sources. A function may be in a script or a notebook, whose text
changes with each run. Its version therefore depends on its compiled code, and on the functions and plain values of its
own module that it uses. Lists, and variables that the function itself writes, are not included, because they may
collect results.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any

from shadho_celery.core.code import Digest, digest_of

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
    for name in _names(function.__code__):
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


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _written(code: CodeType) -> set[str]:
    """Return the outer variables and attributes that a function writes, such as a counter of its calls."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in _WRITES}
    return found.union(*(_written(constant) for constant in code.co_consts if isinstance(constant, CodeType)))
