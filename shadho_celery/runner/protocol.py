"""Records of the pipe between a worker and a slot's process, one JSON object per line, and constants of both ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from shadho_celery.core.checks import decoder, encoded
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import MAX_TEXT, Attempt, GangCall, Int64, Losses, Outcome

#: seconds after a trial's time limit after which its process is killed, if the trial has not returned
HARD_SECONDS = 5.0

#: exit code of a slot's process that has lost its pipe to the worker, for example because the trial has closed it
PIPE_LOST = 74

#: maximum bytes of orders (RunAttempt records) that are sent to a process before it reads them. A socket holds three
#: times as many, so sending them does not block
AHEAD_BYTES = 64_000

#: maximum bytes of a record
MAX_RECORD = 16_000_000

#: exit code of a prepared process that cannot be forked
UNFIT = 75

#: maximum bytes of a request to start a process by a fork
MAX_START = 64_000

#: maximum characters of a complaint about a prepared process, and maximum number of complaints that a worker announces
MAX_COMPLAINT, MAX_COMPLAINTS = 300, 10

#: number that means no order; orders are numbered from 1
NO_ORDER = 0


class _Record(Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower, omit_defaults=True):
    """A record, which is one line in the pipe.

    `order` is the number of a RunAttempt record. Several orders may be sent ahead, so records about a trial contain the
    number of its order.
    """


class RunAttempt(_Record, frozen=True, kw_only=True):
    """To the process: run an attempt, after the attempts that were sent before it."""

    order: int = NO_ORDER
    #: the message that the worker has received, with only this attempt
    payload: Payload
    checkpoint_dir: str
    #: folder of shipped code; "" if the code is in the working directory or on PYTHONPATH
    folder: str = ""
    #: file for the output, created at the first output; "" for no file
    log: str = ""
    compute_class: str
    slot: int
    #: True if the fleet has a signing key, so that the gang's connections are encrypted
    encrypted: bool = False

    @property
    def attempt(self) -> Attempt:
        """The attempt."""
        return self.payload.attempts[0]


class Tell(_Record, frozen=True, kw_only=True):
    """To the process: a command about the trial of this order, which may not have started yet, or may have ended.

    ``recall``: drop the orders that were sent after this one. ``stop``: set the trial's stop flag. ``interrupt``:
    interrupt the trial, because it has not returned after ``stop``. ``time up``: interrupt it at its time limit.
    ``preempt``: tell it that its worker is about to end, so that it writes its checkpoint and returns.
    """

    order: int
    what: Literal["recall", "stop", "interrupt", "time up", "preempt"]


class Threads(_Record, frozen=True, kw_only=True):
    """To the process: use this many threads, from the next trial on."""

    threads: int


class Ready(_Record, frozen=True, kw_only=True):
    """From the process: it has imported the study modules. `codes` has the version or the problem of each module."""

    codes: dict[str, CodeVersion] = {}


class Reported(_Record, frozen=True, kw_only=True):
    """From the process: the objective has reported a loss."""

    order: int
    step: Int64
    loss: float
    #: as in `Report`
    losses: Losses | None = None


class Gang(_Record, frozen=True, kw_only=True):
    """From the process: the trial calls for replicas, or its gang is complete."""

    order: int
    call: GangCall


class Ended(_Record, frozen=True, kw_only=True):
    """From the process: the trial has ended."""

    order: int
    outcome: Outcome
    #: True if the process cannot run another trial
    is_unfit: bool = False
    #: True if the process has dropped the orders after this one (``recall``) and has received none since, so it starts
    #: no other order
    is_recalled: bool = False


class Refused(_Record, frozen=True, kw_only=True):
    """From the process: it did not start the attempt, because it has another version of the code."""

    order: int
    #: the version that the process has
    code: CodeVersion


ToChild = RunAttempt | Tell | Threads
FromChild = Ready | Reported | Gang | Ended | Refused

# Create the decoder at import, before the threads of several slots use it.
_from_child = decoder(FromChild)
#: returns the record in a line from the worker
decode_to_child: Callable[[str], ToChild] = decoder(ToChild)


def boundary(mark: str, order: int) -> bytes:
    """Return the boundary that the process writes into its output when an order starts, or after the last order
    (NO_ORDER).

    `mark` is the value of MARK in the process's environment. A boundary is short enough to be written to a pipe in one
    piece.
    """
    return f"\0{mark} {order}\0".encode()


def encode(record: ToChild | FromChild) -> bytes:
    """Return a record as a line of JSON."""
    return encoded(record) + b"\n"


def decode_from_child(line: bytes) -> FromChild:
    """Return the record in a line from the process.

    Raises ValueError for any other line, which the trial may have written. msgspec's ValidationError is a ValueError.
    """
    record: FromChild = _from_child(line)
    if isinstance(record, Ended):
        outcome = record.outcome
        # Limit texts to MAX_TEXT characters, and replace unpaired surrogates, which cannot be sent to Redis.
        texts = {
            name: text[:MAX_TEXT].encode("utf-8", "replace").decode()
            for name, text in (("error", outcome.error), ("warning", outcome.warning))
            if text is not None
        }
        # The worker adds the log.
        outcome = replace(outcome, **texts, log=None)
        if not outcome.is_an_end:
            raise ValueError("not the end of a trial")
        record = replace(record, outcome=outcome)
    return record
