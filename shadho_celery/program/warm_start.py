"""What a program gives as a warm start: a name, a file, a study, hyperopt's Trials, or params with losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hyperopt
from hyperopt import STATUS_OK, base

from shadho_celery.core.checks import short
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults
from shadho_celery.results.warm_start import of_study
from shadho_celery.session.opening import WarmStartGiven
from shadho_celery.space.space import Space
from shadho_celery.study.warm_start import Lesson, Source

#: params by label of each trial, and the loss, as the objective returns it
Known = Iterable[tuple[Mapping[str, Any], float]]
WarmStartSource = str | Path | StudyResults | hyperopt.Trials | Known


def as_given(given: Any) -> WarmStartGiven | None:
    """Return a warm start as a session takes it."""
    return given if given is None or isinstance(given, (str, Path)) else partial(of_object, given)


def of_object(given: Any, space: Space, least: float | None) -> Source:
    """Return the trials of a study, of hyperopt's Trials, or of a list. Raises UsageError for anything else."""
    if isinstance(given, StudyResults):
        return of_study(given, space, least)
    if isinstance(given, hyperopt.Trials):
        return _of_trials(given)
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(
            f"a warm start is no {short(given, 60)}; give a study, its name, a CSV file, hyperopt's Trials or a list "
            "of (params, loss)"
        )
    pairs = [*given]
    if not pairs:
        raise UsageError("the warm start has no trials; give some, or leave it out")
    for place, pair in enumerate(pairs):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], Mapping)):
            raise UsageError(
                f"trial {place} of the warm start is {short(pair, 60)}; give (params, loss), such as ({{'x': 1}}, .5)"
            )
    return Source(
        name="the list", trials=[Lesson(point=params, loss=loss, is_minimised=False) for params, loss in pairs]
    )


def _of_trials(trials: hyperopt.Trials) -> Source:
    documents = trials._dynamic_trials
    if not documents:
        raise UsageError("the warm start's Trials have no trials; give others, or leave them out")
    ended = [each for each in documents if each["state"] == base.JOB_STATE_DONE]
    well = [each for each in ended if each["result"].get("status") == STATUS_OK]
    left_out = {"failed": sum(each["state"] == base.JOB_STATE_ERROR for each in documents) + len(ended) - len(well)}
    left_out["not finished"] = len(documents) - len(well) - left_out["failed"]
    return Source(
        name="hyperopt's Trials",
        trials=[Lesson(point=base.spec_from_misc(each["misc"]), loss=each["result"].get("loss")) for each in well],
        left_out={reason: count for reason, count in left_out.items() if count},
    )
