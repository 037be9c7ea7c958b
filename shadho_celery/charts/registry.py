"""Registry of the charts of a study. Each chart is a function of columns with the decorator `StudyChart`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

from msgspec.structs import replace

from shadho_celery.charts.chart import Chart
from shadho_celery.charts.columns import AttemptColumns, Depth, TrialColumns
from shadho_celery.core.checks import short
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults

Make = TypeVar("Make", bound=Callable[..., Chart])

#: headings of a page, in their order
SECTIONS = ("Search", "Machines", "Params", "Failures")
#: by annotation of an argument: the function that reads it from text
_TYPES: Mapping[str, Callable[[str], object]] = {"str": str, "int": int}


class Source(Protocol):
    """Gives charts the columns of a study."""

    study: StudyResults

    def trials(self, depth: Depth = Depth.PARAMS) -> TrialColumns:
        """Return the trials. Facts beyond `depth` may be missing."""

    def attempts(self) -> AttemptColumns:
        """Return the attempts and the workers."""


@dataclass(kw_only=True)
class StudyChart:
    """Registers a chart of a study, as the decorator of the function that makes the chart.

    The function's arguments `trials`, `attempts` and `study` come from a `Source`. Other arguments come from the person
    who reads the page. By default, the chart has the name of the function.
    """

    name: str = ""
    #: heading under which pages show the chart, or "" for a chart that is shown only on request; and its position among
    #: the charts of this heading
    section: str = ""
    place: int = 0
    #: depth to which trials are read for this chart
    depth: Depth = Depth.PARAMS
    #: function that returns whether pages show the chart that was made from these trials: by default, if it has marks
    is_shown: Callable[[TrialColumns, Chart], bool] = lambda trials, chart: not chart.empty
    #: word for the first argument, such as "param", if the reader of a page chooses its value; and a function that
    #: returns the values to choose from
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
        """Signature of the chart with only the arguments that a reader gives."""
        found = inspect.signature(self.make)
        return found.replace(parameters=[each for name, each in found.parameters.items() if name not in _COLUMNS])

    def draw(self, source: Source, *given: object, **named: object) -> Chart:
        """Return the chart, made from the current data of the source. Further arguments are those of the reader."""
        arguments = self.signature.bind(*given, **named).arguments
        needed = inspect.signature(self.make).parameters.keys() & _COLUMNS
        chart: Chart = self.make(**{name: _COLUMNS[name](source, self.depth) for name in needed}, **arguments)
        return replace(chart, name=self.name)

    def read(self, texts: Mapping[str, str]) -> dict[str, object]:
        """Return the reader's arguments from texts by name. Raises UsageError if one is unknown, bad or missing."""
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


#: by name of a chart's argument: the function that reads it from a source
_COLUMNS: Mapping[str, Callable[[Source, Depth], object]] = {
    "trials": lambda source, depth: source.trials(depth),
    "attempts": lambda source, depth: source.attempts(),
    "study": lambda source, depth: source.study,
}
#: the charts by name
CHARTS: dict[str, StudyChart] = {}
