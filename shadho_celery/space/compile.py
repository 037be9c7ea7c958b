"""Compile a hyperopt expression to a `Space`. This is the only module that reads hyperopt's graphs (pyll).

A graph is read once, children first, without recursion. From each node a node of `tree` is made, which computes values,
and a `Block`, which has the labels below the node. If a function of the space returns an expression when it is called,
hyperopt's ``space_eval`` computes its value.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from shadho_celery.core.checks import listed, short
from shadho_celery.core.system import placeholder
from shadho_celery.core.trial import Params
from shadho_celery.errors import SpaceError
from shadho_celery.space import tree
from shadho_celery.space.domains import CONTINUOUS, Categorical, Discrete, Domain, RandInt, Uniform, make_domain
from shadho_celery.space.space import Block, Branch, Space, merge
from shadho_celery.space.tree import Call, Dict, Literal, Node, Param, Sequence, Shared, Switch, Value

# networkx is not imported, because only hyperopt's own algorithms use it.
with placeholder("networkx"):
    from hyperopt import space_eval
    from hyperopt.pyll import base as pyll
    from hyperopt.pyll import stochastic

__all__ = ["MAX_DEPTH", "Space", "compile_space"]

#: a node of hyperopt's graphs, whose classes have no type annotations
Apply = Any

#: maximum number of nodes from the root to a leaf. A choice in a dict counts as two. Evaluation needs one frame per
#: node, and Python allows 1000 frames, of which the caller uses a part
MAX_DEPTH = 500

#: modules with distributions of other tools, which cannot be used in a space
OTHERS = ("scipy.stats", "optuna.distributions", "ray.tune", "skopt.space")

#: by name of a distribution in hyperopt: the names of its parameters, in order
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **{law: tuple(field.name for field in fields(kind)) for law, kind in CONTINUOUS.items()},
    "randint": ("low", "high"),
    "categorical": ("p",),
}


def compile_space(expression: Value) -> Space:
    """Compile a hyperopt expression, or a dict, list or tuple that contains hyperopt expressions.

    Raises SpaceError, in one line with the label, the cause and the remedy, if it cannot be searched. Warns if the
    bounds of a log distribution look as if the user forgot to take the logarithm.
    """
    if expression is None:
        raise SpaceError("The space is None; give an hp expression, such as hp.uniform, or a dict of them.")
    space = _Reader().read(_as_graph(expression))
    for label, domain in space.domains.items():
        if isinstance(domain, Uniform) and (hint := domain.hint()):
            warnings.warn(f"Hyperparameter {label!r}: {hint}.", stacklevel=2)
    return space


def _refuse_domains(apply: Apply) -> None:
    """Raise SpaceError for a range, or another tool's distribution, in a dict or list, because it would be a constant.

    In an option of hp.choice it is allowed.
    """
    named = apply.named_args if apply.name == "dict" else [("", child) for child in apply.pos_args]
    for key, child in named if apply.name in {"dict", "pos_args"} else ():
        given, label = child.obj if isinstance(child, pyll.Literal) else None, key or "x"
        remedy = f"hp.uniform({label!r}, 0, 1) or another hp function"
        if isinstance(given, range):
            ends = f"hp.randint({label!r}, {given.start}, {given.stop}) or hp.uniformint({label!r}, {given.start}, "
            remedy = f"{ends}{given.stop - 1})" if given.step == 1 else f"hp.choice({label!r}, {given})"
        elif not type(given).__module__.startswith(OTHERS):
            continue
        where = f" as {key!r}" if key else ""
        raise SpaceError(f"The space has {short(given, 60)}{where}, which would be a constant; write {remedy}.")


def _warn_of_lists(part: Mapping[str, Value]) -> None:
    """Warn of lists of numbers or texts in a dict of the space, because the user may have meant choices.

    Options of hp.choice are not checked, because a list is usually meant there.
    """
    lists = {key: each for key, each in part.items() if isinstance(each, list) and each}
    found = [key for key, each in lists.items() if all(isinstance(one, (int, float, str)) for one in each)]
    if found:
        how = f"hp.choice({found[0]!r}, {short(lists[found[0]], 60)}) to try its values, or a tuple if it is meant"
        what = f"The space has a list as {listed(found, 5)}, which the objective gets as a whole"
        warnings.warn(f"{what}; write {how}.", stacklevel=2)


def _finish(value: Value, params: Params) -> Value:
    """Return a function's result. If it is one of pyll's expressions, return its value."""
    # The result is copied, because hyperopt returns the constants of the expression without copying them.
    return tree.copied(space_eval(value, params), {}) if isinstance(value, pyll.Apply) else value


def _as_graph(expression: Value) -> Apply:
    """Convert an expression to a graph as hyperopt does, but without recursion and without copies of shared parts.

    The order of a dict is kept, although hyperopt would sort it. In an hp.choice, hyperopt has already sorted it.
    """
    converted: dict[int, Apply] = {}
    try:
        for part in tree.postorder(expression, _contents):
            graph: Value = part
            if isinstance(part, dict):
                _warn_of_lists(part)
                graph = pyll.as_apply({key: converted[id(value)] for key, value in part.items()})
                if graph.named_args:  # this holds if all keys are strings
                    graph.named_args = [(key, converted[id(value)]) for key, value in part.items()]
            elif isinstance(part, (list, tuple)):
                graph = [converted[id(value)] for value in part]
            converted[id(part)] = pyll.as_apply(graph)
    except tree.CycleFound:
        raise SpaceError("The space contains itself: a dict or list holds itself; leave it out there.") from None
    except TypeError as error:  # hyperopt sorts a dict by its keys
        raise SpaceError(f"The space has a dict whose keys cannot be sorted ({error}); use strings only.") from None
    return converted[id(expression)]


def _contents(part: Value) -> Iterable[Value]:
    if isinstance(part, dict):
        return part.values()
    return part if isinstance(part, (list, tuple)) else ()


def _inputs(apply: Apply) -> list[Apply]:
    """Return the nodes from which a node is computed; none for a hyperparameter."""
    return [] if apply.name == "hyperopt_param" else apply.inputs()


def _ordered(root: Apply) -> list[Apply]:
    """Return the graph's nodes, children first."""
    try:
        return list(tree.postorder(root, _inputs))
    except tree.CycleFound:
        raise SpaceError("The space contains itself: an option leads back to its choice; leave it out there.") from None


class _Reader:
    """Compiles one graph. It keeps what was made of each pyll node, by the node's id."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._blocks: dict[int, Block] = {}
        self._depths: dict[int, int] = {}
        self._laws: dict[str, Apply] = {}
        self._domains: dict[str, Domain] = {}
        self._switches: dict[str, Switch] = {}

    def read(self, root: Apply) -> Space:
        """Read the whole graph, check it, and return the space."""
        order = _ordered(root)
        for apply in (*order, pyll.as_apply([root])):
            _refuse_domains(apply)
        parents = Counter(id(child) for apply in order for child in apply.inputs())
        for apply in order:
            self._enter(apply, parents[id(apply)] > 1)
        return Space(self._nodes[id(root)], self._blocks[id(root)], self._domains, self._switches)

    def _enter(self, apply: Apply, is_shared: bool) -> None:
        inputs = _inputs(apply)
        depth = 1 + max((self._depths[id(child)] for child in inputs), default=0)
        plain = node = self._node(apply)
        if is_shared and not _is_cheap(node):
            node, depth = Shared(node), depth + 1
        if depth > MAX_DEPTH:
            raise SpaceError(f"The space is nested more than {MAX_DEPTH} nodes deep; make it flatter.")
        self._nodes[id(apply)], self._depths[id(apply)] = node, depth
        match plain:
            case Switch():
                block = self._branch(plain, apply)
            case Param(label):
                block = Block((label,))
            case _:
                block = merge(self._blocks[id(child)] for child in inputs)
        self._blocks[id(apply)] = block

    def _node(self, apply: Apply) -> Node:
        if apply.name == "hyperopt_param":
            return self._param(apply)
        if isinstance(apply, pyll.Literal):
            return Literal(apply.obj, is_copied=not tree.is_fixed(apply.obj))
        args = tuple(self._nodes[id(child)] for child in apply.pos_args)
        kwargs = tuple((name, self._nodes[id(child)]) for name, child in apply.named_args)
        if apply.name == "pos_args" and not kwargs:
            return Sequence(args)
        if apply.name == "dict" and not args:
            return Dict(kwargs)
        if apply.name == "switch" and args and not kwargs:
            return self._switch(args[0], args[1:])
        if apply.name in stochastic.implicit_stochastic_symbols:
            # A distribution without a label but with its own generator is noise that the user has added, not a
            # hyperparameter.
            generator = dict(kwargs).get("rng")
            if generator is None:
                raise SpaceError(f"A {apply.name} has no label; write hp.{apply.name}('label', ...) instead.")
            if isinstance(generator, Literal):
                # The generator must not be copied, because each copy would draw the same values.
                drawn_from = Literal(generator.value, is_copied=False)
                kwargs = tuple((name, drawn_from if node is generator else node) for name, node in kwargs)
        function = pyll.scope._impls.get(apply.name)
        if function is None:
            raise SpaceError(f"The space calls scope.{apply.name}, which is not defined; import its module.")
        return Call(apply.name, function, args, kwargs, None if function in (int, float) else _finish)

    def _param(self, apply: Apply) -> Param:
        label, law = _label_and_law(apply)
        is_known = self._laws.setdefault(label, law) is law
        if not is_known:
            raise SpaceError(
                f"Hyperparameter {label!r}: two different nodes have this label; "
                "give each its own, or put one hp node into a variable and use that in both places."
            )
        if label not in self._domains:
            self._domains[label] = make_domain(label, law.name, _arguments(label, law))
        return Param(label)

    def _switch(self, index: Node, options: tuple[Node, ...]) -> Switch:
        switch = Switch(index, options)
        label = _index_label(index)
        if label is None:
            return switch
        domain = self._domains[label]
        if isinstance(index, Param) and domain == RandInt(0, len(options)):  # an hp.choice, whose options have no order
            domain = self._domains[label] = Categorical.uniform(len(options))
        if isinstance(domain, Discrete):
            if domain.first < 0 or domain.first + domain.count > len(options):
                raise SpaceError(
                    f"Hyperparameter {label!r}: {domain.describe()} selects among {len(options)} options; "
                    "give as many options as it has values, from 0."
                )
            self._switches.setdefault(label, switch)
        return switch

    def _branch(self, switch: Switch, apply: Apply) -> Block:
        index, *options = (self._blocks[id(child)] for child in apply.inputs())
        if not any(options):
            return index
        label = _index_label(switch.index)
        known = label if label is not None and isinstance(self._domains[label], Discrete) else None
        return merge([index, Block((), (Branch(known, switch, tuple(options)),))])


def _is_cheap(node: Node) -> bool:
    """Return True if evaluating the node again is faster than storing its value, and gives the same value."""
    if isinstance(node, Call):
        return node.function in (int, float) and isinstance(node.args[0], Param)
    return isinstance(node, (Literal, Param))


def _index_label(index: Node) -> str | None:
    """Return the label whose value is this index, directly or after the int() of hp.randint; None if there is none."""
    index = tree.unshared(index)
    if isinstance(index, Call) and index.function is int and len(index.args) == 1:
        index = tree.unshared(index.args[0])
    return index.label if isinstance(index, Param) else None


def _label_and_law(apply: Apply) -> tuple[str, Apply]:
    """Return the label of a hyperparameter's node, and the node of its distribution."""
    given = {**dict(zip(("label", "obj"), apply.pos_args, strict=False)), **dict(apply.named_args)}
    law = given["obj"]
    label = given["label"].obj if isinstance(given["label"], pyll.Literal) else None
    if isinstance(label, bytes):
        label = label.decode("utf-8", "backslashreplace")
    if not isinstance(label, str):
        raise SpaceError(f"A hyperparameter's label is {label!r}; give a string.")
    if law.name not in _PARAMETERS:
        raise SpaceError(
            f"Hyperparameter {label!r}: {law.name!r} is not one of hyperopt's distributions; use an hp function."
        )
    return label, law


def _arguments(label: str, law: Apply) -> dict[str, Value]:
    """Return the parameters of a distribution by name, with constant expressions evaluated."""
    names = _PARAMETERS[law.name]
    if len(law.pos_args) > len(names):
        raise SpaceError(f"Hyperparameter {label!r}: {law.name} has too many parameters; it takes {', '.join(names)}.")
    nodes = {**dict(zip(names, law.pos_args, strict=False)), **dict(law.named_args)}
    if extra := [name for name in nodes if name not in (*names, "rng")]:
        raise SpaceError(f"Hyperparameter {label!r}: {law.name} does not take {extra[0]!r} here; leave it out.")
    return {name: _constant(label, name, node) for name, node in nodes.items() if name != "rng"}


def _constant(label: str, name: str, node: Apply) -> Value:
    """Return the value of a distribution's parameter. Raises SpaceError if it depends on a draw."""
    if isinstance(node, pyll.Literal):
        return node.obj
    for part in _ordered(node):
        if part.name == "hyperopt_param":
            other = _label_and_law(part)[0]
            raise SpaceError(
                f"Hyperparameter {label!r}: its {name} depends on {other!r}; "
                "give a number, and scale the drawn value in an expression around it."
            )
        if part.name in stochastic.implicit_stochastic_symbols:
            raise SpaceError(f"Hyperparameter {label!r}: its {name} is random ({part.name}); give a number.")
    try:
        return pyll.rec_eval(node, print_node_on_error=False)
    except Exception as error:
        problem = f"its {name} cannot be computed ({type(error).__name__}: {error})".replace("\n", " ")
        raise SpaceError(f"Hyperparameter {label!r}: {problem}; give a number.") from error
