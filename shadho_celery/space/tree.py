"""The compiled form of a space: frozen nodes, from which the objective's values are computed for drawn params.

Nodes form a graph without cycles. A node that occurs in several places is wrapped in `Shared`. Nodes are compared by
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

#: any object: a part of a space, or an objective's values
Value = Any
Memo = dict[Hashable, Value]
T = TypeVar("T")

#: an array with more bytes is passed as a read-only view instead of a copy
LARGE_ARRAY = 2**20

#: types whose instances cannot change
_FIXED = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, ModuleType, object}
)
#: key in a memo under which the copies made in one evaluation are kept, by the ids of the originals, as in
#: copy.deepcopy
COPIES = "copies"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Literal:
    """A constant."""

    value: Value
    #: True if each evaluation gets a copy, so that an objective can change it without an effect on other trials
    is_copied: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Param:
    """A hyperparameter's raw draw."""

    label: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sequence:
    """A tuple, or a list, which becomes a tuple as in hyperopt."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Dict:
    """A dict with string keys."""

    items: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Call:
    """A call of a function with the values of other nodes: a conversion, arithmetic, or another function of hyperopt's
    scope.
    """

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
        """Return the option's index as an int. Raises SpaceError unless it is an integer within the range.

        As in hyperopt, 1.0 and a numpy bool are refused.
        """
        if isinstance(index, np.ndarray):
            index = index.item()
        if not isinstance(index, (int, np.integer)):
            raise SpaceError(f"An option's index is {index!r}; give a whole number.")
        if not 0 <= index < len(self.options):
            raise SpaceError(f"An option's index is {index}; give one from 0 to {len(self.options) - 1}.")
        return int(index)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Shared:
    """A node that occurs in several places. Each evaluation computes it only once, because it may be slow or random."""

    node: Node


#: one step of the computation from a trial's params to the objective's values
Node = Literal | Param | Sequence | Dict | Call | Switch | Shared


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes from whose values the value of a node is computed, in order."""
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
    """Return the value of a node for these params, as hyperopt's space_eval does.

    `memo` keeps the values of shared nodes during one evaluation.
    """
    # Loops are used instead of functions or comprehensions, because a function, and before Python 3.12 a comprehension,
    # needs one more frame for each level of the space.
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
    """Return the label of a node that is a draw, possibly converted by int() and float(); None for another node."""
    node = unshared(node)
    while isinstance(node, Call) and node.function in (int, float) and len(node.args) == 1:
        node = unshared(node.args[0])
    return node.label if isinstance(node, Param) else None


def nodes(root: Node) -> Iterator[Node]:
    """Yield `root` and every node under it once, children first."""
    return postorder(root, children)


def is_fixed(value: Value) -> bool:
    """Return True if the value and all of its parts are immutable."""
    if isinstance(value, partial):
        return not vars(value) and all(map(is_fixed, (value.func, *value.args, *value.keywords.values())))
    return type(value) in _FIXED or (type(value) in (tuple, frozenset) and all(map(is_fixed, value)))


def copied(value: Value, memo: Memo) -> Value:
    """Return a deep copy of a value. A value that cannot be copied, such as a lock, is returned itself."""
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
