"""A compiled search space: what the rest of the package knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from shadho_celery.core.trial import Params
from shadho_celery.errors import SpaceError
from shadho_celery.space import describe as text
from shadho_celery.space.blocks import Block, Pins, Skeleton
from shadho_celery.space.discrete import Categorical, Discrete
from shadho_celery.space.domain import Domain
from shadho_celery.space.tree import Node, Switch, Value

#: the options that must have been chosen, each a (choice's label, option's index), from the outermost in
Condition = tuple[tuple[str, int], ...]
#: a label with more ways to become active counts as always active
MAX_CONDITIONS = 64
_NO_PINS: Pins = MappingProxyType({})
#: a choice of more options is described by their number and a hash
MAX_DESCRIBED = 20


@dataclass(frozen=True, eq=False, repr=False)
class Space:
    """A search space, compiled; made by `compile_space`, and safe to use from several threads."""

    #: builds the objective's params
    root: Node
    #: which labels are active when
    skeleton: Skeleton
    #: label -> law, in order of first appearance in hyperopt's graph (which sorts a dict by its keys)
    domains: Mapping[str, Domain]
    #: label -> the first choice whose option it picks
    switches: Mapping[str, Switch] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """Every hyperparameter's name, in order of first appearance."""
        return tuple(self.domains)

    def sample(self, generator: np.random.Generator, size: int, pins: Pins = _NO_PINS) -> list[dict[str, Value]]:
        """Draw `size` assignments from the prior: the active labels' raw draws, as plain ints and floats.

        A choice's label in `pins` has the index given there.
        """
        return self.skeleton.draw(self.domains, generator, size, pins)

    def evaluate(self, params: Params) -> Value:
        """What the objective gets for these draws: equal to hyperopt's ``space_eval``, types included.

        Labels that are not active may be absent. Raises SpaceError where an active one is.
        """
        return self.root.evaluate(params, {})

    def active(self, params: Params) -> tuple[str, ...]:
        """The labels that take part under these params, in declaration order; `params` may hold more."""
        found = {label for block in self.skeleton.walk(params) for label in block.labels}
        return tuple(label for label in self.domains if label in found)

    def check(self, params: Params) -> None:
        """Raise SpaceError unless these params can be drawn: every active label there, its value in its domain."""
        for label in params:
            if label not in self.domains:
                raise SpaceError(f"The space has no hyperparameter {label!r}; leave it out, or mend its name.")
        for block in self.skeleton.walk(params):
            for label in block.labels:
                if label not in params:
                    raise SpaceError(f"The params lack {label!r}, which is active in them; give it a value.")
                if not self.domains[label].contains(params[label]):
                    outside = f"{params[label]!r} is outside {self.domains[label].describe()}"
                    raise SpaceError(f"Hyperparameter {label!r}: {outside}; give a value inside.")

    @cached_property
    def conditions(self) -> Mapping[str, tuple[Condition, ...]]:
        """Label -> the alternatives under which it is active; ``((),)`` is always.

        Below an option picked by a computed index, or with more than `MAX_CONDITIONS` alternatives, it says "active"
        too often; `active` is exact.
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
        """The same alternatives, those of all options of a choice replaced by what is above that choice."""
        if () in chains or len(chains) > MAX_CONDITIONS:
            return {()}
        options: dict[tuple[Condition, str], int] = {}
        for chain in chains:
            options[chain[:-1], chain[-1][0]] = options.get((chain[:-1], chain[-1][0]), 0) + 1
        for (prefix, label), count in options.items():
            domain = self.domains[label]
            if isinstance(domain, Discrete) and count == domain.count:
                rest = {chain for chain in chains if chain[: len(prefix)] != prefix}
                return self._simplified(rest | {prefix})
        return chains

    def literal_options(self, label: str) -> tuple[Value, ...]:
        """What a report shows for each index of this choice: the option where it is a constant, else its index.

        Empty for a label that picks no option.
        """
        switch = self.switches.get(label)
        return tuple(text.literal_of(option, place) for place, option in enumerate(switch.options)) if switch else ()

    @cached_property
    def structure(self) -> str:
        """The whole expression as a text (hashed where long), the same in every process."""
        return self._texts[self.root]

    @cached_property
    def _texts(self) -> Mapping[Node, str]:
        return text.structure(self.root)

    @cached_property
    def _expressions(self) -> Mapping[str, list[str]]:
        return text.expressions(self.root, self._texts)

    def describe(self) -> dict[str, str]:
        """Label -> its law, options, use and condition, as a text that is the same in every process.

        Two spaces that describe alike give a recorded index or number the same meaning.
        """
        return {label: self._described(label) for label in self.domains}

    def _described(self, label: str) -> str:
        domain = self.domains[label]
        described = domain.describe()
        if switch := self.switches.get(label):
            options = [self._texts[option] for option in switch.options]
            listed = ", ".join(options) if len(options) <= MAX_DESCRIBED else text.digest("\n".join(options))
            uneven = isinstance(domain, Categorical) and not domain.is_uniform and len(options) > MAX_DESCRIBED
            law = f"pchoice({domain.count}, {text.digest(described)})" if uneven else described  # type: ignore[attr-defined]
            described = f"{law} of {listed}"
        if calls := self._expressions.get(label):
            described = f"{described} as {', '.join(calls)}"
        alternatives = [", ".join(f"{choice}={place}" for choice, place in chain) for chain in self.conditions[label]]
        return described if alternatives == [""] else f"{described} if {' or '.join(alternatives)}"


def _extended(chains: set[Condition], label: str | None, place: int) -> set[Condition]:
    """The chains with one more link; a chain that already went another way at this choice leads nowhere."""
    if label is None:
        return chains
    extended: set[Condition] = set()
    for chain in chains:
        taken = dict(chain).get(label)
        if taken is None:
            extended.add((*chain, (label, place)))
        elif taken == place:
            extended.add(chain)
    return extended
