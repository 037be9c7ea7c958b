"""What a message to a worker must look like before anything is done with what it says.

The study's key and the trial's number become names of folders and of Redis keys, the module is imported: whoever can
put a message into a queue must not choose them freely.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

_STUDY = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: a coordinator's ``host:port``, and the token that lets replicas in
_ADDRESS = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}:[0-9]{1,5}")
_TOKEN = re.compile(r"[A-Za-z0-9_=+/.-]{1,256}")

#: replicas that a gang may have, backups included, and slots that a trial may take
MAX_REPLICAS = 1024

#: more than any study has trials, and still exact in every reader of JSON
_MAX_COUNT = 2**53


def malformed(payload: Any) -> str | None:
    """What is wrong with a message's payload; None where it has the form that schedulers give it."""
    if not isinstance(payload, Mapping):
        return "its payload is no object"
    for name, is_right in _PAYLOAD.items():
        if not is_right(payload.get(name)):
            return f"its {name} cannot be right"
    if payload.get("replica") is not None and (wrong := _no_seat(payload)):
        return wrong
    for attempt in payload["attempts"]:
        for name, is_right in _ATTEMPT.items():
            if not isinstance(attempt, Mapping) or not is_right(attempt.get(name)):
                return f"the {name} of an attempt cannot be right"
    return None


def is_address(value: Any) -> bool:
    """Whether it has the form of a coordinator's address, ``host:port``."""
    return isinstance(value, str) and _ADDRESS.fullmatch(value) is not None and int(value.rpartition(":")[2]) < 2**16


def is_token(value: Any) -> bool:
    """Whether it has the form of a gang's token."""
    return isinstance(value, str) and _TOKEN.fullmatch(value) is not None


def _no_seat(payload: Mapping[str, Any]) -> str | None:
    """What is wrong with what a message says of a seat in a gang; None where nothing is."""
    for name, is_right in _REPLICA.items():
        if not isinstance(payload["replica"], Mapping) or not is_right(payload["replica"].get(name)):
            return f"the {name} of a replica cannot be right"
    return None if len(payload["attempts"]) == 1 else "a replica is one of one attempt"


def _is_study(value: Any) -> bool:
    return isinstance(value, str) and _STUDY.fullmatch(value) is not None


def _is_module(value: Any) -> bool:
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MAX_COUNT


_PAYLOAD: Mapping[str, Callable[[Any], bool]] = {
    "study": _is_study,
    "module": _is_module,
    "attempts": lambda value: isinstance(value, list),
    "watched": lambda value: value is None or isinstance(value, bool),
}
_ATTEMPT: Mapping[str, Callable[[Any], bool]] = {
    "number": lambda value: _is_count(value, 0),
    "attempt": lambda value: _is_count(value, 1),
    "params": lambda value: isinstance(value, Mapping),
    "seed": lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)),
    "budget": lambda value: value is None or _is_number(value),
    "timeout": lambda value: value is None or (_is_number(value) and value > 0),
    "slots": lambda value: value is None or (_is_count(value, 1) and value <= MAX_REPLICAS),
    "origin": lambda value: value is None or _is_count(value, 0),
    "not_on": lambda value: value is None or isinstance(value, str),
}
_REPLICA: Mapping[str, Callable[[Any], bool]] = {
    "address": is_address,
    "token": is_token,
    "call": lambda value: _is_count(value, 1),
    "rank": lambda value: _is_count(value, 1) and value <= 2 * MAX_REPLICAS,
}
