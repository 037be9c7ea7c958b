"""Subspaces of a space: one for each combination of options of its structural choices, up to a limit.

A choice is structural if at least one of its options contains a hyperparameter. Source: SHADHO, arXiv 1707.01428.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.trial import Params
from shadho_celery.errors import UsageError
from shadho_celery.space.describe import option_names
from shadho_celery.space.domains import Discrete, Domain
from shadho_celery.space.space import Block, Branch, Pins, Space
from shadho_celery.space.tree import Value, postorder

logger = logging.getLogger(__name__)

DEFAULT_MAX_SUBSPACES = 64
#: to find the fraction of points that `where` allows in a subspace: maximum number of draws, and number of allowed
#: draws after which no more are made; and the fraction in the whole space below which there is a warning
MOST_DRAWS, ENOUGH, FEW = 10_000, 100, 0.01
#: name of the subspace that is the whole space
UNDIVIDED = "all"
#: values of a subspace's labels in order, None for an inactive label. A key identifies params in the subspace
Key = tuple[Value | None, ...]
#: the branches that are still to be visited, the next one first, as a linked list
_Pending = tuple[Branch, "_Pending"] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Subspace:
    """A part of the search space, in which structural choices are pinned to an option. Shares and placement use it as a
    unit.
    """

    #: text with the pinned choices and options, such as ``kernel=rbf``, joined by commas; "all" if no choice is pinned
    name: str
    #: the pinned choices: index of the option by label, in the order of the space
    fixed: Pins
    #: distributions by label of all labels that may be drawn in it, including choices that are not pinned
    domains: Mapping[str, Domain]
    #: its probability under the prior of the space. The probabilities of all subspaces sum to 1
    probability: float
    space: Space = field(repr=False)

    def sample(self, generator: np.random.Generator, size: int) -> list[dict[str, Value]]:
        """Draw `size` sets of params from the prior within the subspace. Pinned labels are included."""
        return self.space.sample(generator, size, self.fixed)

    def first_allowed(self, proposals: Iterable[Params], generator: np.random.Generator) -> Params:
        """Return the first of these params that `where` allows, otherwise a draw from the prior within the subspace."""
        return next(self.space.allowed(proposals), None) or self.sample(generator, 1)[0]

    def at(self, masses: NDArray[np.float64]) -> dict[str, Value]:
        """Return the params whose values are the quantiles at `masses`, numbers in [0, 1] in the order of `domains`."""
        params: dict[str, Value] = {**self.fixed}
        for column, (label, domain) in enumerate(self.domains.items()):
            params[label] = domain.quantile(masses[column : column + 1]).tolist()[0]
        return {label: params[label] for label in self.active(params)}

    @cached_property
    def always_active(self) -> tuple[str, ...] | None:
        """The active labels if they are the same for all params; None if they depend on the params."""
        space, fixed = self.space, self.fixed
        depends = any(branch.label not in fixed for block in space.walk(fixed) for branch in block.branches)
        return None if depends else space.active(fixed)

    @cached_property
    def most_drawn(self) -> int:
        """Maximum number of labels that are drawn for one trial: of a choice, those of a single option."""
        counts: dict[Block, int] = {}
        for block in postorder(self.space.block, lambda each: _inside(each, self.fixed)):
            taken = [_taken(branch, self.fixed) for branch in block.branches]
            below = sum(max((counts[each] for each in options if each), default=0) for options in taken)
            counts[block] = below + sum(label not in self.fixed for label in block.labels)
        # A label in two blocks was counted twice, so the number may be too high.
        return min(counts[self.space.block], len(self.domains))

    def active(self, params: Params) -> tuple[str, ...]:
        """Return the labels that are active under these params, in the order of the space. `params` may have other
        labels.
        """
        return self.always_active or self.space.active(params)

    def key(self, params: Params) -> Key:
        """Return a key that identifies these params within the subspace."""
        return tuple(map(params.get, self.domains))

    def contains(self, params: Params) -> bool:
        """Return True if these params belong to this subspace. Params belong to exactly one subspace."""
        return all(params.get(label) == place for label, place in self.fixed.items())


def split(space: Space, max_subspaces: int = DEFAULT_MAX_SUBSPACES) -> tuple[Subspace, ...]:
    """Return the subspaces of a space in the order of the space. All params belong to exactly one subspace.

    If there are more than `max_subspaces` combinations, only outermost choices are split, as many in their order as the
    limit allows. The other choices are drawn within subspaces, and a log line says so. An option of probability 0 has
    no subspace.
    """
    subspaces, only = _Structure(space).split(max_subspaces)
    if only is not None:
        # This is not a warning, because nothing is wrong with the space.
        named = ", ".join(only) or "none"
        logger.info("the space has more than %d combinations of choices: split on %s only", max_subspaces, named)
    return subspaces


def bounded(subspaces: Sequence[Subspace]) -> tuple[tuple[Subspace, ...], str | None]:
    """Return the subspaces in which `where` allows points, and a warning, or None.

    A subspace is left out if `where` refuses all of MOST_DRAWS draws from it. The warning names these subspaces, and
    says if few draws are allowed. Raises UsageError if all subspaces are left out.
    """
    if subspaces[0].space.where is None:
        return (*subspaces,), None
    parts = {each: _allowed_part(each) for each in subspaces}
    if not (kept := [each for each, part in parts.items() if part]):
        raise UsageError(
            f"where allows none of {MOST_DRAWS} draws from the search space; widen it. Params that must be equal, or "
            "sum up to a number, need a space with one param less, from which the objective computes the last one"
        )
    left_out = [each for each, part in parts.items() if not part]
    words = [f"where allows no point of subspace {each.name}, which is left out" for each in left_out]
    space = replace(subspaces[0].space, left_out=[each.fixed for each in left_out])
    whole = sum(each.probability for each in kept)
    allowed = sum(each.probability * part for each, part in parts.items()) / whole
    if allowed < FEW:
        words.append(f"where allows about {allowed:.2%} of the draws; a search space that fits it is searched faster")
    kept = [replace(each, probability=each.probability / whole, space=space) for each in kept]
    return tuple(kept), "; ".join(words) or None


def _allowed_part(subspace: Subspace) -> float:
    """Return the fraction of draws from a subspace that `where` allows, estimated from at most MOST_DRAWS draws."""
    generator, space, drawn, allowed = np.random.default_rng(0), subspace.space, 0, 0
    while drawn < MOST_DRAWS and allowed < ENOUGH:
        drawn += ENOUGH
        allowed += sum(map(space.allows, space.draw(generator, ENOUGH, subspace.fixed)))
    return allowed / drawn


def undivided(space: Space) -> Subspace:
    """Return the whole space as one subspace."""
    return _Structure(space).subspace(UNDIVIDED, {})


def parts_of(subspace: Subspace) -> tuple[Subspace, ...]:
    """Return the subspaces of the whole space, as `split` does, but without the log line.

    If choices are pinned in the given subspace, return only itself.
    """
    return (subspace,) if subspace.fixed else _Structure(subspace.space).split(DEFAULT_MAX_SUBSPACES)[0]


class _Structure:
    """The structural choices of a space, and their combinations."""

    def __init__(self, space: Space) -> None:
        self._space = space
        branches = [branch for block in space.blocks for branch in block.branches]
        #: by label of a choice: its first branch
        self.choices = {branch.label: branch for branch in reversed(branches) if branch.label is not None}

    def split(self, most: int) -> tuple[tuple[Subspace, ...], list[str] | None]:
        """Return at most `most` subspaces, and the choices that are split; None instead of these if all choices are
        split.
        """
        combinations, only = list(islice(self.combinations(self.choices), most + 1)), None
        if len(combinations) > most:
            only = self.outermost(most)
            combinations = list(self.combinations(only))
        return tuple(map(self.subspace, self.names(combinations), combinations)), only

    def reachable(self, label: str) -> list[int]:
        """Return the indexes of a choice's options that have a positive probability."""
        options = range(len(self.choices[label].options))
        return [place for place in options if self._probability(label, place) > 0]

    def combinations(self, labels: Collection[str]) -> Iterator[dict[str, int]]:
        """Yield each combination of options of these choices. The option of the last choice changes fastest."""
        todo: list[tuple[_Pending, dict[str, int], set[Branch]]] = [(_push(self._space.block, None), {}, set())]
        while todo:
            pending, pins, seen = todo.pop()
            while pending is not None:
                branch, pending = pending
                if branch.label is None or branch.label not in labels or branch in seen:
                    continue
                seen.add(branch)
                if branch.label in pins:  # the same choice has already selected an option of another list
                    pending = _push(branch.options[pins[branch.label]], pending)
                    continue
                for place in reversed(self.reachable(branch.label)):
                    below_it = _push(branch.options[place], pending)
                    todo.append((below_it, {**pins, branch.label: place}, set(seen)))
                break
            else:
                yield pins

    def outermost(self, limit: int) -> list[str]:
        """Return outermost choices, in the order of the space, that together have at most `limit` combinations."""
        chosen: dict[str, int] = {}
        for branch in self._space.block.branches:
            if branch.label is None or branch.label in chosen:
                continue
            options = len(self.reachable(branch.label))
            if options * math.prod(chosen.values()) <= limit:
                chosen[branch.label] = options
        return list(chosen)

    def names(self, combinations: list[dict[str, int]]) -> list[str]:
        """Return a unique name for each combination."""
        labels = dict.fromkeys(label for pins in combinations for label in pins)
        options = {label: option_names(label, self.choices[label].switch.options) for label in labels}
        named = [[f"{label}={options[label][place]}" for label, place in pins.items()] for pins in combinations]
        names = [",".join(parts) or UNDIVIDED for parts in named]
        if len(set(names)) == len(names):
            return names
        # Two names may be equal, because labels and tags may have commas and equals signs. Then numbers are added.
        return [f"{name}#{number}" for number, name in enumerate(names)]

    def subspace(self, name: str, pins: Pins) -> Subspace:
        """Return the subspace in which these choices are pinned."""
        blocks = postorder(self._space.block, lambda block: _inside(block, pins))
        drawn = {label for block in blocks for label in block.labels} - set(pins)
        leaves = {label: domain for label, domain in self._space.domains.items() if label in drawn}
        mass = math.prod(self._probability(label, place) for label, place in pins.items())
        return Subspace(name=name, fixed=pins, domains=leaves, probability=mass, space=self._space)

    def _probability(self, label: str, place: int) -> float:
        domain = self._space.domains[label]
        assert isinstance(domain, Discrete)
        return domain.probability(place)


def _inside(block: Block, pins: Pins) -> list[Block]:
    """Return the blocks with labels directly below a block, of the options that these pins allow."""
    return [option for branch in block.branches for option in _taken(branch, pins) if option]


def _taken(branch: Branch, pins: Pins) -> tuple[Block, ...]:
    """Return the block of the branch's pinned option; if no option is pinned, the blocks of all options."""
    place = pins.get(branch.label) if branch.label is not None else None
    return branch.options if place is None else (branch.options[place],)


def _push(block: Block, pending: _Pending) -> _Pending:
    for branch in reversed(block.branches):
        pending = (branch, pending)
    return pending
