"""The machine-readable form of a space, as a store keeps it: JSON of declared records, and values made from it again.

Nodes come children first and name one another by their places: a shared node is written once, and depth is no concern.
Constants that JSON cannot carry, such as functions, are kept as texts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from msgspec import Struct, convert, to_builtins

from shadho_celery.core.trial import Params
from shadho_celery.space import tree
from shadho_celery.space.describe import VERSION, option_names, option_text, outermost_calls, unlike
from shadho_celery.space.literals import literal_text
from shadho_celery.space.space import Space
from shadho_celery.space.tree import Memo, Node, Value

#: functions of hyperopt's scope that need no import of hyperopt, which takes more than a second
FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    **{kind.__name__: kind for kind in (float, int, dict)},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "neg", "pow", "getitem")},
}

#: key of the memo of an evaluation that met a constant which is only kept as a text
_INEXACT = "inexact"


class Shown(str):
    """Text in place of a value that only the study's module has; its repr is the text itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Record(Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Node of a space; other nodes are named by their places in the list."""


class Literal(_Record, frozen=True, kw_only=True):
    """A constant."""

    value: Any


class Opaque(_Record, frozen=True, kw_only=True):
    """A constant that JSON cannot carry, in words."""

    text: str


class Param(_Record, frozen=True, kw_only=True):
    """A hyperparameter's raw draw."""

    label: str


class Sequence(_Record, frozen=True, kw_only=True):
    """A tuple."""

    items: list[int]


class Dict(_Record, frozen=True, kw_only=True):
    """A dict with string keys, in order."""

    items: list[tuple[str, int]]


class Call(_Record, frozen=True, kw_only=True):
    """A function of hyperopt's scope, by its name there."""

    name: str
    args: list[int]
    kwargs: list[tuple[str, int]]


class Switch(_Record, frozen=True, kw_only=True):
    """One of the options, by an index."""

    index: int
    options: list[int]


class Shared(_Record, frozen=True, kw_only=True):
    """A node that stands in several places, and is evaluated once."""

    node: int


AnyRecord = Literal | Opaque | Param | Sequence | Dict | Call | Switch | Shared


class Label(Struct, frozen=True, kw_only=True):
    """A hyperparameter: its law, and what a person reads in place of its draw."""

    #: hyperopt's name of the law, and its parameters by name
    law: str
    parameters: dict[str, Any]
    #: alternatives under which it is active, each a list of (choice's label, option's index); ``[[]]`` is always
    conditions: list[list[tuple[str, int]]]
    #: by index, the option of a choice: the constant itself, or a name
    options: list[Any] | None = None
    #: indexes of options that no text tells apart
    alike: list[int] = []
    #: place of the one expression of this label alone, such as an int(); None if there are several
    expression: int | None = None


class StoredSpace(Struct, frozen=True, kw_only=True):
    """A space in its machine-readable form. The last node is the root."""

    nodes: list[AnyRecord]
    labels: dict[str, Label]
    #: version of the texts in it, and of those that describe the space
    version: int = 0


def version_of(stored: Mapping[str, Any] | None) -> int:
    """Return the version of the texts that describe a stored space; 0 for a store that has no space in this form."""
    return int((stored or {}).get("version", 0))


def to_json(space: Space) -> dict[str, Any]:
    """Return the machine-readable form of a space, in JSON values."""
    order = list(tree.nodes(space.root))
    places = {node: place for place, node in enumerate(order)}
    calls = outermost_calls(space.root)
    labels = {}
    for label, domain in space.domains.items():
        switch = space.switches.get(label)
        options, alike = _options(label, switch) if switch else (None, [])
        own = {*calls.get(label, ())}
        labels[label] = Label(
            law=domain.law,
            parameters={field.name: getattr(domain, field.name) for field in fields(domain)},
            conditions=[list(chain) for chain in space.conditions[label]],
            options=options,
            alike=alike,
            expression=places[own.pop()] if len(own) == 1 and switch is None else None,
        )
    nodes = [_record(node, places) for node in order]
    found: dict[str, Any] = to_builtins(StoredSpace(nodes=nodes, labels=labels, version=VERSION))
    return found


class RestoredSpace:
    """Makes values from params by a space's machine-readable form."""

    def __init__(self, stored: Mapping[str, Any], find: Callable[[str], Callable[..., Value] | None]) -> None:
        """`find` returns the function of hyperopt's scope by its name, None for an unknown one.

        Raises ValueError, or an error of msgspec's, which is one, for what is no such form.
        """
        space = convert(stored, StoredSpace)
        self.labels: Mapping[str, Label] = space.labels
        self._nodes: list[Node] = []
        for record in space.nodes:
            self._nodes.append(_node(record, self._nodes.__getitem__, find))

    def evaluate(self, params: Params) -> tuple[Value, bool]:
        """Return the values that the objective got, and False if some of them are texts in place of the real ones."""
        return _evaluated(self._nodes[-1], params)

    def shown(self, params: Params, label: str) -> Value:
        """Return what the objective got of one label that is active: the option of a choice, else the number."""
        known, drawn = self.labels.get(label), params[label]
        if known is not None and known.options is not None:
            return known.options[drawn] if isinstance(drawn, int) and 0 <= drawn < len(known.options) else drawn
        if known is None or known.expression is None:
            return drawn
        return _evaluated(self._nodes[known.expression], params)[0]


class _OpaqueNode(Node):
    """A constant, or the result of an unknown function, of which only a text is known."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = Shown(text)

    def evaluate(self, params: Params, memo: Memo) -> Value:
        memo[_INEXACT] = True
        return self._text


def _evaluated(node: Node, params: Params) -> tuple[Value, bool]:
    memo: Memo = {}
    try:
        value = node.evaluate(params, memo)
    except Exception as error:  # a function may be given a text in place of its argument, or fail by itself
        return Shown(f"({type(error).__name__}: {error})"), False
    return value, _INEXACT not in memo


def _record(node: Node, places: Mapping[Node, int]) -> AnyRecord:
    match node:
        case tree.Literal(value=value):
            value = value.item() if isinstance(value, np.generic) else value
            return Literal(value=value) if _fits_json(value) else Opaque(text=literal_text(value))
        case tree.Param(label=label):
            return Param(label=label)
        case tree.Sequence(items=items):
            return Sequence(items=[places[item] for item in items])
        case tree.Dict(items=items):
            return Dict(items=[(key, places[item]) for key, item in items])
        case tree.Call(name=name, args=args, kwargs=kwargs):
            named = [(key, places[argument]) for key, argument in kwargs]
            return Call(name=name, args=[places[argument] for argument in args], kwargs=named)
        case tree.Switch(index=index, options=options):
            return Switch(index=places[index], options=[places[option] for option in options])
        case tree.Shared(node=shared):
            return Shared(node=places[shared])
    raise TypeError(f"a space has no {type(node).__name__}")


def _node(record: AnyRecord, at: Callable[[int], Node], find: Callable[[str], Callable[..., Value] | None]) -> Node:
    node: Node
    match record:
        case Literal(value=value):
            node = tree.Literal(value)
        case Opaque(text=text):
            node = _OpaqueNode(text)
        case Param(label=label):
            node = tree.Param(label)
        case Sequence(items=items):
            node = tree.Sequence(tuple(map(at, items)))
        case Dict(items=named):
            node = tree.Dict(tuple((key, at(place)) for key, place in named))
        case Call():
            node = _call(record, at, find)
        case Switch(index=index, options=options):
            node = tree.Switch(at(index), tuple(map(at, options)))
        case Shared(node=place):
            node = tree.Shared(at(place))
    return node


def _call(record: Call, at: Callable[[int], Node], find: Callable[[str], Callable[..., Value] | None]) -> Node:
    function = FUNCTIONS.get(record.name) or find(record.name)
    if function is None:
        return _OpaqueNode(f"{record.name}(...)")
    kwargs = tuple((key, at(place)) for key, place in record.kwargs)
    return tree.Call(record.name, function, tuple(map(at, record.args)), kwargs, lambda value, _: value)


def _options(label: str, switch: tree.Switch) -> tuple[list[Any], list[int]]:
    """Return a choice's options as a person reads them: constants themselves, else names or texts; see `unlike`."""
    found: list[Any] = []
    for place, (option, name) in enumerate(zip(switch.options, option_names(label, switch.options), strict=True)):
        plain = tree.unshared(option)
        value = plain.value if isinstance(plain, tree.Literal) else None
        value = value.item() if isinstance(value, np.generic) else value
        is_constant = all(not isinstance(part, (tree.Param, tree.Call, tree.Switch)) for part in tree.nodes(option))
        if isinstance(plain, tree.Literal) and _fits_json(value):
            found.append(value)
        elif name == str(place) or (is_constant and isinstance(plain, tree.Sequence)):
            found.append(option_text(option))
        else:
            found.append(name)
    return unlike(found, switch.options)


def _fits_json(value: object) -> bool:
    """Return whether JSON gives the constant back as it is."""
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        return "\0" not in value and value == value.encode("utf-8", "replace").decode()
    return value is None or type(value) is bool
