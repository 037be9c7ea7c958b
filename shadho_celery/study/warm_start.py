"""Warm start: finished trials of another search, as far as they fit a space, teach a new study.

They are none of its trials. A label that they lack is drawn from its law, one that the space lacks is dropped, and a
trial with a value outside the space is left out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shadho_celery.core.arguments import RESUME, WARM_START
from shadho_celery.core.checks import one_line
from shadho_celery.core.objectives import turned
from shadho_celery.core.trial import Params, Trial, taught
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.space.domains import Categorical
from shadho_celery.space.points import complete, given_values
from shadho_celery.space.space import Space
from shadho_celery.space.split import Subspace

#: seed of the draws for labels that a trial lacks
_STREAM = 0x77
#: kinds of trials that are left out, and labels, that a line names
_LISTED = 4


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Trial of another search that may teach."""

    #: as `enqueue` takes it
    point: Mapping[str, Any]
    #: of several the first; None if it is not known
    loss: Any = None
    #: False if the loss is what an objective returned, which a study may maximise
    is_minimised: bool = True
    #: by name, losses as the objective returned them
    losses: Mapping[str, Any] = field(default_factory=dict)
    #: by name; it is feasible if none is above 0
    constraints: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Trials of another search."""

    #: what they are, such as "study svm-1a2b"
    name: str
    trials: Sequence[Lesson]
    #: reason -> number of its other trials, such as failed ones
    left_out: Mapping[str, int] = field(default_factory=dict)
    #: what to do about a part of it that was not read
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Trials from elsewhere that teach a study, and what became of the others."""

    trials: Sequence[Trial]
    #: one line about them
    words: str
    #: False if some trials or labels were left out
    is_whole: bool


def refuse_if_resumed(given: object, *, resume: bool) -> None:
    """Raise UsageError for a warm start of a study that is continued."""
    if given is not None and resume:
        raise UsageError(
            "a study gets its warm start when it begins, and keeps it; leave out %s or %s", WARM_START, RESUME
        )


def fit(source: Source, subspaces: Sequence[Subspace], objectives: Mapping[str, str] | None = None) -> WarmStart:
    """Return the trials of a source that fit a space and the objectives of a study. Raises UsageError if none does."""
    space, generator = subspaces[0].space, np.random.default_rng(_STREAM)
    found: list[Trial] = []
    left_out, dropped, drawn = Counter(source.left_out), Counter[str](), Counter[str]()
    for lesson in source.trials:
        point = lesson.point
        known = {label: value for label, value in point.items() if label in space.domains}
        try:
            facts = _learned(lesson, objectives)
            name, params = _fitted(space, subspaces, known, generator)
        except SpaceError as error:
            left_out[str(error)] += 1
            continue
        dropped.update(label for label in point if label not in space.domains)
        drawn.update(label for label in params if label not in known)
        found.append(taught(len(found), name, params, **facts))
    total = len(source.trials) + sum(source.left_out.values())
    if not found:
        why = f": {_listed(left_out)}" if left_out else ""
        raise UsageError(f"nothing of {source.name} can teach this study, of {total} trials{why}; give another source")
    words = f"warm start: {len(found)} of {total} trials of {source.name} taught"
    parts = [
        _listed(left_out),
        f"dropped, as the space lacks them: {_labels(dropped)}" if dropped else "",
        f"drawn, as trials lack them: {_labels(drawn)}" if drawn else "",
        source.note,
    ]
    words = "; ".join([words, *filter(None, parts)])
    return WarmStart(trials=found, words=words, is_whole=not any(parts))


def _learned(lesson: Lesson, objectives: Mapping[str, str] | None) -> dict[str, Any]:
    """Return loss, losses and constraints, as a trial of the study has them. Raises SpaceError with what it lacks."""
    constraints = {name: _finite(value, "constraint") for name, value in lesson.constraints.items()}
    if not objectives:
        return {"loss": _finite(lesson.loss, "loss"), "constraints": constraints}
    if not lesson.losses and len(objectives) == 1:
        # A loss without a name is that of the only objective.
        losses = dict.fromkeys(objectives, _finite(lesson.loss, "loss"))
        losses = losses if lesson.is_minimised else turned(losses, objectives)
    elif {*objectives} <= {*lesson.losses}:
        losses = turned({name: _finite(lesson.losses[name], "loss") for name in objectives}, objectives)
    else:
        names = ", ".join(objectives)
        raise SpaceError(f"without the loss{'es' if len(objectives) > 1 else ''} {names}")
    return {"loss": next(iter(losses.values())), "losses": losses, "constraints": constraints}


def _finite(value: Any, what: str) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if is_number and abs(value) <= sys.float_info.max:
        return float(value)
    raise SpaceError(f"without a finite {what}")


def _fitted(
    space: Space, subspaces: Sequence[Subspace], known: Mapping[str, Any], generator: np.random.Generator
) -> tuple[str, Params]:
    """Return subspace and params of a point. Raises SpaceError with the kind of its misfit."""
    if space.domains and not known:
        raise SpaceError("without a label of the space")
    for label, value in known.items():
        try:
            given_values(space, {label: value}, off_grid=True)
        except SpaceError:
            domain = space.domains[label]
            law = f"{domain.count} options" if isinstance(domain, Categorical) else domain.describe()
            raise SpaceError(f"outside {label} ({one_line(law, 60)})") from None
    try:
        return complete(space, subspaces, known, generator, off_grid=True)
    except SpaceError:
        raise SpaceError("with labels that are not active together") from None


def _listed(left_out: Mapping[str, int]) -> str:
    """Return the numbers of trials that were left out, the most frequent reasons first."""
    most = sorted(left_out.items(), key=lambda each: -each[1])
    more = f" and {sum(count for _, count in most[_LISTED:])} for other reasons" if len(most) > _LISTED else ""
    said = ", ".join(f"{count} {reason}" for reason, count in most[:_LISTED])
    return f"left out {said}{more}" if said else ""


def _labels(labels: Mapping[str, int]) -> str:
    names = sorted(map(str, labels))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
