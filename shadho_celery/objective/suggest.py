"""A trial that asks for its labels while it runs, as in Optuna: `trial.suggest_float("x", 0, 1)`.

The trial returns the values that the scheduler has proposed, and draws a value for any other label. The labels for
which the objective has asked are sent back with the trial's result.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import numpy as np

from shadho_celery.core.checks import short
from shadho_celery.core.trial import POINT, Outcome, Params, TrialState
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.objective.call import Objective, wants_context
from shadho_celery.objective.context import LocalContext
from shadho_celery.objective.result import read
from shadho_celery.space.schema import FACTS, Law, Suggested, choice, number, read_point


class TrialPruned(Exception):
    """The trial is not promising. An objective raises it to end as PRUNED, with the loss of its last report."""


@dataclass(eq=False, repr=False)
class Trial:
    """A trial, the only argument of an objective of a study without a space."""

    #: further facts of the trial, such as `seed`, `device` and `checkpoint_dir`
    context: LocalContext
    #: draws by label that the scheduler has proposed
    proposed: Params
    #: facts that `set_user_attr` has noted; those that JSON can represent become metrics
    user_attrs: dict[str, Any] = field(default_factory=dict)
    #: study of `shadho_celery.optuna` to which it belongs
    study: Any = None

    def __post_init__(self) -> None:
        #: position of the trial in its study, from 0
        self.number = self.context.trial
        #: labels that it has asked for so far, as in `Outcome.asked`
        self.asked = self.context.asked = dict[str, Suggested]()
        self.context.facts = self.user_attrs
        if isinstance(facts := read_point(self.proposed).get(FACTS), dict):
            self.user_attrs.update(facts)

    @property
    def params(self) -> dict[str, Any]:
        """Values of the labels that it has asked for so far."""
        return {label: each.law.value(each.drawn) for label, each in self.asked.items()}

    @property
    def distributions(self) -> dict[str, Law]:
        """Laws of the labels that it has asked for so far."""
        return {label: each.law for label, each in self.asked.items()}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a float from `low` to `high`: one of those `step` apart, or evenly drawn by its logarithm."""
        return float(self.suggest(name, number(name, low, high, is_int=False, step=step, log=log)))

    # Earlier names in Optuna.
    suggest_uniform = suggest_float
    suggest_loguniform = partialmethod(suggest_float, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        """Return one of the floats from `low` to `high` that are `q` apart."""
        return self.suggest_float(name, low, high, step=q)

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return int(self.suggest(name, number(name, low, high, is_int=True, step=step, log=log)))

    def suggest_categorical(self, name: str, choices: Iterable[Any]) -> Any:
        """Return one of several options: texts, numbers, True, False or None."""
        return self.suggest(name, choice(name, choices))

    def report(self, value: float | Mapping[str, float], step: int) -> None:
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
        """Return the value of a label: the proposed one if the law has it, else a draw from the law."""
        if not isinstance(label, str) or label in {FACTS, POINT} or not label.isprintable():
            raise SpaceError(f"the name of a label is {short(label, 60)}; give another text")
        warn = self.context.warnings.append
        if (before := self.asked.get(label)) is not None:
            # The first law of a label determines its value. A law of another kind raises SpaceError.
            before.law.joined(label, law)
            if law.fitted(before.drawn) is None:
                warn(f"{label!r} keeps its first value {before.drawn}, which is outside of its later bounds")
            return before.law.value(before.drawn)
        drawn, given = law.fitted(self.proposed.get(label)), read_point(self.proposed)
        if label in given and (drawn := law.place(given[label])) is None:
            warn(f"{label!r} is enqueued as {short(given[label], 60)}, which its law does not have: it is drawn")
        if drawn is None:
            # The seed has the label, so that the value does not depend on the order in which labels are asked for.
            drawn = law.draw(np.random.default_rng([self.context.seed, zlib.crc32(label.encode())]))
        self.asked[label] = Suggested(law=law, drawn=drawn)
        return law.value(drawn)


def read_losses(returned: Any, objectives: Mapping[str, str] | None) -> Outcome:
    """Return the outcome for what an objective has returned. Raises Unreadable.

    Losses may be a sequence in the order of the study's objectives.
    """
    if isinstance(returned, Sequence) and len(returned) == max(1, len(objectives or {})):
        returned = {"losses": dict(zip(objectives, returned, strict=True))} if objectives else returned[0]
    return read(returned, objectives)


@dataclass(frozen=True)
class Suggesting:
    """Wraps an objective that asks for its labels, so that it is called as others are: with params and a context."""

    objective: Objective

    def __call__(self, proposed: Params, context: LocalContext) -> Outcome:
        trial = Trial(context, proposed)
        try:
            returned = self.objective(trial, context) if wants_context(self.objective) else self.objective(trial)
        except Exception as error:
            if not is_pruning(error):
                raise
            returned = Outcome(state=TrialState.PRUNED)
        return read_losses(returned, context.objectives)


def is_pruning(error: BaseException) -> bool:
    """Return whether an exception ends its trial as PRUNED. Optuna's own exception means the same."""
    return any(kind.__name__ == TrialPruned.__name__ for kind in type(error).__mro__)
