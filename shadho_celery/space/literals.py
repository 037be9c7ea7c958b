"""Texts of constants: the same in every process, and different if text, name or plain attributes differ."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import linecache
import re
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: function that returns the text of a part of a value
_Text = Callable[[object], str]

#: bits of an int above which Python may refuse to write it in decimal
LONG_INT = 14_000
#: depth of nesting in a value from which on only type names are given
MAX_LEVELS = 20
#: kinds of arrays whose values are their bytes
_PLAIN = "biufcmMSU"
#: quoted texts within a repr
_QUOTED = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""")
#: makes a repr depend on the process: an address, the order of a set, lines that depend on the terminal's width. Braces
#: are a set unless they are empty or begin with a plain key and a colon: members such as <Kind.A: 1> have colons too.
_VARYING = re.compile(r"0x[0-9a-fA-F]{5,}|\{(?!\}|[^:{}()<>\[\],]+:)|\n|\A<|\A\Z")


def digest(content: str | bytes) -> str:
    """Return the digest of a text: twelve hexadecimal digits."""
    encoded = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    return hashlib.sha256(encoded).hexdigest()[:12]


def literal_text(value: object, levels: int = MAX_LEVELS) -> str:
    """Return a constant's text: type and value, or only the type if it has no name, text or plain attributes."""
    if levels == 0:
        return _object(value)
    try:
        return _text(value, lambda part: literal_text(part, levels - 1))
    except Exception:  # a class of the user may raise anything
        return _object(value)


def _text(value: object, text: _Text) -> str:
    match value:
        case Enum():
            # A combination of flags has no name before Python 3.11.
            return f"{type(value).__qualname__}.{value.name}" if value.name else f"{_name(type(value))}({value.value})"
        case np.generic() | np.ndarray() | np.ufunc():
            return _of_numpy(value, text)
        case dict() | set() | frozenset() | tuple() | list():
            return _container(value, text)
        case None | bool() | int() | float() | complex() | str() | bytes():
            return _scalar(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _record(value, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, text)
    # list[int] has the name of list
    return _other(value) if hasattr(value, "__args__") else _named(value, text)


def _scalar(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > LONG_INT:
        return hex(value)
    kind: Any = next(kind for kind in (type(None), bool, int, float, complex, str, bytes) if isinstance(value, kind))
    return _of_kind(value, kind, kind.__repr__(value))


def _of_numpy(value: np.generic | NDArray[Any] | np.ufunc, text: _Text) -> str:
    match value:
        case np.generic():
            item = value.item()
            return f"numpy.{value.dtype.name}({repr(value) if isinstance(item, np.generic) else text(item)})"
        case np.ndarray():
            kind = "array" if type(value) is np.ndarray else _name(type(value))
            content = value.tobytes() if value.dtype.kind in _PLAIN else text(value.tolist())
            return f"{kind}({value.dtype}, {value.shape}, {digest(content)})"
    return f"numpy.{value.__name__}"


def _container(value: object, text: _Text) -> str:
    match value:
        case dict():
            pairs = ", ".join(f"{text(key)}: {text(item)}" for key, item in value.items())
            return _of_kind(value, dict, f"{{{pairs}}}")
        case set() | frozenset():
            return _of_kind(value, set, f"{{{', '.join(sorted(map(text, value)))}}}" if value else "{,}")
        case list():
            return _of_kind(value, list, f"[{', '.join(map(text, value))}]")
        case tuple() if hasattr(value, "_fields"):
            return _record(value, dict(zip(value._fields, value, strict=True)), text)
        case tuple():
            return _of_kind(value, tuple, f"({', '.join(map(text, value))}{',' if len(value) == 1 else ''})")
    raise TypeError(f"{type(value).__name__} is not a container")


def _record(value: object, fields: Mapping[str, object], text: _Text) -> str:
    return f"{type(value).__qualname__}({', '.join(f'{name}={text(item)}' for name, item in fields.items())})"


def _of_kind(value: object, kind: type, text: str) -> str:
    """Return the text of a container, with its type's name unless that is a built-in type."""
    return text if type(value) is kind else f"{_name(type(value))}({text})"


def _named(value: object, text: _Text) -> str:
    """Return the text of a value that has a name, or consists of such values; see `_function`."""
    match value:
        case partial():
            named = [f"{key}={text(argument)}" for key, argument in sorted(value.keywords.items())]
            return f"{_name(type(value))}({', '.join([*map(text, (value.func, *value.args)), *named])})"
        case ModuleType():
            return f"module {value.__name__}"
        case type():
            return _name(value)
    return _function(value, text) if callable(value) and hasattr(value, "__qualname__") else _other(value)


def _function(value: Callable[..., object], text: _Text) -> str:
    """Return a function's name. If another function made it, or it has no name, the captured values are added."""
    name = _name(value)
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        return f"{name} of {text(owner)}"
    function = inspect.unwrap(value)
    if not isinstance(function, FunctionType) or "<" not in function.__qualname__:
        return name
    given = {**(function.__kwdefaults__ or {}), **inspect.getclosurevars(function).nonlocals}
    parts = [*map(text, function.__defaults__ or ()), *(f"{key}={text(item)}" for key, item in sorted(given.items()))]
    code = function.__code__
    if code.co_name == "<lambda>":
        parts.insert(0, digest(f"{code.co_varnames[: code.co_argcount]} {_body(code)}"))
    return f"{name}({', '.join(parts)})"


def _body(code: CodeType) -> str:
    """Return a lambda's body from its source, or the whole line in Python 3.10; its byte code if there is no source.

    The byte code is the last resort, because it differs between Python versions.
    """
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:
        return f"{code.co_code.hex()} {code.co_names} {list(map(literal_text, code.co_consts))}"
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return lines[0].strip()
    # A node without a position is not part of the source.
    spans = [span for span in positions() if None not in span and span[::2] != span[1::2]]
    start = min((first, column) for first, _, column, _ in spans)
    end = max((last, column) for _, last, _, column in spans)
    encoded = [line.encode() for line in lines[start[0] - code.co_firstlineno : end[0] - code.co_firstlineno + 1]]
    encoded[-1] = encoded[-1][: end[1]]
    encoded[0] = encoded[0][start[1] :]
    return " ".join(b"".join(encoded).decode().split())


def _other(value: object) -> str:
    """Return an object's repr, with its type's name in front unless it begins with it; else its name and attributes."""
    kind = type(value)
    text = repr(value) if kind.__repr__ is not object.__repr__ else ""
    lines = text.split("\n")
    if text.startswith(f"{kind.__name__}(") and text.endswith(")"):
        # The lines of a call, such as those of a torch module, do not depend on the terminal.
        text = " ".join(line.strip() for line in lines)
    if _VARYING.search(_QUOTED.sub("''", text)):
        return _attributes(value) or _object(value)
    if len(lines) > 1 and "..." in text:
        # scikit-learn and XGBoost leave out the middle of a long repr.
        text = f"{text} {_attributes(value)}"
    begins = text.startswith((f"{kind.__name__}(", f"{kind.__module__.partition('.')[0]}."))
    return text if begins else f"{_name(kind)}: {text}"


def _attributes(value: object) -> str:
    """Return an object's name with those of its public attributes that are plain, or "" if there are none.

    Other attributes, such as a network's weights, may differ by process.
    """
    found = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    named = [f"{name}={literal_text(item)}" for name, item in sorted(found.items()) if _is_plain(item)]
    return f"{_name(type(value))}({', '.join(named)})" if named else ""


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, Enum, type))


def _object(value: object) -> str:
    return f"{_name(type(value))} object"


def _name(named: object) -> str:
    return f"{getattr(named, '__module__', None)}.{getattr(named, '__qualname__', None)}"
