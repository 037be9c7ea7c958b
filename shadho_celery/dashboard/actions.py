"""Actions of the pages: requests to running studies and to workers, as the command line makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shadho_celery.cli.points import points_in
from shadho_celery.control.control import Control
from shadho_celery.core.actions import Answer
from shadho_celery.core.checks import one_line
from shadho_celery.core.settings import SETTINGS, read_settings
from shadho_celery.errors import UsageError

_Count = Annotated[int, Meta(ge=0, le=10**9)]
_Worker = Annotated[str, Meta(min_length=1, max_length=500)]


class _Action(Struct, frozen=True, tag_field="action", tag=str.lower, forbid_unknown_fields=True):
    """An action on a study."""


class Stop(_Action, frozen=True):
    """Send no more trials, and end once the running ones have finished."""


class Pause(_Action, frozen=True):
    """Start no more trials."""


class Unpause(_Action, frozen=True):
    """Start trials again."""


class Cancel(_Action, frozen=True):
    """Stop one trial."""

    number: _Count


class Set(_Action, frozen=True):
    """Change settings of the study, as the command `set` does."""

    settings: Annotated[dict[str, int | float | str], Meta(max_length=len(SETTINGS))]


class Enqueue(_Action, frozen=True):
    """Run known points before other trials, as the command `enqueue` does."""

    #: the content of such a file
    points: str


class Drain(_Action, frozen=True):
    """Let a worker take no more trials."""

    worker: _Worker


class Undrain(_Action, frozen=True):
    """Let a worker take trials again."""

    worker: _Worker


OfStudy = Stop | Pause | Unpause | Cancel | Set | Enqueue
OfWorker = Drain | Undrain
_of_study, _of_worker = msgspec.json.Decoder(OfStudy), msgspec.json.Decoder(OfWorker)


def on_study(control: Control, key: str, body: bytes) -> Answer:
    """Do what the JSON `body` asks for with a running study. Raises ShadhoError if it cannot be asked."""
    asked = _decoded(_of_study.decode, body)
    match asked:
        case Cancel(number):
            return control.cancel(key, number)
        case Set(settings):
            read_settings(settings)
            return control.set(key, **settings)
        case Enqueue(points):
            return control.enqueue(key, points_in(points, "the points"))
    found: Answer = getattr(control, type(asked).__name__.lower())(key)
    return found


def on_worker(control: Control, body: bytes) -> Answer:
    """Do what the JSON `body` asks for with a worker. Raises ShadhoError if it cannot be asked."""
    asked = _decoded(_of_worker.decode, body)
    found: Answer = getattr(control, type(asked).__name__.lower())(asked.worker)
    return found


def _decoded(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"there is no such action: {one_line(error)}") from None
