"""Command that deletes a study: `rm`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from shadho_celery.cli import connection_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.result_options import opened, store_option, study_argument
from shadho_celery.core.checks import printable
from shadho_celery.core.units import counted
from shadho_celery.errors import ServiceError, StudyLocked, UsageError
from shadho_celery.transport import urls

if TYPE_CHECKING:
    from shadho_celery.results.study import Deleted


@click.command(
    epilog="""
\b
Examples:
  shadho-celery rm svm-3f2a
  shadho-celery rm svm-3f2a --yes
"""
)
@study_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@store_option
@connection_options.options
def rm(name: str, yes: bool, store: str, **connection: str | None) -> None:
    """Delete a study: its trials and reports, and its checkpoints, logs and state below this folder's .shadho.

    A running study cannot be deleted. Files on the disks of other machines are listed, not deleted. If a fleet is
    named, running trials of the study are stopped, and those that wait in its queues will not run.
    """
    named = connection_options.environment(**connection)
    with opened(store, name, exactly=True) as study:
        if (where := study.running_on) is not None:
            raise StudyLocked(f"the scheduler on {where} runs study {study.name}; stop it first, with Ctrl-C there")
        if yes and study.name != name:
            raise UsageError(f"--yes needs the full name: {study.name}")
        question = f"Delete study {study.name} with its {counted(study.count(), 'trial')} from {study.store}?"
        try:
            if not yes and not click.confirm(printable(question), err=True):
                say("nothing was deleted", err=True)
                raise SystemExit(1)
        except click.Abort:
            raise UsageError("no answer, so nothing was deleted; give --yes if nobody can answer") from None
        deleted = study.delete()
    say(f"deleted: study {deleted.name} with {counted(deleted.trials, 'trial')}")
    for folder in deleted.folders:
        say(f"deleted: {folder}")
    for folder in deleted.left:
        say(f"not deleted: {folder}, which is a link, or belongs to another user")
    if deleted.hosts:
        say(
            f"not deleted: {deleted.folder_there} below the working directory of its workers, on "
            f"{', '.join(deleted.hosts)}"
        )
    if urls.is_fleet(named):
        os.environ.update(named)
        _leave_fleet(deleted)


def _leave_fleet(deleted: Deleted) -> None:
    """Stop the trials of a deleted study on the fleet, or print why they continue."""
    # Imported late: Celery's libraries take half a second, and read the environment.
    from shadho_celery.fleet.executor import remove

    try:
        remove(deleted.key, deleted.numbers)
    except ServiceError as error:
        say(f"Warning: the study's running and waiting trials on the fleet continue: {error}", err=True)
        return
    say("not deleted: messages of its trials in the fleet's queues, if there are any; workers refuse them")
