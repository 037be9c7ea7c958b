"""What an objective sees of its trial, and how an objective is called."""

from __future__ import annotations

import inspect
import json
import logging
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from shadho_celery.clock import Clock, SystemClock
from shadho_celery.trial import TrialState

log = logging.getLogger(__name__)

Objective = Callable[..., Any]

#: characters of a traceback that are kept
MAX_ERROR = 8000


class Context(Protocol):
    """A trial as its objective sees it."""

    #: number of the trial in its study
    trial: int
    #: number of this attempt, from 1
    attempt: int
    #: seed for the objective's random draws, the same in every attempt
    seed: int
    #: how much of the fidelity this trial is given; None for all of it
    budget: float | None
    #: where this trial keeps its checkpoints; a later attempt finds them there
    checkpoint_dir: Path
    #: "cuda" where the slot has a GPU, else "cpu"
    device: str
    compute_class: str
    #: number of the slot on its worker, from 0
    slot: int

    def report(self, step: int, loss: float) -> None:
        """Tell the scheduler the loss reached at `step` (a whole number that grows)."""

    def should_stop(self) -> bool:
        """True once the trial was cancelled; the objective should then return at once, with what it has."""


def _ignore(step: int, loss: float) -> None:
    pass


def _never() -> bool:
    return False


@dataclass(kw_only=True)
class LocalContext:
    """The form of Context that knows no network: reports go to a function, the stop flag comes from one."""

    trial: int = 0
    attempt: int = 1
    seed: int = 0
    budget: float | None = None
    checkpoint_dir: Path = field(default_factory=lambda: Path(".shadho/checkpoints"))
    device: str = "cpu"
    compute_class: str = "local"
    slot: int = 0
    on_report: Callable[[int, float], None] = _ignore
    stopped: Callable[[], bool] = _never

    def report(self, step: int, loss: float) -> None:
        self.on_report(int(step), float(loss))

    def should_stop(self) -> bool:
        return self.stopped()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one call of an objective."""

    state: TrialState
    loss: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    #: seconds the call took
    seconds: float = 0.0
    #: peak bytes, None where they were not measured
    memory: int | None = None


def call(objective: Objective, make_params: Callable[[], Any], context: Context, clock: Clock | None = None) -> Outcome:
    """Call `objective` on what `make_params` builds; whatever it does short of ending the process is an outcome.

    Only KeyboardInterrupt passes through: it is meant for the whole process.
    """
    clock = clock or SystemClock()
    began = clock.now()
    try:
        params = make_params()
        returned = objective(params, context) if wants_context(objective) else objective(params)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome(state=TrialState.FAILED, error=describe(error), seconds=clock.now() - began)
    seconds = clock.now() - began
    if context.should_stop():
        return Outcome(state=TrialState.CANCELLED, error="cancelled", seconds=seconds)
    try:
        loss, metrics = read(returned)
    except ValueError as error:
        return Outcome(state=TrialState.FAILED, error=str(error), seconds=seconds)
    return Outcome(state=TrialState.COMPLETE, loss=loss, metrics=metrics, seconds=seconds)


def wants_context(objective: Objective) -> bool:
    """True where `objective` takes a second positional argument."""
    try:
        parameters = inspect.signature(objective).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].name == "context" or positional[1].default is inspect.Parameter.empty)


def read(returned: Any) -> tuple[float, dict[str, Any]]:
    """Loss and metrics of what an objective returned: a number, or a mapping with `loss`.

    hyperopt's ``status: "fail"`` is honoured. Raises ValueError with a message for a person.
    """
    if not isinstance(returned, Mapping):
        return _number(returned, "the objective's return value"), {}
    if returned.get("status") == "fail":
        raise ValueError("the objective returned status 'fail'")
    if "loss" not in returned:
        raise ValueError(f"the objective returned a dict without 'loss' (it has {', '.join(map(repr, returned))})")
    loss = _number(returned["loss"], "'loss'")
    rest = {key: _plain(value) for key, value in returned.items() if key != "loss"}
    return loss, {str(key): value for key, value in rest.items() if _fits_json(key, value)}


def _plain(value: Any) -> Any:
    """The number in a numpy scalar, a 0-d array or a tensor; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _number(value: Any, what: str) -> float:
    """`value` as a finite float; ValueError names `what` it is where it cannot be one."""
    value = _plain(value)
    if not isinstance(value, (numbers.Real, Decimal)):
        raise ValueError(f"{what} is no number but {type(value).__name__}: {_short(value)}")
    try:
        loss = float(value)
    except (OverflowError, ValueError):
        raise ValueError(f"{what} is too large for a float: {_short(value)}") from None
    if not math.isfinite(loss):
        raise ValueError(f"{what} is {loss}")
    return loss


def _fits_json(key: Any, value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        log.warning("metric %r dropped, JSON cannot carry it: %s", key, _short(error))
        return False
    return True


def _short(value: Any) -> str:
    try:
        text = repr(value) if not isinstance(value, Exception) else str(value)
    except Exception:
        text = f"<unprintable {type(value).__name__}>"
    return text if len(text) <= 200 else text[:200] + "..."


def describe(error: BaseException) -> str:
    """The error and its traceback, the end of it where it is long; never raises."""
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:
        text = f"{type(error).__name__} (its message cannot be printed)"
    return text if len(text) <= MAX_ERROR else "..." + text[-MAX_ERROR:]
