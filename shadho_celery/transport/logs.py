"""Logs of trials on other machines: requests to workers for them, and the answers, which are sent as in `control`."""

from __future__ import annotations

from msgspec import Struct

from shadho_celery.core.payload import StudyKey
from shadho_celery.core.trial import Number, Place
from shadho_celery.transport.control import Asked, Kind
from shadho_celery.transport.signing import Sealed

#: maximum number of characters of a log in an answer; no log is longer
MAX_SENT = 2_500_000
#: maximum number of characters of a sealed request
MAX_REQUEST = 2000


class ReadLog(Struct, frozen=True, kw_only=True):
    """Read the log of an attempt."""

    study: StudyKey
    number: Number
    attempt: Place
    #: position from which the log is wanted
    after: Number = 0


class LogAnswer(Struct, frozen=True, kw_only=True):
    """A worker's answer to a request."""

    #: the log after the requested position, with time stamps; None if the worker does not have this log
    text: str | None = None
    #: position of the log's end, from which the next request can continue
    end: Number = 0


LOGS = Kind(
    requests=Sealed[Asked[ReadLog]](Asked[ReadLog], MAX_REQUEST),
    answers=Sealed[LogAnswer](LogAnswer, 7 * MAX_SENT),
    longest=MAX_REQUEST,
    kept_seconds=30,
)
