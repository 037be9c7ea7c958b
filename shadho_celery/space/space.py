"""The compiled search space, `Space`, and its blocks, which determine when a label is active.

A `Block` has labels that are active together, and the branches below them. A `Branch` is a choice with labels in at
least one option. Both are compared by identity, and a block may occur in several places.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, repeat
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from shadho_celery.core.checks import listed, short
from shadho_celery.core.failures import headline, read_failure
from shadho_celery.core.trial import Params
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.space import describe as text
from shadho_celery.space.domains import Categorical, Continuous, Discrete, Domain
from shadho_celery.space.literals import digest
from shadho_celery.space.tree import Node, Switch, Value, evaluate, postorder

H = TypeVar("H", bound=Hashable)
P = TypeVar("P", bound=Params)

#: by label of a choice: the index of its option
Pins = Mapping[str, int]
#: options under which a label is active: pairs of a choice's label and an option's index, the outermost first
Condition = tuple[tuple[str, int], ...]
#: a label that is active under more alternatives counts as always active
MAX_CONDITIONS = 64
_NO_PINS: Pins = MappingProxyType({})
#: a choice with more options is described by their number and a hash
MAX_DESCRIBED = 20
#: number of params drawn at a time; maximum number of params in a row that the bounds between params may refuse
BLOCK, MOST_REFUSED = 64, 100_000
#: matches messages of exceptions that ask for an int, except those about the conversion by int()
_ASKS_FOR_INT = re.compile(r"\b(int|integer)s?\b(?!\()")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Block:
    """Labels that are active together, and the choices whose options contain further labels."""

    #: labels in the order of their first appearance, labels of its branches' choices included
    labels: tuple[str, ...] = ()
    branches: tuple[Branch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.branches)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Branch:
    """A choice whose options contain labels: one block for each option."""

    #: the label whose value is the option's index; None for a computed index
    label: str | None
    switch: Switch
    #: the block of each option; an empty block for an option without labels
    options: tuple[Block, ...]

    def position(self, params: Params) -> int:
        """Return the index of the option that these params choose."""
        if self.label is not None and self.label in params:
            return self.switch.position(params[self.label])
        return self.switch.position(evaluate(self.switch.index, params, {}))


def merge(blocks: Iterable[Block]) -> Block:
    """Return a block with the labels and branches of all `blocks`, without duplicates."""
    filled = list(dict.fromkeys(block for block in blocks if block))
    if len(filled) == 1:
        return filled[0]
    labels = dict.fromkeys(label for block in filled for label in block.labels)
    branches = dict.fromkeys(branch for block in filled for branch in block.branches)
    return Block(tuple(labels), tuple(branches))


def below(block: Block) -> list[Block]:
    """Return the blocks of all options below a block that have labels, in order. A block may occur repeatedly."""
    return [option for branch in block.branches for option in branch.options if option]


@dataclass(frozen=True, eq=False, repr=False)
class Space:
    """A compiled search space, made by `compile_space`. Several threads may use it."""

    #: node that computes the objective's values
    root: Node
    #: the block of the labels that are always active
    block: Block
    #: distributions by label, in the order of first appearance in hyperopt's graph, in which dicts are sorted by key
    domains: Mapping[str, Domain]
    #: by label of a choice: the first node in which it selects an option
    switches: Mapping[str, Switch]
    #: bounds between params: a function of the objective's argument, which returns whether the point may be tried; None
    #: if there are no bounds
    where: Callable[[Any], Any] | None = None
    #: the fixed choices of each subspace in which `where` allows no point
    left_out: Sequence[Pins] = ()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks without duplicates, each before the blocks below it."""
        return tuple(postorder(self.block, below))[::-1]

    @cached_property
    def _shared(self) -> frozenset[Block]:
        """Blocks that occur in several places."""
        return _repeated(option for block in self.blocks for option in below(block))

    @cached_property
    def _repeated(self) -> frozenset[str]:
        """Labels that occur in several blocks."""
        return _repeated(label for block in self.blocks for label in block.labels)

    def sample(self, generator: np.random.Generator, size: int, pins: Pins = _NO_PINS) -> list[dict[str, Value]]:
        """Draw `size` sets of params from the prior, as `draw` does. Only params that `where` allows are returned.

        Raises UsageError if `where` refuses MOST_REFUSED draws in a row.
        """
        if self.where is None:
            return self.draw(generator, size, pins)
        draws = (each for rows in chain([size], repeat(BLOCK)) for each in self.draw(generator, rows, pins))
        found = [*islice(self.allowed(draws), size)]
        if len(found) < size:
            raise UsageError(f"where allows none of {MOST_REFUSED} draws; widen it, or write the space so that it fits")
        return found

    def allows(self, params: Params) -> bool:
        """Return whether `where` allows these params. If `where` fails, raises UsageError, which names the point."""
        if self.where is None:
            return True
        if any(pins.items() <= params.items() for pins in self.left_out):
            return False
        values = self.evaluate(params)
        try:
            found = self.where(values)
            if isinstance(found, (bool, np.bool_)):
                return bool(found)
            why = f"it returned {short(found, 60)}"
        except (Exception, SystemExit):
            why = str(read_failure(traceback.format_exc()))
        raise UsageError(f"where failed for {short(values, 200)}: {why}; return True or False for every point")

    def allowed(self, points: Iterable[P]) -> Iterator[P]:
        """Yield the points that `where` allows, until it has refused MOST_REFUSED points in a row."""
        refused = 0
        for params in points:
            refused = 0 if self.allows(params) else refused + 1
            if not refused:
                yield params
            elif refused == MOST_REFUSED:
                return

    def draw(self, generator: np.random.Generator, size: int, pins: Pins = _NO_PINS) -> list[dict[str, Value]]:
        """Draw `size` sets of params from the prior: raw draws of the active labels, as ints and floats.

        A label in `pins` has the value given there. The labels of a block are drawn at once for all sets of params in
        which it is active. Then the sets are divided among the options of its branches. `where` is not called.
        """
        drawn: list[dict[str, Value]] = [{} for _ in range(size)]
        seen: dict[Block, set[int]] = {block: set() for block in self._shared}
        todo: list[tuple[Block | Branch, list[int]]] = [(self.block, list(range(size)))]
        while todo:
            part, rows = todo.pop()
            if isinstance(part, Branch):
                todo.extend(reversed(_deal(part, rows, drawn)))
                continue
            if part in seen:  # another branch may already have reached this block for a part of the rows
                rows = [row for row in rows if row not in seen[part]]
                seen[part].update(rows)
            if not rows:
                continue
            for label in part.labels:
                empty = rows if label not in self._repeated else [row for row in rows if label not in drawn[row]]
                count = len(empty)
                values = (
                    [pins[label]] * count if label in pins else self.domains[label].sample(generator, count).tolist()
                )
                for row, value in zip(empty, values, strict=True):
                    drawn[row][label] = value
            todo.extend((branch, rows) for branch in reversed(part.branches))
        return drawn

    def evaluate(self, params: Params) -> Value:
        """Return the objective's values for these params. They equal those of hyperopt's ``space_eval``, types
        included.

        Inactive labels may be missing. Raises SpaceError if an active label is missing.
        """
        return evaluate(self.root, params, {})

    def walk(self, params: Params) -> Iterator[Block]:
        """Yield the blocks that are active under these params."""
        todo: list[Block | Branch] = [self.block]
        seen: set[Block] = set()
        while todo:
            part = todo.pop()
            if isinstance(part, Branch):
                if option := part.options[part.position(params)]:
                    todo.append(option)
            elif part not in seen:
                seen.add(part)
                yield part
                todo.extend(reversed(part.branches))

    def active(self, params: Params) -> tuple[str, ...]:
        """Return the labels that are active under these params, in the order of `domains`. `params` may have other
        labels.
        """
        found = {label for block in self.walk(params) for label in block.labels}
        return tuple(label for label in self.domains if label in found)

    def check(self, params: Params) -> None:
        """Raise SpaceError unless these params have all active labels, with values in their domains."""
        for label in params:
            if label not in self.domains:
                raise SpaceError(f"The space has no hyperparameter {label!r}; leave it out, or correct its name.")
        for block in self.walk(params):
            for label in block.labels:
                if label not in params:
                    raise SpaceError(f"The params lack {label!r}, which is active in them; give it a value.")
                if not self.domains[label].contains(params[label]):
                    outside = f"{params[label]!r} is outside {self.domains[label].describe()}"
                    raise SpaceError(f"Hyperparameter {label!r}: {outside}; give a value inside.")

    @cached_property
    def conditions(self) -> Mapping[str, tuple[Condition, ...]]:
        """By label: the alternatives under which it is active; ``((),)`` means always.

        For labels below an option that is selected by a computed index, or with more than `MAX_CONDITIONS`
        alternatives, the conditions may be too wide. `active` is exact.
        """
        above: dict[Block, set[Condition]] = {block: set() for block in self.blocks}
        above[self.block] = {()}
        found: dict[str, set[Condition]] = {label: set() for label in self.domains}
        for block in self.blocks:
            here = self._simplified(above[block])
            for label in block.labels:
                found[label] |= here
            for branch in block.branches:
                for place, option in enumerate(branch.options):
                    if option:
                        above[option] |= _extended(here, branch.label, place)
        return {label: tuple(sorted(self._simplified(chains))) for label, chains in found.items()}

    @cached_property
    def whole(self) -> frozenset[str]:
        """Labels that the objective gets as ints, as from hp.uniformint."""
        return text.whole_labels(self.root)

    def whole_number_hint(self, error: str | None, params: Params) -> str:
        """Return a hint if a trial may have failed because whole numbers are drawn as floats; "" otherwise."""
        domains = {label: self.domains.get(label) for label in params if label not in self.whole}
        steps = {label: each.step for label, each in domains.items() if isinstance(each, Continuous)}
        floats = [label for label, step in steps.items() if step is not None and step.is_integer()]
        if not floats or not _ASKS_FOR_INT.search(headline(error)):
            return ""
        return f"{listed(floats, 3)}: drawn as float; hp.uniformint draws whole numbers as int"

    def _simplified(self, chains: set[Condition]) -> set[Condition]:
        """Return simplified alternatives. Alternatives for all options of a choice together are replaced by that under
        which the choice itself is active.
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
        """Return by label a text with its distribution, options, use and conditions, which is the same in every
        process.

        If two spaces have the same texts, recorded indexes and numbers mean the same in both.
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
    """Return the conditions extended by this option of a choice. Conditions with another option of it are left out."""
    if label is None:
        return chains
    lasting = {chain for chain in chains if dict(chain).get(label, place) == place}
    return {chain if (label, place) in chain else (*chain, (label, place)) for chain in lasting}


def _deal(branch: Branch, rows: list[int], drawn: list[dict[str, Value]]) -> list[tuple[Block | Branch, list[int]]]:
    """Return pairs of the block of a chosen option and the rows that chose it. Options without labels are left out."""
    hands: dict[int, list[int]] = {}
    for row in rows:
        hands.setdefault(branch.position(drawn[row]), []).append(row)
    return [(branch.options[place], hand) for place, hand in sorted(hands.items()) if branch.options[place]]


def _repeated(things: Iterable[H]) -> frozenset[H]:
    return frozenset(thing for thing, count in Counter(things).items() if count > 1)
