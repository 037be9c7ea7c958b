"""Command that copies the folder of a trial: `fetch`."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.core.units import counted, size_text
from shadho_celery.fleet import urls


@shared_options.command(
    "fetch svm -o best",
    "fetch svm 3 -o trial3",
    f"{urls.REDIS}=redis://127.0.0.1/0 shadho-celery fetch svm -o best     # from the fleet's workers",
)
@shared_options.study_argument
@click.argument("number", metavar="[TRIAL]", required=False, type=click.IntRange(min=0))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="New or empty folder for the copy.",
)
@shared_options.store_option
@shared_options.fleet_options
def fetch(name: str, number: int | None, output: Path, store: str, **connection: str | None) -> None:
    """Copy what trial number TRIAL, by default the best one, has left in its checkpoint_dir to DIR.

    The files are read from this folder, otherwise from a worker of the named fleet. Links are left out. DIR appears
    once all files are there and their digests are those of the trial's files.
    """
    named = shared_options.environment(**connection)
    os.environ.update(named)
    # Imported late, because `--help` needs none of it.
    from shadho_celery.session import fetching
    from shadho_celery.session.control import TrialLogs

    with shared_options.opened(store, name) as study, closing(TrialLogs(is_fleet=urls.is_fleet(named))) as workers:
        trial = study.best if number is None else study.trial(number)
        folder = fetching.TrialFolder(workers, study.key, trial)
        what = f"trial {trial.number} of study {study.name}: {counted(folder.count, 'file')}, {size_text(folder.size)}"
        say(what, err=True)
        with click.progressbar(length=folder.size, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
            fetching.fetch(folder, output, bar.update)
    say(f"copied to {output}", err=True)
