"""JSON form of studies and trials, which is the same in all commands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from shadho_celery.core.checks import plain
from shadho_celery.core.columns import names
from shadho_celery.core.trial import MAX_LEVELS, TrialState
from shadho_celery.results.report import Ended, Run, StudyReport
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult

_S = TrialState


def trial_json(trial: TrialResult) -> dict[str, Any]:
    """Return a trial as plain values for JSON.

    `loss` is the first loss, as the objective returned it.
    """
    found = {name: getattr(trial, name) for name in names()}
    loss = next(iter(trial.losses.values()), trial.loss)
    return {"number": trial.number, "values": _values(trial), **found, "loss": loss}


def attempt_json(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return an attempt, as `Records.of_trial` returns it, as plain values for JSON."""
    return {**attempt, "placed": {name: each._asdict() for name, each in attempt["placed"].items()}}


#: attributes of a report that have the same name in JSON: plain values, and records
_PLAIN = ["state", "running_on", "store", "module", "seed", "created_at", "objectives", "settings", "in_force", "space"]
_PLAIN += ["command", "warm_start", "money", "money_to_best", "hosts", "codes"]
_RECORDS = ("rungs", "placed_by_params", "subspaces", "actions")


def study_json(report: StudyReport, run: Run | None = None) -> dict[str, Any]:
    """Return a study as plain values for JSON. `run` is given by the process that has run the study."""
    slots = {} if run is None else run.slots
    return {
        "study": report.name,
        **{name: getattr(report, name) for name in _PLAIN},
        "seconds": None if run is None else round(run.seconds, 3),
        "active_seconds": round(report.active_seconds, 3),
        **trials_json(report.counts),
        "best": None if report.best is None else trial_json(report.best),
        "front": [*map(trial_json, report.front)],
        "hypervolume": report.coverage and to_builtins(report.coverage),
        "money_plan": to_builtins(report.record.money_plan),
        "classes": {
            name: to_builtins(report.classes.get(name, Ended(complete=0, pruned=0, failed=0)))
            | {"slots": None if run is None else slots.get(name, 0)}
            for name in sorted({*report.classes, *slots})
        },
        "sampler": {"name": report.in_force.get("sampler"), "choices": dict(report.record.choices)},
        "pruner": report.in_force.get("pruner"),
        **{name: to_builtins(getattr(report, name)) for name in _RECORDS},
        "failures": [
            {"failure": str(each.failure), "trials": each.trials, "first": each.first} for each in report.failures
        ],
        "notices": [*report.notices, *(() if run is None else run.notices), *filter(None, [report.still_words])],
    }


def trials_json(counts: Mapping[TrialState, int]) -> dict[str, dict[str, int]]:
    """Return the numbers of ended and of open trials by state. `total` is the number of ended trials except cancelled
    ones.
    """

    def numbers(*states: TrialState) -> dict[str, int]:
        return {state.lower(): counts.get(state, 0) for state in states}

    counted = numbers(_S.COMPLETE, _S.FAILED, _S.PRUNED)
    ended = {"total": sum(counted.values()), **counted, **numbers(_S.CANCELLED)}
    return {"trials": ended, "open": numbers(_S.WAITING, _S.QUEUED, _S.RUNNING)}


def listed_json(study: StudyResults) -> dict[str, Any]:
    """Return a study's entry in a list of studies: a few of the facts in `study_json`, and the best loss."""
    return {
        "study": study.name,
        **{name: getattr(study, name) for name in ("state", "running_on", "module", "command", "created_at")},
        **trials_json({TrialState(state): count for state, count in study.counts.items()}),
        "best_loss": study.best_loss,
    }


def plain_json(value: Any) -> Any:
    """Convert a value to plain values for JSON. NaN and infinity become null, and objects of other types become their
    repr.
    """
    return _known(plain(value, MAX_LEVELS))


def _values(trial: TrialResult) -> Any:
    try:
        return trial.values
    except Exception as error:  # a space may call any function, which may fail for these params
        return f"({type(error).__name__})"


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _known(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        # msgspec refuses subclasses of str, such as `Shown`, so they are converted.
        return str.__str__(value)
    return value if value is None or isinstance(value, (bool, int)) else repr(value)
