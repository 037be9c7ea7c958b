"""Progress bar of a search, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Callable

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shadho_celery.cli.console import PrintableConsole
from shadho_celery.results.report import overview_of
from shadho_celery.scheduler.scheduler import Scheduler


class ProgressBar:
    """Progress bar of the trials of one run, with the best loss so far. A context manager."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        console = PrintableConsole(stderr=True)
        words = TextColumn("{task.description}", markup=False)
        self._bar = Progress(words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._task = self._bar.add_task(scheduler.study.name, total=scheduler.limits.trials)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return self._update

    def __exit__(self, *_: object) -> None:
        self._update()
        self._bar.stop()

    def _update(self) -> None:
        study = self._scheduler.study
        words = f"{study.name}: {overview_of(study).best_words}"
        self._bar.update(self._task, completed=study.counted, description=words)
