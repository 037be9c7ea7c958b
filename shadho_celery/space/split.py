"""A space's subspaces: one for each combination of its structural choices, made lazily and never more than a bound.

Structural is a choice of which at least one option holds a hyperparameter. Source: SHADHO, arXiv 1707.01428.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from shadho_celery.space.base import Domain
from shadho_celery.space.blocks import Block, Branch, Pins, below
from shadho_celery.space.discrete import Discrete
from shadho_celery.space.space import Space
from shadho_celery.space.text import option_names
from shadho_celery.space.tree import Params, postorder

logger = logging.getLogger(__name__)

DEFAULT_MAX_SUBSPACES = 64
#: the subspace that is the whole space
UNDIVIDED = "all"
#: with more pairs to compare, a count of choices that stand in several places becomes a bound, to take milliseconds
_MAX_PAIRS = 20_000

#: the choices still open, nearest first, as a linked list
_Pending = tuple[Branch, "_Pending"] | None
#: which options of choices that stand in several places were taken -> how many combinations of the others
_Counts = dict[frozenset[tuple[str, int]], int]


@dataclass(frozen=True, eq=False, kw_only=True)
class Subspace:
    """A part of the search space that is ranked and assigned as one: some choices are pinned, the rest is drawn."""

    #: the pinned choices and options, ``kernel=rbf``, joined by commas; "all" where nothing is pinned
    name: str
    #: the pinned choices: label -> option index, in declaration order
    fixed: Pins
    #: the leaves: label -> law of everything that may be drawn in it, choices that were not split included
    domains: Mapping[str, Domain]
    #: the share of the space's own prior that falls into it; all subspaces' sum to 1
    probability: float
    space: Space = field(repr=False)

    @property
    def labels(self) -> tuple[str, ...]:
        """The leaves' names, in declaration order."""
        return tuple(self.domains)

    @property
    def leaves(self) -> tuple[Domain, ...]:
        """The leaves' laws, in declaration order; pinned choices are no leaves."""
        return tuple(self.domains.values())

    def sample(self, generator: np.random.Generator, size: int) -> list[dict[str, Any]]:
        """Draw `size` assignments of the active labels from the prior within the subspace, pinned labels included."""
        return self.space.sample(generator, size, self.fixed)

    def contains(self, params: Params) -> bool:
        """Whether these params lie in this subspace and no other."""
        return all(params.get(label) == place for label, place in self.fixed.items())


def split(space: Space, max_subspaces: int = DEFAULT_MAX_SUBSPACES) -> tuple[Subspace, ...]:
    """The space's subspaces, every assignment in exactly one, in declaration order.

    With more than `max_subspaces` combinations only the outermost choices are split, and of these as many, in
    declaration order, as fit; the others stay conditional leaves, and a log line says so. An option of probability 0
    has no subspace.
    """
    within = _Structure(space)
    combinations = list(islice(within.combinations(within.all_labels), max_subspaces + 1))
    if len(combinations) > max_subspaces:
        chosen = within.outermost(max_subspaces)
        logger.warning(
            "the space has %s combinations of choices, more than %d: split on %s only",
            _readable(within.count()), max_subspaces, ", ".join(chosen) or "none",
        )  # fmt: skip
        combinations = list(within.combinations(frozenset(chosen)))
    names = _names(combinations, within.names)
    return tuple(within.subspace(name, pins) for name, pins in zip(names, combinations, strict=True))


def count_subspaces(space: Space) -> int:
    """How many combinations of structural choices the space has, exactly, however many.

    Only where very many choices stand in several places (hundreds of combinations of these alone) it is an upper bound:
    the product over all choices.
    """
    return _Structure(space).count()


class _TooManyPairs(Exception):
    """The exact count would take too long."""


class _Structure:
    """The structural choices of one space."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._skeleton = space.skeleton
        branches = [branch for block in self._skeleton.blocks for branch in block.branches if branch.label is not None]
        self.all_labels = frozenset(str(branch.label) for branch in branches)
        self._first: dict[str, Branch] = {}
        for branch in branches:
            self._first.setdefault(str(branch.label), branch)

    def names(self, label: str) -> tuple[str, ...]:
        """The names of a choice's options."""
        return option_names(label, self._first[label].switch.options)

    def reachable(self, branch: Branch) -> list[int]:
        """The options that the prior ever takes."""
        domain = self._choice(str(branch.label))
        return [place for place in range(len(branch.options)) if domain.probability(place) > 0]

    def combinations(self, labels: frozenset[str]) -> Iterator[dict[str, int]]:
        """Every combination of options of these choices, the last choice varying fastest."""
        todo: list[tuple[_Pending, dict[str, int], set[Branch]]] = [(_push(self._skeleton.root, None), {}, set())]
        while todo:
            pending, pins, seen = todo.pop()
            while pending is not None:
                branch, pending = pending
                if branch.label not in labels or branch in seen:
                    continue
                seen.add(branch)
                if branch.label in pins:  # another list of options with the same index
                    pending = _push(branch.options[pins[branch.label]], pending)
                    continue
                for place in reversed(self.reachable(branch)):
                    below_it = _push(branch.options[place], pending)
                    todo.append((below_it, {**pins, branch.label: place}, set(seen)))
                break
            else:
                yield pins

    def outermost(self, limit: int) -> list[str]:
        """As many of the choices at the top, in declaration order, as have at most `limit` combinations."""
        chosen: dict[str, int] = {}
        for branch in self._skeleton.root.branches:
            if branch.label is None or branch.label in chosen:
                continue
            options = len(self.reachable(branch))
            if options * math.prod(chosen.values()) <= limit:
                chosen[branch.label] = options
        return list(chosen)

    def subspace(self, name: str, pins: dict[str, int]) -> Subspace:
        """The subspace of these pins."""

        def inside(block: Block) -> list[Block]:
            return [option for branch in block.branches for option in _taken(branch, pins) if option]

        seen = {label for block in postorder(self._skeleton.root, inside) for label in block.labels}
        drawn = seen - set(pins)
        leaves = {label: domain for label, domain in self._space.domains.items() if label in drawn}
        mass = math.prod(self._choice(label).probability(place) for label, place in pins.items())
        return Subspace(name=name, fixed=pins, domains=leaves, probability=mass, space=self._space)

    def _choice(self, label: str) -> Discrete:
        domain = self._space.domains[label]
        assert isinstance(domain, Discrete)
        return domain

    def count(self) -> int:
        """The number of combinations: a sum over a choice's options, a product over what stands side by side.

        A choice that stands in several places takes the same option in all: what was taken of these is carried along.
        """
        shared = self._shared_labels()
        try:
            return sum(self._counts(shared).values())
        except _TooManyPairs:
            return math.prod(len(self.reachable(branch)) for branch in self._first.values())

    def _shared_labels(self) -> frozenset[str]:
        """The choices that can be met twice on the way through one assignment."""
        places: dict[str, int] = {}
        reached = self._skeleton.shared
        inside = {block for top in reached for block in postorder(top, below)}
        for block in self._skeleton.blocks:
            for branch in block.branches:
                if branch.label is not None:
                    places[branch.label] = places.get(branch.label, 0) + (2 if block in inside else 1)
        return frozenset(label for label, count in places.items() if count > 1)

    def _counts(self, shared: frozenset[str]) -> _Counts:
        """The root's counts by what was taken of the shared choices."""
        self._pairs = 0
        found: dict[Block, _Counts] = {}
        for block in reversed(self._skeleton.blocks):
            total: _Counts = {frozenset(): 1}
            for branch in block.branches:
                if branch.label is None:
                    continue  # an index that is computed is not split, nor is what depends on it
                total = self._product(total, self._union(branch, found, branch.label in shared))
            found[block] = total
        return found[self._skeleton.root]

    def _union(self, branch: Branch, found: dict[Block, _Counts], is_shared: bool) -> _Counts:
        total: _Counts = {}
        for place in self.reachable(branch):
            counts = found.get(branch.options[place], {frozenset(): 1})
            if is_shared:
                counts = self._product({frozenset({(str(branch.label), place)}): 1}, counts)
            for taken, count in counts.items():
                total[taken] = total.get(taken, 0) + count
        return total

    def _product(self, left: _Counts, right: _Counts) -> _Counts:
        """All pairs that take the same option wherever both took one."""
        self._pairs += len(left) * len(right)
        # one pair each is the ordinary case, however large the space
        if len(left) * len(right) > 1 and self._pairs > _MAX_PAIRS:
            raise _TooManyPairs
        total: _Counts = {}
        for taken, count in left.items():
            options = dict(taken)
            for also, more in right.items():
                if all(options.get(label, place) == place for label, place in also):
                    total[taken | also] = total.get(taken | also, 0) + count * more
        return total


def _taken(branch: Branch, pins: Pins) -> tuple[Block, ...]:
    """The options that may be taken under these pins."""
    place = pins.get(branch.label) if branch.label is not None else None
    return branch.options if place is None else (branch.options[place],)


def _readable(count: int) -> str:
    """A count of any size: 390 or 3.9e19."""
    if count < 10**15:
        return str(count)
    power = math.log10(count)  # of an int: a float would overflow
    return f"{10 ** (power % 1):.2g}e{math.floor(power)}"


def _push(block: Block, pending: _Pending) -> _Pending:
    for branch in reversed(block.branches):
        pending = (branch, pending)
    return pending


def _names(combinations: list[dict[str, int]], names_of: Callable[[str], tuple[str, ...]]) -> list[str]:
    """A name for each combination, all different."""
    options = {label: names_of(label) for label in dict.fromkeys(label for pins in combinations for label in pins)}
    named = [[f"{label}={options[label][place]}" for label, place in pins.items()] for pins in combinations]
    names = [",".join(parts) or UNDIVIDED for parts in named]
    if len(set(names)) == len(names):
        return names
    # commas and equals signs inside labels and tags can make two names one
    return [f"{name}#{number}" for number, name in enumerate(names)]
