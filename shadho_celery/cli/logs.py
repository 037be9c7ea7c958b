"""Commands about what a trial has left: `logs` prints its output, `fetch` copies its folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.core.checks import printable
from shadho_celery.core.units import counted, size_text
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls

if TYPE_CHECKING:
    from shadho_celery.results.study import StudyResults
    from shadho_celery.results.trial import TrialResult
    from shadho_celery.session.control import NotLeft, TrialLogs

#: seconds between two checks of a log with --follow
FOLLOW_SECONDS = 0.5

#: without --attempt, the logs of this many latest attempts are tried
LATEST = 5


@shared_options.command(
    "logs svm 3",
    "logs svm 3 --follow",
    "logs svm 3 --attempt 1",
    f"{urls.REDIS}=redis://127.0.0.1/0 shadho-celery logs svm 3     # from the fleet's workers",
)
@shared_options.study_argument
@click.argument("number", metavar="TRIAL", type=click.IntRange(min=0))
@click.option("-f", "--follow", is_flag=True, help="Go on until the trial ends.")
@click.option("--attempt", type=click.IntRange(min=1), help="Attempt of the trial.  [default: the last with output]")
@click.option("--raw", is_flag=True, help="Print it unchanged: control codes, which a terminal obeys, are not escaped.")
@shared_options.store_option
@shared_options.on_fleet
def logs(name: str, number: int, *, follow: bool, attempt: int | None, raw: bool, store: str) -> None:
    """Print the output of trial number TRIAL: all that it and its child processes have printed, logged and warned.

    The log is read from this folder, otherwise from the workers of the named fleet. Only the beginning and the end of a
    long log are kept. Each other replica or rank of a gang has a file of its own, which is named if it is in this
    folder.
    """
    # Imported here, so that `--help` stays fast.
    from shadho_celery.session.control import TrialLogs

    with shared_options.opened(store, name) as study, closing(TrialLogs(is_fleet=urls.is_fleet({}))) as found:
        trial = study.trial(number)
        if attempt is not None and attempt > trial.attempts:
            raise UsageError(
                f"trial {number} has {counted(trial.attempts, 'attempt')}; give --attempt a smaller number"
            )
        shown = Shown(study, found, is_raw=raw)
        while True:
            wanted = [attempt] if attempt else [*range(trial.attempts, 0, -1)][:LATEST]
            shown.show(trial, wanted)
            if not follow or trial.state.is_finished:
                break
            time.sleep(FOLLOW_SECONDS)
            # The trial is read before its log, so that the log of a trial that has ended is complete.
            trial = study.trial(number)
        if not shown.attempt:
            _explain(trial, shown.missing)
        for path in found.of_replicas(study.key, number, shown.attempt or attempt or trial.attempts):
            say(f"output of another replica or rank: {path}", err=True)


class Shown:
    """Prints the log of one trial, and remembers how much of it was printed."""

    def __init__(self, study: StudyResults, logs: TrialLogs, *, is_raw: bool = False) -> None:
        """With `is_raw`, logs are printed unchanged."""
        self._study, self._logs, self._is_raw = study, logs, is_raw
        #: attempt whose log is printed (0: none yet), the position up to which it was printed, and the worker that has
        #: the log
        self.attempt = self._position = 0
        self._source: str | None = None
        #: why no log was found for the attempt that was tried last
        self.missing: NotLeft | None = None

    def show(self, trial: TrialResult, attempts: Iterable[int]) -> None:
        """Print the new output in the log of the first attempt in `attempts` that has a log."""
        from shadho_celery.session.control import NotLeft

        for attempt in attempts:
            is_shown = attempt == self.attempt
            after, source = (self._position, self._source) if is_shown else (0, None)
            try:
                found, source = self._logs.read(self._study, trial, attempt, after, source)
            except NotLeft as why:
                self.missing = why
                continue
            if not is_shown and (trial.attempts > 1 or self.attempt):
                say(f"attempt {attempt} of {trial.attempts}:", err=True)
            self.attempt, self._position, self._source = attempt, found.end, source
            (partial(click.echo, color=True) if self._is_raw else say)(found.text, nl=False)
            return


def _explain(trial: TrialResult, why: NotLeft | None) -> None:
    """Print why there is no log, and the last lines of the output if the result of the trial has them."""
    reason = f"trial {trial.number} has not been sent to a worker yet" if why is None else str(why)
    if trial.log:
        say(f"{reason}; the last lines of its output were sent with its result:", err=True)
        say(trial.log)
    elif why is not None and why.is_error:
        raise ServiceError(reason)
    else:
        say(reason, err=True)


@shared_options.command(
    "fetch svm -o best",
    "fetch svm 3 -o trial3",
    f"{urls.REDIS}=redis://127.0.0.1/0 shadho-celery fetch svm -o best     # from the fleet's workers",
)
@shared_options.study_argument
@click.argument("number", metavar="[TRIAL]", required=False, type=click.IntRange(min=0))
@click.option("-o", "--output", required=True, metavar="DIR", type=Path, help="New or empty folder for the copy.")
@shared_options.store_option
@shared_options.on_fleet
def fetch(name: str, number: int | None, output: Path, store: str) -> None:
    """Copy what trial number TRIAL, by default the best one, has left in its checkpoint_dir to DIR.

    The files are read from this folder, otherwise from a worker of the named fleet. Links are left out. DIR appears
    once all files are there and their digests are those of the trial's files.
    """
    # Imported late, because `--help` needs none of it.
    from shadho_celery.session import fetching
    from shadho_celery.session.control import TrialLogs

    with shared_options.opened(store, name) as study, closing(TrialLogs(is_fleet=urls.is_fleet({}))) as workers:
        trial = study.best if number is None else study.trial(number)
        folder = fetching.TrialFolder(workers, study.key, trial)
        what = f"{counted(len(folder.files), 'file')}, {size_text(folder.size)}"
        label = printable(f"trial {trial.number} of study {study.name}: {what}")
        # Without a terminal, only the label is printed.
        with click.progressbar(length=folder.size, label=label, file=sys.stderr) as bar:
            fetching.fetch(folder, output, bar.update)
    say(f"copied to {output}", err=True)
