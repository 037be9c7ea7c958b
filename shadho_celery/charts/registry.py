"""The registry of the charts of one study: each chart is a function of columns with the decorator `StudyChart`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

from shadho_celery.charts.chart import Chart
from shadho_celery.charts.columns import AttemptColumns, Depth, TrialColumns
from shadho_celery.core.checks import short
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults

Make = TypeVar("Make", bound=Callable[..., Chart])

#: headings of a page, in their order
SECTIONS = ("Search", "Machines", "Params", "Failures")
#: types of arguments by their annotation, to read them from text
_TYPES: Mapping[str, Callable[[str], object]] = {"str": str, "int": int, "float": float, "float | None": float}


class Source(Protocol):
    """Where the columns of a study come from."""

    study: StudyResults

    def trials(self, depth: Depth = Depth.PARAMS) -> TrialColumns:
        """Return the trials. Facts that are deeper than `depth` may be missing."""

    def attempts(self) -> AttemptColumns:
        """Return the attempts and the workers."""


@dataclass(kw_only=True)
class StudyChart:
    """A chart of one study, and where pages show it. It decorates the function that makes the chart.

    The function takes what a source has by the names `trials`, `attempts` and `study`. Its other arguments are given
    by the reader. The name of the chart is that of the function, if no other one is given.
    """

    name: str = ""
    #: heading under which pages show the chart, and its place there; "" if it is drawn only when it is asked for
    section: str = ""
    place: int = 0
    #: how much of the trials it needs, or a function that returns this for a study and the reader's arguments
    depth: Depth | Callable[..., Depth] = Depth.PARAMS
    #: returns whether pages show this chart of a study
    is_shown: Callable[[TrialColumns, Chart], bool] = lambda trials, chart: True
    #: what the reader of a page chooses, such as "param", and the values of the first argument; none by default
    choice: str = ""
    choices: Callable[[TrialColumns], Sequence[str]] = lambda trials: ()
    make: Callable[..., Chart] = field(init=False)

    def __call__(self, make: Make) -> Make:
        """Register the function that makes the chart."""
        self.make, self.name = make, self.name or make.__name__
        CHARTS[self.name] = self
        return make

    @cached_property
    def signature(self) -> inspect.Signature:
        """The arguments that a reader gives."""
        found = inspect.signature(self.make)
        return found.replace(parameters=[each for name, each in found.parameters.items() if name not in _COLUMNS])

    def draw(self, source: Source, *given: object, **named: object) -> Chart:
        """Return the chart as the source has the study now."""
        arguments = self.signature.bind(*given, **named).arguments
        depth = self.depth if isinstance(self.depth, Depth) else self.depth(source.study, **arguments)
        needed = inspect.signature(self.make).parameters.keys() & _COLUMNS
        return self.make(**{name: _COLUMNS[name](source, depth) for name in needed}, **arguments)

    def read(self, texts: Mapping[str, str]) -> dict[str, object]:
        """Return arguments that are given as texts. Raises UsageError for an unknown, bad or missing one."""
        known = self.signature.parameters
        found: dict[str, object] = {}
        for name, text in texts.items():
            if name not in known:
                raise UsageError(f"chart {self.name} has no argument {short(name)}")
            try:
                found[name] = _TYPES[str(known[name].annotation)](text)
            except ValueError:
                raise UsageError(f"{name}={short(text)} is not of type {known[name].annotation}") from None
        if missing := [each.name for each in known.values() if each.default is each.empty and each.name not in found]:
            raise UsageError(f"chart {self.name} needs {', '.join(missing)}")
        return found


#: what a source has, by the name of a chart's argument
_COLUMNS: Mapping[str, Callable[[Source, Depth], object]] = {
    "trials": lambda source, depth: source.trials(depth),
    "attempts": lambda source, depth: source.attempts(),
    "study": lambda source, depth: source.study,
}
#: the charts by name
CHARTS: dict[str, StudyChart] = {}
