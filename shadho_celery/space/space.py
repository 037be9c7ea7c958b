"""A compiled search space as used by the rest of the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from shadho_celery.core.trial import Params
from shadho_celery.errors import SpaceError
from shadho_celery.space import describe as text
from shadho_celery.space.blocks import Block, Pins, Skeleton
from shadho_celery.space.domains import Categorical, Discrete, Domain
from shadho_celery.space.literals import digest
from shadho_celery.space.tree import Node, Switch, Value

#: options that must have been chosen, each a (choice's label, option's index), from the outermost inwards
Condition = tuple[tuple[str, int], ...]
#: a label with more ways to become active counts as always active
MAX_CONDITIONS = 64
_NO_PINS: Pins = MappingProxyType({})
#: a choice of more options is described by their number and a hash
MAX_DESCRIBED = 20


@dataclass(frozen=True, eq=False, repr=False)
class Space:
    """A compiled search space, made by `compile_space`. Safe to use from several threads."""

    #: builds the objective's values
    root: Node
    #: conditions under which each label is active
    skeleton: Skeleton
    #: label -> distribution, in order of first appearance in hyperopt's graph (which sorts a dict by its keys)
    domains: Mapping[str, Domain]
    #: label -> the first choice whose option it selects
    switches: Mapping[str, Switch] = field(default_factory=dict)
    #: hyperopt's own form of the space, for hyperopt's algorithms; None if it was not made from one
    graph: Value = None

    def sample(self, generator: np.random.Generator, size: int, pins: Pins = _NO_PINS) -> list[dict[str, Value]]:
        """Draw `size` assignments from the prior: raw draws of the active labels, as plain ints and floats.

        A choice's label in `pins` has the index given there.
        """
        return self.skeleton.draw(self.domains, generator, size, pins)

    def evaluate(self, params: Params) -> Value:
        """Return the objective's values for these draws. They equal those of hyperopt's ``space_eval``, types included.

        Labels that are not active may be missing. Raises SpaceError if an active one is missing.
        """
        return self.root.evaluate(params, {})

    def active(self, params: Params) -> tuple[str, ...]:
        """Return the active labels under these params, in declaration order. `params` may contain more."""
        found = {label for block in self.skeleton.walk(params) for label in block.labels}
        return tuple(label for label in self.domains if label in found)

    def check(self, params: Params) -> None:
        """Raise SpaceError unless these params can be drawn: every active label is there, with a value in its
        domain.
        """
        for label in params:
            if label not in self.domains:
                raise SpaceError(f"The space has no hyperparameter {label!r}; leave it out, or correct its name.")
        for block in self.skeleton.walk(params):
            for label in block.labels:
                if label not in params:
                    raise SpaceError(f"The params lack {label!r}, which is active in them; give it a value.")
                if not self.domains[label].contains(params[label]):
                    outside = f"{params[label]!r} is outside {self.domains[label].describe()}"
                    raise SpaceError(f"Hyperparameter {label!r}: {outside}; give a value inside.")

    @cached_property
    def conditions(self) -> Mapping[str, tuple[Condition, ...]]:
        """Label -> the alternatives under which it is active; ``((),)`` means always.

        Below an option selected by a computed index, or with more than `MAX_CONDITIONS` alternatives, it says "active"
        too often. `active` is exact.
        """
        above: dict[Block, set[Condition]] = {block: set() for block in self.skeleton.blocks}
        above[self.skeleton.root] = {()}
        found: dict[str, set[Condition]] = {label: set() for label in self.domains}
        for block in self.skeleton.blocks:
            here = self._simplified(above[block])
            for label in block.labels:
                found[label] |= here
            for branch in block.branches:
                for place, option in enumerate(branch.options):
                    if option:
                        above[option] |= _extended(here, branch.label, place)
        return {label: tuple(sorted(self._simplified(chains))) for label, chains in found.items()}

    def _simplified(self, chains: set[Condition]) -> set[Condition]:
        """Return the same alternatives, with those of all options of a choice replaced by the condition of that
        choice.
        """
        if () in chains or len(chains) > MAX_CONDITIONS:
            return {()}
        options = Counter((chain[:-1], chain[-1][0]) for chain in chains)
        for (prefix, label), count in options.items():
            domain = self.domains[label]
            if isinstance(domain, Discrete) and count == domain.count:
                rest = {chain for chain in chains if chain[: len(prefix)] != prefix}
                return self._simplified(rest | {prefix})
        return chains

    def describe(self) -> dict[str, str]:
        """Return label -> its law, options, use and condition, as a text that is the same in every process.

        Two spaces that describe alike give a recorded index or number the same meaning.
        """
        texts = text.structure(self.root)
        calls = text.expressions(self.root, texts)
        return {label: self._described(label, texts, calls.get(label, ())) for label in self.domains}

    def _described(self, label: str, texts: Mapping[Node, str], calls: Sequence[str]) -> str:
        domain = self.domains[label]
        described = domain.describe()
        if switch := self.switches.get(label):
            options = [texts[option] for option in switch.options]
            listed = ", ".join(options)
            if len(options) > MAX_DESCRIBED:
                listed = digest("\n".join(options))
                if isinstance(domain, Categorical) and not domain.is_uniform:
                    described = f"pchoice({domain.count}, {digest(described)})"
            described = f"{described} of {listed}"
        if calls:
            described = f"{described} as {', '.join(calls)}"
        alternatives = [", ".join(f"{choice}={place}" for choice, place in chain) for chain in self.conditions[label]]
        return described if alternatives == [""] else f"{described} if {' or '.join(alternatives)}"


def _extended(chains: set[Condition], label: str | None, place: int) -> set[Condition]:
    """Return the chains with one more link, without those that chose another option of this choice."""
    if label is None:
        return chains
    lasting = {chain for chain in chains if dict(chain).get(label, place) == place}
    return {chain if (label, place) in chain else (*chain, (label, place)) for chain in lasting}
