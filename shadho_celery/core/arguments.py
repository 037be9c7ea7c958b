"""Arguments of functions for users: the type of `resume`, and a check for unknown ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Literal, ParamSpec, TypeAlias, TypeVar

from shadho_celery.core.checks import guess
from shadho_celery.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

#: whether a study is continued; "if-exists" begins it if there is none of its name
Resume: TypeAlias = bool | Literal["if-exists"]


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
