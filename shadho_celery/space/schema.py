"""Schema of a space that is not declared: which labels the objectives of a study's trials have asked for, and how.

An objective that calls ``trial.suggest_float("x", 0, 1)`` has no space beforehand. The result of a trial has the labels
that it has asked for, with their laws. A `Schema` collects them, and makes the space in which samplers propose values.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Real
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from shadho_celery.core.checks import one_line, resolve, short
from shadho_celery.core.trial import POINT, Params
from shadho_celery.errors import SpaceError
from shadho_celery.space.space import Space

#: an option of a choice, which JSON can represent
Scalar = bool | int | float | str | None
#: a value as a space draws it: a number, or the index of an option
Drawn = int | float

#: maximum number of values of a whole number that may explain which labels a trial asks for
MOST_COUNTED = 64
#: a grid with so many values is too large for a draw, and a whole number as large as this for a space
MOST_STEPS = 2**62
#: a number that is too large for a space, because the sum of several such numbers may overflow
MOST_FLOAT = 1e307
#: maximum number of labels of a schema
MOST_LABELS = 1000
#: fraction of a step by which a number may differ from a value of its grid
_ROUNDING = 1e-9
#: key of an enqueued point for the facts that its trial notes; no label can have this name
FACTS = ""
#: value of a label for which a trial did not ask
_NOT_ASKED = "None"


class Law(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Law from which a trial draws a label: a range of numbers, or options. Made by `number` or `choice`."""

    kind: Literal["float", "int", "categorical"]
    #: bounds of a number, or of the index of an option; if there is a grid, both are values of the grid
    low: int | float = 0
    high: int | float = 0
    #: step of the grid from `low`; None for a float without a grid
    step: int | float | None = None
    log: bool = False
    #: options of a choice in order; a draw is the index of an option
    choices: tuple[Scalar, ...] = ()

    @property
    def explains(self) -> bool:
        """True if its value may explain which other labels a trial asks for: a choice, or a count."""
        is_plain = self.kind == "int" and self.step == 1 and not self.log
        return self.kind == "categorical" or (is_plain and self.high - self.low < MOST_COUNTED)

    @property
    def form(self) -> str:
        """Text of the parts that must be the same in all trials. The options 1, 1.0 and True have different texts."""
        of = f" of {[*self.choices]}" if self.choices else ""
        return f"{self.kind} with log" if self.log else f"{self.kind}{of}"

    def joined(self, label: str, other: Law) -> Law:
        """Return the law whose values are those of both. Raises SpaceError if they differ in more than bounds."""
        if (before := self.form) != (now := other.form):
            now, before = one_line(now, 80), one_line(before, 80)
            raise SpaceError(f"{label!r} is suggested as {now}, and was {before}; give it another name")
        step, low, high = self.step, min(self.low, other.low), max(self.high, other.high)
        if step != other.step or (step and not _is_multiple(other.low - self.low, step)):
            step = 1 if self.kind == "int" else None
        # The same object is returned if nothing changes, which makes the comparison of two schemas fast.
        known = self.step, self.low, self.high
        return self if (step, low, high) == known else replace(self, step=step, low=low, high=high)

    def draw(self, generator: np.random.Generator) -> Drawn:
        """Draw a value."""
        if self.log:
            half = 0.5 if self.kind == "int" else 0.0
            drawn = math.exp(generator.uniform(math.log(self.low - half), math.log(self.high + half)))
            return min(max(round(drawn) if self.kind == "int" else drawn, self.low), self.high)
        if self.step:
            return self.low + self.step * int(generator.integers(round((self.high - self.low) / self.step) + 1))
        return float(generator.uniform(self.low, self.high))

    def fitted(self, drawn: Any) -> Drawn | None:
        """Return a proposed value, moved to the grid if there is one; None if the value is outside of the bounds."""
        if isinstance(drawn, bool) or not isinstance(drawn, Real) or not math.isfinite(drawn):
            return None
        found: Any = drawn
        if self.step:
            found = self.low + self.step * round((found - self.low) / self.step)
            found = min(found, self.high) if found - self.high < self.step * _ROUNDING else found
        if not self.low <= found <= self.high:
            return None
        return float(found) if self.kind == "float" else int(found)

    def place(self, value: Any) -> Drawn | None:
        """Return how this law draws the value that an objective gets, or None if it does not draw it."""
        if self.kind != "categorical":
            found = self.fitted(value)
            near = (self.step or 0) * _ROUNDING
            is_same = found is not None and math.isclose(found, value, rel_tol=_ROUNDING, abs_tol=near)
            return found if is_same else None
        same = [place for place, option in enumerate(self.choices) if option == value]
        return next((place for place in same if type(self.choices[place]) is type(value)), next(iter(same), None))

    def value(self, drawn: Drawn) -> Any:
        """Return what an objective gets for a drawn value."""
        return self.choices[int(drawn)] if self.kind == "categorical" else drawn

    def expression(self, label: str) -> Any:
        """Return the hp expression of a number's law."""
        # Imported late, as below, because a reader of a recorded schema does not need hyperopt.
        from hyperopt import hp
        from hyperopt.pyll import scope

        low, high, half = self.low, self.high, (self.step or 0) / 2
        ends = [low - half, high + half]
        ends = [*map(math.log, ends)] if self.log else ends
        # hyperopt refuses a range of one number, and the values of its grids are multiples of the step. For other
        # grids, the trial itself moves the value to the grid (`fitted`).
        is_range, is_grid = ends[0] < ends[1], half > 0 and _is_multiple(low, 2 * half)
        if self.kind == "int" and not (is_range and (self.log or (is_grid and self.step != 1))):
            return hp.randint(label, int(low), int(high) + 1)
        if not is_range:
            return hp.uniform(label, low, math.nextafter(low, math.inf))
        if not is_grid:
            return (hp.loguniform if self.log else hp.uniform)(label, *ends)
        node = (hp.qloguniform if self.log else hp.quniform)(label, *ends, self.step)
        return scope.int(node) if self.kind == "int" else node


def number(label: str, low: Any, high: Any, *, is_int: bool, step: Any = None, log: bool = False) -> Law:
    """Return the law of a number. Raises SpaceError, which names the label, if there is no such number."""
    what, kind = f"{label!r}: from {short(low, 30)} to {short(high, 30)}", int if is_int else float
    step = 1 if is_int and step is None else step
    try:
        least, most, by = kind(low), kind(high), None if step is None else kind(step)
        is_range = least <= most and max(-least, most, by or 0) < (MOST_STEPS if is_int else MOST_FLOAT)
        is_range = is_range and (by is None or (by > 0 and max(-least, most, most - least) // by < MOST_STEPS))
    except (TypeError, ValueError, OverflowError):
        is_range = False
    if not is_range:
        raise SpaceError(
            f"{what} is no range; give two numbers, the lower one first, and a step above 0. Whole numbers, and "
            f"numbers divided by the step, are below 2**62, and others below {MOST_FLOAT:g}"
        )
    if log and (by != (1 if is_int else None) or (least < 1 if is_int else least <= 0)):
        bound = "of 1 or more" if is_int else "above 0"
        raise SpaceError(f"{what} has no logarithms; give a lower bound {bound}, and no step")
    if by:
        # A step that does not reach the upper bound ends below it.
        most = least + ((most - least) // by if is_int else math.floor((most - least) / by + _ROUNDING)) * by
    return Law(kind="int" if is_int else "float", low=least, high=most, step=by, log=bool(log))


def choice(label: str, options: Iterable[object]) -> Law:
    """Return the law of a choice. Raises SpaceError, which names the label, for options that JSON cannot represent."""
    found = [option.item() if isinstance(option, np.generic) else option for option in options]
    if not found:
        raise SpaceError(f"{label!r} has no options; give at least one")
    for option in found:
        if not (option is None or isinstance(option, (bool, int, float, str))) or option in (math.inf, -math.inf):
            raise SpaceError(
                f"{label!r} has the option {short(option, 60)}; give texts, numbers, True, False or None, and use them "
                "as names of other objects"
            )
    return Law(kind="categorical", high=len(found) - 1, step=1, choices=tuple(found))  # type: ignore[arg-type]


def law_of(label: str, distribution: Any) -> Law:
    """Return the law for a distribution of Optuna, or for a `Law`, whose attributes are the same. Raises SpaceError."""
    if choices := getattr(distribution, "choices", ()):
        return choice(label, choices)
    low, high, step, log = (getattr(distribution, name) for name in ("low", "high", "step", "log"))
    return number(label, low, high, is_int=isinstance(low, int), step=step, log=log)


class Suggested(Struct, frozen=True, kw_only=True):
    """A label that a trial has asked for: its law in this trial, and the value that it got."""

    law: Law
    drawn: Drawn


def suggested(laws: Mapping[str, Law], values: Mapping[str, Any]) -> dict[str, Suggested]:
    """Return by label what a trial with these values has asked for. Raises SpaceError for an unknown label or value."""
    found = {}
    for label, value in values.items():
        if (law := laws.get(label)) is None:
            raise SpaceError(f"there is no label {short(label, 60)}; known are {short([*laws], 300)}")
        if (drawn := law.place(value)) is None:
            raise SpaceError(f"{label!r} is {short(value, 60)}, which its law does not have")
        found[label] = Suggested(law=law, drawn=drawn)
    return found


class _Met(Struct, frozen=True, kw_only=True):
    """Labels for which trials have asked. In all of these trials, a choice or count had the same value."""

    #: labels for which at least one trial has asked
    ever: frozenset[str] = frozenset()
    #: labels for which all COMPLETE trials have asked; None without such trials
    always: frozenset[str] | None = None

    def seen(self, asked: frozenset[str], *, is_complete: bool) -> _Met:
        """Return this with one more trial."""
        before = asked if self.always is None else self.always
        return _Met(ever=self.ever | asked, always=before & asked if is_complete else self.always)


class Schema(Struct, frozen=True, kw_only=True):
    """The labels that the trials of a study have asked for, and what explains why a trial asks for a label.

    A choice explains a label that is asked for with some of its options in each trial, and with others in none. A count
    explains a label that is asked for from a certain number on, as in a loop. The label that explains another one was
    first asked for earlier. Only trials that ended COMPLETE are assumed to have asked for all of their labels.
    """

    #: the law of each label, in the order in which they were first asked for
    laws: dict[str, Law] = {}
    #: by label of a choice or count, by the text of its value. The entry "" has all trials under _NOT_ASKED, and is the
    #: beginning of the entry of a new label
    met: dict[str, dict[str, _Met]] = {}

    def seen(self, asked: Mapping[str, Suggested], *, is_complete: bool) -> Schema:
        """Return the schema with one more trial. Raises SpaceError for a law that differs from that of other trials."""
        laws = {**self.laws}
        for label, each in asked.items():
            laws[label] = laws[label].joined(label, each.law) if label in laws else each.law
        if len(laws) > MOST_LABELS:
            raise SpaceError(f"trials ask for more than {MOST_LABELS} labels; give labels the same name in each trial")
        met = {**self.met}
        for explaining in ["", *(label for label, law in laws.items() if law.explains)]:
            known = self.met.get(explaining, self.met.get("", {}))
            value = str(int(asked[explaining].drawn)) if explaining in asked else _NOT_ASKED
            met[explaining] = {**known, value: known.get(value, _Met()).seen(frozenset(asked), is_complete=is_complete)}
        return Schema(laws=laws, met=met)

    def parent(self, label: str) -> tuple[str, list[int]] | None:
        """Return the choice or count that explains a label, and the values with which trials ask for the label.

        It is the latest such choice, else the count with the fewest values. None stands for a label that nothing
        explains, for which values are always proposed.
        """
        counts, choices = [], []
        for explaining, law in self.laws.items():
            if explaining == label:
                break
            met = self.met[explaining] if law.explains else {}
            without = [
                int(value)
                for value, each in met.items()
                if value != _NOT_ASKED and each.always is not None and label not in each.always
            ]
            if not without or (_NOT_ASKED in met and label in met[_NOT_ASKED].ever):
                continue
            with_it = sorted(int(value) for value, each in met.items() if label in each.ever)
            if law.choices and not {*without} & {*with_it}:
                choices.append((explaining, with_it))
            elif not law.choices and with_it[0] > max(without):
                counts.append((explaining, [*range(with_it[0], int(law.high) + 1)]))
        counts.sort(key=lambda each: self.laws[each[0]].high - self.laws[each[0]].low)
        return next(iter([*choices[::-1], *counts]), None)

    def outline(self) -> dict[str, tuple[Law, tuple[str, list[int]] | None]]:
        """Return what determines the space: the law of each label, and what explains it."""
        return {label: (law, self.parent(label)) for label, law in self.laws.items()}

    def space(self) -> Space:
        """Return the space in which values of the labels known so far are proposed."""
        from shadho_celery.space.compile import compile_space

        with warnings.catch_warnings():
            # The bounds of a log range are as the user gave them.
            warnings.simplefilter("ignore")
            return compile_space(self.expression())

    def expression(self) -> dict[str, Any]:
        """Return the hp expression of the space: a dict by label. The options of a choice have the labels below it."""
        from hyperopt import hp
        from hyperopt.pyll import scope

        inner: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        for label in self.laws:
            explaining, values = self.parent(label) or ("", [0])
            for value in values:
                inner[explaining, value].append(label)

        def under(explaining: str, value: int) -> dict[str, Any]:
            return {name: node for label in inner[explaining, value] for name, node in entry(label).items()}

        @cache
        def entry(label: str) -> dict[str, Any]:
            law = self.laws[label]
            below = [under(label, value) for value in range(int(law.low), int(law.high) + 1)] if law.explains else []
            if law.choices:
                pairs = zip(law.choices, below, strict=True)
                options = [{label: str(option), **labels} if labels else option for option, labels in pairs]
                return {label: hp.choice(label, options)}
            node = law.expression(label)
            # The index is computed, so that the counts make no subspaces, which would differ in the number alone.
            more = {f"{label}: labels": scope.switch(node - int(law.low), *below)} if any(below) else {}
            return {label: node, **more}

        return under("", 0)

    def read_values(self, params: Params) -> dict[str, Any]:
        """Return what an objective gets for these params, by label."""
        known = {label: self.laws[label].value(drawn) for label, drawn in params.items() if label in self.laws}
        return known | {label: value for label, value in read_point(params).items() if label != FACTS}

    def proposed(self, params: Params) -> Params:
        """Return the params that a trial would have. Those of an enqueued point are its values of known labels."""
        point = read_point(params)
        placed = {label: law.place(point[label]) for label, law in self.laws.items() if label in point}
        return {label: drawn for label, drawn in placed.items() if drawn is not None} if POINT in params else params


def read_point(params: Params) -> dict[str, Any]:
    """Return the values that a user has given to labels of an enqueued trial, and its FACTS; {} for other trials."""
    try:
        found = json.loads(params.get(POINT, "{}"))
    except (ValueError, TypeError, RecursionError):
        # The record may come from a stranger.
        found = None
    return found if isinstance(found, dict) else {}


def _is_multiple(value: float, step: float) -> bool:
    return abs(value / step - round(value / step)) < _ROUNDING


# Threads of several studies may read schemas.
resolve(Schema, Suggested)
