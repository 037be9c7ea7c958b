"""Durations of trials by subspace and compute class, learned from noisy measurements.

The logarithm of a trial's seconds is modelled as a_j + b_c + u_jc + noise for subspace j and class c: an effect of the
subspace, an effect of the class, and the departure of their pair, u_jc ~ N(0, tau^2). A class is a column of the table.
Columns may form groups, such as the numbers of slots of trials on one class: a column without trials then has the
effect of its group. Effects and variances are estimated from the trials (empirical Bayes). The estimate of a pair with
few trials is close to a_j + b_c, and that of a pair with many trials is close to its measurements. Source: Morris,
"Parametric Empirical Bayes Inference", JASA 78, 1983, in its two-way form.

`Extrapolation` predicts the seconds of a running trial from the steps that it reports.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shadho_celery.core.trial import Report, Trial, TrialState
from shadho_celery.space.features import Array

#: prior variance of log seconds within a pair; prior variance of u; and number of trials or pairs that a prior is worth
NOISE_VARIANCE, PAIR_VARIANCE, BELIEF = 0.25, 0.1, 4.0
#: ridge penalty of the effects of subspaces and classes, in units of the weight of the pair with the most evidence
RIDGE = 0.02
#: iterations of alternating least squares for an estimate, which start from the previous estimate
ROUNDS = 8
#: a trial that is more than this many standard deviations from its estimate is moved to this distance, because of
#: stragglers
FAR_OUT = 4.0
#: a new estimate is made when the number of trials has grown by this fraction, so its cost per trial falls over time
GROWTH = 0.02


class Estimate(NamedTuple):
    """Estimates for every pair of subspace and class, in log seconds, shapes (subspaces, classes)."""

    mean: Array
    #: posterior standard deviation of u, the pair's own effect
    deviation: Array
    #: standard deviation of the log seconds of single trials within a pair
    noise: float


class Durations:
    """Learns a table of log seconds by subspace (rows) and compute class (columns, added as classes appear)."""

    def __init__(self, rows: int) -> None:
        #: by pair: number of trials, sum of weights, sum of weight times log seconds, sum of weight times squared log
        #: seconds
        self._told = np.zeros((4, rows, 0))
        #: the same four numbers for running trials that are extrapolated or have run unusually long; and the number of
        #: extrapolated trials
        self._open = np.zeros((4, rows, 0))
        self._extrapolated = np.zeros((rows, 0))
        self._row_part = np.zeros(rows)
        self._column_part = np.zeros(0)
        #: by column: its group, and its assumed log seconds relative to the other columns of the group
        self._group_of: list[int] = []
        self._usual = np.zeros(0)
        self._pair_variance = PAIR_VARIANCE
        #: by column: number of trials, as plain ints, because they are read in every turn
        self.by_column: list[int] = []
        self._trials = 0
        self._estimated_at = -1
        self._estimate: Estimate | None = None
        #: number of changes of the estimate
        self.version = 0

    def add_column(self, group: int | None = None, usual: float = 0.0) -> None:
        """Add the column of a class without trials.

        Columns with the same `group` are assumed to differ by their `usual` log seconds. By default, a column has a
        group of its own.
        """
        self._group_of.append(-1 - len(self._group_of) if group is None else group)
        self._usual = np.append(self._usual, usual)
        blank = np.zeros((4, len(self._row_part), 1))
        self._told, self._open = (np.concatenate([table, blank], axis=2) for table in (self._told, self._open))
        self._extrapolated = np.concatenate([self._extrapolated, blank[0]], axis=1)
        self._column_part = np.append(self._column_part, 0.0)
        self.by_column.append(0)
        self._estimate = None

    def forget(self) -> None:
        """Forget all trials, and keep the classes."""
        self._told[:], self._open[:], self._extrapolated[:] = 0.0, 0.0, 0.0
        self._row_part[:], self._column_part[:] = 0.0, 0.0
        self._pair_variance = PAIR_VARIANCE
        self.by_column = [0] * len(self.by_column)
        self._trials, self._estimated_at, self._estimate = 0, -1, None

    def tell(self, row: int, column: int, log_seconds: float, weight: float = 1.0) -> None:
        """Learn from a trial of the subspace `row` on the class `column`, which took this many log seconds. The
        variance of its noise is divided by `weight`.
        """
        estimate = self.estimate()
        count = int(self._told[0, row, column])
        if count >= 5:
            centre = float(estimate.mean[row, column])
            reach = FAR_OUT * math.hypot(estimate.noise / math.sqrt(weight), float(estimate.deviation[row, column]))
            log_seconds = min(max(log_seconds, centre - reach), centre + reach)
        self._told[:, row, column] += (1.0, weight, weight * log_seconds, weight * log_seconds**2)
        self.by_column[column] += 1
        self._trials += 1
        # A class that joins late has few trials among many. So a new estimate is also due after the trials 1, 2, 4, 8,
        # ... of a pair.
        if (count + 1) & count == 0:
            self._estimate = None

    def suppose(self, running: Sequence[tuple[int, int, float, float, bool]]) -> None:
        """Replace what is known about the running trials.

        Each has its row, its column, log seconds, a weight, and `is_total`. If `is_total` is True, the seconds are
        extrapolated to the whole trial, which counts like an ended trial. Otherwise they are the seconds so far.

        A trial that has run much longer than expected for its pair counts as if it ended now. A pair that is much
        slower than its subspace and class suggest is therefore noticed before its first trial ends.
        """
        estimate = self.estimate()
        supposed, self._extrapolated = np.zeros_like(self._open), np.zeros_like(self._extrapolated)
        for row, column, log_seconds, weight, is_total in running:
            self._extrapolated[row, column] += is_total
            if is_total or log_seconds > estimate.mean[row, column] + estimate.noise:
                supposed[:, row, column] += (1.0, weight, weight * log_seconds, weight * log_seconds**2)
        if supposed.any() or self._open.any():
            self._open = supposed
            self._estimate = None

    @property
    def measured(self) -> Array:
        """Number of ended and extrapolated trials, shape (subspaces, columns)."""
        return np.asarray(self._told[0] + self._extrapolated)

    def estimate(self) -> Estimate:
        """Return the current estimate: one second for all pairs before there are trials."""
        due = self._trials >= self._estimated_at + max(1, int(GROWTH * self._estimated_at))
        if self._estimate is None or due:
            self._estimate = self._fit()
            self._estimated_at = self._trials
            self.version += 1
        return self._estimate

    def _fit(self) -> Estimate:
        count, weights, total, squares = self._told + self._open
        tried = np.where(weights > 0, weights, 1.0)
        measured = total / tried
        within = float((squares - weights * measured**2).sum())
        freedom = float(np.maximum(count - 1.0, 0.0).sum())
        noise = (max(within, 0.0) + BELIEF * NOISE_VARIANCE) / (freedom + BELIEF)
        # A pair's mean differs from a_j + b_c by u_jc and by the mean of its noise: the weight is the inverse of the
        # sum of both variances, and 0 for a pair without trials.
        weight = np.where(count > 0, 1.0 / (self._pair_variance + noise / tried), 0.0)
        common = float((weight * measured).sum() / max(weight.sum(), 1e-12))
        # Effects by alternating weighted least squares, with weights in units of the largest one, so that the ridge
        # depends on the noise and not on the number of trials. Without trials, effects are the common mean and 0.
        scaled = weight / max(float(weight.max(initial=0.0)), 1e-12)
        by_row, by_column = scaled.sum(axis=1) + RIDGE, scaled.sum(axis=0) + RIDGE
        for _ in range(ROUNDS):
            rest = scaled * (measured - self._column_part)
            self._row_part = (rest.sum(axis=1) + RIDGE * common) / by_row
            rest = scaled * (measured - self._row_part[:, None])
            self._column_part = (rest.sum(axis=0) + RIDGE * self._group_part(by_column - RIDGE)) / by_column
        prior = self._row_part[:, None] + self._column_part
        own = (measured - prior) * self._pair_variance * weight
        variance = self._pair_variance * (1.0 - self._pair_variance * weight)
        # One step of expectation maximisation for each fit is enough, because there is a new fit every few trials.
        self._pair_variance = float((own**2 + variance).sum() + BELIEF * PAIR_VARIANCE) / (own.size + BELIEF)
        return Estimate(prior + own, np.sqrt(variance), math.sqrt(noise))

    def _group_part(self, weights: Array) -> Array:
        """Return the effect of each column by the weighted mean of its group; 0 for a column that is alone."""
        if len(set(self._group_of)) == len(self._group_of):
            return np.zeros(len(self._group_of))
        groups, places, sizes = np.unique(self._group_of, return_inverse=True, return_counts=True)
        total = np.bincount(places, weights * (self._column_part - self._usual), len(groups))
        means = (total / (np.bincount(places, weights, len(groups)) + RIDGE))[places]
        return np.where(sizes[places] > 1, means + self._usual, 0.0)


def filled(
    means: Mapping[tuple[str, str], float], subspaces: Collection[str], classes: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Return the mean seconds of each of the `subspaces` on each class: the known `means`, or estimates from them.

    `means` are by subspace and class. A class without a known mean is estimated as an average class.
    """
    rows = {name: row for row, name in enumerate(subspaces)}
    columns = {name: column for column, name in enumerate(dict.fromkeys([*classes, *(name for _, name in means)]))}
    durations = Durations(len(rows))
    for _ in columns:
        durations.add_column()
    for (subspace, name), seconds in means.items():
        durations.tell(rows[subspace], columns[name], math.log(seconds))
    estimates = np.exp(durations.estimate().mean)
    return {
        subspace: {name: means.get((subspace, name), float(estimates[row, columns[name]])) for name in columns}
        for subspace, row in rows.items()
    }


#: number of COMPLETE trials that must have ended at about the same step before running trials are extrapolated
LEAST_TRIALS = 3
#: fraction of all steps that must lie between the first and the latest report of a trial before it is extrapolated
LEAST_PART = 0.05
#: last steps agree if they differ by at most the fraction TOLERANCE of all steps. At most this fraction of a trial's
#: seconds, plus SHORT_SECONDS, may follow its last report
TOLERANCE, SHORT_SECONDS = 0.1, 1.0


class Elapsed(NamedTuple):
    """Seconds of a running trial."""

    trial: Trial
    seconds: float
    #: True for the seconds of the whole trial, extrapolated from its reports; False for those that it has run so far
    is_total: bool = False


class _Steps(NamedTuple):
    """Steps of the COMPLETE trials of a subspace and budget."""

    trials: int
    #: smallest first step
    first: int
    #: smallest and greatest last step
    least: int
    most: int

    @property
    def agree(self) -> bool:
        """True if enough trials have ended at about the same step."""
        is_alike = self.most - self.least <= TOLERANCE * (self.most - self.first)
        return self.trials >= LEAST_TRIALS and is_alike and self.first < self.most


class Extrapolation:
    """Extrapolates the seconds of running trials from their reports.

    A trial is assumed to have as many steps as the COMPLETE trials of its subspace and budget, if their numbers of
    steps agree. Each remaining step is assumed to take as long as the mean step between the trial's first and latest
    report. Promoted trials and repeated attempts are not extrapolated, because they may begin at a checkpoint. All
    times are from the worker's clock, so it does not matter if reports arrive late.
    """

    def __init__(self) -> None:
        #: by subspace and budget
        self._steps: dict[tuple[str, float | None], _Steps] = {}
        #: by number of a running trial: its first report, and the one with the greatest step
        self._reports: dict[int, tuple[Report, Report]] = {}

    def tell(self, trial: Trial, report: Report) -> None:
        """Record a report of a running trial."""
        if report.attempt > 1 or trial.origin is not None:
            return
        first, latest = self._reports.get(trial.number, (report, report))
        self._reports[trial.number] = first, report if report.step > latest.step else latest
        key = trial.subspace, trial.budget
        if key in self._steps and report.step > self._steps[key].most:
            # The trial has more steps than the trials that have ended.
            self._steps[key] = self._steps[key]._replace(most=report.step)

    def end(self, trial: Trial) -> None:
        """Record that a trial has ended."""
        reports = self._reports.pop(trial.number, None)
        if reports is None or trial.attempt > 1 or trial.state is not TrialState.COMPLETE:
            return
        first, last = reports[0].step, reports[1].step
        seconds = trial.outcome.seconds or 0.0
        unreported = seconds - (reports[1].at - (trial.started_at or 0.0))
        if unreported > SHORT_SECONDS + TOLERANCE * seconds:
            # The reports do not show how long the trial takes, so it counts as if it had made no steps.
            last = first
        key = trial.subspace, trial.budget
        trials, earliest, least, most = self._steps.get(key, _Steps(0, first, last, last))
        self._steps[key] = _Steps(trials + 1, min(earliest, first), min(least, last), max(most, last))

    def elapsed(self, trial: Trial, ran: float) -> Elapsed:
        """Return the seconds of the whole trial if its reports allow to extrapolate them, else `ran`, its seconds so
        far.
        """
        reports = self._reports.get(trial.number) if trial.attempt == 1 else None
        steps = self._steps.get((trial.subspace, trial.budget))
        if reports is None or trial.started_at is None or steps is None or not steps.agree:
            return Elapsed(trial, ran)
        first, latest = reports
        made, seconds = latest.step - first.step, latest.at - first.at
        if made < LEAST_PART * (steps.most - steps.first) or latest.step > steps.most or seconds <= 0:
            return Elapsed(trial, ran)
        total = latest.at - trial.started_at + (steps.most - latest.step) * seconds / made
        return Elapsed(trial, max(ran, total), is_total=True)
