"""Shares of the subspaces in a study's trials: by their probability in the space, or by the chance of a better loss."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shadho_celery.core.checks import check_name, listed
from shadho_celery.core.columns import feasible_loss
from shadho_celery.core.names import SHARES, named
from shadho_celery.core.trial import COUNTED, Trial, TrialState
from shadho_celery.space.features import Array

#: a subspace counts as failing after this many failures without a success
HOPELESS = 5
#: fraction of its share that a failing subspace, or the least promising one, keeps
FLOOR = 0.1
#: when the shares follow a sampler's outlook, this fraction of all trials is still divided by the probabilities
LED_FLOOR = 0.1
#: least number of losses from which a promise is computed; number of latest losses used; fraction of these that is the
#: lower tail
MIN_LOSSES, LOSSES, TAIL = 10, 200, 0.25
#: under promise, the weight of a past trial halves in the time in which the least probable subspace gets this many
#: trials at its full share. With a faster decay, a subspace with a tiny share would never get a trial
HALF_LIFE = 10
#: number of results between two updates of the promises
RENEW_RESULTS = 10
#: maximum number of subspaces that `notice` names
NAMED = 3


@dataclass(kw_only=True)
class _Part:
    """The share of one subspace, and counts of its trials."""

    #: its probability in the search space, and its current share of all trials, both as fractions
    law: float
    weight: float
    #: number of trials that were sent, in all and before the latest restart
    sent: int = 0
    before: int = 0
    #: sum of the charges of its trials, and number of failed trials; under promise both decay
    dealt: float = 0.0
    failed: float = 0.0
    #: number of ended trials that failed, and of ended trials that did not fail
    failures: int = 0
    others: int = 0
    #: True while it gets fewer trials, because none of at least HOPELESS has succeeded
    only_fails: bool = False
    #: number of its trials divided by its share, where an average share counts as 1; and -p / (2 d + 1) of Webster's
    #: rule, so the next subspace in turn has the least
    progress: float = 0.0
    turn: float = 0.0

    @property
    def charge(self) -> float:
        """Number of trials as which its next trial counts."""
        return 1 / FLOOR if self.only_fails else 1.0


class UniformShares:
    """Divides a study's trials among its subspaces in proportion to their probabilities in the search space.

    Trials are divided by Webster's (Sainte-Laguë's) rule: the next trial goes to the subspace with the greatest p / (2
    d + 1), where p is its share and d its number of trials. So the division of the first n trials does not depend on
    the length of the study.

    Failed trials do not count as long as they are a minority, so others replace them. They do count in `quotas`.
    """

    #: True if each subspace's number of trials depends only on the study's number of trials
    fixed = True
    #: True if the shares follow the outlook of a sampler that learns in the whole space
    follows = False
    #: True if a subspace whose trials all fail gets fewer trials
    lowers_failing = False

    def __init__(self, probabilities: Mapping[str, float]) -> None:
        self._parts = {name: _Part(law=float(weight), weight=float(weight)) for name, weight in probabilities.items()}
        #: number of trials of the last call of `quotas`, and its result
        self._quotas: tuple[int, dict[str, int]] = (0, {})
        self._count(*self._parts.values())

    def deal(self, subspace: str) -> None:
        """Record that a trial of `subspace` is sent."""
        if (part := self._parts.get(subspace)) is not None:
            part.sent += 1
            part.dealt += part.charge
            self._count(part)

    def tell(self, trial: Trial) -> None:
        """Learn from a finished trial."""
        part = self._parts.get(trial.subspace)
        if part is None or trial.state is TrialState.CANCELLED:
            return
        has_failed = trial.state is TrialState.FAILED
        part.failures += has_failed
        part.others += not has_failed
        was_failing = part.only_fails
        part.only_fails = self.lowers_failing and part.failures >= HOPELESS and not part.others
        if part.only_fails is not was_failing:
            self.restart([trial.subspace])
        elif has_failed and not part.only_fails:
            part.failed += 1
            self._count(part)

    def restart(self, subspaces: Collection[str]) -> None:
        """Forget the past of these subspaces, as if they were as far ahead of their shares as the other subspaces on
        average.
        """
        others = [part for name, part in self._parts.items() if name not in subspaces]
        # The sum is divided by probabilities in the space, because under promise the other subspaces may have had far
        # greater shares earlier.
        level = sum(part.progress * part.weight for part in others) / (sum(part.law for part in others) or 1.0)
        for name, part in self._parts.items():
            part.before = part.sent
            if name in subspaces:
                part.dealt, part.failed = level * part.weight * len(self._parts), 0.0
        self._quotas = (0, {})
        self._count(*self._parts.values())

    def backlogs(self) -> dict[str, float]:
        """Return for each subspace by how many trials it is behind the subspace that is furthest ahead of its share, 0
        or more.

        The unit is a trial of a subspace with an average share. The next subspace in turn comes first.
        """
        furthest = max([part.progress for part in self._parts.values()])
        turns = {name: part.turn for name, part in self._parts.items()}
        return {name: furthest - self._parts[name].progress for name in sorted(turns, key=turns.__getitem__)}

    def _count(self, *parts: _Part) -> None:
        """Update the progress of these subspaces."""
        for part in parts:
            had = part.dealt - max(0.0, min(part.failed, part.dealt - part.failed)) + (part.charge - 1) / 2
            part.progress = had / (part.weight * len(self._parts))
            part.turn = -part.weight / (2 * had + 1)

    @property
    def notice(self) -> str | None:
        """A line that names the subspaces that get fewer trials because all of their trials fail; None if there are
        none.
        """
        failing = [name for name, part in self._parts.items() if part.only_fails]
        if not failing or len(failing) == len(self._parts):
            return None
        return f"subspaces that get a tenth of their share until a trial of them succeeds: {listed(failing, NAMED)}"

    def follow(self, outlook: Mapping[str, float]) -> None:
        """Divide the next trials by this outlook (`WholeSampler.outlook`). The default does nothing, see `follows`."""

    def quotas(self, trials: int) -> dict[str, int]:
        """Return the number of trials of each subspace after `trials` trials in total."""
        if self._quotas[0] != trials or not self._quotas[1]:
            self._quotas = trials, self._dealt_by_rule(trials)
        return self._quotas[1]

    def _dealt_by_rule(self, trials: int) -> dict[str, int]:
        """Return the number of trials of each subspace if Webster's rule divides this many.

        Only the trials since the latest restart are divided; earlier ones stay as they are.
        """
        before = np.array([part.before for part in self._parts.values()])
        trials -= int(before.sum())
        weights = np.array([part.weight for part in self._parts.values()])
        if self.lowers_failing:
            weights /= [part.charge for part in self._parts.values()]
            weights /= weights.sum()
        # Webster's rule passes through rounded multiples of the weights, so start from such a state.
        counts = np.floor(weights * max(0, trials - len(weights)) + 0.5)
        for _ in range(trials - int(counts.sum())):
            counts[np.argmax(weights / (2 * counts + 1))] += 1
        return {name: int(n) for name, n in zip(self._parts, before + counts, strict=True)}


class EvenShares(UniformShares):
    """Uniform shares, but a subspace whose trials all fail gets a tenth of its share until a trial succeeds.

    The cause may be a missing library, which can be installed during the study. When the share of a subspace changes,
    its earlier trials no longer count. With a limit on trials, the other subspaces get the rest.
    """

    lowers_failing = True


class PaperShares(UniformShares):
    """For policy `paper`, which draws each trial's subspace by rank, so that no share is fixed."""

    fixed = False


class PromiseShares(UniformShares):
    """Shares by promise: a subspace that will probably not beat the best loss gets less, down to a tenth of its share.

    A subspace's promise is the probability that its next trial beats the best loss so far at the same budget, see
    `promise`. An outlook of the sampler replaces it. Numbers of past trials decay, so that a change soon takes effect.
    """

    fixed, follows, lowers_failing = False, True, True

    def __init__(self, probabilities: Mapping[str, float]) -> None:
        super().__init__(probabilities)
        #: latest outlook of the sampler, which replaces the promises; empty if there is none
        self._outlook: Mapping[str, float] = {}
        self._even = np.array(list(probabilities.values()), dtype=float)
        #: latest losses by subspace, each with its trial's budget
        self._losses: dict[str, deque[tuple[float | None, float]]] = {n: deque(maxlen=LOSSES) for n in probabilities}
        #: by budget: the least loss so far
        self._best: dict[float | None, float] = {}
        self._new = 0
        self._kept = 0.5 ** (float(self._even.min()) / HALF_LIFE)

    def deal(self, subspace: str) -> None:
        for part in self._parts.values():
            part.dealt *= self._kept
            part.failed *= self._kept
        super().deal(subspace)
        self._count(*self._parts.values())

    def tell(self, trial: Trial) -> None:
        super().tell(trial)
        # Trials that failed, were pruned or violate a constraint count with an infinite loss, so that failing subspaces
        # are judged, too. If a trial has several losses, the first one is used.
        if not self._outlook and trial.state in COUNTED and trial.subspace in self._losses:
            loss = feasible_loss(trial)
            self._losses[trial.subspace].append((trial.budget, loss))
            self._best[trial.budget] = min(self._best.get(trial.budget, math.inf), loss)
            self._new += 1
            if self._new >= RENEW_RESULTS:
                self._weigh()

    def restart(self, subspaces: Collection[str]) -> None:
        for name in subspaces:
            self._losses[name].clear()
        if self._outlook:
            # A resumed study gets all results before the outlook, and must come to the same shares.
            self.follow(self._outlook)
        super().restart(subspaces)

    def follow(self, outlook: Mapping[str, float]) -> None:
        self._outlook = outlook
        fails = np.array([part.only_fails for part in self._parts.values()])
        weights = np.array([outlook[name] for name in self._parts]) * ~fails
        wanted = self._even * next(each for each in (weights / (weights.max() or 1.0), ~fails, fails) if each.any())
        led = LED_FLOOR * self._even + (1.0 - LED_FLOOR) * wanted / wanted.sum()
        # Each trial of a subspace that only fails is charged as ten trials, which lowers its share.
        self._use(led * [part.charge for part in self._parts.values()])

    def _weigh(self) -> None:
        self._new = 0
        # Losses of different budgets cannot be compared, so the budget with the most recent losses is used. Trials of a
        # warm start have no budget, and count as trials of the lowest budget.
        known = Counter(budget for told in self._losses.values() for budget, _ in told)
        lowest = min((budget for budget in known if budget is not None), default=None)
        known[lowest] += 0 if lowest is None else known.pop(None, 0)
        (judged, _), *_ = known.most_common(1)
        budgets = {judged, None} if judged == lowest else {judged}
        best = min(self._best.get(budget, math.inf) for budget in budgets)
        told = [[] if part.only_fails else self._losses[name] for name, part in self._parts.items()]
        chances = np.array([promise(_of_budgets(each, budgets), best) for each in told])
        # A subspace without a promise, because it has few losses or only fails, counts as the most promising one. If
        # all promises are 0, all subspaces are equal.
        most = float(np.nan_to_num(chances).max())
        relative = np.where(np.isnan(chances), 1.0, chances / most) if most > 0 else np.ones(len(chances))
        self._use(self._even * (FLOOR + (1.0 - FLOOR) * relative))

    def _use(self, weights: Array) -> None:
        """Divide the next trials by these weights."""
        for part, weight in zip(self._parts.values(), (weights / weights.sum()).tolist(), strict=True):
            part.weight = weight
        self._count(*self._parts.values())


def _of_budgets(told: Collection[tuple[float | None, float]], budgets: Container[float | None]) -> list[float]:
    """Return a subspace's losses at the given budgets. If all of its losses are infinite, return the losses at all
    budgets.
    """
    fails = all(loss == math.inf for _, loss in told)
    return [loss for budget, loss in told if fails or budget in budgets]


def promise(losses: Sequence[float], best: float) -> float:
    """Return the probability that the next trial's loss is below `best`, or nan for fewer than MIN_LOSSES losses.

    The losses below the lower quartile u are approximated by an exponential distribution: P(y < best) = P(y < u)
    exp(-(u - best) / e), where e is the mean of u - y below u. Source: peaks over threshold, Pickands, Annals of
    Statistics 3, 1975, with shape 0. An infinite loss stands for a failed trial. If nearly all trials failed, the
    probability is 0.
    """
    if len(losses) < MIN_LOSSES:
        return math.nan
    known = np.asarray(losses, dtype=float)
    ordered = np.sort(known[np.isfinite(known)])
    size = max(3, int(TAIL * len(ordered)))
    if len(ordered) <= size:
        return 0.0
    threshold = ordered[size]
    excess = float((threshold - ordered[:size]).mean())
    distance = float(threshold - best)
    if distance <= 0:
        return float((ordered < best).sum()) / len(losses)
    if not excess > 0:
        return 0.0
    return size / len(losses) * math.exp(-distance / excess)


def make_shares(name: str, probabilities: Mapping[str, float]) -> UniformShares:
    """Return the shares called `name`. Raises UsageError for an unknown name."""
    check_name("kind of shares", name, SHARES)
    made: UniformShares = named(SHARES[name])(probabilities)
    return made
