"""Progress of running trials by the steps that they report, which shows how long a trial takes before it ends."""

from __future__ import annotations

from typing import NamedTuple

from shadho_celery.core.trial import Report, Trial, TrialState

#: part of a trial's steps that must lie between two reports before its seconds are extrapolated from them
LEAST_PART = 0.05
#: the last steps of complete trials agree if the smallest is at least this part of the greatest
ALIKE = 0.9


class Elapsed(NamedTuple):
    """Seconds of a running trial."""

    trial: Trial
    seconds: float
    #: True for the seconds of the whole trial, extrapolated from its reports; False for those that it has run so far
    is_total: bool = False


class _Reported(NamedTuple):
    """First and latest report of a trial, and the time on the scheduler's clock at which the latest one arrived."""

    first: Report
    latest: Report
    arrived: float


class Progress:
    """Extrapolates the seconds of running trials from their reports.

    The last step of a trial is assumed to be that of the COMPLETE trials of its subspace and budget, if these agree.
    The steps until then are assumed to take as long as those between its first report and its latest one.
    """

    def __init__(self) -> None:
        #: by subspace and budget: the smallest and the greatest last step of the COMPLETE trials
        self._last_steps: dict[tuple[str, float | None], tuple[int, int]] = {}
        #: by number of the trial
        self._reported: dict[int, _Reported] = {}

    def tell(self, trial: Trial, report: Report, now: float) -> None:
        """Record a report that arrived at the time `now`.

        Those of repeated and promoted trials are ignored, because these may begin at a checkpoint.
        """
        if report.attempt > 1 or trial.origin is not None:
            return
        known = self._reported.get(trial.number)
        if known is None:
            self._reported[trial.number] = _Reported(report, report, now)
        elif report.step > known.latest.step:
            self._reported[trial.number] = _Reported(known.first, report, now)

    def end(self, trial: Trial) -> None:
        """Record that a trial has ended."""
        known = self._reported.pop(trial.number, None)
        if known is not None and trial.state is TrialState.COMPLETE:
            key, last = (trial.subspace, trial.budget), known.latest.step
            least, most = self._last_steps.get(key, (last, last))
            self._last_steps[key] = min(least, last), max(most, last)

    def elapsed(self, trial: Trial, since: float, now: float) -> Elapsed:
        """Return the seconds of a trial that runs `since` a time: of the whole trial if its reports show them."""
        ran = now - since
        known = self._reported.get(trial.number) if trial.attempt == 1 else None
        least, most = self._last_steps.get((trial.subspace, trial.budget), (0, 0))
        if known is None or not least >= ALIKE * most > 0:
            return Elapsed(trial, ran)
        first, latest, arrived = known
        # By the worker's clock, as many reports may arrive at once after an outage; but that clock may be set.
        steps, seconds = latest.step - first.step, min(latest.at - first.at, arrived - since)
        if latest.step >= most or steps < LEAST_PART * (most - first.step) or seconds <= 0:
            return Elapsed(trial, ran)
        total = arrived - since + (most - latest.step) * seconds / steps
        # After a resume, `since` is that of the resume, and most steps may be earlier.
        return Elapsed(trial, max(ran, total, most * seconds / steps), is_total=True)
