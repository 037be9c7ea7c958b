"""Records of the pipe between a worker and a slot's process, one JSON object per line, and constants of both ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from shadho_celery.core.checks import decoder, encoded
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import MAX_TEXT, Attempt, GangCall, Int64, Outcome

#: seconds after a trial's time limit at which its process is killed, if the trial has not returned
HARD_SECONDS = 5.0

#: exit code of a process whose trial has closed its end of the pipe
PIPE_LOST = 74

#: bytes that may be sent ahead to a process that runs a trial and may not read; a socket holds three times as many
AHEAD_BYTES = 64_000

#: maximum bytes of a record
MAX_RECORD = 16_000_000

#: exit code of a prepared process that cannot be forked
UNFIT = 75

#: maximum bytes of a request to start a process by a fork
MAX_START = 64_000

#: maximum characters of a complaint about a prepared process, and number of them that a worker announces
MAX_COMPLAINT, MAX_COMPLAINTS = 300, 10

#: number that stands for no order; orders are counted from 1
NO_ORDER = 0


class _Record(Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower, omit_defaults=True):
    """A line of the pipe.

    `order` is the number of a RunAttempt record. Several of these may be sent ahead, to run one after another, so a
    record about a trial contains the number of its order.
    """


class RunAttempt(_Record, frozen=True, kw_only=True):
    """To the process: run an attempt, after the attempts that were sent before."""

    order: int = NO_ORDER
    #: the message that the worker has got, with this attempt alone
    payload: Payload
    checkpoint_dir: str
    #: folder of its code; "" for the working directory and PYTHONPATH
    folder: str = ""
    #: file for its output, created when there is any; "" for none
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
    """To the process: something about the trial of this order, which may not have started yet, or may have ended.

    ``recall``: drop the attempts that were sent after it. ``stop``: set its stop flag. ``interrupt``: interrupt it,
    because it has not returned since. ``time up``: interrupt it, because its time is up. ``preempt``: tell it that its
    worker is about to end, so that it writes its checkpoint and returns.
    """

    order: int
    what: Literal["recall", "stop", "interrupt", "time up", "preempt"]


class Threads(_Record, frozen=True, kw_only=True):
    """To the process: use this many threads, from the next trial on."""

    threads: int


class Ready(_Record, frozen=True, kw_only=True):
    """From the process: the imports of the study modules have ended; `codes` has the version or problem of each."""

    codes: dict[str, CodeVersion] = {}


class Reported(_Record, frozen=True, kw_only=True):
    """From the process: the objective reported its loss."""

    order: int
    step: Int64
    loss: float


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
    #: True if it was told to recall (`Tell`) and has received no order since, so it starts no other order by itself
    is_recalled: bool = False


class Refused(_Record, frozen=True, kw_only=True):
    """From the process: the attempt was not started, because the process has another version of the code."""

    order: int
    #: the version of the process
    code: CodeVersion


ToChild = RunAttempt | Tell | Threads
FromChild = Ready | Reported | Gang | Ended | Refused

# Created at import: each of a worker's slots decodes in its own thread.
_from_child = decoder(FromChild)
#: returns the record in a line from the worker
decode_to_child: Callable[[str], ToChild] = decoder(ToChild)


def boundary(mark: str, order: int) -> bytes:
    """Return what the process writes into its output when an order starts, or with NO_ORDER after the last order.

    `mark` is from the process's environment. The result is short enough for a pipe to take it in one piece.
    """
    return f"\0{mark} {order}\0".encode()


def encode(record: ToChild | FromChild) -> bytes:
    """Return a record as a line."""
    return encoded(record) + b"\n"


def decode_from_child(line: bytes) -> FromChild:
    """Return the record in a line from the process.

    Raises ValueError for anything else, such as a line that the trial has written. msgspec's ValidationError is a
    ValueError.
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
