"""Checks of what comes from outside: names, and plain values that must be a declared record; and words for messages."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

import msgspec

from shadho_celery.errors import UsageError

R = TypeVar("R")

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 200

#: how msgspec says what is wrong, and where
_WHERE = re.compile(r"(?P<what>.*?)(?: - at (?P<is_key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_KEY = re.compile(r"Object (?P<how>missing required|contains unknown) field `(?P<key>.*)`", re.DOTALL)
_BOUND = re.compile(r"Expected `\w+` (?P<sign>[<>]=?) (?P<bound>\S+)")
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_KINDS = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list", dict: "a table"}


def one_line(text: object, most: int = 200) -> str:
    """Return `text` in one line of at most so many characters."""
    return " ".join(str(text).split())[:most]


def short(value: object, most: int = 200) -> str:
    """Return at most about `most` characters of a value's repr, or of an error's message, in one line; never raises."""
    try:
        text = " ".join((str(value) if isinstance(value, BaseException) else _repr.repr(value)).split())
    except Exception:
        text = f"<unprintable {type(value).__name__}>"
    return text if len(text) <= most else text[:most] + "..."


def plain(value: object) -> object:
    """Return a value with Python's own numbers in place of others, such as numpy's, which msgspec refuses."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Raise UsageError for the `name` of a `kind` that is not among the `known` ones."""
    if name not in known:
        raise UsageError(f"there is no {kind} {name!r}; choose one of {', '.join(known)}")


def resolve(*kinds: Any) -> None:
    """Resolve the types of records, or of unions of them, when their module is imported, and not when one is decoded.

    msgspec otherwise does so at the first decoding, and keeps the answer before it is complete: another thread that
    decodes a record of the same type at that moment crashes the process (SIGSEGV).
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)


def as_record(value: object, kind: type[R], where: str = "", form: str = "") -> R:
    """Return plain values as a declared record.

    Raises UsageError, naming the key under `where`, what is wrong with it, and `form`, what would be right.
    """
    try:
        return msgspec.convert(plain(value), kind)
    except msgspec.ValidationError as error:
        key, what = misfit(error, value, kind)
        name = ".".join(part for part in (where, key) if part)
        raise UsageError(f"{name}: {what}{form and '; '}{form}") from None


def misfit_at(key: str, what: str) -> ValueError:
    """Return the error of a record whose fields do not fit together: the one called `key` is wrong."""
    return ValueError(f"{what} - at `$.{key}`")


def misfit(error: msgspec.ValidationError, value: object, kind: type[object]) -> tuple[str, str]:
    """Return the key that msgspec found wrong in `value`, "" for all of it, and what is wrong with it, in words."""
    found = _WHERE.fullmatch(str(error))
    what, path = (found["what"], found["path"] or "") if found else (str(error), "")
    keys = [part for part in re.split(r"[.\[\]]+", path) if part]
    if missing := _KEY.fullmatch(what):
        words = "it is missing" if missing["how"] == "missing required" else _no_such_key(kind)
        return ".".join([*keys, missing["key"]]), words
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)]
    if found and found["is_key"] and isinstance(value, Mapping):
        wrong = next(key for key in value if not isinstance(key, str))
        return ".".join([*keys, short(wrong, 60)]), _no_such_key(kind)
    return ".".join(keys), _in_words(what, value)


def _no_such_key(kind: type[object]) -> str:
    known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))  # type: ignore[arg-type]
    return f"there is no such key; known are {known}"


def _in_words(what: str, value: object) -> str:
    shown = short(value, 60)
    if bound := _BOUND.fullmatch(what):
        return f"{shown} will not do; it must be {_BOUNDS[bound['sign']]} {float(bound['bound']):g}"
    for wanted, noun in (("object", "table"), ("array", "list")):
        if what.startswith(f"Expected `{wanted}"):
            return f"this is no {noun} but {_KINDS.get(type(value), type(value).__name__)}"
    if what.startswith("Expected `int"):
        return f"{shown} is no whole number"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{shown} is more than a float can hold"
    if what.startswith(("Expected `float", "Number out of range")):
        return f"{shown} is no number"
    return f"{shown} will not do; {what[:1].lower()}{what[1:]}"
