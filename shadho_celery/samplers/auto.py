"""The sampler `auto`, which uses `gp`, `tpe` or both in turn, and the time that its proposals may take.

The Gaussian process of `gp` learns fastest if losses are a smooth function of few labels. Its leave-one-out predictions
of the losses are checked before it is used alone. The density estimates of `tpe` work with more labels,
discontinuities, noise and long histories, and take less time. If trials are short, `gp` would take longer than the
trials.

How long trials take is expressed as a decade, a power of ten seconds. It follows from the first trials of a study and
is recorded once. All rules depend on the space, the limit, the decade and numbers of trials, never on a clock, so equal
seeds and equal decades give equal studies.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile

from shadho_celery.core.checks import printable
from shadho_celery.core.trial import WELL, Params, Trial
from shadho_celery.samplers.gp import GpSampler
from shadho_celery.samplers.random import LearnsBudgets, WholeSampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.samplers.wrapped import ByBudget
from shadho_celery.space.split import Subspace, parts_of

#: the median seconds of the first FIRST trials determine the decade; until then, those of the first EARLY trials
FIRST, EARLY = 20, 10
#: least decade in seconds, which is also used for shorter trials
LEAST = 0.01
#: a proposal may take this fraction of the decade on average, but at least LEAST_MS milliseconds
PART, LEAST_MS = 0.1, 2.0
#: `gp` makes quick proposals if a proposal may take less than this
QUICK_MS = 50.0
#: a quick proposal by `gp` takes GP_MS plus GP_MS_PER_LABEL milliseconds for each label, for the loss and again for
#: each constraint. The same time is added for every GP_RESULTS results, up to GP_MOST results
GP_MS, GP_MS_PER_LABEL, GP_RESULTS, GP_MOST = 3.0, 0.25, 100, 300
#: factors of this time: for full proposals; and for quick ones, as a reserve for the first trials, for fits and for
#: slower machines
FULL, RESERVE = 3.0, 6.0
#: seconds of a typical trial, as a multiple of the decade
TYPICAL = 6.0
#: milliseconds of a proposal by `tpe`: a constant, and an amount for each label
TPE_MS, TPE_MS_PER_LABEL = 0.3, 0.03


class Decade:
    """Decade of the seconds of a study's trials, shared by all samplers `auto` of the study."""

    def __init__(self, recorded: float | None = None) -> None:
        """`recorded` is the decade in the study's record, such as 0.1; None if it is not known yet."""
        #: decade for the study's record; None until FIRST trials have ended
        self.recorded = recorded
        #: decade by the trials so far; None until it is known
        self.seconds = recorded
        self._first: list[float] = []

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from finished trials. Failed and cancelled ones are ignored, because they may have ended at once."""
        if self.recorded is not None:
            return
        told = [trial.outcome.seconds for trial in trials if trial.state in WELL]
        self._first += [seconds for seconds in told if seconds is not None]
        if len(self._first) >= EARLY:
            # Only the first trials are used, because a resumed study may tell many trials at once.
            self.seconds = decade_of(self._first[: FIRST if len(self._first) >= FIRST else EARLY])
        if len(self._first) >= FIRST:
            self.recorded = self.seconds

    def __str__(self) -> str:
        if self.seconds is None:
            return "an unknown time"
        return f"{self.seconds:g} to {10 * self.seconds:g} s" if self.seconds > LEAST else f"under {10 * LEAST:g} s"

    @property
    def allowed_ms(self) -> float:
        """Milliseconds that a proposal may take on average; infinite until the decade is known."""
        return math.inf if self.seconds is None else max(LEAST_MS, 1000 * PART * self.seconds)


def decade_of(seconds: Sequence[float]) -> float:
    """Return the greatest power of ten that is not above the median, but at least .01."""
    return float(f"1e{math.floor(math.log10(max(statistics.median(seconds), LEAST)))}")


def turn_of_gp(allowed_ms: float, labels: int, results: int, functions: int = 1) -> int:
    """Return k if `gp` may propose the params of every k-th trial, and `tpe` those of the others; 0 if `gp` takes too
    long.

    `results` is the number of results. `functions` is the number of modelled functions: the loss and the constraints.
    """
    spare = allowed_ms - TPE_MS - TPE_MS_PER_LABEL * labels
    factor = RESERVE if allowed_ms < QUICK_MS else FULL
    by_gp = factor * _by_gp(labels, results, functions)
    return 0 if spare <= 0 else max(1, math.ceil(by_gp / spare))


def keeps_up(seconds: float | None, trials: int, labels: int, results: int, functions: int = 1) -> bool:
    """Return True if full proposals by `gp` for this number of trials take at most a tenth of one trial's seconds.

    Then slots hardly wait for proposals. `seconds` is the decade of the trials; None if it is unknown. The other
    arguments are as in `turn_of_gp`.
    """
    tenth_ms = 1000 * PART * (seconds or 0.0)
    return tenth_ms >= QUICK_MS and trials * FULL * _by_gp(labels, results, functions) <= TYPICAL * tenth_ms


def allows_outlook(allowed_ms: float, subspaces: int, labels: int, results: int, functions: int = 1) -> bool:
    """Return True if `gp` may compute its outlook for this number of subspaces after each result.

    For each subspace this takes as long as a quick proposal. The other arguments are as in `turn_of_gp`.
    """
    return allowed_ms >= max(QUICK_MS, subspaces * _by_gp(labels, results, functions))


def _by_gp(labels: int, results: int, functions: int) -> float:
    """Return the milliseconds of a quick proposal by `gp`."""
    growth = 1 + min(results, GP_MOST) // GP_RESULTS
    return (GP_MS + GP_MS_PER_LABEL * labels) * growth * functions


#: maximum number of labels for `gp`: of a trial, and of the space with all its branches
MOST_LABELS, MOST_IN_ALL = 30, 1000
#: `gp` is used in studies with a limit of up to MOST_TRIALS trials, and for the first AT_FIRST trials of other studies,
#: running trials included. Afterwards, it is used if it `keeps_up` with the running trials
MOST_TRIALS, AT_FIRST = 500, 100
#: if the leave-one-out R² of `gp` is below this, every second proposal comes from `tpe`
LEAST_R_SQUARED = 0.1
#: maximum number of labels that a line names, and of characters of each
NAMED, MOST_LETTERS = 3, 30


class AutoSampler(LearnsBudgets):
    """Sampler `auto`: it uses `gp`, `tpe`, or both in turn. Both learn from all trials."""

    adaptive = True

    def __init__(
        self,
        subspace: Subspace,
        entropy: Sequence[int],
        *,
        limit: int | None = None,
        budgets: Sequence[float] = (),
    ) -> None:
        """`limit` is the study's limit on trials, or None. `budgets` are those of the rungs, the lowest first."""
        self._gp = GpSampler(subspace, entropy, budgets=budgets)
        by_budget = partial(ByBudget, TpeSampler, budgets)
        self._tpe: WholeSampler = by_budget(subspace, entropy) if budgets else TpeSampler(subspace, entropy)
        self._labels = len(subspace.domains)
        #: maximum number of labels of a trial
        self._widest = max(part.most_drawn for part in parts_of(subspace))
        #: for `choice`: what is learned from several subspaces, and that each learns only from its own trials
        self._shared, self._apart = _sharing(parts_of(subspace))
        self._limit = limit
        #: number of trials passed to `tell`; and number of these that came before the first one with seconds, which are
        #: from a warm start
        self._told = self._earlier = 0
        #: number of losses of a trial; number of its constraints
        self._losses, self._constraints = 1, 0
        #: decade of the trials' seconds; the scheduler sets one that is shared by all subspaces of a study
        self.decade = Decade()
        #: for each of the params proposed last: the name of the sampler that proposed them, or `start`
        self.proposed_by: Sequence[str] = ()
        #: text that says which sampler proposed params last, and why
        self.choice = "the first trials cover the space"

    def ask(self, n: int, pending: Collection[Trial], within: Subspace | None = None) -> list[Params]:
        self.proposed_by = ["start"] * n
        self._gp.budget = self.budget
        if not self._labels:
            self.choice = "there is nothing to choose"
        if not self._gp.is_started:
            return self._gp.ask(n, pending, within)
        if why := self._why_not_gp(pending):
            self.choice = f"tpe{self._shared}: {why}"
            self.proposed_by = ["tpe"] * n
            return self._tpe.ask(n, pending, within)
        every, self.choice = self._share_of_gp()
        first = self._told + len(pending)
        by_gp = sum(place % every == 0 for place in range(first, first + n))
        asked = self._gp.ask(by_gp, pending, within) if by_gp else []
        self.proposed_by = ["gp"] * len(asked) + ["tpe"] * (n - by_gp)
        if by_gp == n:
            return asked
        waiting = [*pending, *(Trial(number=-1, subspace="", params=params) for params in asked)]
        return asked + self._tpe.ask(n - by_gp, waiting, within)

    def outlook(self, parts: Sequence[Subspace], pending: int) -> Mapping[str, float]:
        functions = 1 + self._constraints
        may_use_gp = allows_outlook(self.decade.allowed_ms, len(parts), self._labels, self._told, functions)
        if self._gp.is_started and (not may_use_gp or self._why_not_gp(())):
            return self._tpe.outlook(parts, pending)
        self._set_pace()
        return self._gp.outlook(parts, pending)

    def tell(self, trials: Sequence[Trial]) -> None:
        self.decade.tell(trials)
        if self._told == self._earlier:
            self._earlier += sum(1 for _ in takewhile(lambda trial: trial.outcome.seconds is None, trials))
        self._told += len(trials)
        self._losses = max([self._losses, *(len(trial.outcome.losses) for trial in trials)])
        self._constraints = max([self._constraints, *(len(trial.outcome.constraints) for trial in trials)])
        self._gp.tell(trials)
        self._tpe.tell(trials)

    def _why_not_gp(self, pending: Collection[Trial]) -> str | None:
        """Return the reason not to use `gp`, or None if it may be used."""
        if self._losses > 1:
            return f"it learns {self._losses} losses at once"
        if self._widest > MOST_LABELS:
            return f"{self._widest} hyperparameters are more than {MOST_LABELS}"
        if self._labels > MOST_IN_ALL:
            return f"{self._labels} hyperparameters in all branches are more than {MOST_IN_ALL}"
        is_short = self._limit is not None and self._limit <= MOST_TRIALS
        is_early = self._told + len(pending) <= (MOST_TRIALS if is_short else AT_FIRST)
        rest = self._labels, self._told, 1 + self._constraints
        if self._allowed_turn() and (is_early or keeps_up(self.decade.seconds, 1 + len(pending), *rest)):
            return None
        return f"trials take {self.decade}, which is too short for gp's proposals"

    def _allowed_turn(self) -> int:
        return turn_of_gp(self.decade.allowed_ms, self._labels, self._told, 1 + self._constraints)

    def _share_of_gp(self) -> tuple[int, str]:
        """Return k if `gp` proposes the params of every k-th trial, and the text for `choice`."""
        self._set_pace()
        every = self._allowed_turn()
        if every > 1:
            shared = self._shared if self._gp.is_shared else self._apart
            return every, f"gp and tpe in turn{shared}: trials take {self.decade}, which is too short for gp alone"
        r_squared = self._gp.r_squared
        shared = self._shared if self._gp.is_shared else self._apart
        if r_squared >= LEAST_R_SQUARED:
            return 1, f"gp{shared}: it predicts {r_squared:.0%} of the variance of the losses"
        little = f"less than {LEAST_R_SQUARED:.0%} of the variance of the losses"
        return 2, f"gp and tpe alternating{shared}: gp predicts {little}"

    def _set_pace(self) -> None:
        """Let `gp` make quick proposals if trials are short."""
        self._gp.is_quick, self._gp.rare_from = self.decade.allowed_ms < QUICK_MS, self._earlier + FIRST


def _sharing(parts: Sequence[Subspace]) -> tuple[str, str]:
    """Return a text that says which labels are learned from several subspaces, and a text that none are.

    The second one is for subspaces that differ too much. Both begin with a comma, and are "" for one subspace.
    """
    number = len(parts)
    if number == 1:
        return "", ""
    apart = f", each of the {number} subspaces by itself, because they differ too much"
    used = Counter(label for part in parts for label in part.domains)
    labels = [label for label, count in used.items() if count > 1]
    if not labels:
        return f", which compares the {number} subspaces", apart
    named = [printable(label)[:MOST_LETTERS] for label in labels[:NAMED]]
    if len(labels) > NAMED:
        named.append(f"{len(labels) - NAMED} more labels")
    listed = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
    sources = f"all {number}" if all(used[label] == number for label in labels) else f"several of the {number}"
    return f", {listed} learnt from {sources} subspaces", apart
