"""Actions: what can be asked of a running study and of workers, what was asked, and what has become of it.

Each action is one record. Its command, the routes and buttons of the dashboard and the requests over Redis are made
from it. `Control` has a method for it, and `session.steering` the function that carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args

from msgspec import Meta, Struct

from shadho_celery.core.trial import MAX_TEXT, Name, Number, StoredMoment

#: maximum number of known points in a request
MAX_POINTS = 1000


class Deed(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """What a request asks for. The class's name is that of the action, its docstring the help of the command."""

    #: line in the list of commands
    line: ClassVar[str]
    #: command lines after the program's name; the first one is also shown for a fleet
    examples: ClassVar[tuple[str, ...]]
    #: question of the dashboard's button, with the names of what it is about in braces
    question: ClassVar[str]
    #: text of the button, if it is not the action's name
    button: ClassVar[str] = ""
    #: what it is about: a study, a trial of one, or a worker
    scope: ClassVar[str] = "study"
    #: whether the button is for a paused study or a drained worker; None: for any
    while_held: ClassVar[bool | None] = None


class Stop(Deed, frozen=True):
    """End the running study STUDY: start no more trials, and finish the running ones, as after one Ctrl-C.

    shadho-celery resume continues it.
    """

    line = "End a running study once its trials have finished."
    examples = ("stop svm-3f2a",)
    question = "End {study} once its running trials have finished?"


class Pause(Deed, frozen=True):
    """Let the running study STUDY start no more trials until shadho-celery unpause. Its running trials finish.

    The study keeps its scheduler. The time for --seconds goes on.
    """

    line = "Let a running study start no more trials for now."
    examples = ("pause svm-3f2a",)
    question = "Start no more trials of {study} until it is unpaused? Its running trials finish."
    while_held = False


class Unpause(Deed, frozen=True):
    """Let the paused study STUDY start trials again."""

    line = "Let a paused study start trials again."
    examples = ("unpause svm-3f2a",)
    question = "Start trials of {study} again?"
    while_held = True


class Cancel(Deed, frozen=True):
    """Cancel trial number TRIAL of the running study STUDY, whether it runs or waits.

    It ends CANCELLED and does not count towards --trials, so another trial takes its place.
    """

    line = "Cancel one trial of a running study."
    examples = ("cancel svm-3f2a 12",)
    question = "Stop trial {number} of {study}?"
    scope = "trial"

    number: Number


class Enqueue(Deed, frozen=True):
    """Let the running study STUDY run the known points in FILE before other trials.

    FILE is as for --enqueue of shadho-celery run: one JSON object per line, such as {"rate": 0.1}, or a JSON list.
    """

    line = "Let a running study run known points next."
    examples = ("enqueue svm-3f2a points.jsonl",)
    question = "Let {study} run known points before other trials"

    points: Annotated[list[Any], Meta(min_length=1, max_length=MAX_POINTS)]


class Set(Deed, frozen=True):
    """Change settings of the running study STUDY. Later runs of it have the new values too.

    --trial-timeout applies to the trials that are sent from now on. A study that is already stopping does not change.
    """

    line = "Change settings of a running study."
    examples = (
        "set svm-3f2a --trials 200",
        "set svm-3f2a --seconds 7200 --early-stop 50",
        "set svm-3f2a --weight 3        # three times the slots of a study of weight 1",
    )
    question = "Change settings of {study}, also for its later runs"
    button = "set limits"

    settings: dict[str, Any]


class Drain(Deed, frozen=True):
    """Let WORKER finish its trials and take no more, as before the maintenance of its machine.

    WORKER is CLASS@HOST, with a host of shadho-celery status: all workers of that class on that host. Those that start
    there later are drained too, until shadho-celery undrain. The full name of one of several workers there stands for
    that worker alone. No study needs to run.
    """

    line = "Let a worker take no more trials."
    examples = (
        "drain cpu@node7                # all workers of class cpu on node7",
        "drain cpu@node7.3817.0bdf      # one of them, by its name of shadho-celery status",
    )
    question = "Let {worker} finish its trials and take no more?"
    scope = "worker"
    while_held = False

    worker: Annotated[str, Meta(min_length=1, max_length=500)]


class Undrain(Deed, frozen=True):
    """Let WORKER, which shadho-celery drain has drained, take trials again."""

    line = "Let a drained worker take trials again."
    examples = ("undrain cpu@node7",)
    question = "Let {worker} take trials again?"
    scope = "worker"
    while_held = True

    worker: Annotated[str, Meta(min_length=1, max_length=500)]


OfStudy = Stop | Pause | Unpause | Cancel | Enqueue | Set
OfWorker = Drain | Undrain


def name_of(deed: Deed | type[Deed]) -> str:
    """Return the name of an action."""
    return str(deed.__struct_config__.tag)


#: all actions by name, in the order of the list of commands
ACTIONS: Mapping[str, type[Deed]] = {name_of(each): each for each in get_args(OfStudy) + get_args(OfWorker)}


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
