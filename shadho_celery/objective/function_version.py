"""Version of a function that runs in the process that defines it: what it would compute, as far as that can be read.

A study file has the digests of its sources. A function may be one of a script or a notebook, whose text changes with
each run, so that its compiled code decides, with the functions and the plain values of its own module that it names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from shadho_celery.core.code import Digest, digest_of

#: values whose text says all of them
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def function_version(function: Callable[..., Any]) -> Digest:
    """Return the digest of a function's compiled code; "" for one that is not written in Python."""
    parts = [*_parts(function, set())]
    return digest_of("\n".join(parts).encode("utf-8", "surrogatepass")) if parts else ""


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield what makes a value what it is; nothing of one that cannot be told from others."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, (tuple, list)):
        yield from (part for each in value for part in _parts(each, seen))
    elif id(value) in seen:
        return
    else:
        seen.add(id(value))
        if isinstance(value, functools.partial):
            yield from _parts((value.func, value.args, sorted(value.keywords.items())), seen)
        elif isinstance(value, MethodType):
            yield from _parts((value.__func__, _state(value.__self__)), seen)
        elif isinstance(value, FunctionType):
            yield from _of_function(value, seen)
        elif isinstance(value, type):
            yield from _parts([each for _, each in sorted(vars(value).items()) if isinstance(each, FunctionType)], seen)
        elif isinstance(called := getattr(type(value), "__call__", None), FunctionType):  # noqa: B004 -- of its type
            yield from _parts((called, _state(value)), seen)


def _state(value: object) -> list[tuple[str, object]]:
    """Return the attributes of an object whose method is called."""
    return sorted(getattr(value, "__dict__", {}).items()) if not isinstance(value, type) else []


def _of_function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    yield from _of_code(function.__code__, function.__doc__)
    yield from _parts((function.__defaults__, sorted((function.__kwdefaults__ or {}).items())), seen)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, seen)
    for name in _names(function.__code__):
        found = function.__globals__.get(name)
        # Other modules are libraries, or told by their own versions.
        if isinstance(found, (*_PLAIN, tuple, list)) or getattr(found, "__module__", None) == function.__module__:
            yield from _parts(found, seen)


def _of_code(code: CodeType, documentation: str | None = None) -> Iterator[str]:
    """Yield the instructions and constants of code, without its name, its place in a file, and its docstring."""
    yield code.co_code.hex()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
        elif documentation is None or constant != documentation:
            # A set of texts has another order in each process.
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
    yield " ".join(code.co_names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
