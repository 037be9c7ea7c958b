"""The machine-readable form of a space in a store: JSON of declared records, and values computed from it.

Nodes come children first and refer to one another by their places. A shared node is written once, and depth is not
limited. Constants that JSON cannot represent, such as functions, are kept as texts.

A stored space may come from a stranger, so it may call only pure functions, on plain values, with limits on size and
steps. A value is a number, a text, None, or a tuple, list or dict of such values, of exactly these types. No attribute
of it is looked up by name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from msgspec import Struct, convert, to_builtins

from shadho_celery.core.checks import short
from shadho_celery.core.trial import Params
from shadho_celery.space import tree
from shadho_celery.space.describe import DRAWN, MAX_LEVELS, VERSION, option_tags, option_text, outermost_calls, unlike
from shadho_celery.space.literals import LONG_INT, literal_text
from shadho_celery.space.space import Space
from shadho_celery.space.tree import Node, Value

#: a constant that JSON can represent
Scalar = bool | int | float | str | None

#: steps of one evaluation of a space, and additional steps for each of its nodes
LEAST_STEPS, STEPS_PER_NODE = 10_000, 4


#: number of characters of a text that count as one step
_CHARACTERS = 100
_NUMBERS = frozenset({bool, int, float, np.bool_, np.int64, np.float64})
_SCALARS: frozenset[type] = _NUMBERS | {str, type(None)}
_LISTS = frozenset({tuple, list})
_SIZED: frozenset[type] = _LISTS | {str, dict}


class Shown(str):
    """Text that is shown instead of a value which only the study's module can create. Its repr is the text itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Record(Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Node of a space. It refers to other nodes by their indexes in the list of nodes."""


class Literal(_Record, frozen=True, kw_only=True):
    """A constant."""

    value: Scalar


class Opaque(_Record, frozen=True, kw_only=True):
    """A constant that JSON cannot represent. Its text is stored instead."""

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
    """A call of a function of hyperopt's scope, which is stored by name."""

    name: str
    args: list[int]
    kwargs: list[tuple[str, int]]


class Switch(_Record, frozen=True, kw_only=True):
    """A choice: one of several options, selected by an index."""

    index: int
    options: list[int]


class Shared(_Record, frozen=True, kw_only=True):
    """A node that occurs in several places and is evaluated once."""

    node: int


AnyRecord = Literal | Opaque | Param | Sequence | Dict | Call | Switch | Shared


class Label(Struct, frozen=True, kw_only=True):
    """A label: its distribution, and what is shown instead of its draw."""

    #: hyperopt's name of the distribution, and its parameters by name
    law: str
    parameters: dict[str, Any]
    #: alternatives under which it is active, each a list of (choice's label, option's index); ``[[]]`` means always
    conditions: list[list[tuple[str, int]]]
    #: the option of a choice by index: the constant itself, or a name
    options: list[Scalar] | None = None
    #: index of the node of the only expression of this label alone, such as an int(); None if there are several
    expression: int | None = None


class StoredSpace(Struct, frozen=True, kw_only=True):
    """A space in its machine-readable form. The last node is the root."""

    nodes: list[AnyRecord]
    labels: dict[str, Label]
    #: version of the texts in this form, and of those that describe the space
    version: int = 0


def to_json(space: Space) -> dict[str, Any]:
    """Return the machine-readable form of a space, as values that JSON can represent."""
    order = list(tree.nodes(space.root))
    places = {node: place for place, node in enumerate(order)}
    calls = outermost_calls(space.root)
    labels = {}
    for label, domain in space.domains.items():
        switch = space.switches.get(label)
        own = {*calls.get(label, ())}
        labels[label] = Label(
            law=domain.law,
            parameters={field.name: getattr(domain, field.name) for field in fields(domain)},
            conditions=[list(chain) for chain in space.conditions[label]],
            options=shown_options(label, switch)[0] if switch else None,
            expression=places[own.pop()] if len(own) == 1 and switch is None else None,
        )
    nodes = [_record(node, places) for node in order]
    found: dict[str, Any] = to_builtins(StoredSpace(nodes=nodes, labels=labels, version=VERSION))
    return found


class Refused(Exception):
    """A value is not plain, or a function would take too many steps."""


class Steps:
    """Number of steps that are left for one evaluation. They limit its time and the size of its results."""

    def __init__(self, left: int) -> None:
        self._left = left

    def spend(self, count: int = 1) -> None:
        """Take this many steps. Raises Refused if fewer are left."""
        self._left -= count
        if self._left < 0:
            raise Refused("too many steps")

    def scalar(self, value: Value) -> Value:
        """Return a number, a text or None. Raises Refused for other values, and for values that are too long."""
        if type(value) is int and value.bit_length() > LONG_INT:
            raise Refused("too long a number")
        if type(value) is str:
            self.spend(len(value) // _CHARACTERS)
        if type(value) not in _SCALARS:
            raise Refused(f"not a plain value but {type(value).__name__}")
        return value

    def made(self, value: Value) -> Value:
        """Return the result of a function of plain values: a scalar, or a tuple, list or dict."""
        return value if type(value) in _LISTS or type(value) is dict else self.scalar(value)


#: function of the steps that are left and of its own arguments
Pure = Callable[..., Value]


def _on(kinds: frozenset[type], function: Callable[..., Value], count: int) -> Pure:
    """Return a function of this many values of these types."""

    def call(steps: Steps, *args: Value) -> Value:
        if len(args) != count or not all(type(each) in kinds for each in args):
            raise Refused("arguments of other types")
        return steps.made(function(*args))

    return call


def _over(function: Callable[..., Value]) -> Pure:
    """Return a function of numbers, given one by one or as one list."""

    def call(steps: Steps, *args: Value) -> Value:
        items = args[0] if len(args) == 1 and type(args[0]) in _LISTS else args
        steps.spend(len(items))
        if not all(type(each) in _NUMBERS for each in items):
            raise Refused("arguments of other types")
        return steps.made(function(items))

    return call


def _add(steps: Steps, left: Value, right: Value) -> Value:
    if type(left) is type(right) and type(left) in _LISTS | {str}:
        steps.spend(len(left) + len(right))
    elif not {type(left), type(right)} <= _NUMBERS:
        raise Refused("arguments of other types")
    return steps.made(left + right)


def _mul(steps: Steps, left: Value, right: Value) -> Value:
    if type(left) in _LISTS | {str} and type(right) is int:
        steps.spend(len(left) * max(0, right))
    elif not {type(left), type(right)} <= _NUMBERS:
        raise Refused("arguments of other types")
    return steps.made(left * right)


def _pow(steps: Steps, base: Value, exponent: Value) -> Value:
    if not {type(base), type(exponent)} <= _NUMBERS:
        raise Refused("arguments of other types")
    if {type(base), type(exponent)} <= {bool, int} and int(base).bit_length() * exponent > LONG_INT:
        raise Refused("too long a number")
    return steps.made(base**exponent)


def _getitem(steps: Steps, found: Value, key: Value) -> Value:
    if type(found) not in _LISTS | {dict}:
        raise Refused("items of another type")
    if type(found) in _LISTS and type(key) not in {bool, int, np.int64}:
        raise Refused("a place of another type")
    return found[steps.scalar(key)]


def _dict(steps: Steps, pairs: Value = (), /, **named: Value) -> Value:
    if type(pairs) not in _LISTS or not all(type(pair) in _LISTS and len(pair) == 2 for pair in pairs):
        raise Refused("arguments of other types")
    steps.spend(len(pairs) + len(named))
    return {**{steps.scalar(key): value for key, value in pairs}, **named}


def _list(steps: Steps, items: Value = ()) -> Value:
    if type(items) not in _LISTS:
        raise Refused("items of another type")
    steps.spend(len(items))
    return list(items)


#: functions by their names in hyperopt's scope
FUNCTIONS: Mapping[str, Pure] = {
    **{kind.__name__: _on(_NUMBERS, kind, 1) for kind in (float, int)},
    **{name: _on(_NUMBERS, getattr(operator, name), 2) for name in ("sub", "truediv", "floordiv")},
    **{name: _on(_SCALARS, getattr(operator, name), 2) for name in ("eq", "ge", "gt", "le", "lt")},
    **{name: _on(_NUMBERS, getattr(np, name), 1) for name in ("exp", "log", "sqrt", "sin", "cos", "tan")},
    **{name: _on(_NUMBERS, getattr(np, name), 2) for name in ("maximum", "minimum")},
    **{function.__name__: _over(function) for function in (max, min)},
    "sum": _over(np.sum),
    "neg": _on(_NUMBERS, operator.neg, 1),
    "len": _on(_SIZED, len, 1),
    "add": _add,
    "mul": _mul,
    "pow": _pow,
    "getitem": _getitem,
    "dict": _dict,
    "list": _list,
}


class RestoredSpace:
    """Computes values from params, using a space's machine-readable form.

    The form may come from a stranger: only those of `FUNCTIONS` are called, within limits. A value that these functions
    refuse is shown as text.
    """

    def __init__(self, stored: Mapping[str, Any]) -> None:
        """Raise ValueError, or an error of msgspec (a ValueError), for anything that is not such a form."""
        space = convert(stored, StoredSpace)
        _check_order(space.nodes)
        self.labels: Mapping[str, Label] = space.labels
        self._nodes = space.nodes

    def evaluate(self, params: Params) -> tuple[Value, bool]:
        """Return the values that the objective got, and False if some of them are texts instead of the real ones."""
        return self._evaluated(-1, params)

    def shown(self, params: Params, label: str) -> Value:
        """Return what the objective got for one active label: a choice's option, or the number of another label."""
        known, drawn = self.labels.get(label), params[label]
        if known is not None and known.options is not None:
            return known.options[drawn] if isinstance(drawn, int) and 0 <= drawn < len(known.options) else drawn
        if known is None or known.expression is None:
            return drawn
        return self._evaluated(known.expression, params)[0]

    def outlines(self, label: str) -> dict[int, Value]:
        """Return the tuples and dicts among a choice's options that are shown as Python's text, by index.

        "..." stands for what is drawn in them, and for what is nested deeper than MAX_LEVELS.
        """
        known = self.labels.get(label)
        switches = (node for node in self._nodes if isinstance(node, Switch))
        switch = next((node for node in switches if self._unshared(node.index) == Param(label=label)), None)
        if known is None or known.options is None or switch is None:
            return {}
        steps = Steps(LEAST_STEPS + STEPS_PER_NODE * len(self._nodes))
        found: dict[int, Value] = {}
        for index, (shown, place) in enumerate(zip(known.options, switch.options, strict=False)):
            if isinstance(shown, str) and shown.startswith(("(", "{")):
                try:
                    value = self._outline(place, MAX_LEVELS, steps)
                except Refused:
                    return found
                found |= {index: value} if isinstance(value, (tuple, dict)) else {}
        return found

    def _outline(self, place: int, levels: int, steps: Steps) -> Value:
        steps.spend()
        match self._unshared(place):
            case Literal(value=value):
                return value
            case Opaque(text=text):
                return text
            case Sequence(items=items) if levels:
                return tuple(self._outline(item, levels - 1, steps) for item in items)
            case Dict(items=named) if levels:
                return {key: self._outline(item, levels - 1, steps) for key, item in named}
        return DRAWN

    def _unshared(self, place: int) -> AnyRecord:
        node = self._nodes[place]
        while isinstance(node, Shared):
            node = self._nodes[node.node]
        return node

    def _evaluated(self, place: int, params: Params) -> tuple[Value, bool]:
        evaluation = _Evaluation(self._nodes, params)
        try:
            value = evaluation.at(place)
        except Exception as error:  # a function may fail by itself
            return Shown(f"({type(error).__name__}: {short(error)})"), False
        return value, evaluation.is_exact


class _Evaluation:
    """Evaluation of the nodes of a space for one trial's params."""

    def __init__(self, nodes: list[AnyRecord], params: Params) -> None:
        self._nodes = nodes
        self._params = params
        self._steps = Steps(LEAST_STEPS + STEPS_PER_NODE * len(nodes))
        #: False once a value is a text instead of the real one
        self.is_exact = True

    # The loops are written out because each comprehension would use one more frame per level before Python 3.12.
    def at(self, place: int) -> Value:
        """Return the value of a node."""
        self._steps.spend()
        match self._nodes[place]:
            case Literal(value=value):
                return self._steps.scalar(value)
            case Opaque(text=text):
                return self._text(text)
            case Param(label=label):
                return self._steps.scalar(self._params[label])
            case Sequence(items=items):
                return tuple(self._all(items))
            case Dict(items=named):
                return self._named(named)
            case Call() as call:
                return self._called(call)
            case Switch(index=index, options=options):
                taken = self.at(index)
                if type(taken) is not int or not 0 <= taken < len(options):
                    raise Refused(f"no option {short(taken, 60)}")
                return self.at(options[taken])
            case Shared(node=shared):
                return self.at(shared)

    def _all(self, places: list[int]) -> list[Value]:
        found = []
        for place in places:
            found.append(self.at(place))
        return found

    def _named(self, places: list[tuple[str, int]]) -> dict[str, Value]:
        found = {}
        for key, place in places:
            found[key] = self.at(place)
        return found

    def _called(self, call: Call) -> Value:
        args, kwargs = self._all(call.args), self._named(call.kwargs)
        pure = FUNCTIONS.get(call.name)
        try:
            return self._text(f"{call.name}(...)") if pure is None else pure(self._steps, *args, **kwargs)
        except (Refused, TypeError):
            return self._text(f"{call.name}(...)")

    def _text(self, text: str) -> Shown:
        self.is_exact = False
        return Shown(text)


def _check_order(nodes: list[AnyRecord]) -> None:
    """Raise ValueError unless each node refers only to earlier ones, so that there are no cycles."""
    if not nodes:
        raise ValueError("a space without nodes")
    for place, node in enumerate(nodes):
        if any(not 0 <= child < place for child in _children(node)):
            raise ValueError(f"node {place} refers to one that does not precede it")


def _children(node: AnyRecord) -> list[int]:
    match node:
        case Sequence(items=items):
            return items
        case Dict(items=named):
            return [child for _, child in named]
        case Call(args=args, kwargs=kwargs):
            return [*args, *(child for _, child in kwargs)]
        case Switch(index=index, options=options):
            return [index, *options]
        case Shared(node=shared):
            return [shared]
    return []


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


def shown_options(label: str, switch: tree.Switch) -> tuple[list[Any], list[int]]:
    """Return a choice's options as shown to users: constants themselves, else tags or texts; see `unlike`."""
    found: list[Any] = []
    for option, tag in zip(switch.options, option_tags(label, switch.options), strict=True):
        plain = tree.unshared(option)
        value = plain.value if isinstance(plain, tree.Literal) else None
        value = value.item() if isinstance(value, np.generic) else value
        is_constant = all(not isinstance(part, (tree.Param, tree.Call, tree.Switch)) for part in tree.nodes(option))
        if isinstance(plain, tree.Literal) and _fits_json(value):
            found.append(value)
        elif tag is None or (is_constant and isinstance(plain, tree.Sequence)):
            found.append(option_text(option))
        else:
            found.append(tag)
    return unlike(found, switch.options)


def _fits_json(value: object) -> bool:
    """Return whether JSON returns the constant unchanged."""
    if isinstance(value, float):
        return type(value) is float and math.isfinite(value)
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        return "\0" not in value and value == value.encode("utf-8", "replace").decode()
    return value is None or type(value) is bool
