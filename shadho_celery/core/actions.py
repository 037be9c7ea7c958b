"""Actions: what somebody has asked of a running study, and what has become of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from shadho_celery.core.trial import MAX_TEXT, Name, StoredMoment


class Answer(Struct, frozen=True, kw_only=True):
    """What has become of a request."""

    #: False if it was refused; `text` then has the reason
    is_done: bool
    text: Annotated[str, Meta(max_length=MAX_TEXT)]


class Action(Struct, frozen=True, kw_only=True):
    """A request to a running study, or to workers of its fleet, as its store records it."""

    #: id of the request, 32 hexadecimal digits
    id: Name
    #: seconds since the epoch, by the scheduler's clock; of a drain, by the clock of Redis
    at: StoredMoment
    #: user and host
    by: Name
    #: name of the action, such as ``stop``
    action: Name
    #: its arguments by name
    arguments: Mapping[str, Any]
    answer: Answer
    #: fencing number of the scheduler that was asked; None for a drain, which no scheduler carries out
    fence: int | None = None
