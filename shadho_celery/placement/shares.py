"""Shares of the subspaces in a study's trials: by the space's distribution, or by the probability of a better loss."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.best import feasible_loss
from shadho_celery.core.checks import check_name
from shadho_celery.core.names import SHARES, named
from shadho_celery.core.trial import COUNTED, Trial, TrialState

Array = NDArray[np.float64]

#: number of failures without a success after which a subspace counts as failing
HOPELESS = 5
#: fraction of its share that a failing subspace, or the least promising one, keeps
FLOOR = 0.1
#: number of losses before a subspace can be judged; number of latest losses used; and the lowest part of them, its tail
MIN_LOSSES, LOSSES, TAIL = 10, 200, 0.25
#: number of trials of the rarest subspace, at its full share, after which a past trial counts half under promise. With
#: a faster decay, a subspace with fewer trials would never get any
HALF_LIFE = 10
#: number of results between two updates of the promises
RENEW_RESULTS = 10
#: subspaces that a line names
NAMED = 3


class Shares(Protocol):
    """Divides a study's trials among its subspaces."""

    #: True if each subspace's number of trials depends only on the study's number of trials
    fixed: bool

    def deal(self, subspace: str) -> None:
        """Record that a trial goes to `subspace`."""

    def tell(self, trial: Trial) -> None:
        """Learn from a finished trial."""

    def backlogs(self) -> dict[str, float]:
        """Return by how many trials each subspace is behind the one that is furthest ahead of its share, 0 or more.

        In units of trials per subspace, the next one in turn first.
        """

    def quotas(self, trials: int) -> dict[str, int]:
        """Return the number of trials by subspace after `trials` have been divided evenly."""


class UniformShares:
    """In proportion to a subspace's probability in the search space: evenly, if its choices are uniform.

    Trials are divided by Webster's (Sainte-Laguë's) rule: the next one goes to the subspace with the greatest p / (2 d
    + 1), where d is its number of trials. The first n trials of a longer study are therefore those of a study of n.
    Failed trials are replaced as long as they are a minority, unless a limit on trials fixes the counts.
    """

    fixed = True

    def __init__(self, probabilities: Mapping[str, float]) -> None:
        self._names = list(probabilities)
        self._place = {name: place for place, name in enumerate(self._names)}
        self._weights = np.array(list(probabilities.values()), dtype=float)
        # Plain numbers, because one subspace changes at a time, and numpy's cost is per call.
        self._dealt = [0.0] * len(self._names)
        self._failed = [0.0] * len(self._names)
        #: by subspace: its number of trials in units of its share; and p / (2 d + 1), negative
        self._progress = [0.0] * len(self._names)
        self._turns = [0.0] * len(self._names)
        #: the last requested quotas, and their number of trials
        self._quotas: tuple[int, dict[str, int]] = (0, {})
        self._count(*range(len(self._names)))

    def deal(self, subspace: str) -> None:
        if subspace in self._place:
            self._dealt[self._place[subspace]] += 1
            self._count(self._place[subspace])

    def tell(self, trial: Trial) -> None:
        if trial.subspace not in self._place or trial.state is TrialState.CANCELLED:
            return
        # A success changes nothing, and most results are successes.
        if trial.state is TrialState.FAILED:
            self._failed[self._place[trial.subspace]] += 1
            self._count(self._place[trial.subspace])

    def backlogs(self) -> dict[str, float]:
        furthest = max(self._progress)
        order = sorted(range(len(self._names)), key=self._turns.__getitem__)
        return {self._names[place]: furthest - self._progress[place] for place in order}

    def _count(self, *places: int) -> None:
        """Update the progress of these subspaces."""
        for place in places:
            had, weight = self._had(place), float(self._weights[place])
            self._progress[place] = had / (weight * len(self._names))
            self._turns[place] = -weight / (2 * had + 1)

    def _had(self, place: int) -> float:
        """Return the number of a subspace's trials that count as its own."""
        dealt, failed = self._dealt[place], self._failed[place]
        return dealt - max(0.0, min(failed, dealt - failed))

    def quotas(self, trials: int) -> dict[str, int]:
        if self._quotas[0] != trials or not self._quotas[1]:
            self._quotas = trials, self._dealt_by(self._weights, trials)
        return self._quotas[1]

    def _dealt_by(self, weights: Array, trials: int) -> dict[str, int]:
        """Return the trials by subspace after the rule has divided this many by `weights`, which add up to 1."""
        # The rule reaches a rounded multiple of the weights after as many trials, so start from there.
        counts = np.floor(weights * max(0, trials - len(self._names)) + 0.5)
        for _ in range(trials - int(counts.sum())):
            counts[np.argmax(weights / (2 * counts + 1))] += 1
        return {name: int(n) for name, n in zip(self._names, counts, strict=True)}


class EvenShares(UniformShares):
    """Like uniform, but a subspace whose trials all fail gets a tenth of its share until one succeeds.

    The cause may be a missing library or a broken component that is fixed during the study. With a limit on trials, the
    other subspaces get the rest. As long as no subspace counts as failing, these shares are uniform.
    """

    def __init__(self, probabilities: Mapping[str, float]) -> None:
        #: number of ended trials, by subspace and whether they failed
        self._ended: Counter[tuple[str, bool]] = Counter()
        self._only_fails = [False] * len(probabilities)
        super().__init__(probabilities)

    def tell(self, trial: Trial) -> None:
        super().tell(trial)
        if trial.subspace not in self._place or trial.state is TrialState.CANCELLED:
            return
        name, place = trial.subspace, self._place[trial.subspace]
        self._ended[name, trial.state is TrialState.FAILED] += 1
        failing = only_fails(self._ended[name, True], self._ended[name, False])
        if failing is not self._only_fails[place]:
            self._only_fails[place] = failing
            self._quotas = (0, {})
            self._count(place)

    def _had(self, place: int) -> float:
        return self._dealt[place] / FLOOR if self._only_fails[place] else super()._had(place)

    def _dealt_by(self, weights: Array, trials: int) -> dict[str, int]:
        lowered = weights * np.where(self._only_fails, FLOOR, 1.0)
        return super()._dealt_by(lowered / lowered.sum(), trials)


class PaperShares(UniformShares):
    """No shares: policy `paper` draws each trial's subspace by its rank, so the ranks determine the mix."""

    fixed = False


class PromiseShares(EvenShares):
    """By promise: a subspace that can hardly beat the best loss gets less, down to a tenth of its share.

    A subspace's promise is the probability that its next trial is the best so far of its budget, see `promise`. Past
    trials decay, so a change of promise takes effect without regard to the past.
    """

    fixed = False

    def __init__(self, probabilities: Mapping[str, float]) -> None:
        super().__init__(probabilities)
        self._even = self._weights.copy()
        #: latest losses by subspace, each with its trial's budget
        self._losses: dict[str, deque[tuple[float | None, float]]] = {n: deque(maxlen=LOSSES) for n in self._names}
        #: by budget
        self._best: dict[float | None, float] = {}
        self._new = 0
        self._kept = 0.5 ** (float(self._even.min()) / HALF_LIFE)

    def deal(self, subspace: str) -> None:
        self._dealt = [self._kept * each for each in self._dealt]
        self._failed = [self._kept * each for each in self._failed]
        super().deal(subspace)
        self._count(*range(len(self._names)))

    def tell(self, trial: Trial) -> None:
        super().tell(trial)
        # A failed trial counts as one that could not have been worse, so failing subspaces are judged too. So do pruned
        # trials and those that violate a constraint. With several losses, the first one is used.
        if trial.state in COUNTED and trial.subspace in self._losses:
            loss = feasible_loss(trial)
            self._losses[trial.subspace].append((trial.budget, loss))
            self._best[trial.budget] = min(self._best.get(trial.budget, math.inf), loss)
            self._new += 1
            if self._new >= RENEW_RESULTS:
                self._weigh()

    def _had(self, place: int) -> float:
        # Failing subspaces have a low weight here.
        return UniformShares._had(self, place)

    def _weigh(self) -> None:
        self._new = 0
        # Losses of different budgets cannot be compared: the budget at which most recent trials started is used. Trials
        # of earlier studies, from a warm start, have none and count as those of the lowest budget.
        known = Counter(budget for told in self._losses.values() for budget, _ in told)
        lowest = min((budget for budget in known if budget is not None), default=None)
        known[lowest] += 0 if lowest is None else known.pop(None, 0)
        (judged, _), *_ = known.most_common(1)
        budgets = {judged, None} if judged == lowest else {judged}
        best = min(self._best.get(budget, math.inf) for budget in budgets)
        chances = np.array([promise(_of_budgets(told, budgets), best) for told in self._losses.values()])
        # A subspace that cannot be judged yet is as promising as the best one. If none is promising, all are equal.
        most = float(np.nan_to_num(chances).max())
        relative = np.where(np.isnan(chances), 1.0, chances / most) if most > 0 else np.ones(len(chances))
        relative = np.where(self._only_fails, 0.0, relative)
        weights = self._even * (FLOOR + (1.0 - FLOOR) * relative)
        self._weights = weights / weights.sum()
        self._count(*range(len(self._names)))


def _of_budgets(told: Iterable[tuple[float | None, float]], budgets: Container[float | None]) -> list[float]:
    """Return the losses of some budgets; for a subspace without a success those of all, which are failures."""
    told = [*told]
    fails = all(loss == math.inf for _, loss in told)
    return [loss for budget, loss in told if fails or budget in budgets]


def only_fails(failed: int, succeeded: int) -> bool:
    """Return whether a subspace with this many ended trials counts as failing."""
    return failed >= HOPELESS and not succeeded


def promise(losses: Sequence[float], best: float) -> float:
    """Return the probability that the next trial's loss is below `best`, from the lower tail of `losses`; nan if too
    few.

    Below its lower quartile u, the tail of a distribution is approximated by an exponential: P(y < best) = P(y < u)
    exp(-(u - best) / e), where e is the mean of u - y below u. Source: peaks over threshold, Pickands, Annals of
    Statistics 3, 1975, with shape 0. An infinite loss stands for a failed trial. If nearly all failed, the probability
    is 0.
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


def make_shares(name: str, probabilities: Mapping[str, float]) -> Shares:
    """Return the shares called `name`. Raises UsageError for unknown ones."""
    check_name("kind of shares", name, SHARES)
    made: Shares = named(SHARES[name])(probabilities)
    return made


def starved_words(shares: object, ended: Mapping[str, tuple[int, int]]) -> str | None:
    """Return a line on the subspaces that these shares give fewer trials, as all of theirs fail; None without such.

    `ended` are the failed and the other trials by subspace.
    """
    failing = {name: failed for name, (failed, others) in ended.items() if only_fails(failed, others)}
    if shares not in {"even", "promise"} or not failing or len(ended) < 2:
        return None
    more = f" and {len(failing) - NAMED} more" if len(failing) > NAMED else ""
    named = ", ".join(f"{name} ({failed})" for name, failed in [*failing.items()][:NAMED])
    return f"all trials failed, so it gets a tenth of its share until one succeeds: {named}{more}"
