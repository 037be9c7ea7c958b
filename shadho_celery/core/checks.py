"""Validation of input from outside against declared records, and texts that are safe to show in messages."""

from __future__ import annotations

import inspect
import json
import math
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar, get_type_hints
from urllib.parse import unquote

import msgspec

from shadho_celery.core.names import elsewhere
from shadho_celery.errors import UsageError

R = TypeVar("R")

# The encoder is created at import, because an objective may replace json.dumps.
_to_json = json.JSONEncoder().encode

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 200

#: characters that may control a terminal or are invisible: control characters except tab and line feed, direction
#: marks, unpaired surrogates and the like. Zero-width joiners are left out, because some scripts and emojis need them
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)

#: maximum nesting of plain values; no record is nested more deeply
_LEVELS = 8

#: beginning of a URL; beginning of an SQLite URL, which has no password but may have any file name
_SCHEME, _FILE = re.compile(r"(?:[\w+.-]+:/+)?"), re.compile(r"sqlite[^:/]*:///")
#: beginning of a URL whose user may be a token
_TOKEN = re.compile(r"https?://", re.IGNORECASE)
#: name of a password in a URL's query; any name with a percent sign matches, because its letters may be encoded
_SECRET = re.compile(r"[?&;][^?&;=]*(?:pass|pwd|secret|%)[^?&;=]*=", re.IGNORECASE)

#: format of msgspec's messages: the problem, then the path of the field
_WHERE = re.compile(r"(?P<what>.*?)(?: - at (?P<is_key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_KEY = re.compile(r"Object (?P<how>missing required|contains unknown) field `(?P<key>.*)`", re.DOTALL)
_BOUND = re.compile(r"Expected `\w+` (?P<sign>[<>]=?) (?P<bound>\S+)")
_LENGTH = re.compile(r"Expected `\w+` of length (?P<sign>[<>]=?) (?P<bound>\d+)")
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_KINDS = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list", dict: "a table"}


def printable(text: str) -> str:
    """Return a text that cannot control a terminal: control and format characters are escaped as in Python.

    Line feeds and tabs are kept. Use this for all text that is sent to a terminal or a log, because a stranger may have
    written it.
    """
    return text if text.isprintable() else _UNPRINTABLE.sub(_escape, text)


def printable_json(text: str) -> str:
    """Return JSON text with the same values in which characters that may control a terminal are escaped."""
    return text if text.isprintable() else _UNPRINTABLE.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def unbroken(text: str) -> str:
    """Return a text as `printable` does, but also with escaped line feeds, which labels and values may have."""
    return printable(text).replace("\n", "\\n")


def one_line(text: object, most: int = 200) -> str:
    """Return `text` as one printable line of at most `most` characters. A longer line is cut and ends with dots."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= most else line[: most - 3] + "..."


def mask(url: str) -> str:
    """Return a URL, or several joined by semicolons, with asterisks in place of passwords.

    A password may contain any character. Therefore everything that may belong to a password is hidden: from the first
    colon after the scheme to the last @, with HTTP also the user, and everything after ``?password=``.
    """
    for start, end in reversed(_passwords(url)):
        url = f"{url[:start]}***{url[end:]}"
    return url


def mask_in(text: str, url: str) -> str:
    """Return a text about a URL, such as a driver's error, with asterisks in place of the URL's passwords."""
    hidden = " ".join(url[start:end] for start, end in _passwords(url))
    words = "|".join({*re.findall(r"\w+", f"{hidden} {unquote(hidden)}")})
    return re.sub(rf"(?<!\w)(?:{words})(?!\w)", "***", text, flags=re.IGNORECASE) if words else text


def _passwords(url: str) -> list[tuple[int, int]]:
    """Return the parts of a URL that may belong to a password, each as its start and end."""
    if _FILE.match(url):
        return []
    scheme, token = _SCHEME.match(url), _TOKEN.match(url)
    colon = token.end() - 1 if token else url.find(":", scheme.end() if scheme else 0)
    at, secret = url.rfind("@"), _SECRET.search(url)
    if secret and secret.start() < at:
        # Either the @ belongs to the password in the query, or ``?password=`` belongs to a password before the @.
        return [(min(colon + 1 or secret.end(), secret.end()), len(url))]
    found = [(colon + 1, at)] if 0 <= colon < at else []
    return [*found, (secret.end(), len(url))] if secret else found


def short(value: object, most: int = 200) -> str:
    """Return about `most` characters of a value's repr, or of an exception's message, in one line. Never raises."""
    try:
        text = printable(" ".join((str(value) if isinstance(value, BaseException) else _repr.repr(value)).split()))
    except Exception:
        text = f"<unprintable {type(value).__name__}>"
    return text if len(text) <= most else text[:most] + "..."


def listed(texts: Sequence[object], most: int) -> str:
    """Return the first `most` texts, joined by commas, and the number of further texts."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(map(str, texts[:most]))}{more}"


def line_of(error: BaseException, path: str) -> str:
    """Return the line of the file at `path` that led to `error`; "" if there is none, as for a SyntaxError."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" ({path}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def plain(value: object, levels: int = _LEVELS) -> object:
    """Convert numbers and keys of types that msgspec refuses, such as numpy's, to Python's own types.

    A value that is nested deeper than `levels` becomes None.
    """
    if levels == 0:
        return None
    if isinstance(value, Mapping):
        return {_plain_key(key): plain(each, levels - 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, levels - 1) for each in value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except Exception:  # a Fraction may be too large for a float; a user's class may raise anything
        return value


def is_shallow(value: object, levels: int) -> bool:
    """Return whether dicts and lists in a value are nested at most `levels` deep."""
    if not isinstance(value, (dict, list)):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(each, levels - 1) for each in inside)


def _plain_key(key: object) -> object:
    """Convert a key of a subclass of str, such as numpy's, to a plain str, with unpaired surrogates escaped."""
    return str.encode(key, errors="backslashreplace").decode() if isinstance(key, str) else key


def guess(name: object, known: Collection[str]) -> str:
    """Return a hint for an unknown name: what this package calls the `name` of another tool, else that of `similar`."""
    here = elsewhere(name, known) if isinstance(name, str) else ""
    return f"here it is {here}; " if here else similar(name, known)


def unknown(how: object, known: Collection[str], others: Collection[str], are: str) -> str:
    """Return an error text for `how`, which is not a `known` name.

    `others` are valid names of another setting, and `are` is the text that follows such a name in the error.
    """
    if here := elsewhere(str(how), known):
        return f"write {here} for {short(how, 60)}"
    return f"{short(how, 60)} {are}" if elsewhere(str(how), others) else f"there is no {short(how, 60)}"


def similar(name: object, known: Iterable[str]) -> str:
    """Return the question whether the most similar known name was meant, and a space; "" if none is similar."""
    near = get_close_matches(name, known, n=1) if isinstance(name, str) else []
    return f"did you mean {near[0]}? " if near else ""


def check_name(kind: str, name: object, known: Collection[str]) -> None:
    """Raise UsageError unless `name` is one of the `known` names of its `kind`."""
    if not isinstance(name, str) or name not in known:
        raise UsageError(f"there is no {kind} {short(name)}; {guess(name, known)}choose one of {', '.join(known)}")


def check_whole(least: float = -math.inf, most: float = math.inf, *, other: str = "", **values: object) -> None:
    """Raise UsageError for a value that is not a whole number from `least` to `most`. None is always allowed.

    `other` is a text for the message that says what else the value may be.
    """
    bounds = "" if least == -math.inf else f" from {least} " + ("up" if most == math.inf else f"to {most}")
    for name, value in values.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_whole and least <= value <= most):  # type: ignore[operator]
            raise UsageError(f"{name} is {value!r}; give a whole number{bounds}{other and f', {other}'}")


def check_seconds(**values: float | None) -> None:
    """Raise UsageError for seconds that are not above 0, or too large for timers. None is always allowed."""
    for name, seconds in values.items():
        if seconds is not None and not 0 < seconds < 1e9:
            raise UsageError(f"{name} is {seconds!r}; give a number of seconds above 0 and below 1e9")


def resolve(*kinds: Any) -> None:
    """Make msgspec resolve the types of records, or of unions of records, when their module is imported.

    Otherwise msgspec resolves them at the first decoding, and stores the type information before it is complete. If
    another thread decoded a record of the same type at that moment, the process would crash (SIGSEGV).
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)


def encoded(record: object) -> bytes:
    """Return a record as JSON, which functions that `decoder` returns can read.

    msgspec takes a tenth of the time of Python's encoder, but writes null for NaN and infinite numbers, and refuses
    unpaired surrogates. Therefore Python's encoder is used if msgspec writes a null or refuses the text.
    """
    with suppress(UnicodeEncodeError):
        text = msgspec.json.encode(record)
        if b"null" not in text:
            return text
    return _to_json(msgspec.to_builtins(record)).encode()


def decoder(kind: Any) -> Callable[[str | bytes], Any]:
    """Return a function that decodes JSON to a record of `kind`, which may be a union. This also resolves the type.

    msgspec does not read NaN, infinite numbers and unpaired surrogates, which Python writes. Such a text is read by
    Python's decoder, which takes three times as long. The function raises ValueError (msgspec's errors are ValueErrors)
    and RecursionError.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(text: str | bytes) -> Any:
        try:
            return decode(text)
        except msgspec.DecodeError:
            return msgspec.convert(json.loads(text), kind)

    return read


def as_record(value: object, kind: type[R], where: str = "", form: str = "") -> R:
    """Convert plain values to a declared record.

    Raises UsageError if they do not fit. Its message has the invalid key, prefixed with `where`; the problem; the
    description of the field; and the remedy `form`.
    """
    try:
        return msgspec.convert(plain(value), kind)
    except msgspec.ValidationError as error:
        key, what = misfit(error, value, kind)
        name = ".".join(part for part in (where, key) if part)
        raise UsageError(f"{name}: {'; '.join(filter(None, (what, description(kind, key), form)))}") from None


def description(kind: type[object], key: str) -> str:
    """Return the description of the field `key` of a record, or of the field that contains `key`; "" if it has none."""
    hint = get_type_hints(kind, include_extras=True).get(key.partition(".")[0]) if key else None
    return next((meta.description for meta in getattr(hint, "__metadata__", ()) if meta.description), "")


def misfit_at(key: str, what: str) -> ValueError:
    """Return the exception that a record raises for an invalid field `key`, with a message in msgspec's format."""
    return ValueError(f"{what} - at `$.{key}`")


def misfit(error: msgspec.ValidationError, value: object, kind: type[object]) -> tuple[str, str]:
    """Return the key in `value` that msgspec has refused, and a readable description of the problem.

    The key is "" if msgspec has refused the whole value.
    """
    found = _WHERE.fullmatch(str(error))
    what, path = (found["what"], found["path"] or "") if found else (str(error), "")
    keys = [part for part in re.split(r"[.\[\]]+", path) if part]
    if missing := _KEY.fullmatch(what):
        words = "it is missing" if missing["how"] == "missing required" else _no_such_key(kind, missing["key"])
        return ".".join([*keys, missing["key"]]), words
    for key in keys:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and key.isdecimal():
            value = value[int(key)]
    if found and found["is_key"] and isinstance(value, Mapping):
        wrong = next((short(key, 60) for key in value if not isinstance(key, str)), None)
        if not keys:
            return wrong or "", _no_such_key(kind)
        given = ", ".join(short(key, 60) for key in value)
        return ".".join(keys), f"the key {wrong} is not a text" if wrong else f"not allowed as a key: {given}"
    return ".".join(keys), _in_words(what, value)


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Return whether `function` can be called with `count` positional arguments; True if that is not known."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # A function written in C has no signature.
        return True
    return True


def _no_such_key(kind: type[object], key: object = None) -> str:
    tag = kind.__struct_config__.tag_field  # type: ignore[attr-defined]
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]  # type: ignore[arg-type]
    known = [*filter(None, (tag, *fields))]
    return f"there is no such key; {guess(key, known)}known are {', '.join(known)}"


def _in_words(what: str, value: object) -> str:
    if isinstance(value, int) and 2**64 < abs(value) <= sys.float_info.max:
        value = float(value)  # 1e300 rather than its 301 digits
    shown = short(value, 60)
    if isinstance(value, float) and not math.isfinite(value) and what.startswith("Expected `float"):
        return f"{shown} is not a finite number"
    if bound := _BOUND.fullmatch(what):
        return f"{shown} is not allowed; it must be {_BOUNDS[bound['sign']]} {float(bound['bound']):g}"
    if length := _LENGTH.fullmatch(what):
        return f"{shown} is not allowed; its length must be {_BOUNDS[length['sign']]} {length['bound']}"
    kind = _KINDS.get(type(value), type(value).__name__)
    for wanted, noun in (("object", "table"), ("array", "list")):
        # msgspec's path does not name the keys of a dict, so `value` may also be the dict that has the wrong value.
        if what.startswith(f"Expected `{wanted}") and kind != f"a {noun}":
            return f"this is not a {noun} but {kind}"
    if what.startswith("Expected `int"):
        return f"{shown} is not a whole number"
    if isinstance(value, int) and what == "Number out of range":
        return f"{shown} is more than a float can hold"
    if what.startswith("Expected `float"):
        return f"{shown} is not a number"
    return f"{shown} is not allowed; {what[:1].lower()}{what[1:]}"
