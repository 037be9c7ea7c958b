"""The report of a study made from its scheduler's state, as a session asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from rich.console import Console

from shadho_celery.cli import tables
from shadho_celery.cli.tables import further_trials, make_console, place_lines, resume_command, time_line
from shadho_celery.results.report import StudyReport, ended_by_subspace, report_of, run_of
from shadho_celery.results.schema import plain_json, study_json
from shadho_celery.results.values import Values
from shadho_celery.space.space import Space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.state import StudyState

__all__ = ["further_trials", "make_console", "place_lines", "resume_command", "time_line"]


def _report(study: StudyState, space: Space | None = None, subspaces: Iterable[str] = ()) -> StudyReport:
    values = Values(study.record, None if space is None else space.evaluate)
    return report_of(study, cast(SqlStore, study.store), values, subspaces=subspaces)


def summary(
    study: StudyState,
    space: Space,
    console: Console,
    resume_command: str | None,
    refused: int = 0,
    *,
    run_lines: Sequence[str] = (),
) -> None:
    """Print the report at the end of a run."""
    run = run_of(study, 0.0, 0, {}, refused)
    tables.summary(_report(study, space), console, resume_command, run, run_lines=run_lines)


def as_json(study: StudyState, seconds: float, subspaces: Iterable[str], slots: Mapping[str, int]) -> Any:
    """Return the report as plain values for JSON."""
    run = run_of(study, seconds, 0, slots)
    return plain_json(study_json(_report(study, subspaces=subspaces), run))


def share_lines(study: StudyState) -> list[str]:
    """Return lines on shares that are not those of the space's own law."""
    return tables.share_lines(study.record.in_force or {}, ended_by_subspace(study))
