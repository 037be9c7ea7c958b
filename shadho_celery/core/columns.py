"""The table of a trial's facts, and the order of trials from best to worst.

Stores, summaries, exported tables, JSON and `TrialResult` are made from the table. A new fact needs a field of `Trial`
or `Outcome` (core/trial.py), the code that sets it, and a line in `TrialFacts`.

The order is that of `merit`. Stores and tables in memory sort trials in the same order, which a test checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar, get_type_hints, overload

from msgspec import Struct

from shadho_celery.core.hardware import shortages
from shadho_celery.core.trial import POINT, Number, Outcome, Trial, TrialState

T = TypeVar("T")


@dataclass(frozen=True)
class Packed:
    """Form of a fact in the rows of numbers in which a study keeps its finished trials in memory."""

    #: format character of `struct`
    code: str
    #: number that means None
    none: float = -1


#: forms of an integer from 0, of an integer that may be negative, and of a float
COUNT, STEP, REAL = Packed("q"), Packed("q", -(2**63)), Packed("d", math.nan)
#: forms of a rung, of a bool, and of the time of the end, which is 0 if it is not known
RUNG, FLAG, MOMENT = Packed("h"), Packed("b"), Packed("d", 0.0)
#: forms of a text, as its index in a list of names, where 0 means None; and of a state, as its index
NAMED, STATE = Packed("I"), Packed("B")
#: form of a fact that is kept for finished trials (`Summary`), but is not a number in their rows
ASIDE = Packed("")


class Shown(Enum):
    """Where a fact is shown: nowhere (NO), only in JSON, or in JSON and in exported tables.

    In a table, the fact is a column before labels and metrics (FRONT), a date after them (DATE), or a text in the last
    columns (END).
    """

    NO = auto()
    JSON = auto()
    FRONT = auto()
    DATE = auto()
    END = auto()


class Fact(Generic[T]):
    """A fact of a trial: an attribute of `TrialFacts`, and how it is stored and shown."""

    def __init__(
        self,
        read: Callable[[Trial], T],
        packed: Packed | None,
        shown: Shown,
        words: str,
        *,
        column: str = "",
    ) -> None:
        """`packed` is None for a fact that a study does not keep in memory for finished trials. `words` describe the
        fact to users.

        `column` is the name of the fact in records and stores, if it differs from the attribute's name.
        """
        self.read, self.packed, self.shown = read, packed, shown
        self.name, self.column = "", column
        self.__doc__ = words

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.column = name, self.column or name

    @overload
    def __get__(self, instance: None, owner: type) -> Fact[T]: ...

    @overload
    def __get__(self, instance: TrialFacts, owner: type) -> T: ...

    def __get__(self, instance: TrialFacts | None, owner: type) -> Fact[T] | T:
        return self if instance is None else self.read(instance._trial)

    def __set__(self, instance: TrialFacts, value: T) -> None:
        raise AttributeError(f"{self.name} of a trial cannot be set")


_NO, _JSON, _FRONT, _DATE, _END = Shown


# fmt: off
class TrialFacts:
    """The facts of a trial as users see them, in the order in which they are shown."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    number = Fact(lambda t: t.number, COUNT, _FRONT, "Position of the trial in its study, from 0.")
    state = Fact(lambda t: t.state, STATE, _FRONT,
                 "WAITING, QUEUED, RUNNING, COMPLETE, PRUNED, FAILED or CANCELLED; each is a str.")
    loss = Fact(lambda t: t.outcome.loss, REAL, _FRONT,
                "Loss in minimised form; the first of several losses. For a PRUNED trial, that of its last report.")
    losses = Fact(lambda t: t.outcome.losses, ASIDE, _JSON,
                  "Losses by name; empty in a study without `objectives`.")
    constraints = Fact(lambda t: t.outcome.constraints, ASIDE, _JSON,
                       "Constraints by name; the trial is feasible if none is above 0.")
    violation = Fact(lambda t: t.outcome.violation, None, _NO,
                     "Sum of the constraints above 0; 0 for a feasible trial.")
    subspace = Fact(lambda t: t.subspace, NAMED, _FRONT,
                    "Name of the subspace of the params, such as ``kernel=rbf``.")
    params = Fact(lambda t: {name: t.params[name] for name in t.params if name != POINT}, None, _JSON,
                  "Drawn value of each active label; for a choice, the index of its option.")
    given = Fact(lambda t: t.given, None, _NO,
                 "Values that the objective gets, as JSON by `space.stored`; None if they are the params.")
    budget = Fact(lambda t: t.budget, REAL, _FRONT, "Part of the fidelity; None for all of it.")
    rung = Fact(lambda t: t.rung, RUNG, _JSON, "Rung of its budget, from 0; None in a study without budgets.")
    origin = Fact(lambda t: t.origin, COUNT, _FRONT,
                  "Number of the trial that it continues or repeats, whose params it has; None if they are its own.")
    continued = Fact(lambda t: t.outcome.continued, FLAG, _JSON,
                     "True if a promoted or repeated trial found a checkpoint, False if not; None for others.")
    step = Fact(lambda t: t.step, STEP, _FRONT,
                "Step of the last report of a trial that was pruned; None for others.")
    seconds = Fact(lambda t: t.outcome.seconds, REAL, _FRONT, "Seconds that the objective took.")
    compute_class = Fact(lambda t: t.compute_class, NAMED, _FRONT,
                         "Compute class of its present or last machine.")
    host = Fact(lambda t: t.host, None, _FRONT, "Name of its present or last machine.")
    attempts = Fact(lambda t: t.attempt, None, _FRONT,
                    "Number of times that it was sent to a worker.", column="attempt")
    sampler = Fact(lambda t: t.sampler, None, _FRONT,
                   "Sampler that chose the params; or start (of `auto`), promoted, repeated, enqueued or added.")
    lost = Fact(lambda t: t.lost, ASIDE, _JSON,
                "Number of attempts that were lost, with their workers or a rank.")
    vanished = Fact(lambda t: t.vanished, None, _NO,
                    "Number of further attempts whose machines have vanished; None for none.")
    seed = Fact(lambda t: t.seed, None, _JSON, "Seed of the objective's own draws.")
    slots = Fact(lambda t: t.slots, ASIDE, _NO, "Slots of one class that it takes.")
    memory = Fact(lambda t: t.outcome.memory, COUNT, _JSON, "Peak bytes of the objective's resident memory.")
    gpu_memory = Fact(lambda t: t.outcome.gpu_memory, COUNT, _JSON,
                      "Peak bytes of the objective's GPU memory; None if it used none.")
    outgrown = Fact(lambda t: shortages(t.outgrown, t.outgrown_memory), NAMED, _JSON,
                    'Compute classes on which it ran out of memory, each with the kind, the str "gpu" or "host".')
    outgrown_memory = Fact(lambda t: t.outgrown_memory, NAMED, _NO,
                           "Kind of memory that each of these classes had too little of, joined by commas.")
    code = Fact(lambda t: t.outcome.code, NAMED, _JSON,
                "Digest of the code that it ran under; None for a function without a module.")
    live = Fact(lambda t: t.living, None, _NO,
                "Attempts that are queued or run, with class, host and start of each.")
    metrics = Fact(lambda t: t.outcome.metrics, None, _JSON, "Further results of the objective.")
    asked_at = Fact(lambda t: t.asked_at, REAL, _DATE, "Seconds since the epoch at which it was proposed.")
    started_at = Fact(lambda t: t.started_at, None, _DATE, "Seconds since the epoch at which it began to run.")
    finished_at = Fact(lambda t: t.finished_at, MOMENT, _DATE, "Seconds since the epoch at which it ended.")
    error = Fact(lambda t: t.outcome.error, None, _END, "Reason of its failure, with the traceback.")
    warning = Fact(lambda t: t.outcome.warning, ASIDE, _END,
                   "Message to the user although it ended well, for instance about a dropped metric.")
    log = Fact(lambda t: t.outcome.log, None, _JSON,
               "The last lines of its output, with time stamps, if it has failed.")
# fmt: on


#: the facts by their names in records and stores
FACTS: Mapping[str, Fact[Any]] = {each.column: each for each in vars(TrialFacts).values() if isinstance(each, Fact)}
#: names of the facts that a study keeps in memory for finished trials; and by name: forms of the facts in their rows
KEPT = [column for column, fact in FACTS.items() if fact.packed is not None]
PACKED = {column: fact.packed for column, fact in FACTS.items() if fact.packed is not None and fact.packed.code}
#: by name: types of the facts, which are those of the fields of a trial and of its outcome
HINTS = {
    "violation": float | None,
    **get_type_hints(Outcome, include_extras=True),
    **get_type_hints(Trial, include_extras=True),
}


class Summary(Struct, frozen=True, kw_only=True):
    """Base of records of finished trials. A store makes a subclass with a field for each fact in KEPT."""

    number: Number


def of_trial(column: str) -> str:
    """Return the attribute path of a fact in a `Trial`: a field of the trial, or of its outcome."""
    return column if column in Trial.__struct_fields__ else f"outcome.{column}"


def names(*shown: Shown) -> list[str]:
    """Return the names, for users, of the facts that are `shown` in one of these ways, by default in any way."""
    return [fact.name for fact in FACTS.values() if (fact.shown in shown if shown else fact.shown is not Shown.NO)]


#: sort key of a trial; the best trial has the least key
Merit = tuple[bool, float, float, bool, float]

#: merit of a trial without a loss
NO_MERIT: Merit = (True, 0.0, 0.0, False, 0.0)


def merit(trial: Trial) -> Merit:
    """Return the sort key of a trial, which is least for the best trial. Of equal keys, the trial with the least number
    wins.

    The criteria are, in this order: least violation of constraints (0 for feasible trials); highest budget, because
    losses at different budgets cannot be compared; complete before pruned; least loss. Trials without a loss come last.
    """
    outcome = trial.outcome
    if outcome.loss is None:
        return NO_MERIT
    budget = math.inf if trial.budget is None else trial.budget
    violation = outcome.violation if outcome.constraints else 0.0
    return False, violation, -budget, trial.state is not TrialState.COMPLETE, outcome.loss


def feasible_loss(trial: Trial) -> float:
    """Return the loss by which trials of one budget are compared; infinity unless the trial is COMPLETE and feasible.

    So a trial that failed, was pruned or violates a constraint is never better than another one, and is never promoted.
    """
    loss = trial.outcome.loss
    if trial.state is not TrialState.COMPLETE or loss is None or math.isnan(loss) or trial.outcome.violation:
        return math.inf
    return float(loss)


def feasible_losses(trial: Trial) -> tuple[float, ...]:
    """Return all losses of a trial that has several, else its loss, under the conditions of `feasible_loss`."""
    losses, loss = trial.outcome.losses, feasible_loss(trial)
    return tuple(losses.values()) if len(losses) > 1 and loss < math.inf else (loss,)
