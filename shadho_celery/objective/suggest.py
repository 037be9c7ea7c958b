"""A trial that asks for its labels while it runs, as in Optuna: `trial.suggest_float("x", 0, 1)`.

The trial answers from the values that the scheduler has proposed, and draws what was not proposed. What it has asked
for returns with its result.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from shadho_celery.core.checks import short
from shadho_celery.core.trial import Outcome, Params, TrialState
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.objective.call import Objective, wants_context
from shadho_celery.objective.context import LocalContext
from shadho_celery.objective.result import read
from shadho_celery.space.schema import Law, Schema, Suggested, choice, number

#: metrics of noted facts whose names are keys of an objective's result
_RENAMED = {key: f"user.{key}" for key in ("loss", "losses", "constraints", "status")}
_NO_SCHEMA = Schema()


def metric_name(fact: str) -> str:
    """Return the name of the metric of a noted fact."""
    return _RENAMED.get(fact, fact)


def fact_name(metric: str) -> str:
    """Return the name of the noted fact of a metric."""
    return next((fact for fact, renamed in _RENAMED.items() if renamed == metric), metric)


class TrialPruned(Exception):
    """The trial is not promising. An objective raises it to end as PRUNED, with the loss of its last report."""


@dataclass(eq=False, repr=False)
class Trial:
    """A trial, the only argument of an objective of a study without a space."""

    #: further facts of the trial, such as `seed`, `device` and `checkpoint_dir`
    context: LocalContext
    #: draws by label
    proposed: Params
    #: labels of the study as far as they are known here; laws that contradict it are refused
    schema: Schema = _NO_SCHEMA
    #: values that a user gives for labels
    enqueued: Mapping[str, Any] = field(default_factory=dict)
    #: values of the labels that it has asked for so far
    params: dict[str, Any] = field(default_factory=dict)
    #: facts that `set_user_attr` has noted; those that JSON can represent become metrics
    user_attrs: dict[str, Any] = field(default_factory=dict)
    #: study of `shadho_celery.optuna` to which it belongs
    study: Any = None

    def __post_init__(self) -> None:
        #: position of the trial in its study, from 0
        self.number = self.context.trial
        self.context.asked = {}
        self._suggested: dict[str, Suggested] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a float from `low` to `high`: one of those `step` apart, or evenly drawn by its logarithm."""
        return float(self.suggest(name, number(name, low, high, is_int=False, step=step, log=log)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return int(self.suggest(name, number(name, low, high, is_int=True, step=step, log=log)))

    def suggest_categorical(self, name: str, choices: Iterable[Any]) -> Any:
        """Return one of several options: texts, numbers, True, False or None."""
        return self.suggest(name, choice(name, choices))

    def report(self, value: float, step: int) -> None:
        """Report the loss reached at `step`; see `Context.report`, whose arguments are in the other order."""
        self.context.report(step, value)

    def should_prune(self) -> bool:
        """Return whether the trial should end, by raising `TrialPruned` or by returning."""
        return self.context.should_stop()

    def set_user_attr(self, key: str, value: Any) -> None:
        """Note a fact of the trial, which is recorded as a metric if JSON can represent it."""
        self.user_attrs[key] = value

    def __getitem__(self, label: str) -> Any:
        raise UsageError(
            "the study has no space, so its objective gets a trial: give a space, or write "
            f"trial.suggest_float({short(label, 40)}, 0, 1) or the like"
        )

    def suggest(self, label: str, law: Law) -> Any:
        """Return a value of a law."""
        if not isinstance(label, str) or not label:
            raise SpaceError(f"the name of a label is {short(label, 60)}; give a text")
        if (before := self._suggested.get(label)) is not None:
            # The first law counts, but another kind is a mistake.
            before.law.joined(label, law)
            return before.law.value(before.drawn)
        if (known := self.schema.laws.get(label)) is not None:
            known.joined(label, law)
        drawn = law.fitted(self.proposed.get(label))
        if label in self.enqueued and (drawn := law.place(self.enqueued[label])) is None:
            raise SpaceError(f"{label!r} is enqueued as {short(self.enqueued[label], 60)}, which its law does not have")
        if drawn is None:
            # Independent of the order in which labels are asked for.
            drawn = law.draw(np.random.default_rng([self.context.seed, zlib.crc32(label.encode())]))
        found = self._suggested[label] = Suggested(law=law, drawn=drawn)
        self.context.asked = {**(self.context.asked or {}), label: msgspec.to_builtins(found)}
        self.params[label] = value = law.value(drawn)
        return value

    def result(self, returned: Any) -> Any:
        """Return an objective's result in the form of this package, with the noted facts as metrics."""
        return in_our_form(returned, self.context.objectives or {}, self.user_attrs)


def in_our_form(returned: Any, objectives: Mapping[str, str], facts: Mapping[str, Any]) -> Any:
    """Return an objective's result in the form of this package, with noted facts as metrics.

    Of several losses, a sequence is enough, in the order of the study's objectives.
    """
    metrics = {metric_name(fact): value for fact, value in facts.items()}
    if returned is None:
        return None
    if isinstance(returned, Outcome):
        return msgspec.structs.replace(returned, metrics=read({**metrics, "loss": 0.0}).metrics)
    if isinstance(returned, Mapping):
        return {**metrics, **returned}
    losses = returned if isinstance(returned, Sequence) else [returned]
    is_named = len(losses) == len(objectives)
    return {**metrics, **({"losses": dict(zip(objectives, losses, strict=True))} if is_named else {"loss": returned})}


@dataclass(frozen=True)
class Suggesting:
    """An objective that asks for its labels, in the form of other objectives: it gets proposed draws and a context."""

    objective: Objective
    #: returns the trial for the proposed draws, if it is not a plain one
    make: Callable[[LocalContext, Params], Trial] = Trial

    @cached_property
    def _takes_context(self) -> bool:
        return wants_context(self.objective)

    def __call__(self, proposed: Params, context: LocalContext) -> Any:
        trial = self.make(context, proposed)
        try:
            returned = self.objective(trial, context) if self._takes_context else self.objective(trial)
            return trial.result(returned)
        except Exception as error:
            if not is_pruning(error):
                raise
            return trial.result(Outcome(state=TrialState.PRUNED))


def is_pruning(error: BaseException) -> bool:
    """Return whether an exception ends its trial as PRUNED. Optuna's own exception means the same."""
    return any(kind.__name__ == TrialPruned.__name__ for kind in type(error).__mro__)
