"""Command that deletes a study: `rm`."""

from __future__ import annotations

import click

from shadho_celery.cli.connection_options import refusals
from shadho_celery.cli.messages import say
from shadho_celery.cli.result_options import opened, store_option, study_argument
from shadho_celery.core.checks import printable
from shadho_celery.errors import StudyLocked, UsageError


@click.command(
    epilog="""
\b
Examples:
  shadho-celery rm svm-3f2a
  shadho-celery rm svm-3f2a --yes
"""
)
@study_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@store_option
@refusals()
def rm(name: str, yes: bool, store: str) -> None:
    """Delete a study: its trials and reports, and its checkpoints, logs and state below this folder's .shadho.

    A study that runs is refused. Files on the disks of other machines are named, not deleted.
    """
    with opened(store, name, exactly=True) as study:
        if (where := study.running_on) is not None:
            raise StudyLocked(f"study {study.name} is run by the scheduler on {where}; stop it first, by Ctrl-C there")
        if yes and study.name != name:
            raise UsageError(f"--yes needs the whole name: {study.name}")
        if not yes and not _confirms(f"Delete study {study.name} with its {study.count()} trials from {study.store}?"):
            say("nothing was deleted", err=True)
            raise SystemExit(1)
        deleted = study.delete()
    say(f"deleted: study {deleted.name} with {deleted.trials} trials")
    for folder in deleted.folders:
        say(f"deleted: {folder}")
    for folder in deleted.left:
        say(f"not deleted: {folder}, which is a link, or not this user's")
    if deleted.hosts:
        say(
            f"not deleted: {deleted.folder_there} below the working directory of its workers, on "
            f"{', '.join(deleted.hosts)}"
        )


def _confirms(question: str) -> bool:
    try:
        return click.confirm(printable(question), err=True)
    except click.Abort:
        raise UsageError("nobody answered, and nothing was deleted; give --yes where nobody can answer") from None
