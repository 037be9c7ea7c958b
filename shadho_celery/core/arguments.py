"""Names of a run's arguments that are not settings, for messages: options of the command, or arguments in Python.

Also refuses unknown arguments in Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from shadho_celery.core.checks import guess
from shadho_celery.errors import UsageError, Words

P = ParamSpec("P")
R = TypeVar("R")

#: whether a study is continued; "if-exists" begins it if there is none of its name
Resume: TypeAlias = bool | Literal["if-exists"]

RESUME = Words("--resume", "resume=True")
STUDY = Words("--study", "study=")
STORE = Words("--store", "store=")
SEED = Words("--seed", "seed=")
WARM_START = Words("--warm-start", "warm_start=")
#: the arguments that say where a study is kept and how it begins, by their names in Python
ARGUMENTS = {"store": STORE, "study": STUDY, "resume": Words("--resume", "resume="), "seed": SEED}


def refuse_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise UsageError, which names a similar argument, for one that it does not have. A decorator."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name not in known:
                called = function.__qualname__.removesuffix(".__init__")
                raise UsageError(
                    f"{called} has no argument {name}; {guess(name, known)}its arguments are {', '.join(known)}"
                )
        return function(*args, **named)

    return checked


def resume(name: str) -> Words:
    """Return what a user writes to resume the study called `name`."""
    return Words(f"--resume {name}", "resume=True")


def workers(compute_class: str, slots: int) -> Words:
    """Return what a user writes to start embedded workers with this number of slots of a class."""
    return Words(f"--workers {compute_class}={slots}", f'workers={{"{compute_class}": {slots}}}')
