"""The charts of one study by name, from the columns that a source has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Protocol

from shadho_celery.charts import failures, fronts, losses, machines, params, rungs, timeline
from shadho_celery.charts.chart import Chart
from shadho_celery.charts.columns import AttemptColumns, Depth, TrialColumns
from shadho_celery.core.checks import short
from shadho_celery.core.settings import BUDGETS
from shadho_celery.core.trial import TrialState
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults

#: maximum of a moment in seconds since the epoch, which is before the year 5138
MOST_MOMENT = 1e11


class Source(Protocol):
    """Where the columns of a study come from."""

    study: StudyResults

    def trials(self, depth: Depth = Depth.PARAMS) -> TrialColumns:
        """Return the trials. Facts that are deeper than `depth` may be missing."""

    def attempts(self) -> AttemptColumns:
        """Return the attempts and the workers."""


class StudyCharts:
    """The charts of one study. Each method returns a chart as the store has the study now."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def history(self, along: str = "trials") -> Chart:
        """Return the loss of each trial and the best loss so far, along "trials" or "seconds"."""
        axis = losses.Along(along)
        return losses.history(self._source.trials(Depth.LOSSES if axis is losses.Along.TRIALS else Depth.FACTS), axis)

    def samplers(self) -> Chart:
        """Return which sampler chose each trial."""
        return losses.samplers(self._source.trials(Depth.LOSSES))

    def parallel(self) -> Chart:
        """Return the params of each trial as parallel coordinates."""
        return params.parallel(self._source.trials())

    def importance(self) -> Chart:
        """Return how much each param matters for the loss and for the seconds."""
        return params.importance(self._source.trials())

    def slice(self, label: str) -> Chart:
        """Return the loss over one param."""
        trials = self._source.trials()
        if label in trials.labels:
            return params.slice_of(trials, label)
        if label not in self._source.study.space:
            raise UsageError(f"the study has no param {short(label)}")
        return params.empty_slice(label)

    def failures(self) -> Chart:
        """Return the failures by kind."""
        return failures.failures(self._source.trials())

    def failures_by_label(self) -> Chart:
        """Return where in the space trials fail."""
        return failures.failures_by_label(self._source.trials())

    def rungs(self) -> Chart:
        """Return the losses by budget."""
        return rungs.rungs(self._source.trials(Depth.FACTS))

    def curves(self) -> Chart:
        """Return the reported losses by step."""
        trials = self._source.trials(Depth.FACTS)
        return rungs.curves(trials, self._source.study.reports(rungs.candidates(trials)))

    def front(self) -> Chart:
        """Return the front of several losses."""
        trials = self._source.trials()
        return fronts.front(trials, {*fronts.on_front(trials)})

    def hypervolume(self) -> Chart:
        """Return the hypervolume of the front over the course of the study."""
        return fronts.hypervolume(self._source.trials())

    def timeline(self, since: float | None = None, until: float | None = None, pixels: int = timeline.PIXELS) -> Chart:
        """Return which slot ran which trial, between two moments in seconds since the epoch."""
        # A NaN fails this comparison too.
        if not all(each is None or 0 <= each <= MOST_MOMENT for each in (since, until)):
            raise UsageError("a timeline begins and ends at a moment in seconds since the epoch")
        if since is not None and until is not None and until <= since:
            raise UsageError("the end of a timeline must be after its beginning")
        pixels = min(max(pixels, 100), timeline.PIXELS * 4)
        has_budgets = any(self._source.study.in_force.get(name) for name in BUDGETS)
        trials = self._source.trials(Depth.FACTS) if has_budgets else None
        return timeline.timeline(self._source.attempts(), since, until, pixels, trials=trials)

    def throughput(self) -> Chart:
        """Return the completed trials an hour beside the bound of the fleet."""
        return machines.throughput(self._source.trials(Depth.FACTS), self._source.attempts())

    def predictions(self) -> Chart:
        """Return predicted and actual seconds."""
        return machines.predictions(self._source.trials(Depth.FACTS), self._source.attempts())

    def one_more_worker(self) -> Chart:
        """Return what one more worker of each class would bring."""
        return machines.one_more_worker(self._source.trials(Depth.FACTS), self._source.attempts())

    def waiting(self) -> Chart:
        """Return the attempts that wait in the queues."""
        return machines.waiting(self._source.attempts())

    def why_here(self, number: int, attempt: int = 1) -> Chart:
        """Return what each class would have cost a trial when an attempt of it was placed."""
        trial = self._source.study.trial(number)
        found = [each for each in self._source.study.records.of_trial(number) if each["attempt"] == attempt]
        if not found:
            raise UsageError(f"the store has no attempt {short(attempt)} of trial {number}")
        seconds = trial.seconds if trial.state == TrialState.COMPLETE and trial.attempts == attempt else None
        free = machines.free_slots(self._source.attempts(), number, attempt)
        return machines.why_here(found[0]["placed"], found[0]["compute_class"], (number, attempt), seconds, free)


def _arguments(method: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    found = dict(inspect.signature(method).parameters)
    del found["self"]
    return found


#: by name of a chart: the arguments of its method
CHARTS: Mapping[str, Mapping[str, inspect.Parameter]] = {
    name: _arguments(method)
    for name, method in vars(StudyCharts).items()
    if not name.startswith("_") and inspect.isfunction(method)
}
#: types of arguments by their annotation, to read them from text
_TYPES: Mapping[str, Callable[[str], object]] = {"str": str, "int": int, "float": float, "float | None": float}


def chart_by_name(charts: StudyCharts, name: str, texts: Mapping[str, str]) -> Chart:
    """Return a chart by its name, with arguments as texts. Raises UsageError for an unknown or bad one."""
    if name not in CHARTS:
        raise UsageError(f"there is no chart {short(name)}; charts: {', '.join(CHARTS)}")
    known = CHARTS[name]
    arguments: dict[str, object] = {}
    for argument, text in texts.items():
        if argument not in known:
            raise UsageError(f"chart {name} has no argument {short(argument)}")
        try:
            arguments[argument] = _TYPES[str(known[argument].annotation)](text)
        except ValueError:
            raise UsageError(f"{argument}={short(text)} is not of type {known[argument].annotation}") from None
    if missing := [each.name for each in known.values() if each.default is each.empty and each.name not in arguments]:
        raise UsageError(f"chart {name} needs {', '.join(missing)}")
    try:
        found: Chart = getattr(charts, name)(**arguments)
    except ValueError as error:
        raise UsageError(f"chart {name}: {error}") from None
    return found
