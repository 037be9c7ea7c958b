"""Call of an objective: every return value and every exception becomes an outcome."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from shadho_celery.core.checks import accepts
from shadho_celery.core.clock import Clock, SystemClock
from shadho_celery.core.names import elsewhere
from shadho_celery.core.trial import Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.objective.context import LocalContext, RankLost
from shadho_celery.objective.memory import exhausted
from shadho_celery.objective.result import Unreadable, read

Objective = Callable[..., Any]

#: folder of this package
_PACKAGE = Path(__file__).parent.parent

#: maximum number of characters of a traceback; its end is kept
MAX_ERROR = 8000

#: maximum number of chained exceptions in a traceback, and of frames of each exception; the last ones are kept
MAX_CAUSES, MAX_FRAMES = 20, 50


def call(
    objective: Objective,
    make_params: Callable[[], object],
    context: LocalContext,
    clock: Clock | None = None,
    *,
    takes_context: bool | None = None,
    fatal: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    objectives: Mapping[str, str] | None = None,
) -> Outcome:
    """Call `objective` on the values that `make_params` builds, and return the outcome.

    `takes_context` is the answer of `wants_context`, if it is known: to find it out for each trial takes longer than
    the rest of the call. `objectives` are the directions of the study's losses by name, if they have names. An
    exception becomes a FAILED outcome. Only `fatal` exceptions are raised: by default Ctrl-C, which is meant for the
    whole process.
    """
    clock = clock or SystemClock()
    began = clock.now()
    try:
        params = make_params()
        if takes_context is None:
            takes_context = wants_context(objective)
        returned = objective(params, context) if takes_context else objective(params)
        seconds = max(0.0, clock.now() - began)
        try:
            outcome = read(returned, objectives)
        except Unreadable:
            if not (context.stopped() or context.was_told):
                raise
            outcome = Outcome(state=TrialState.CANCELLED)
        if context.stopped() or context.was_told:
            outcome = outcome.cancelled(seconds)
        elif context.timed_out():
            cut_off = f"stopped at its time limit of {context.timeout or 0:g} s"
            outcome = replace(outcome, warning=joined(cut_off, outcome.warning), seconds=seconds)
        else:
            outcome = replace(outcome, seconds=seconds)
    except fatal:
        raise
    except BaseException as error:
        outcome = _failed(error, context, max(0.0, clock.now() - began))
    if (warning := context.reports.warning) is None:
        return outcome
    return replace(outcome, warning=joined(outcome.warning, warning))


def _failed(error: BaseException, context: LocalContext, seconds: float) -> Outcome:
    # An unreadable return value needs no traceback, which would only show this package's code.
    text = str(error) if isinstance(error, Unreadable) else describe(error)
    missing = str(error.name) if isinstance(error, AttributeError) else ""
    here = elsewhere(missing if missing.startswith("suggest_") else type(error).__name__, ())
    if here and here not in text:
        text = f"{text.rstrip()}; here it is {here}"
    if context.timed_out():
        text = f"timed out after {context.timeout or 0:g} s (trial timeout)\n{text}"
    return Outcome(
        state=TrialState.FAILED,
        error=text,
        seconds=seconds,
        out_of_memory=exhausted(error),
        rank_lost=isinstance(error, RankLost),
    )


def joined(*warnings: str | None) -> str | None:
    """Return the warnings that are not None in one line. Return None if there are no such warnings."""
    return "; ".join(filter(None, warnings)) or None


def check_objective(objective: object, name: str) -> None:
    """Raise UsageError if `objective` cannot be called with the values of a trial. Messages call it `name`."""
    if not callable(objective):
        raise UsageError(f"{name} is not a function but {type(objective).__name__}")
    if _is_suspended(objective):
        raise UsageError(
            f"{name} is a coroutine or a generator, whose call returns no loss; write a function that runs it, such as "
            "lambda params: asyncio.run(f(params))"
        )
    if accepts(objective, 2 if wants_context(objective) else 1):
        return
    signature = inspect.signature(objective)
    if not signature.parameters:
        raise UsageError(f"{name} takes no argument, but it gets the values of a trial; write objective(params)")
    raise UsageError(
        f"{name} takes {signature}, but it is called with the values of a trial as its one argument, or with a context "
        "as the second; write objective(params), or pass lambda params: f(**params)"
    )


def _is_suspended(objective: Any) -> bool:
    """Return whether a call of `objective` only creates a coroutine or a generator."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(function) for kind in kinds for function in (objective, type(objective).__call__))


def wants_context(objective: Objective) -> bool:
    """Return whether `objective` gets the context: its second argument is called context, or has no default."""
    try:
        parameters = inspect.signature(objective).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].name == "context" or positional[1].default is inspect.Parameter.empty)


def describe(error: BaseException) -> str:
    """Return the error with its traceback. A long text lacks its first frames and the middle of its message.

    Never raises.
    """
    try:
        _cut_short(error)
        trace = _from_the_user(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace, limit=-MAX_FRAMES))
        message = "".join(traceback.format_exception_only(type(error), error))
    except BaseException:  # its own __str__ may do anything
        text = f"{type(error).__name__} (its message cannot be printed)"
        message = text
    text = text if len(text) <= MAX_ERROR else _shortened(text, message)
    # An unpaired surrogate cannot be printed or sent.
    return text.encode("utf-8", "replace").decode()


def _shortened(text: str, message: str) -> str:
    """Shorten a traceback to MAX_ERROR characters: keep its last frames, and beginning and end of its message."""
    if not text.endswith(message):
        # The traceback of an exception group ends with its members.
        return "..." + text[-MAX_ERROR:]
    frames, most = text[: -len(message)], MAX_ERROR // 2
    if len(message) > most:
        head, tail = message[: most // 2], message[-most // 2 :]
        message = f"{head}\n... ({len(message) - most} characters are left out)\n{tail}"
    rest = MAX_ERROR - len(message)
    return (frames if len(frames) <= rest else "..." + frames[-rest:]) + message


def _from_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames in this package. Return it unchanged if all frames are in it."""
    rest = trace
    while rest is not None and Path(rest.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
        rest = rest.tb_next
    return rest or trace


def _cut_short(error: BaseException) -> None:
    """Cut a chain of causes to MAX_CAUSES, because the time to format it grows with the square of its length."""
    for _ in range(MAX_CAUSES):
        cause = error.__cause__ or error.__context__
        if cause is None:
            return
        error = cause
    error.__cause__ = error.__context__ = None
