"""Extrapolation of the seconds of running trials from the steps that they report."""

from __future__ import annotations

from typing import NamedTuple

from shadho_celery.core.trial import Report, Trial, TrialState

#: number of COMPLETE trials that must have ended at about the same step before others are extrapolated
LEAST_TRIALS = 3
#: part of its steps that must lie between two reports of a trial before it is extrapolated
LEAST_PART = 0.05
#: last steps agree if they differ by at most this part of all steps; it is also the largest part of a trial's seconds,
#: beyond some seconds, that may follow its last report
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

    The last step of a trial is assumed to be that of the COMPLETE trials of its subspace and budget, if these agree.
    The steps until then are assumed to take as long as those between its first report and its latest one. Only the
    first attempt of a trial that was not promoted is extrapolated, because others may begin at a checkpoint. All times
    are of the worker's clock, so reports may arrive late, or after the study was resumed.
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
            # The trial is longer than those that have ended.
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
            # Its steps do not show its seconds, as if it had made none.
            last = first
        key = trial.subspace, trial.budget
        trials, earliest, least, most = self._steps.get(key, _Steps(0, first, last, last))
        self._steps[key] = _Steps(trials + 1, min(earliest, first), min(least, last), max(most, last))

    def elapsed(self, trial: Trial, ran: float) -> Elapsed:
        """Return the seconds of a trial that has run for `ran` seconds: of the whole trial if its reports show them."""
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
