"""Environment variables that set how long a worker stays, and what it does when it is preempted.

A worker is preempted if its machine will soon be taken away. Its trials then get a grace period to write checkpoints.
This module imports nothing heavy, because the worker's command checks these options before it loads Celery.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from shadho_celery.core.units import seconds_of
from shadho_celery.errors import UsageError

#: environment variables that say how long a worker stays
FOR, IDLE, GRACE, SIGNAL = "SHADHO_FOR", "SHADHO_IDLE_EXIT", "SHADHO_GRACE", "SHADHO_PREEMPT_SIGNAL"

#: seconds that preempted trials have to return, if SHADHO_GRACE is not set
GRACE_SECONDS = 30.0

#: a worker stops once it has declined this many trials in a row, because they would not end in time
MAX_TOO_LONG = 3

#: a worker takes a trial only if the time left is this multiple of the trial's predicted time, which is not exact
SAFETY = 1.25

#: maximum seconds until the scheduler knows that a worker has declined a trial
DECLINE_SECONDS = 1.0

#: signals that may mean a preemption, by the names that users may write
SIGNALS: Mapping[str, signal.Signals] = {
    name: number
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
    for name in (number.name, number.name.removeprefix("SIG"))
}


@dataclass(frozen=True, kw_only=True)
class Stay:
    """Settings of how long a worker stays, and of preemption."""

    #: seconds from its start to its end; the worker preempts itself `grace` seconds before the end. None for no limit
    seconds: float | None = None
    #: seconds without a trial after which the worker ends; None for never
    idle: float | None = None
    #: seconds that preempted trials have to return
    grace: float = GRACE_SECONDS
    #: signals that preempt the worker
    signals: frozenset[signal.Signals] = field(default=frozenset())

    @classmethod
    def configured(cls) -> Stay:
        """Return the settings in the environment. Raises UsageError for invalid ones."""
        told = os.environ.get(SIGNAL, "").upper()
        if told and told not in SIGNALS:
            names = ", ".join(name for name in SIGNALS if not name.startswith("SIG"))
            raise UsageError(f"{SIGNAL} (--preempt-signal) is {told!r}; give one of {names}")
        grace, seconds = _seconds(GRACE), _seconds(FOR)
        # SIGTERM preempts a worker only if a grace or signal is set. Otherwise running trials finish after SIGTERM.
        signals = {signal.SIGTERM} if grace is not None or told else set()
        stay = cls(
            seconds=seconds,
            idle=_seconds(IDLE),
            grace=min(GRACE_SECONDS, (seconds or math.inf) / 4) if grace is None else grace,
            signals=frozenset(signals | ({SIGNALS[told]} if told else set())),
        )
        if seconds is not None and stay.grace >= seconds:
            raise UsageError(f"{FOR} (--for) must be longer than {GRACE} (--grace), in which its trials return")
        return stay


def _seconds(variable: str) -> float | None:
    """Return the seconds of the duration in an environment variable, or None. Raises UsageError."""
    told = os.environ.get(variable)
    try:
        return seconds_of(told) if told else None
    except ValueError as error:
        raise UsageError(f"{variable}: {error}") from None
