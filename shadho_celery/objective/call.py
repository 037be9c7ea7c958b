"""Call an objective, and make an outcome of whatever it does."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from shadho_celery.core.clock import Clock, SystemClock
from shadho_celery.core.trial import Outcome, TrialState
from shadho_celery.objective.context import LocalContext
from shadho_celery.objective.memory import is_out_of_memory
from shadho_celery.objective.result import Unreadable, read

Objective = Callable[..., Any]


#: characters of a traceback that are kept
MAX_ERROR = 8000


#: exceptions of a chain of causes that are told, and frames of each: the last ones
MAX_CAUSES, MAX_FRAMES = 20, 50


def call(
    objective: Objective,
    make_params: Callable[[], Any],
    context: LocalContext,
    clock: Clock | None = None,
    *,
    fatal: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
) -> Outcome:
    """Call `objective` on what `make_params` builds; whatever it does short of ending the process is an outcome.

    Only what is `fatal` passes through: Ctrl-C is meant for the whole process.
    """
    clock = clock or SystemClock()
    began = clock.now()
    try:
        params = make_params()
        returned = objective(params, context) if wants_context(objective) else objective(params)
        seconds = clock.now() - began
        if context.stopped():
            return Outcome(state=TrialState.CANCELLED, error="cancelled", seconds=seconds)
        loss, metrics, warning = read(returned)
    except fatal:
        raise
    except BaseException as error:
        # Of what could not be read the message says it all; of an objective that failed, its traceback.
        text = str(error) if isinstance(error, Unreadable) else describe(error)
        return Outcome(
            state=TrialState.FAILED,
            error=f"timed out after {context.timeout or 0:g} s (--trial-timeout)\n{text}"
            if context.timed_out()
            else text,
            seconds=clock.now() - began,
            out_of_memory=is_out_of_memory(error),
        )
    if context.timed_out():
        warning = joined(f"cut off at its time limit of {context.timeout or 0:g} s", warning)
    return Outcome(state=TrialState.COMPLETE, loss=loss, metrics=metrics, warning=warning, seconds=seconds)


def joined(*warnings: str | None) -> str | None:
    """Those that there are, in one line."""
    return "; ".join(filter(None, warnings)) or None


def wants_context(objective: Objective) -> bool:
    """True where `objective` takes a second positional argument."""
    try:
        parameters = inspect.signature(objective).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].name == "context" or positional[1].default is inspect.Parameter.empty)


def describe(error: BaseException) -> str:
    """The error and its traceback, the end of it where it is long; never raises."""
    try:
        _cut_short(error)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-MAX_FRAMES))
    except BaseException:  # its own __str__ may do anything
        text = f"{type(error).__name__} (its message cannot be printed)"
    text = text if len(text) <= MAX_ERROR else "..." + text[-MAX_ERROR:]
    # Half a surrogate pair cannot be printed, nor sent on.
    return text.encode("utf-8", "replace").decode()


def _cut_short(error: BaseException) -> None:
    """Break off a long chain of causes: formatting takes time that grows with its square."""
    for _ in range(MAX_CAUSES):
        cause = error.__cause__ or error.__context__
        if cause is None:
            return
        error = cause
    error.__cause__ = error.__context__ = None
