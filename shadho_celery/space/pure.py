"""Functions that a stored space may call: pure ones, on plain values, with limits on size and steps.

A stored space may come from a stranger. A value is therefore a number, a text, None, or a tuple, list or dict of such
values, of exactly these types. No attribute of it is looked up by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shadho_celery.space.literals import LONG_INT

Value = Any

#: number of characters of a text that count as one step
_CHARACTERS = 100
_NUMBERS = frozenset({bool, int, float, np.bool_, np.int64, np.float64})
_SCALARS: frozenset[type] = _NUMBERS | {str, type(None)}
_LISTS = frozenset({tuple, list})
_SIZED: frozenset[type] = _LISTS | {str, dict}


class Refused(Exception):
    """A value is not plain, or a function would take too many steps."""


class Steps:
    """Steps that are left for one evaluation, which limit its time and the size of its results."""

    def __init__(self, left: int) -> None:
        self._left = left

    def spend(self, count: int = 1) -> None:
        """Take this many steps. Raises Refused if fewer are left."""
        self._left -= count
        if self._left < 0:
            raise Refused("too many steps")

    def scalar(self, value: Value) -> Value:
        """Return a number, a text or None. Raises Refused for anything else, and for one that is too long."""
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


#: a function of the steps that are left and of its arguments
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


#: by name in hyperopt's scope
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
