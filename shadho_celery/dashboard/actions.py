"""Actions of the pages: their buttons, and what these ask of running studies and of workers."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any, get_args

import msgspec
from msgspec import Struct

from shadho_celery.cli.points import points_in
from shadho_celery.control.control import Control
from shadho_celery.core.actions import ACTIONS, Answer, Enqueue, OfStudy, OfWorker, name_of
from shadho_celery.core.checks import one_line
from shadho_celery.errors import UsageError


class _Points(Struct, frozen=True, tag_field="action", tag=name_of(Enqueue), forbid_unknown_fields=True):
    """Request to run the known points in a text, which is as in a file of the command `enqueue`."""

    points: str


_ON_STUDY = msgspec.json.Decoder[Any](reduce(or_, {_Points, *get_args(OfStudy)} - {Enqueue}))
_ON_WORKER = msgspec.json.Decoder[Any](OfWorker)


def act(control: Control, body: bytes, study: str = "") -> Answer:
    """Do what the JSON `body` asks for with a running study, or with a worker that it names.

    Raises ShadhoError if the study or worker cannot be asked.
    """
    try:
        deed = (_ON_STUDY if study else _ON_WORKER).decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"there is no such action: {one_line(error)}") from None
    if isinstance(deed, _Points):
        deed = Enqueue(points_in(deed.points, "the points"))
    return control.act(deed, study)


def buttons(scope: str, *, is_held: bool = False, **named: Any) -> list[dict[str, Any]]:
    """Return the buttons for the actions of a scope on what is `named`, which is paused or drained if `is_held`.

    Each has its text, its question, the request that it sends, and the name of the argument that the user fills in.
    """
    made = []
    for name, kind in sorted(ACTIONS.items(), key=lambda each: each[1].while_held is None):
        if kind.scope == scope and kind.while_held in {None, is_held}:
            question = kind.question.format(**named)
            given = {each: named[each] for each in kind.__struct_fields__ if each in named}
            field = next((each for each in kind.__struct_fields__ if each not in named), None)
            request = {"action": name, **given}
            made.append({"text": kind.button or name, "question": question, "request": request, "field": field})
    return made
