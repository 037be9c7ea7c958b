"""Progress of a search in this process: a bar in a terminal, and a line of summary at its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shadho_celery.core.checks import one_line
from shadho_celery.results.report import overview_of
from shadho_celery.results.trial import given
from shadho_celery.scheduler.scheduler import Scheduler

#: maximum number of characters of the best values in the summary
MOST_VALUES = 200


@contextmanager
def progress_bar(scheduler: Scheduler, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar of the trials of a run, with the best loss so far. Yield the function that updates it.

    The bar is shown in a terminal, and its last state stays there, above one line of summary. In a notebook the line is
    printed alone. If it is `wanted` elsewhere, only the bar's last state is printed. Nothing is shown if it is False.
    """
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    if wanted is False or (wanted is None and not is_notebook and not (sys.stderr and sys.stderr.isatty())):
        yield lambda: None
        return
    if is_notebook:
        # Imported late, as below, because a search without a bar needs no command line.
        from shadho_celery.cli.messages import say

        yield lambda: None
        say(_summary(scheduler), err=True)
        return
    # rich is slow to import, and a search without a bar does not need it.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from shadho_celery.cli.console import PrintableConsole

    words, study = TextColumn("{task.description}", markup=False), scheduler.study
    console = PrintableConsole(stderr=True)
    try:
        with Progress(words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
            task = bar.add_task(study.name, total=scheduler.limits.trials)

            def update() -> None:
                bar.update(task, completed=study.counted, description=_state(scheduler))

            try:
                yield update
            finally:
                update()
    finally:
        if console.is_terminal:
            console.print(Text(_summary(scheduler)), soft_wrap=True)


def _state(scheduler: Scheduler) -> str:
    study = scheduler.study
    return f"{study.name}: {overview_of(study).best_words}"


def _summary(scheduler: Scheduler) -> str:
    """Return the result of a search in one line."""
    # Imported late, because it imports rich.
    from shadho_celery.cli.tables import counts_line

    study = overview_of(scheduler.study)
    best = study.best
    found = "" if best is None else f" (trial {best.number}: {one_line(given(best), MOST_VALUES)})"
    return f"study {study.name}: {counts_line(study)}; {study.best_words}{found}"
