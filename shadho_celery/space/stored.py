"""The forms in which a store keeps a search space, and the values that the objective of a trial gets.

The scheduler writes the labels of the space once, and the values of a trial when it draws the trial. Readers only
decode them and never evaluate an expression, because a store may come from a stranger.

Values are written as JSON. A value that JSON cannot represent is an object with one key. ``!tuple`` has the list of a
tuple's items. ``!float`` has the text of nan or an infinity. ``!dict`` has the pairs of a dict whose keys are not all
plain texts. ``!text`` has the text of any other value, such as a function, or of a value that is too long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct, convert, to_builtins

from shadho_celery.core.checks import short
from shadho_celery.core.trial import Params
from shadho_celery.space import tree
from shadho_celery.space.describe import (
    DRAWN,
    VERSION,
    brief,
    cut,
    is_storable,
    option_names,
    option_tags,
    option_text,
    outermost_calls,
    outline,
    unlike,
)
from shadho_celery.space.literals import MAX_LEVELS, literal_text
from shadho_celery.space.schema import Schema
from shadho_celery.space.space import Space
from shadho_celery.space.tree import Node, Value

#: maximum number of characters: of a text among the values; of a constant; of all values of a trial; and of a trial's
#: record that is read. A number counts as NUMBER characters
MAX_STRING, MAX_CONSTANT, MAX_VALUES, LONGEST, NUMBER = 2_000, 10_000, 200_000, 1_000_000, 20
#: maximum number of pairs of a dict whose keys are not texts, because an attacker could choose numbers with colliding
#: hashes
MAX_PAIRS = 1_000
_TUPLE, _FLOAT, _DICT, _TEXT = "!tuple", "!float", "!dict", "!text"
#: exceptions that the reading of a record may raise
_UNREADABLE = (ValueError, TypeError, RecursionError, msgspec.MsgspecError)

#: a constant that JSON can represent
Scalar = bool | int | float | Annotated[str, Meta(max_length=MAX_STRING)] | None


class Shown(str):
    """Text that is shown instead of a value that cannot be restored from a store, such as a function. Its repr is the
    text.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Label(Struct, frozen=True, kw_only=True):
    """A stored label: its distribution, and for a choice the forms in which its options are shown."""

    #: hyperopt's name of the distribution, and its parameters by name
    law: str
    parameters: dict[str, Any]
    #: alternatives under which it is active, each a list of pairs of a choice's label and an option's index; ``[[]]``
    #: means always
    conditions: list[list[tuple[str, int]]]
    #: True if the objective gets its draw as an int
    is_whole: bool = False
    #: options of a choice by index, as tables show them: the constant itself, or a text; None for other labels
    options: list[Scalar] | None = None
    #: options of a choice as charts show them: as in tables, but tuples and dicts in the form of `brief`
    outlines: list[Scalar] | None = None
    #: options of a choice as the objective gets them: a constant, in the form of values, or the name of an option with
    #: labels
    constants: list[Any] | None = None

    def shown(self, drawn: Any) -> Any:
        """Return a draw as tables show it."""
        return self._of(self.options, drawn)

    def outlined(self, drawn: Any) -> Any:
        """Return a draw as charts show it."""
        return self._of(self.outlines, drawn)

    def given(self, drawn: Any) -> tuple[Value, bool]:
        """Return a draw as the objective got it, and True; if the value could only be stored as a text, the text and
        False.
        """
        return _decoded(self._of(self.constants, drawn))

    def _of(self, options: list[Any] | None, drawn: Any) -> Any:
        if options is not None:
            return options[drawn] if isinstance(drawn, int) and 0 <= drawn < len(options) else drawn
        return int(drawn) if self.is_whole and isinstance(drawn, float) and math.isfinite(drawn) else drawn


class StoredSpace(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The labels of a space, and the version of this form and of the texts that describe it (`describe.VERSION`)."""

    labels: dict[str, Label]
    version: int = 0
    #: the schema from which the space was made; None for a space that a user has declared
    schema: Schema | None = None


def to_json(space: Space, schema: Schema | None = None) -> dict[str, Any]:
    """Return the stored form of a space, and of its schema if it has one, as values that JSON can represent."""
    labels = {}
    for label, domain in space.domains.items():
        switch = space.switches.get(label)
        labels[label] = Label(
            law=domain.law,
            parameters={field.name: getattr(domain, field.name) for field in fields(domain)},
            conditions=[list(chain) for chain in space.conditions[label]],
            is_whole=label in space.whole,
            options=shown_options(label, switch)[0] if switch else None,
            outlines=_outlines(label, switch) if switch else None,
            constants=_constants(label, switch) if switch else None,
        )
    found: dict[str, Any] = to_builtins(StoredSpace(labels=labels, version=VERSION, schema=schema))
    return found


def read_labels(stored: Mapping[str, Any] | None) -> Mapping[str, Label]:
    """Return the labels of a stored space; {} if it was not stored, or cannot be read."""
    try:
        return {} if stored is None else convert(stored, StoredSpace).labels
    except _UNREADABLE:
        return {}


def read_schema(stored: Mapping[str, Any] | None) -> Schema | None:
    """Return the schema of a recorded space, or None if the space was declared, or cannot be read."""
    try:
        return None if stored is None else convert(stored, StoredSpace).schema
    except _UNREADABLE:
        return None


class _Values(Struct):
    values: Any


class _Shown(Struct):
    #: by label: the value of its only expression, if it differs from `Label.shown`
    shown: dict[str, Any] = {}


_encode = msgspec.json.Encoder().encode
_as_values, _as_shown = msgspec.json.Decoder(_Values).decode, msgspec.json.Decoder(_Shown).decode


def read_given(text: str | None, params: Params) -> tuple[Value, bool]:
    """Return the values in a trial's record, and True if all of them are real values; False if some are only texts.

    Without a record, the values are the `params`.
    """
    if text is None:
        return dict(params), True
    try:
        return _decoded(_as_values(text if len(text) <= LONGEST else "").values)
    except _UNREADABLE:
        return Shown("(values that cannot be read)"), False


def read_shown(text: str | None) -> dict[str, Any]:
    """Return by label the values in a trial's record that tables show instead of those of `Label.shown`."""
    try:
        found = {} if text is None or len(text) > LONGEST else _as_shown(text).shown
        return {label: _decoded(value)[0] for label, value in found.items()}
    except _UNREADABLE:
        return {}


def record_values(schema: Schema, params: Params) -> str | None:
    """Return the record of the values that an objective gets by label, or None if they are the params."""
    values = schema.read_values(params)
    return None if values == params else _encode({"values": _Writer(MAX_VALUES).of(values)}).decode()


class ValuesRecord:
    """Makes the records of the values that objectives of a space get.

    The functions of the space are called in the same way as for the objective.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        order = [*tree.nodes(space.root)]
        arguments: set[Node] = set()
        for node in reversed(order):
            if isinstance(node, tree.Call) or node in arguments:
                arguments.update(tree.children(node))
        constants = {node: node.value for node in order if isinstance(node, tree.Literal)}
        #: by id: constants that need not be copied in an evaluation, because no function gets them
        self._uncopied = {id(value): value for node, value in constants.items() if node not in arguments}
        #: by id of a constant: its stored form
        self._written = {
            id(value): _Writer(MAX_CONSTANT).of(value) for value in constants.values() if not _fits_json(value)
        }
        #: True if the space has a random function, which would draw other values here than for the objective
        self._is_random = any(isinstance(node, tree.Call) and "rng" in dict(node.kwargs) for node in order)
        calls = {label: {*each} for label, each in outermost_calls(space.root).items() if label not in space.switches}
        #: by label: its expression, if it has only one, which is more than a conversion by int() or float()
        self._calls = {
            label: call
            for label, each in calls.items()
            if len(each) == 1 and tree.converted(call := each.pop()) is None
        }

    def of(self, params: Params) -> str | None:
        """Return the record of the values for these params; None if the values are equal to the params."""
        if self._is_random:
            return _encode({"values": _text("(a random function of the space draws these values)")}).decode()
        writer = _Writer(MAX_VALUES, self._written)
        memo: tree.Memo = {tree.COPIES: {**self._uncopied}}
        try:
            values = _encode(writer.of(tree.evaluate(self._space.root, params, memo)))
        except Exception as error:  # a space may call any function
            values = _encode(_text(f"({type(error).__name__}: {short(error)})"))
        shown: dict[str, Any] = {}
        for label, call in self._calls.items():
            with suppress(Exception):
                drawn = int(params[label]) if label in self._space.whole else params[label]
                value = writer.of(tree.evaluate(call, params, memo))
                shown |= {label: value} if type(value) is not type(drawn) or value != drawn else {}
        if not shown and values == _encode(params):
            return None
        return _encode({"values": msgspec.Raw(values), **({"shown": shown} if shown else {})}).decode()


class _Writer:
    """Converts values to their stored form, of at most about `left` characters."""

    def __init__(self, left: int, written: Mapping[int, Any] | None = None) -> None:
        """`written` has the stored form of constants by id."""
        self._left = left
        self._written = written or {}

    def of(self, value: Value, levels: int = MAX_LEVELS) -> Any:
        """Return the stored form of a value, with at most `levels` levels of nesting."""
        value = value.item() if isinstance(value, np.generic) else value
        kind = type(value)
        self._left -= NUMBER
        if kind is float or kind is int or kind is bool or value is None:
            return value if _fits_json(value) else _odd(value)
        if (found := self._written.get(id(value))) is not None:
            return found
        if kind is str:
            self._left -= len(value)
            return value if len(value) <= MAX_STRING and self._left >= 0 and is_storable(value) else _text(value)
        if kind not in (tuple, list, dict):
            return _text(literal_text(value))
        if NUMBER * len(value) > self._left or not levels:
            return _text(DRAWN)
        if kind is not dict:
            items = [self.of(item, levels - 1) for item in value]
            return {_TUPLE: items} if kind is tuple else items
        pairs = [(key, self.of(item, levels - 1)) for key, item in value.items()]
        if all(type(key) is str and key[:1] != "!" for key in value):
            return dict(pairs)
        return {_DICT: [[self.of(key), item] for key, item in pairs]} if len(pairs) <= MAX_PAIRS else _text(DRAWN)


def _odd(number: float) -> Any:
    """Return the stored form of a number that JSON cannot represent."""
    return {_FLOAT: repr(number)} if isinstance(number, float) else _text(literal_text(number))


def _text(text: str) -> dict[str, str]:
    return {_TEXT: cut(text.encode("utf-8", "replace").decode())}


def _decoded(written: Any) -> tuple[Value, bool]:
    """Return the value of a stored form, and whether it is complete: False if a part of it is only a text."""
    texts: list[str] = []

    def value(found: Any, levels: int) -> Value:
        if levels == 0:
            raise ValueError("too many levels")
        match found:
            case list():
                return [value(each, levels - 1) for each in found]
            case {"!tuple": [*items]} if len(found) == 1:
                return tuple([value(each, levels - 1) for each in items])
            case {"!float": str(text)} if len(found) == 1:
                return float(text)
            case {"!dict": [*pairs]} if len(found) == 1 and len(pairs) <= MAX_PAIRS:
                return {value(key, levels - 1): value(each, levels - 1) for key, each in pairs}
            case {"!text": str(text)} if len(found) == 1:
                texts.append(text)
                return Shown(text)
            case dict():
                if len(found) == 1 and next(iter(found))[:1] == "!":
                    raise ValueError("an unknown mark")
                return {key: value(each, levels - 1) for key, each in found.items()}
        return found

    return value(written, 5 * MAX_LEVELS), not texts


def shown_options(label: str, switch: tree.Switch) -> tuple[list[Any], list[int]]:
    """Return the options of a choice as tables show them: constants, tags or texts; and the places of options with
    equal texts.

    See `unlike`.
    """
    found: list[Any] = []
    for option, tag in zip(switch.options, option_tags(label, switch.options), strict=True):
        plain = tree.unshared(option)
        value = plain.value if isinstance(plain, tree.Literal) else None
        value = value.item() if isinstance(value, np.generic) else value
        is_constant = _is_constant(option)
        if isinstance(plain, tree.Literal) and _fits_json(value):
            found.append(cut(value) if isinstance(value, str) and len(value) > MAX_STRING else value)
        elif tag is None or (is_constant and isinstance(plain, tree.Sequence)):
            found.append(option_text(option))
        else:
            found.append(tag)
    return unlike(found, switch.options)


def _outlines(label: str, switch: tree.Switch) -> list[Any]:
    """Return the options of a choice as charts show them: tuples and dicts in short form, unless two would then be
    equal.
    """
    shown = shown_options(label, switch)[0]
    long = {place for place, each in enumerate(shown) if isinstance(each, str) and each.startswith(("(", "{"))}
    brief_ones = {place: outline(switch.options[place]) for place in long}
    texts = {place: cut(brief(value)) for place, value in brief_ones.items() if isinstance(value, (tuple, dict))}
    # Options whose short forms are equal keep their texts, which differ.
    counts = Counter([*texts.values(), *map(str, shown)])
    return [texts[place] if counts[texts.get(place, "")] == 1 else each for place, each in enumerate(shown)]


def _constants(label: str, switch: tree.Switch) -> list[Any]:
    names = option_names(label, switch.options)
    return [
        _Writer(MAX_CONSTANT).of(tree.evaluate(option, {}, {})) if _is_constant(option) else name
        for option, name in zip(switch.options, names, strict=True)
    ]


def _is_constant(option: Node) -> bool:
    return all(not isinstance(part, (tree.Param, tree.Call, tree.Switch)) for part in tree.nodes(option))


def _fits_json(value: object) -> bool:
    """Return whether a constant is the same after it was written to JSON and read."""
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return value is None or type(value) is bool or (type(value) is str and is_storable(value))
