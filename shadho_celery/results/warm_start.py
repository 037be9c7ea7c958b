"""Warm start: the samplers of a new study learn from trials of another search.

The trials come from a recorded study, a table as `export` writes it, hyperopt's Trials or a list. They do not become
trials of the new study. If a trial lacks a label of the space, a value is drawn for this label. A label that the space
lacks is dropped. A trial with a value outside the space is left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import hyperopt
import numpy as np
from hyperopt import STATUS_OK, base

from shadho_celery.core.checks import listed, one_line, short
from shadho_celery.core.files import read_table
from shadho_celery.core.trial import Params, Trial, TrialState, taught, turned
from shadho_celery.core.units import counted
from shadho_celery.errors import SpaceError, StoreError, UsageError
from shadho_celery.results.frame import DRAWN, FACTS, MOMENTS, TEXTS, unquoted
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.space.domains import Categorical
from shadho_celery.space.flat import FlatValues
from shadho_celery.space.points import complete, given_values
from shadho_celery.space.schema import Schema, law_of, suggested
from shadho_celery.space.space import Space
from shadho_celery.space.split import Subspace
from shadho_celery.space.stored import read_schema, shown_options
from shadho_celery.space.tree import Switch
from shadho_celery.store.memory import LateStore, database

if TYPE_CHECKING:
    from shadho_celery.store.sql import SqlStore

#: trials, each as its params by label and its loss as the objective returned it
Known: TypeAlias = Iterable[tuple[Mapping[str, Any], float]]
#: a study's name, STORE_URL#STUDY or a file; or an object that contains the trials
WarmStartSource: TypeAlias = str | Path | StudyResults | hyperopt.Trials | Known

#: seed of the generator that draws values for missing labels
_STREAM = 0x77
#: maximum number of labels, and of reasons for leaving trials out, that a line names
_LISTED = 4
#: numbers that differ relatively by at most this count as equal
_EQUAL = 1e-9
#: prefix of the name of a CSV column with the values of a constraint
_CONSTRAINT = "constraint."


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A trial of another search, from which a study may learn."""

    #: params in the form that `enqueue` accepts
    point: Mapping[str, Any]
    #: the loss, or the first of several losses; None if it is not known
    loss: Any = None
    #: True if a lower `loss` is better; False if `loss` is as an objective returned it, and may have to be maximised
    is_minimised: bool = True
    #: losses by name, as the objective returned them
    losses: Mapping[str, Any] = field(default_factory=dict)
    #: constraints by name; the trial is feasible if none is above 0
    constraints: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Trials of another search, before they are compared with the space of a study."""

    #: description, such as "study svm-1a2b"
    name: str
    trials: Sequence[Lesson]
    #: by reason: number of trials that cannot be used, such as failed ones
    left_out: Mapping[str, int] = field(default_factory=dict)
    #: labels for which these trials have asked, if the new study has no space of its own
    schema: Schema | None = None


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The trials from which a new study learns, and a description of the trials that were left out."""

    trials: Sequence[Trial]
    #: line about the trials that are used and those that were left out
    words: str
    #: True if no trial was left out, no label was dropped, and no value was drawn
    is_whole: bool


#: a trial, its state and its budget
_Row = tuple[Lesson, str, Any]


def refuse_if_resumed(given: object, *, resume: bool) -> None:
    """Raise UsageError if a warm start is given for a study that is resumed."""
    if given is not None and resume:
        raise UsageError("a study gets its warm start when it begins, and keeps it; leave out warm_start or resume")


def fit(source: Source, subspaces: Sequence[Subspace], objectives: Mapping[str, str] | None = None) -> WarmStart:
    """Return the trials of a source that fit the space and the objectives of a study.

    Raises UsageError if no trial fits.
    """
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
        raise UsageError(
            f"none of {counted(total, 'trial')} of {source.name} fits this study{why}; give another source"
        )
    words = f"warm start: learned from {len(found)} of {counted(total, 'trial')} of {source.name}"
    parts = [
        _listed(left_out),
        f"dropped because the space lacks them: {listed(sorted(map(str, dropped)), _LISTED)}" if dropped else "",
        f"drawn because trials lack them: {listed(sorted(map(str, drawn)), _LISTED)}" if drawn else "",
    ]
    words = "; ".join([words, *filter(None, parts)])
    return WarmStart(trials=found, words=words, is_whole=not any(parts))


def _learned(lesson: Lesson, objectives: Mapping[str, str] | None) -> dict[str, Any]:
    """Return loss, losses and constraints as the study records them. Raises SpaceError if one of them is missing or not
    finite.
    """
    constraints = {name: _finite(value, "constraint") for name, value in lesson.constraints.items()}
    if not objectives:
        return {"loss": _finite(lesson.loss, "loss"), "constraints": constraints}
    if not lesson.losses and len(objectives) == 1:
        # The loss has no name, and the study has only one objective, so it is the loss of this objective.
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
    """Return the subspace and the params of a known point. Raises SpaceError with the reason if it does not fit."""
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
        found = complete(space, subspaces, known, generator, off_grid=True)
    except SpaceError:
        raise SpaceError("with labels that are not active together") from None
    if not space.allows(found[1]):
        raise SpaceError("refused by where")
    return found


def _listed(left_out: Mapping[str, int]) -> str:
    """Return a text with the most frequent reasons for leaving trials out, and their numbers of trials."""
    most = sorted(left_out.items(), key=lambda each: -each[1])
    more = f" and {sum(count for _, count in most[_LISTED:])} for other reasons" if len(most) > _LISTED else ""
    said = ", ".join(f"{count} {reason}" for reason, count in most[:_LISTED])
    return f"left out {said}{more}" if said else ""


def read_source(
    given: WarmStartSource,
    space: Space | None,
    store: SqlStore | LateStore,
    least: float | None = None,
    objectives: Mapping[str, str] | None = None,
) -> Source:
    """Return the trials that `given` names: a study in `store`, ``STORE_URL#STUDY``, or a CSV file.

    If `given` is another object, it contains the trials itself, see `of_object`. Only trials at one budget are used,
    because losses at different budgets cannot be compared: the trials at `least`, the lowest budget of the new study;
    or if there are none, the trials at the greatest budget. `objectives` and `space` are those of the new study. If
    `space` is None, the source must have the distributions of its labels. Raises UsageError, StudyNotFound or
    StoreError.
    """
    if not isinstance(given, (str, Path)):
        return of_object(given, space, least)
    text = str(given)
    if not text.strip():
        raise UsageError("the warm start is empty; give a study's name, STORE_URL#STUDY or FILE.csv, or leave it out")
    if "://" in text:
        url, mark, name = text.rpartition("#")
        if not mark or not name:
            raise UsageError(
                f"{short(text)} does not name a study; write STORE_URL#STUDY, such as sqlite:///old.db#svm"
            )
        from shadho_celery.store.sql import SqlStore

        try:
            with closing(SqlStore(url, read_only=True)) as other:
                return of_study(StudyResults(other, other.find(name, told=_is_named)), space, least)
        except StoreError:
            # The URL may be that of a storage of Optuna.
            with suppress(Exception):
                import optuna

                return _of_optuna(optuna.load_study(study_name=name, storage=url), space, least)
            raise
    if isinstance(given, Path) or text.lower().endswith(".csv"):
        return of_table(Path(given), space, least, objectives)
    found = database(store).find(
        text, instead="shadho-celery studies lists its studies; a file is named FILE.csv", told=_is_named
    )
    return of_study(StudyResults(store, found), space, least)


def _is_named(_: str) -> None:
    """Ignore the message about a shortened name of a study, because the line of the warm start has the whole name."""


def _known(space: Space | None) -> Space:
    """Return `space`. Raises UsageError if it is None."""
    if space is None:
        raise UsageError(
            "without a space, a study learns only from a study of Optuna or from another one without a space, because "
            "other sources do not say how labels are drawn; give a space"
        )
    return space


def of_study(study: StudyResults, space: Space | None, least: float | None = None) -> Source:
    """Return the trials of a recorded study.

    If the domain of a label has changed, a drawn value is used only if the objective gets the same value for it as
    before. An option of a choice is found by its text.
    """
    schema = read_schema(study.tree) if space is None else None
    space = _known(space if schema is None else schema.space())
    reader, described = _Reader(space), space.describe()

    def point(trial: TrialResult) -> dict[str, Any]:
        is_same = {label: study.space.get(label) == described.get(label) for label in trial.params}
        shown = {} if all(is_same.values()) else study.shown(trial)
        return {
            label: value if is_same[label] else reader.draw(label, value, shown[label])
            for label, value in trial.params.items()
        }

    def lesson(each: TrialResult) -> Lesson:
        return Lesson(point=point(each), loss=each.loss, losses=each.losses, constraints=each.constraints)

    rows = [(lesson(each), each.state, each.budget) for each in study.trials]
    return _of_rows(f"study {study.name}", rows, least, schema)


def of_table(
    path: Path, space: Space | None, least: float | None = None, objectives: Mapping[str, str] | None = None
) -> Source:
    """Return the trials of a CSV file, which has a column with the drawn values of each label, and the column `loss`.

    In a file of `export`, a label's column has the values that the objective got, and the column ``drawn.LABEL`` the
    drawn values where they differ. The cell of an inactive label is empty. The cell of a choice is an option as
    `export` writes it. With `objectives`, the column of each objective replaces the column `loss`. The columns have the
    losses that the objective returned, except that `loss` in a file of `export` is the loss that was minimised. The
    columns `state`, `budget` and ``constraint.NAME`` of `export` are used if they exist.
    """
    space = _known(space)
    names, lines = read_table(path, f"the warm start {path}", "give a file as written by shadho-celery export")
    is_export = {*FACTS} <= {*names}
    if is_export:
        # Only `export` quotes formulas; in a user's own table, an apostrophe is part of the text.
        lines = [{unquoted(name): unquoted(cell) for name, cell in cells.items()} for cells in lines]
        names = [*map(unquoted, names)]
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise UsageError(
            f"the warm start {path} has several columns named {short(twice[0])}; rename or delete all but one"
        )
    taken = {*FACTS, *MOMENTS, *TEXTS} if is_export else {"loss", "state", "budget"}
    columns = _columns(space.domains, "param", {*names}, taken)
    losses = _columns(objectives or {}, "loss", {*names} - {*columns.values()}, taken)
    if not columns or not (losses or "loss" in names):
        wanted = listed([f"param.{name}" if name in taken else name for name in space.domains], _LISTED)
        raise UsageError(
            f"the warm start {path} needs the column {' or '.join(['loss', *(objectives or ())])}, and columns named "
            f"after the labels: {wanted}; its columns are {short(names)}"
        )
    reader = _Reader(space)

    def row(cells: Mapping[str, str]) -> _Row:
        filled = {label: cell for label, column in columns.items() if (cell := cells.get(column))}
        drawn = {label: cells.get(f"{DRAWN}{label}") or cell for label, cell in filled.items()} if is_export else {}
        state = (cells.get("state") or TrialState.COMPLETE).upper()
        lesson = Lesson(
            point={label: reader.of_cell(label, cell, drawn.get(label)) for label, cell in filled.items()},
            loss=_number(cells.get("loss", "")),
            is_minimised=is_export,
            losses={name: _number(cells.get(column, "")) for name, column in losses.items()},
            constraints={
                column.removeprefix(_CONSTRAINT): _number(cell)
                for column, cell in cells.items()
                if column.startswith(_CONSTRAINT) and cell
            },
        )
        return lesson, state, _number(cells.get("budget", ""))

    return _of_rows(str(path), [row(cells) for cells in lines], least)


def _columns(wanted: Iterable[str], kind: str, names: Collection[str], taken: Collection[str]) -> dict[str, str]:
    """Return the column names of labels or objectives, by name. `export` adds the prefix `kind` if a name is taken."""
    plain = {name: name for name in wanted if name in names and name not in taken}
    return plain | {name: column for name in wanted if (column := f"{kind}.{name}") in names}


def _of_rows(name: str, rows: Sequence[_Row], least: float | None, schema: Schema | None = None) -> Source:
    """Return a source with the COMPLETE trials at one budget, as in `read_source`. Other trials are counted as left
    out.
    """
    if not rows:
        raise UsageError(f"the warm start {name} has no trials; give another source, or leave it out")
    complete = [row for row in rows if row[1] == TrialState.COMPLETE]
    left_out = Counter(str(state).lower() for _, state, _ in rows if state != TrialState.COMPLETE)
    budgets = [budget if isinstance(budget, (int, float)) else math.inf for *_, budget in complete]
    wanted = max(budgets, default=math.inf) if least is None or least not in budgets else least
    if others := sum(budget != wanted for budget in budgets):
        left_out["of another budget"] += others
    kept = [lesson for (lesson, *_), budget in zip(complete, budgets, strict=True) if budget == wanted]
    return Source(name=name, trials=kept, left_out=left_out, schema=schema)


class _Options:
    """Finds an option of a choice by its value or text. Options whose texts are equal are ambiguous, so never found."""

    def __init__(self, label: str, switch: Switch) -> None:
        options, alike = shown_options(label, switch)
        self._options = {place: option for place, option in enumerate(options) if place not in alike}
        self._places = {str(option): place for place, option in self._options.items()}
        # `export` writes a column of values of different types as JSON.
        self._written = {json.dumps(option): place for place, option in self._options.items()} | self._places

    def of_value(self, shown: Any) -> int | None:
        """Return the index of the option with this value, or of the only option that equals this number, or None."""
        place = self._places.get(str(shown))
        if place is not None and type(self._options[place]) in {type(shown), type(None)}:
            return place
        return self._of_number(shown)

    def of_cell(self, cell: str) -> int | None:
        """Return the index of the option that `export` writes like this, or of the only option that equals this number,
        or None.
        """
        return self._written[cell] if cell in self._written else self._of_number(_number(cell))

    def _of_number(self, number: Any) -> int | None:
        equal = [place for place, option in self._options.items() if _is_number(number) and option == number]
        return equal[0] if len(equal) == 1 else None


class _Reader:
    """Converts values from another search to drawn values, for which this objective gets the same values."""

    def __init__(self, space: Space) -> None:
        self._space, self._values = space, FlatValues(space)
        self._options = {label: _Options(label, switch) for label, switch in space.switches.items()}

    def of_cell(self, label: str, cell: str, drawn: str | None) -> Any:
        """Return the drawn value for the cell of a table, as `draw` does.

        `drawn` is the text of the drawn value in a table of `export`; None for another table.
        """
        if label in self._options:
            return self._options[label].of_cell(cell)
        return _number(cell) if drawn is None else self.draw(label, _number(drawn), _number(cell))

    def draw(self, label: str, drawn: Any, shown: Any) -> Any:
        """Return the drawn value of `label` for which the objective gets the value `shown`.

        `drawn` is the value that was drawn in the other search. If the objective cannot get `shown`, None or a text is
        returned, which no domain contains.
        """
        if label in self._options:
            return self._options[label].of_value(shown)
        is_same = label not in self._space.domains
        # The label's expression may call any function, which may fail.
        with suppress(Exception):
            is_same = is_same or _are_equal(self._values({label: drawn})[label], shown)
        return drawn if is_same else str(shown)


def _are_equal(one: Any, other: Any) -> bool:
    # An int may be too large for a float.
    with suppress(OverflowError):
        return _is_number(one) and _is_number(other) and math.isclose(one, other, rel_tol=_EQUAL)
    return False


def _number(cell: str) -> Any:
    """Return the number in a cell, as int if possible. A text that is not a number is returned unchanged."""
    # Python would also accept 1_000 and the digits of other scripts, which are excluded here.
    for kind in (int, float) if cell.isascii() and "_" not in cell else ():
        with suppress(ValueError):
            return kind(cell)
    return cell


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def of_object(given: Any, space: Space | None, least: float | None) -> Source:
    """Return the trials in a study, in hyperopt's Trials, or in a list. Raises UsageError for any other object."""
    if isinstance(given, StudyResults):
        return of_study(given, space, least)
    if callable(getattr(given, "get_trials", None)):
        return _of_optuna(given, space, least)
    _known(space)
    if isinstance(given, hyperopt.Trials):
        return _of_trials(given)
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(
            f"{short(given, 60)} cannot be a warm start; give a study, its name, a CSV file, hyperopt's Trials, "
            "Optuna's Study or a list of (params, loss)"
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


def _of_optuna(study: Any, space: Space | None, least: float | None) -> Source:
    """Return the trials of a study of Optuna, or of `shadho_celery.optuna`. Only trials with one loss can be used."""
    trials, schema = study.get_trials(deepcopy=False), None
    if space is None:
        schema = Schema()
        for trial in trials:
            asked = suggested({label: law_of(label, each) for label, each in trial.distributions.items()}, trial.params)
            schema = schema.seen(asked, is_complete=trial.state.name == TrialState.COMPLETE)
        space = schema.space()
    reader, rows = _Reader(space), []
    for trial in trials:
        point = {label: reader.draw(label, value, value) for label, value in trial.params.items()}
        loss = trial.values[0] if trial.values and len(trial.values) == 1 else None
        rows.append((Lesson(point=point, loss=loss, is_minimised=False), trial.state.name, None))
    return _of_rows(f"Optuna's study {study.study_name}", rows, least, schema)


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
