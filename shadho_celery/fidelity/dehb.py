"""DEHB: differential evolution with a population for each budget, in the brackets of Hyperband.

Source: Awad, Mallik, Hutter, "DEHB: Evolutionary Hyperband for Scalable, Robust and Efficient Hyperparameter
Optimization", IJCAI 2021, arXiv 2105.09821. Section numbers are those of the paper.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from shadho_celery.core.columns import feasible_loss
from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.fidelity.brackets import rung_of, sizes_of
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Rounds, Wanted
from shadho_celery.space.domains import Domain
from shadho_celery.space.features import Array
from shadho_celery.space.space import Space
from shadho_celery.space.split import undivided

#: mutation factor F and crossover rate p of section 3.1
MUTATION, CROSSOVER = 0.5, 0.5
#: number of individuals from which a mutant is made
PARENTS = 3
#: maximum number of mutations until the space's `where` allows the mutant
REFUSED = 100
#: number of bisection steps in the search for the quantile of a value
HALVINGS = 40


@dataclass(kw_only=True)
class _Population:
    """The individuals of the evolution at one budget."""

    #: positions of the individuals in the unit cube, shape (size, labels); their losses, infinite until they are known
    vectors: Array
    losses: Array
    #: for each individual, the number of the trial that has its checkpoint; -1 if there is none
    origins: list[int]
    #: origins that were promoted to this budget, or that reached it under another ladder
    promoted: set[int] = field(default_factory=set)
    #: number of trials added at this budget. It determines the target of the next trial, because targets are used in
    #: turn
    made: int = 0

    def best(self, count: int) -> list[int]:
        """Return the indexes of at most `count` of the best individuals, the best first."""
        return [int(place) for place in np.argsort(self.losses, kind="stable")[:count]]


@dataclass(kw_only=True)
class _Job:
    """A trial to send. It competes with the individual with index `target` in its budget's population."""

    rung: int
    target: int
    vector: Array
    #: number of the trial that it continues; None for a new draw
    origin: int | None = None


@dataclass(kw_only=True)
class _Bracket:
    """A bracket of Hyperband. Its next rung starts when all trials of the rung before have ended."""

    #: its index among all brackets, from 0
    place: int
    #: the ladder's index of its lowest rung; number of trials on each of its rungs
    first: int
    sizes: list[int]
    #: by rung, counted from `first`: vectors and origins that are promoted to it and were not sent yet
    chosen: dict[int, list[tuple[Array, int]]] = field(default_factory=dict)
    #: by rung, counted from `first`: number of added trials; number of ended trials
    added: Counter[int] = field(default_factory=Counter)
    ended: Counter[int] = field(default_factory=Counter)
    #: trials that were cancelled and must be sent again
    again: list[_Job] = field(default_factory=list)

    @property
    def filling(self) -> int | None:
        """Index of the lowest rung to which trials must still be added, counted from `first`; None if there is none."""
        return next((place for place, size in enumerate(self.sizes) if self.added[place] < size), None)

    @property
    def asking(self) -> int | None:
        """The rung `filling` if its next trial may be sent now; None while it waits for results."""
        place = self.filling
        return None if place is None or (place and self.ended[place - 1] < self.sizes[place - 1]) else place


class Dehb(Rounds):
    """Differential evolution across budgets. It proposes params itself, in the whole space.

    In the first bracket, individuals are drawn and promoted as in successive halving. In the other brackets of
    Hyperband's first cycle, the trials on the lowest rung are made by evolution, and the best are promoted. From the
    second cycle on, all trials are made by evolution, above the lowest rung from the best individuals of the next lower
    budget. When a trial ends, it replaces its target in the population unless its loss is higher or it has failed. If
    all started brackets wait for results, the next bracket starts.
    """

    def __init__(self, ladder: Ladder, space: Space, seed: int) -> None:
        self._budgets = ladder.budgets
        self._sizes = sizes_of(ladder)
        self._whole = undivided(space)
        self._domains = [*self._whole.domains.values()]
        self._seed = seed
        self._brackets: list[_Bracket] = []
        self._begun = self._made = 0
        #: by number of a trial in flight: its bracket and its job
        self._sent: dict[int, tuple[_Bracket, _Job]] = {}
        #: by number of a trial: its vector, which a promoted trial uses, too
        self._vectors: dict[int, Array] = {}
        self._populations = [self._population(rung) for rung in range(len(self._budgets))]

    def offers(self, slots: int = 0) -> Sequence[Wanted]:
        _, job = self._next()
        params = None if job.origin is not None else self._whole.at(job.vector)
        budget = self._budgets[job.rung]
        return [Wanted(budget=budget, rung=job.rung, origin=job.origin, params=params, sampler="dehb")]

    def add(self, trial: Trial) -> None:
        rung = rung_of(trial, self._budgets)
        if rung is None:
            self._add_of_other_ladder(trial)
            return
        bracket, job = self._next()
        params = None if job.origin is not None else self._whole.at(job.vector)
        if (job.rung, job.origin) != (rung, trial.origin) or params not in (None, trial.params):
            # This is a trial of an earlier run. Its vector was not stored, so it is computed from the params.
            job = self._recalled(trial, rung)
            if job.origin is not None and trial.state is not TrialState.CANCELLED:
                self._populations[rung].promoted.add(job.origin)
            self._vectors[trial.number] = job.vector
            room = self._room_for(job)
            if room is None:
                return
            bracket = room
        if bracket.place == self._begun:
            self._brackets.append(bracket)
            self._begun += 1
        population, place = self._populations[rung], rung - bracket.first
        if bracket.again and bracket.again[0] is job:
            del bracket.again[0]
        else:
            population.made += 1
            self._made += 1
        if job.origin is not None:
            population.promoted.add(job.origin)
            bracket.chosen[place] = [each for each in bracket.chosen.get(place, []) if each[1] != job.origin]
        bracket.added[place] += 1
        self._sent[trial.number] = bracket, job
        self._vectors[trial.number] = job.vector

    def tell(self, trial: Trial) -> None:
        if trial.number not in self._sent:
            return
        bracket, job = self._sent.pop(trial.number)
        place = job.rung - bracket.first
        if trial.state is TrialState.CANCELLED:
            bracket.added[place] -= 1
            bracket.again.append(job)
            return
        bracket.ended[place] += 1
        loss, population = feasible_loss(trial), self._populations[job.rung]
        if loss < math.inf and loss <= population.losses[job.target]:
            population.losses[job.target] = loss
            population.vectors[job.target] = job.vector
            population.origins[job.target] = trial.number if job.origin is None else job.origin
        self._advance(bracket, place)

    @property
    def promotable(self) -> Collection[int]:
        found = {origin for each in self._brackets for chosen in each.chosen.values() for _, origin in chosen}
        found |= {job.origin for each in self._brackets for job in each.again if job.origin is not None}
        # Only the brackets of the first cycle promote individuals.
        if min([self._begun, *(each.place for each in self._brackets)]) < len(self._sizes):
            for lower, upper in pairwise(self._populations):
                found |= {*lower.origins} - upper.promoted
        return found - {-1}

    def _advance(self, bracket: _Bracket, place: int) -> None:
        """If a rung is complete, choose the trials that are promoted from it. End the bracket after its last rung."""
        while bracket.ended[place] >= bracket.sizes[place]:
            place += 1
            if place == len(bracket.sizes):
                self._brackets = [each for each in self._brackets if each is not bracket]
                return
            if not self._promotes(bracket, place):
                return
            rung, count = bracket.first + place, bracket.sizes[place] - bracket.added[place]
            chosen = bracket.chosen[place] = self._promotable(rung, count)
            self._populations[rung].promoted.update(origin for _, origin in chosen)
            bracket.sizes[place] = bracket.added[place] + len(chosen)

    def _add_of_other_ladder(self, trial: Trial) -> None:
        """Record the budget reached under another ladder: the checkpoint is past lower budgets."""
        if trial.origin is None or trial.budget is None or trial.state is TrialState.CANCELLED:
            return
        for budget, population in zip(self._budgets, self._populations, strict=True):
            if budget <= trial.budget:
                population.promoted.add(trial.origin)
        for bracket in [*self._brackets]:
            for place, chosen in [*bracket.chosen.items()]:
                left = [each for each in chosen if each[1] != trial.origin]
                if len(left) < len(chosen) and self._budgets[bracket.first + place] <= trial.budget:
                    bracket.chosen[place] = left
                    bracket.sizes[place] -= 1
                    self._advance(bracket, place)

    def _population(self, rung: int) -> _Population:
        """Return the initial population at a budget. Its size is that of the largest rung of any bracket at this
        budget.
        """
        top = len(self._budgets) - 1
        size = max(sizes[rung - (top - len(sizes) + 1)] for sizes in self._sizes if len(sizes) > top - rung)
        generator = np.random.default_rng([self._seed, rung])
        vectors = np.array([self._allowed([each], generator) for each in generator.random((size, len(self._domains)))])
        return _Population(vectors=vectors, losses=np.full(size, np.inf), origins=[-1] * size)

    def _bracket(self, place: int) -> _Bracket:
        sizes = [*self._sizes[place % len(self._sizes)]]
        return _Bracket(place=place, first=len(self._budgets) - len(sizes), sizes=sizes)

    def _next(self) -> tuple[_Bracket, _Job]:
        """Return the bracket and the job of the next trial to send. The bracket may not have started yet."""
        bracket = next((each for each in self._brackets if each.again or each.asking is not None), None)
        bracket = bracket or self._bracket(self._begun)
        return bracket, self._job(bracket)

    def _recalled(self, trial: Trial, rung: int) -> _Job:
        """Return a job for a trial of an earlier run."""
        vector = None if trial.origin is None else self._vectors.get(trial.origin)
        vector = self._encoded(trial.params) if vector is None else vector
        return _Job(rung=rung, target=self._target(rung), vector=vector, origin=trial.origin)

    def _room_for(self, job: _Job) -> _Bracket | None:
        """Return the first bracket that needs a trial like this job's; None if there is none.

        The brackets before it are started.
        """
        for _ in range(len(self._sizes) + 1):
            for bracket in [*self._brackets, self._bracket(self._begun)]:
                place = job.rung - bracket.first
                if bracket.filling == place and self._promotes(bracket, place) == (job.origin is not None):
                    return bracket
            self._brackets.append(self._bracket(self._begun))
            self._begun += 1
        return None

    def _promotes(self, bracket: _Bracket, place: int) -> bool:
        return place > 0 and bracket.place < len(self._sizes)

    def _target(self, rung: int) -> int:
        """Return the index of the individual with which the next trial on a rung competes. They are used in turn."""
        population = self._populations[rung]
        return population.made % len(population.losses)

    def _job(self, bracket: _Bracket) -> _Job:
        """Return the job of a bracket's next trial."""
        if bracket.again:
            return bracket.again[0]
        place = bracket.asking
        assert place is not None
        rung = bracket.first + place
        target, size = self._target(rung), bracket.sizes[place]
        population, lower, origin = self._populations[rung], self._populations[rung - 1], None
        if self._promotes(bracket, place):
            vector, origin = bracket.chosen[place][0]
        elif bracket.place == 0:
            vector = population.vectors[target]
        else:
            pool = population.vectors if place == 0 else lower.vectors[lower.best(size)]
            vector = self._evolved(population.vectors[target], pool)
        return _Job(rung=rung, target=target, vector=vector, origin=origin)

    def _promotable(self, rung: int, count: int) -> list[tuple[Array, int]]:
        """Return the vectors and origins of at most `count` of the best individuals at the next lower budget.

        Individuals that were already promoted are left out.
        """
        lower, gone = self._populations[rung - 1], self._populations[rung].promoted | {-1}
        new = [place for place in lower.best(len(lower.losses)) if lower.origins[place] not in gone]
        return [(lower.vectors[place], lower.origins[place]) for place in new[:count]]

    def _evolved(self, base: Array, pool: Array) -> Array:
        """Return the vector of a trial that competes with the target `base`: rand/1 mutation and binomial crossover
        (section 3.1).

        The parents come from `pool`; if it has too few, also from all budgets (section 3.3). The target itself is never
        a parent.
        """
        generator = np.random.default_rng([self._seed, self._made])
        parents = pool[(pool != base).any(axis=1)]
        if len(parents) < PARENTS:
            rest = generator.permutation(np.concatenate([each.vectors for each in self._populations]))
            parents = np.concatenate([parents, rest[(rest != base).any(axis=1)][:PARENTS]])
        if len(parents) < PARENTS:
            # The space has no labels, or each label has only one possible value.
            return base
        return self._allowed((self._mutant(base, parents, generator) for _ in range(REFUSED)), generator)

    @staticmethod
    def _mutant(base: Array, parents: Array, generator: np.random.Generator) -> Array:
        r1, r2, r3 = parents[generator.permutation(len(parents))[:PARENTS]]
        mutant = r1 + MUTATION * (r2 - r3)
        mutant = np.where((mutant < 0) | (mutant > 1), generator.random(len(mutant)), mutant)
        crossed = generator.random(len(mutant)) < CROSSOVER
        crossed[generator.integers(len(crossed))] = True
        return np.asarray(np.where(crossed, mutant, base))

    def _allowed(self, vectors: Iterable[Array], generator: np.random.Generator) -> Array:
        """Return the first vector whose params the space's `where` allows, else a vector of drawn params."""
        space = self._whole.space
        found = next((each for each in vectors if space.allows(self._whole.at(each))), None)
        return self._encoded(self._whole.sample(generator, 1)[0]) if found is None else found

    def _encoded(self, params: Params) -> Array:
        """Return a vector for these params. The coordinates of inactive labels are drawn."""
        vector = np.random.default_rng([self._seed, self._made, 2]).random(len(self._domains))
        for column, (label, domain) in enumerate(self._whole.domains.items()):
            if label in params:
                # The middle of the interval of quantiles for which the distribution has this value.
                before, behind = (_mass_before(domain, params[label], each) for each in (operator.ge, operator.gt))
                vector[column] = (before + behind) / 2
        return vector


def _mass_before(domain: Domain, value: float, is_behind: Callable[[float, float], bool]) -> float:
    """Return the least quantile in [0, 1] for which `is_behind(value at the quantile, value)` is true, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_behind(domain.quantile([middle]).tolist()[0], value) else (middle, high)
    return low
