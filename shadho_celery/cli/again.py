"""Trials that run once more: `again` runs one in this process, `enqueue --failed` enqueues the params of failed ones.

A store has only the name of a study file, not its content. The file with this name in the current folder is used.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.core import hardware
from shadho_celery.core.checks import short
from shadho_celery.core.records import Answer
from shadho_celery.core.trial import MAX_COUNT, TrialState, turned, whole
from shadho_celery.errors import SpaceError, UsageError

if TYPE_CHECKING:
    from shadho_celery.results.study import StudyResults


@shared_options.command("again svm 3", "again svm 3 --store sqlite:///other.db")
@shared_options.study_argument
@click.argument("number", metavar="TRIAL", type=click.IntRange(min=0))
@shared_options.store_option
def again(name: str, number: int, store: str) -> None:
    """Run the values and the seed of trial number TRIAL again, in this process, and show its output and its loss.

    Nothing is recorded. The objective is that of the study's file in this folder as it is now; a line says so if the
    trial ran under another version. Its checkpoints are in an empty folder, which is deleted at the end.
    """
    # Imported late, because `--help` needs none of it.
    from shadho_celery.objective import study_file
    from shadho_celery.objective.call import call
    from shadho_celery.objective.context import LocalContext
    from shadho_celery.runner.process_state import seed_generators
    from shadho_celery.space.compile import compile_space

    with shared_options.opened(store, name) as study:
        shown = f"shadho-celery trial {shlex.quote(study.name)} {number}"
        module = shared_options.file_of(study, f"there, call the objective with the params that {shown} shows")
        found, record = study.trial(number), study.record
        trial = found.record
        recorded: Mapping[str, float | None] = found.losses or {"loss": found.loss}
    file = study_file.load(module)
    space = compile_space({} if file.space is None else file.space)
    try:
        if file.space is not None:
            space.check(trial.params)
    except SpaceError as error:
        raise UsageError(f"trial {number} does not fit the SPACE that {module} has now: {error}") from None
    now, then = file.code.with_space(space.describe()).digest, trial.outcome.code
    if then not in {None, now}:
        say(f"the code of {module} is now version {now}; trial {number} ran under version {then}", err=True)
    if trial.origin is not None and not trial.is_repeat:
        say(f"trial {number} continued trial {trial.origin}; here it begins without its checkpoint", err=True)
    objectives: Mapping[str, str] | None = record.in_force.get("objectives")
    gpus = hardware.detect().gpus_for(str(trial.compute_class))
    os.environ.setdefault(hardware.DEVICE, gpus[0].device if gpus else "cpu")
    with TemporaryDirectory() as folder, study_file.within(f"trial {number}"):
        context = LocalContext(
            study=record.name,
            trial=number,
            seed=trial.seed,
            budget=whole(trial.budget),
            checkpoints=Path(folder, "checkpoints"),
            device=os.environ[hardware.DEVICE],
            objectives=objectives,
        )
        seed_generators(trial.seed)
        objective, make = file.runnable(space)
        outcome = call(objective, lambda: make(trial.params), context, objectives=objectives)
    if outcome.warning is not None:
        say(f"Warning: {outcome.warning}", err=True)
    if outcome.state is TrialState.FAILED:
        say(outcome.error, err=True)
        raise SystemExit(1)
    losses: Mapping[str, float | None] = turned(outcome.losses, objectives) or {"loss": outcome.loss}
    for label, loss in losses.items():
        before = recorded.get(label)
        say(f"trial {number}: {label} {loss!r}, {'no loss' if before is None else repr(before)} on record")
    for label, metric in outcome.metrics.items():
        say(f"  {label}: {metric!r}")


def failed_params(study: StudyResults, numbers: Sequence[str]) -> list[Any]:
    """Return the params of the failed trials with these numbers; without numbers, of all that were not tried again.

    Raises UsageError if one of the trials has not failed, or if there is no trial to return.
    """
    from shadho_celery.scheduler import known_points
    from shadho_celery.space.stored import read_schema

    if wrong := [each for each in numbers if not each.isdecimal() or len(each) > len(str(MAX_COUNT))]:
        raise UsageError(f"{short(wrong[0], 60)} is not the number of a trial; with --failed give numbers, or nothing")
    asked = [study.trial(int(each)).record for each in dict.fromkeys(numbers)]
    for trial in asked:
        if trial.state is not TrialState.FAILED:
            raise UsageError(f"trial {trial.number} has not failed: it is {trial.state.lower()}; leave it out")
    schema = read_schema(study.tree)
    if found := asked or known_points.failed((each.record for each in study.trials), schema):
        return known_points.as_given([each.params for each in found], schema)
    raise UsageError(f"study {study.name} has no failed trial, or all of them were tried again")


def enqueued(study: StudyResults, store: str, points: Sequence[object]) -> Answer:
    """Enqueue known points (params to run first) for the next run of a study that does not run. Raises ShadhoError."""
    from shadho_celery.objective import study_file
    from shadho_celery.objective.toml_study import resume_words
    from shadho_celery.scheduler import known_points
    from shadho_celery.session.control import Control
    from shadho_celery.session.opening import Opening, Request
    from shadho_celery.study.state import named

    file = study_file.load(shared_options.file_of(study))
    request = Request(
        space=file.space, module=file.module, stated=file.stated, store=store, name=study.name, resume=True
    )
    with closing(Opening(request).open(Control(store=store).check_owner)) as opened:
        numbers = known_points.enqueue(opened.study, opened.plan, points)
        limit, least = opened.plan.limits.trials, opened.study.counted + len(opened.study.pending())
    more = ("--trials", str(least)) if limit is not None and limit < least else ()
    then = shlex.join(resume_words(file.module, study.name, *more))
    return Answer(is_done=True, text=f"enqueued {named(numbers)} for the next run: {then}")
