"""Display of a study in a notebook: its summary as HTML, and its charts, each in a separate frame."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shadho_celery.charts.chart import Chart
from shadho_celery.charts.payload import encoded
from shadho_celery.charts.registry import CHARTS
from shadho_celery.charts.report import best_trials, document, element, joined
from shadho_celery.charts.study import Figure, StudyData
from shadho_celery.core.checks import one_line, short
from shadho_celery.core.units import counted, took
from shadho_celery.results.study import StudyResults

#: height in pixels: of a frame with an empty chart, of a frame with marks, and of a category's row
_EMPTY, _HEIGHT, _ROW = 96, 520, 28
#: maximum height of a frame in pixels; a taller chart scrolls
_MOST_HEIGHT = 1000


class Picture:
    """A chart that a notebook displays as a picture. The attribute `chart` has its data."""

    def __init__(self, chart: Chart, classes: Collection[str]) -> None:
        """`classes` are the names of all compute classes of the study, in the order of their colours."""
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
    """The charts of a study as methods, such as `history()`. Each reads the study and returns a `Picture`."""

    def __init__(self, study: StudyResults) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Callable[..., Picture]:
        chart = CHARTS.get(name)
        if chart is None:
            raise AttributeError(f"there is no chart {short(name)}; charts: {', '.join(sorted(CHARTS))}")

        def picture(*given: object, **named: object) -> Picture:
            data = StudyData(self._study)
            return Picture(chart.draw(data, *given, **named), data.classes)

        # These are shown by `help` and by the completion of a notebook.
        picture.__name__, picture.__doc__ = name, chart.make.__doc__
        picture.__signature__ = chart.signature  # type: ignore[attr-defined]
        return picture

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *CHARTS]


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
