"""Conditional skeleton of a space: which labels are active when, without the computations on them.

A `Block` holds the labels that are drawn together and the branches below them. A `Branch` is a choice with labels in at
least one option. Both compare by identity, and one block may occur in several places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shadho_celery.core.trial import Params
from shadho_celery.space.domains import Domain
from shadho_celery.space.tree import Switch, Value, postorder

H = TypeVar("H", bound=Hashable)

#: label -> the option's index
Pins = Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Block:
    """Labels that are active together, and the choices whose options contain further labels."""

    #: in order of first appearance; includes the labels of its branches
    labels: tuple[str, ...] = ()
    branches: tuple[Branch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.branches)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Branch:
    """A choice between blocks."""

    #: the label whose value is the option's index; None for a computed index
    label: str | None
    switch: Switch
    #: one per option, empty for an option without labels
    options: tuple[Block, ...]

    def position(self, params: Params) -> int:
        """Return the index of the option that these params choose."""
        if self.label is not None and self.label in params:
            return self.switch.position(params[self.label])
        return self.switch.position(self.switch.index.evaluate(params, {}))


def merge(blocks: Iterable[Block]) -> Block:
    """Return one block with all their labels and branches, each once."""
    filled = list(dict.fromkeys(block for block in blocks if block))
    if len(filled) == 1:
        return filled[0]
    labels = dict.fromkeys(label for block in filled for label in block.labels)
    branches = dict.fromkeys(branch for block in filled for branch in block.branches)
    return Block(tuple(labels), tuple(branches))


def below(block: Block) -> list[Block]:
    """Return the blocks of all options with labels, in order, with repetitions."""
    return [option for branch in block.branches for option in branch.options if option]


class Skeleton:
    """The blocks of a space, from the root."""

    def __init__(self, root: Block) -> None:
        self.root = root
        #: every block once, parents before children
        self.blocks = tuple(postorder(root, below))[::-1]
        #: blocks that occur in several places
        self._shared = _repeated(option for block in self.blocks for option in below(block))
        #: labels that occur in several blocks
        self._repeated = _repeated(label for block in self.blocks for label in block.labels)

    def walk(self, params: Params) -> Iterator[Block]:
        """Yield the blocks that are active under these params."""
        todo: list[Block | Branch] = [self.root]
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

    def draw(
        self, domains: Mapping[str, Domain], generator: np.random.Generator, size: int, pins: Pins
    ) -> list[dict[str, Value]]:
        """Draw `size` assignments of the active labels. A pinned label has its pinned value instead of a draw.

        Each block draws its labels for all assignments in which it is active, then divides these among the options.
        """
        drawn: list[dict[str, Value]] = [{} for _ in range(size)]
        seen: dict[Block, set[int]] = {block: set() for block in self._shared}
        todo: list[tuple[Block | Branch, list[int]]] = [(self.root, list(range(size)))]
        while todo:
            part, rows = todo.pop()
            if isinstance(part, Branch):
                todo.extend(reversed(_deal(part, rows, drawn)))
                continue
            if part in seen:  # already reached in another way, for some of the rows
                rows = [row for row in rows if row not in seen[part]]
                seen[part].update(rows)
            if not rows:
                continue
            for label in part.labels:
                empty = rows if label not in self._repeated else [row for row in rows if label not in drawn[row]]
                count = len(empty)
                values = [pins[label]] * count if label in pins else domains[label].sample(generator, count).tolist()
                for row, value in zip(empty, values, strict=True):
                    drawn[row][label] = value
            todo.extend((branch, rows) for branch in reversed(part.branches))
        return drawn


def _deal(branch: Branch, rows: list[int], drawn: list[dict[str, Value]]) -> list[tuple[Block | Branch, list[int]]]:
    """Return the rows by the option that each has chosen, without options that have no labels."""
    hands: dict[int, list[int]] = {}
    for row in rows:
        hands.setdefault(branch.position(drawn[row]), []).append(row)
    return [(branch.options[place], hand) for place, hand in sorted(hands.items()) if branch.options[place]]


def _repeated(things: Iterable[H]) -> frozenset[H]:
    return frozenset(thing for thing, count in Counter(things).items() if count > 1)
