"""Which hyperparameters are active when: the conditional skeleton of a space, without what is computed from them.

A `Block` holds the labels that are drawn together and the branches that open below them; a `Branch` is a choice of
which at least one option holds a hyperparameter. Both compare by identity, and one block may stand in several places.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from shadho_celery.core.trial import Params
from shadho_celery.space.domain import Domain
from shadho_celery.space.tree import Switch, Value, postorder

H = TypeVar("H", bound=Hashable)

#: label -> the option's index
Pins = Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Block:
    """Labels that are active together, and the choices whose options hold further ones."""

    #: in order of first appearance; a branch's own label is among them
    labels: tuple[str, ...] = ()
    branches: tuple[Branch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.labels or self.branches)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Branch:
    """A choice between blocks."""

    #: the label whose value is the option's index; None where the index is computed from several or in another way
    label: str | None
    switch: Switch
    #: one per option, `EMPTY` where it holds no hyperparameter
    options: tuple[Block, ...]

    def position(self, params: Params) -> int:
        """The index of the option that these params choose."""
        if self.label is not None and self.label in params:
            return self.switch.position(params[self.label])
        return self.switch.position(self.switch.index.evaluate(params, {}))


EMPTY = Block()


def merge(blocks: Iterable[Block]) -> Block:
    """One block of all their labels and branches, each once."""
    filled = list({id(block): block for block in blocks if block}.values())
    if len(filled) <= 1:
        return filled[0] if filled else EMPTY
    labels = dict.fromkeys(label for block in filled for label in block.labels)
    branches = dict.fromkeys(branch for block in filled for branch in block.branches)
    return Block(tuple(labels), tuple(branches))


def below(block: Block) -> list[Block]:
    """The blocks of all options that hold hyperparameters, with repetition, in order."""
    return [option for branch in block.branches for option in branch.options if option]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Skeleton:
    """A space's blocks, from the root."""

    root: Block
    #: every block once, those above before those below
    blocks: tuple[Block, ...] = field(init=False)
    #: blocks that stand in several places
    shared: frozenset[Block] = field(init=False)
    #: labels that stand in several blocks
    repeated: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        blocks = tuple(postorder(self.root, below))[::-1]
        places = [option for block in blocks for option in below(block)]
        labels = [label for block in blocks for label in block.labels]
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "shared", frozenset(_repeated(places)))
        object.__setattr__(self, "repeated", frozenset(_repeated(labels)))

    def walk(self, params: Params) -> Iterator[Block]:
        """The blocks that are active under these params."""
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
        """Draw `size` assignments of the active labels; a pinned label has its pinned value instead of a draw.

        Each block draws its labels for all assignments in which it is active, then deals these out to the options.
        """
        drawn: list[dict[str, Value]] = [{} for _ in range(size)]
        seen: dict[Block, set[int]] = {block: set() for block in self.shared}
        todo: list[tuple[Block | Branch, list[int]]] = [(self.root, list(range(size)))]
        while todo:
            part, rows = todo.pop()
            if isinstance(part, Branch):
                todo.extend(reversed(_deal(part, rows, drawn)))
                continue
            if part in seen:  # reached by another way already, for some of the rows
                rows = [row for row in rows if row not in seen[part]]
                seen[part].update(rows)
            if not rows:
                continue
            for label in part.labels:
                empty = rows if label not in self.repeated else [row for row in rows if label not in drawn[row]]
                count = len(empty)
                values = [pins[label]] * count if label in pins else domains[label].sample(generator, count).tolist()
                for row, value in zip(empty, values, strict=True):
                    drawn[row][label] = value
            todo.extend((branch, rows) for branch in reversed(part.branches))
        return drawn


def _deal(branch: Branch, rows: list[int], drawn: list[dict[str, Value]]) -> list[tuple[Block | Branch, list[int]]]:
    """The rows by the option that each has chosen, options without hyperparameters left out."""
    hands: dict[int, list[int]] = {}
    for row in rows:
        hands.setdefault(branch.position(drawn[row]), []).append(row)
    return [(branch.options[place], hand) for place, hand in sorted(hands.items()) if branch.options[place]]


def _repeated(things: list[H]) -> Iterator[H]:
    seen: set[H] = set()
    for thing in things:
        if thing in seen:
            yield thing
        seen.add(thing)
