"""The compiled form of a space: small frozen nodes that compute the objective's values from the drawn values.

Nodes form a graph without cycles. A node that occurs in several places is wrapped in `Shared`. Nodes compare by
identity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

from shadho_celery.core.trial import Params
from shadho_celery.errors import SpaceError

#: anything: a part of a space, or an objective's values
Value = Any
Memo = dict[Hashable, Value]
T = TypeVar("T")

#: size in bytes above which an array is passed as a read-only view instead of a copy
LARGE_ARRAY = 2**20

#: types whose values cannot change; instances of the last one, `object`, are compared by identity
_FIXED = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, ModuleType, object}
)
#: key in a memo of the copies made in one evaluation, by the ids of the originals, as in copy.deepcopy
COPIES = "copies"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Literal:
    """A constant."""

    value: Value
    #: True if each evaluation gets a copy, so that an objective which changes it changes only its own
    is_copied: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Param:
    """A hyperparameter's raw draw."""

    label: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sequence:
    """A tuple. Lists become tuples too, as in hyperopt."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dict:
    """A dict with string keys."""

    items: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Call:
    """A function call on other nodes: a conversion, arithmetic, or another function of hyperopt's scope."""

    name: str
    function: Callable[..., Value]
    args: tuple[Node, ...]
    kwargs: tuple[tuple[str, Node], ...]
    #: computes the node's value from the function's result and the params; None if the result is the value
    finish: Callable[[Value, Params], Value] | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Switch:
    """A choice: one of several options, selected by an index. The other options are not evaluated."""

    index: Node
    options: tuple[Node, ...]

    def position(self, index: Value) -> int:
        """Return the option's index. Only whole numbers are accepted, as in hyperopt (no numpy bool, no 1.0)."""
        if isinstance(index, np.ndarray):
            index = index.item()
        if not isinstance(index, (int, np.integer)):
            raise SpaceError(f"An option's index is {index!r}; give a whole number.")
        if not 0 <= index < len(self.options):
            raise SpaceError(f"An option's index is {index}; give one from 0 to {len(self.options) - 1}.")
        return int(index)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Shared:
    """A node that occurs in several places. It is evaluated once, because it may be expensive or have side effects."""

    node: Node


#: one step of the computation from a trial's params to the objective's values
Node = Literal | Param | Sequence | Dict | Call | Switch | Shared


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes that a node refers to, in order."""
    match node:
        case Sequence(items):
            return items
        case Dict(pairs):
            return tuple(item for _, item in pairs)
        case Call(args=args, kwargs=kwargs):
            return (*args, *(argument for _, argument in kwargs))
        case Switch(index, options):
            return (index, *options)
        case Shared(shared):
            return (shared,)
    return ()


def evaluate(node: Node, params: Params, memo: Memo) -> Value:  # noqa: C901 - one frame for each level
    """Return the same value as hyperopt's space_eval. `memo` keeps the values of shared nodes for one evaluation."""
    # The loops are written out because each function, and before Python 3.12 each comprehension, would use one more
    # frame for each level of the space.
    if isinstance(node, Param):
        if node.label not in params:
            raise SpaceError(f"The params lack {node.label!r}, which is active in them; give it a value.")
        return params[node.label]
    if isinstance(node, Literal):
        return copied(node.value, memo) if node.is_copied else node.value
    if isinstance(node, Call):
        args, kwargs = [], {}
        for argument in node.args:
            args.append(evaluate(argument, params, memo))
        for name, argument in node.kwargs:
            kwargs[name] = evaluate(argument, params, memo)
        value = node.function(*args, **kwargs)
        return value if node.finish is None else node.finish(value, params)
    if isinstance(node, Switch):
        return evaluate(node.options[node.position(evaluate(node.index, params, memo))], params, memo)
    if isinstance(node, Dict):
        named = {}
        for key, item in node.items:
            named[key] = evaluate(item, params, memo)
        return named
    if isinstance(node, Sequence):
        values = []
        for item in node.items:
            values.append(evaluate(item, params, memo))
        return tuple(values)
    if node not in memo:
        memo[node] = evaluate(node.node, params, memo)
    return memo[node]


def unshared(node: Node) -> Node:
    """Return the node inside a `Shared`, or a node of another kind unchanged."""
    return node.node if isinstance(node, Shared) else node


def converted(node: Node) -> str | None:
    """Return the label whose draw a node is, as it is or converted by int() and float(); None for any other node."""
    node = unshared(node)
    while isinstance(node, Call) and node.function in (int, float) and len(node.args) == 1:
        node = unshared(node.args[0])
    return node.label if isinstance(node, Param) else None


def nodes(root: Node) -> Iterator[Node]:
    """Yield `root` and every node under it once, children first."""
    return postorder(root, children)


def is_fixed(value: Value) -> bool:
    """Return True if no part of the value can change."""
    if isinstance(value, partial):
        return not vars(value) and all(map(is_fixed, (value.func, *value.args, *value.keywords.values())))
    return type(value) in _FIXED or (type(value) in (tuple, frozenset) and all(map(is_fixed, value)))


def copied(value: Value, memo: Memo) -> Value:
    """Return a copy that shares no part with the value, or the value itself if it cannot be copied (a lock)."""
    copies = memo.setdefault(COPIES, {})
    if isinstance(value, np.ndarray) and value.nbytes > LARGE_ARRAY and not value.dtype.hasobject:
        if id(value) not in copies:
            copies[id(value)] = value.view()
            copies[id(value)].flags.writeable = False
        return copies[id(value)]
    try:
        return deepcopy(value, copies)
    except Exception:
        return value


class CycleFound(Exception):
    """A graph with a cycle has no order."""


def postorder(root: T, children: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield every object reachable from `root` once, children first, in order. Raises CycleFound for a cycle.

    Objects compare by identity. There is no recursion, so depth is not limited.
    """
    open_or_done: dict[int, bool] = {id(root): False}
    stack: list[tuple[T, Iterator[T]]] = [(root, iter(children(root)))]
    while stack:
        current, rest = stack[-1]
        for child in rest:
            done = open_or_done.get(id(child))
            if done is None:
                open_or_done[id(child)] = False
                stack.append((child, iter(children(child))))
                break
            if not done:
                raise CycleFound
        else:
            open_or_done[id(current)] = True
            stack.pop()
            yield current
