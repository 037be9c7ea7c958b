"""A study in a notebook: its summary as HTML, and its charts, each in a frame of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shadho_celery.charts.chart import Chart
from shadho_celery.charts.study import StudyCharts
from shadho_celery.core.checks import one_line
from shadho_celery.core.units import counted, took
from shadho_celery.pages.document import document, element, joined
from shadho_celery.pages.figures import Figure
from shadho_celery.pages.payload import encoded
from shadho_celery.pages.reading import StudyData
from shadho_celery.pages.report import best_trials
from shadho_celery.results.study import StudyResults

#: pixels of a frame without the chart's marks, and with them
_EMPTY, _HEIGHT, _ROW = 96, 520, 28
#: pixels from which on a frame scrolls
_MOST_HEIGHT = 1000


class Picture:
    """A chart that a notebook displays. `chart` has its data."""

    def __init__(self, chart: Chart, classes: Collection[str]) -> None:
        """`classes` are the names of all compute classes of the study, which have the same colours in each chart."""
        self.chart = chart
        self._classes = [*classes]

    def _repr_html_(self) -> str:
        """Return a frame that may run scripts, but has no access to the notebook."""
        figure = Figure(section="", charts=[(self.chart.name, self.chart)])
        data = encoded([figure], self._classes)
        page = document(self.chart.title, element("main", id="figures"), data, is_embedded=True)
        frame = element(
            "iframe",
            srcdoc=page,
            sandbox="allow-scripts",
            title=one_line(self.chart.title),
            style=f"width: 100%; height: {self._height}px; border: 0",
        )
        return str(frame)

    @property
    def _height(self) -> int:
        if not len(self.chart):
            return _EMPTY
        rows = len(self.chart.axes[1].categories) if len(self.chart.axes) == 2 else 0
        return min(_MOST_HEIGHT, max(_HEIGHT, 200 + _ROW * rows))

    def __repr__(self) -> str:
        return f"<chart {one_line(self.chart.title)!r}>"


class StudyPictures:
    """The charts of a study. Each method reads the study and returns a `Picture`, which a notebook displays."""

    def __init__(self, study: StudyResults) -> None:
        self._study = study

    def history(self, along: str = "trials") -> Picture:
        """Draw the loss of each trial over the numbers of the "trials", or over "seconds"."""
        return self._picture(lambda charts: charts.history(along))

    def samplers(self) -> Picture:
        """Draw which sampler chose each trial."""
        return self._picture(lambda charts: charts.samplers())

    def parallel(self) -> Picture:
        """Draw a line for each trial over its params and its loss."""
        return self._picture(lambda charts: charts.parallel())

    def slice(self, label: str) -> Picture:
        """Draw the loss over one label of the space."""
        return self._picture(lambda charts: charts.slice(label))

    def importance(self) -> Picture:
        """Draw how much each label matters for the loss and for the seconds."""
        return self._picture(lambda charts: charts.importance())

    def front(self) -> Picture:
        """Draw the front of several losses."""
        return self._picture(lambda charts: charts.front())

    def hypervolume(self) -> Picture:
        """Draw the hypervolume of the front over the trials."""
        return self._picture(lambda charts: charts.hypervolume())

    def rungs(self) -> Picture:
        """Draw the losses by budget."""
        return self._picture(lambda charts: charts.rungs())

    def curves(self) -> Picture:
        """Draw the losses that trials have reported while they ran."""
        return self._picture(lambda charts: charts.curves())

    def failures(self) -> Picture:
        """Draw the number of failed trials by kind of failure."""
        return self._picture(lambda charts: charts.failures())

    def failures_by_label(self) -> Picture:
        """Draw the share of failed trials over the label that best explains the failures."""
        return self._picture(lambda charts: charts.failures_by_label())

    def timeline(self) -> Picture:
        """Draw which slot ran which trial (a Gantt chart)."""
        return self._picture(lambda charts: charts.timeline())

    def throughput(self) -> Picture:
        """Draw the completed trials per hour by class, beside the bound of what the fleet could complete."""
        return self._picture(lambda charts: charts.throughput())

    def one_more_worker(self) -> Picture:
        """Draw how many more trials an hour one more worker of each class would complete."""
        return self._picture(lambda charts: charts.one_more_worker())

    def predictions(self) -> Picture:
        """Draw the predicted seconds of trials beside the actual ones."""
        return self._picture(lambda charts: charts.predictions())

    def waiting(self) -> Picture:
        """Draw the number of attempts that waited in the queue of each class."""
        return self._picture(lambda charts: charts.waiting())

    def why_here(self, number: int, attempt: int = 1) -> Picture:
        """Draw what each class would have cost a trial when an attempt of it was placed."""
        return self._picture(lambda charts: charts.why_here(number, attempt))

    def _picture(self, draw: Callable[[StudyCharts], Chart]) -> Picture:
        data = StudyData(self._study)
        return Picture(draw(data.charts), data.classes)


def study_html(study: StudyResults) -> str:
    """Return a study's summary and its best trials as HTML without scripts."""
    data = StudyData(study)
    report = data.report
    states = ", ".join(f"{count:,} {state.lower()}" for state, count in report.counts.items() if count) or "none"
    ended = (
        f"{report.ended:,} of {counted(report.asked, 'trial has', 'trials have')} ended ({states})"
        if report.asked
        else f"{counted(report.ended, 'trial has', 'trials have')} ended ({states})"
    )
    said = f"{report.best_words}; {ended}; they ran for {took(report.active_seconds)}"
    line = element("p", element("strong", one_line(study.name)), f": {one_line(said, 500)}")
    return str(joined([line, best_trials(data)]))
