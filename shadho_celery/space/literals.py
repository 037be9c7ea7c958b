"""Texts of constants, which are the same in every process.

The text of a function or a class is its name. The text of another object is its repr, unless the repr depends on the
process; then it is the name of the type. So two lambdas, or two objects without a repr of their own, may have the same
text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

#: function that returns the text of an item of a value
_Text = Callable[[object], str]

#: number of bits above which Python may refuse to convert an int to decimal text
LONG_INT = 14_000
#: maximum nesting of a value; deeper items are only represented by the names of their types
MAX_LEVELS = 20
#: types of constants whose repr is their text
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
#: dtype kinds of arrays whose bytes determine their values
_PLAIN = "biufcmMSU"
#: quoted texts within a repr
_QUOTED = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""")
#: signs that a repr depends on the process: an address, a set, whose order varies, or lines that depend on the
#: terminal's width. Braces count as a set unless they are empty or begin with a simple key and a colon, because members
#: such as <Kind.A: 1> have colons, too.
_VARYING = re.compile(r"0x[0-9a-fA-F]{5,}|\{(?!\}|[^:{}()<>\[\],]+:)|\n|\A<|\A\Z")


def digest(content: str | bytes) -> str:
    """Return the digest of a text: twelve hexadecimal digits."""
    encoded = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    return hashlib.sha256(encoded).hexdigest()[:12]


def literal_text(value: object, levels: int = MAX_LEVELS) -> str:
    """Return the text of a constant: its value or its name; if it has neither, the name of its type."""
    if levels == 0:
        return _object(value)
    try:
        return _text(value, lambda part: literal_text(part, levels - 1))
    except Exception:  # a class of the user may raise anything
        return _object(value)


def _text(value: Any, text: _Text) -> str:
    match value:
        case Enum():
            # Before Python 3.11, a combination of flags has no name.
            return f"{type(value).__qualname__}.{value.name or value.value}"
        case np.generic():
            item = value.item()
            return f"numpy.{value.dtype.name}({repr(value) if isinstance(item, np.generic) else text(item)})"
        case np.ndarray():
            kind = "array" if type(value) is np.ndarray else _name(type(value))
            content = value.tobytes() if value.dtype.kind in _PLAIN else text(value.tolist())
            return f"{kind}({value.dtype}, {value.shape}, {digest(content)})"
        case dict() | set() | frozenset() | list() | tuple():
            return _container(value, text)
        case partial():
            named = [f"{key}={text(argument)}" for key, argument in sorted(value.keywords.items())]
            return f"{_name(type(value))}({', '.join([*map(text, (value.func, *value.args)), *named])})"
        case int() if value.bit_length() > LONG_INT:
            return hex(value)
    # Generic aliases are excluded, because list[int] has the same name as list.
    if callable(value) and hasattr(value, "__name__") and not hasattr(value, "__args__"):
        return _name(value)
    return repr(value) if type(value) in _SCALARS else _other(value)


def _container(value: Any, text: _Text) -> str:
    match value:
        case dict():
            pairs = ", ".join(f"{text(key)}: {text(item)}" for key, item in value.items())
            return _of_kind(value, dict, f"{{{pairs}}}")
        case set() | frozenset():
            return _of_kind(value, set, f"{{{', '.join(sorted(map(text, value)))}}}" if value else "{,}")
        case list():
            return _of_kind(value, list, f"[{', '.join(map(text, value))}]")
    return _of_kind(value, tuple, f"({', '.join(map(text, value))}{',' if len(value) == 1 else ''})")


def _of_kind(value: object, kind: type, text: str) -> str:
    """Return the text of a container, with the name of its type unless it is the built-in type."""
    return text if type(value) is kind else f"{_name(type(value))}({text})"


def _other(value: object) -> str:
    """Return an object's repr, with the name of its type in front unless it begins with the name.

    If the repr depends on the process, return only the name.
    """
    kind, text = type(value), repr(value)
    if text.startswith(f"{kind.__name__}(") and text.endswith(")"):
        # The lines of a repr that looks like a call, such as that of a torch module, do not depend on the terminal.
        text = " ".join(line.strip() for line in text.split("\n"))
    if _VARYING.search(_QUOTED.sub("''", text)):
        return _object(value)
    begins = text.startswith((f"{kind.__name__}(", f"{kind.__module__.partition('.')[0]}."))
    return text if begins else f"{_name(kind)}: {text}"


def _object(value: object) -> str:
    return f"{_name(type(value))} object"


def _name(named: object) -> str:
    name = getattr(named, "__qualname__", getattr(named, "__name__", None))
    # Objects such as a ufunc of scipy.special have no module.
    return f"{getattr(named, '__module__', None) or type(named).__module__}.{name}"
