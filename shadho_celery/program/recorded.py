"""Recorded studies in a program and in notebooks (`load_study`, `list_studies`), and the progress bar of a search.

A search in this process shows its progress as a bar in a terminal, and a one-line summary at its end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.settings import refuse_unknown
from shadho_celery.errors import UsageError
from shadho_celery.results.report import overview_of
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import given
from shadho_celery.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from shadho_celery.charts.params import Importance
    from shadho_celery.charts.report import StudyPictures


class ShownStudy(StudyResults):
    """The results of a study. A notebook displays it with its summary, best trials and charts."""

    @property
    def charts(self) -> StudyPictures:
        """Charts of the study, such as ``study.charts.history()``. Each call reads the study anew."""
        # Imported here, as below, because only notebooks need it.
        from shadho_celery.charts.report import StudyPictures

        return StudyPictures(self)

    def importance(self) -> dict[str, Importance]:
        """Return how much each label matters for the loss and for the seconds, the most important label first.

        `loss` and `seconds` are shares of the variance, with the errors of their intervals of 95 % in `loss_error` and
        `seconds_error`. They are None for a label that is active in fewer than ten completed trials.
        """
        from shadho_celery.charts.columns import read_trials
        from shadho_celery.charts.params import importances

        return {each.label: each for each in importances(read_trials(self))}

    def fetch(self, to: str | Path, number: int | None = None) -> None:
        """Copy what trial `number`, by default the best one, has left in its checkpoint_dir to the folder `to`.

        The files are read from the working directory, or else from the workers of the fleet that the environment names.
        Raises UsageError unless `to` is new or empty, and ServiceError if the files cannot be read.
        """
        from shadho_celery.fleet import urls
        from shadho_celery.session.control import TrialLogs
        from shadho_celery.session.fetching import TrialFolder, fetch

        with closing(TrialLogs(is_fleet=urls.is_fleet({}))) as workers:
            fetch(TrialFolder(workers, self.key, self.best if number is None else self.trial(number)), Path(to))

    def _repr_html_(self) -> str:
        from shadho_celery.charts.report import study_html

        return study_html(self)


@refuse_unknown
def load_study(store: str, name: str) -> ShownStudy:
    """Return the study called `name` from the store at a URL. `name` may be shortened if it stays unique.

    `name` may also be the name of a module, which means its latest study. The study may be running: each access reads
    what is recorded at that moment. Raises StudyNotFound, which lists the candidates if there are several, or
    StoreError.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"a study's name is a text, not {short(name, 60)}")
    from shadho_celery.store.sql import SqlStore

    opened = SqlStore(store, read_only=True)
    return ShownStudy(opened, opened.find(name, told=lambda line: None))


def list_studies(store: str) -> list[ShownStudy]:
    """Return the studies of the store at a URL, the latest first. Raises StoreError."""
    from shadho_celery.store.sql import SqlStore

    opened = SqlStore(store, read_only=True)
    return [ShownStudy(opened, record) for record in opened.records()]


#: maximum number of characters for the best trial's values in the summary
MOST_VALUES = 200


@contextmanager
def progress_bar(scheduler: Scheduler, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """Show a progress bar of a run's trials, with the best loss so far. Yield the function that updates it.

    In a terminal, the bar's last state remains, above a one-line summary. A notebook shows only the summary. Elsewhere,
    only the bar's last state is printed, and only if `wanted` is True. If `wanted` is False, nothing is shown.
    """
    if wanted is False or (wanted is None and not is_notebook() and not (sys.stderr and sys.stderr.isatty())):
        yield lambda: None
        return
    if is_notebook():
        # Imported here, as below, because a search without a bar does not need the room `cli`.
        from shadho_celery.cli.messages import say

        yield lambda: None
        say(summary(scheduler), err=True)
        return
    # rich is slow to import, and a search without a bar does not need it.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from shadho_celery.cli.tables import PrintableConsole

    words, study = TextColumn("{task.description}", markup=False), scheduler.study
    console = PrintableConsole(stderr=True)
    try:
        with Progress(words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
            task = bar.add_task(study.name, total=scheduler.limits.trials)

            def update() -> None:
                bar.update(task, completed=study.counted, description=f"{study.name}: {overview_of(study).best_words}")

            try:
                yield update
            finally:
                update()
    finally:
        if console.is_terminal:
            console.print(Text(summary(scheduler)), soft_wrap=True)


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return type(sys.stderr).__module__.startswith("ipykernel")


def summary(scheduler: Scheduler) -> str:
    """Return a summary of a search's result in one line."""
    study = overview_of(scheduler.study)
    best = study.best
    found = "" if best is None else f" (trial {best.number}: {one_line(given(best), MOST_VALUES)})"
    return f"study {study.name}: {study.counts_words}; {study.best_words}{found}"
