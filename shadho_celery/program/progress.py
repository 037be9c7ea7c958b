"""A progress bar in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shadho_celery.results.report import overview_of
from shadho_celery.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from shadho_celery.session.session import Session, View


class ProgressBar:
    """Bar of the trials of one run, with the best loss so far. A context manager."""

    def __init__(self, scheduler: Scheduler, console: Console) -> None:
        self._scheduler = scheduler
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


def make_bar(scheduler: Scheduler, *, wanted: bool | None) -> ProgressBar | None:
    """Return a bar if it is wanted, by default in a terminal or in a notebook; otherwise None."""
    if wanted is False:
        return None
    # Imported late: a search without a bar needs nothing of the command line.
    from shadho_celery.cli.console import PrintableConsole

    console = PrintableConsole(stderr=True)
    is_seen = console.is_terminal or console.is_jupyter
    return ProgressBar(scheduler, console) if wanted or is_seen else None


def say(text: str) -> None:
    """Print a line on standard error."""
    from shadho_celery.cli import messages

    messages.say(text, err=True)


def view_of(session: Session) -> View:
    """Return the view of a run on workers, as the command line has it."""
    from shadho_celery.cli import run, tables

    return run.view_of(session, tables.make_console())
