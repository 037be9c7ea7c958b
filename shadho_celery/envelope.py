"""An event as it travels from one process to another: as JSON, behind its signature where messages are signed."""

from __future__ import annotations

import json
from collections.abc import Callable

from shadho_celery.signing import Signer
from shadho_celery.trial import Assembling, Event, GangEvent, Lost, Report, Result, Started, TrialState, Unseated

_KINDS: dict[str, Callable[..., Event | GangEvent]] = {
    "started": Started,
    "report": Report,
    "result": Result,
    "lost": Lost,
    "assembling": Assembling,
    "unseated": Unseated,
}

#: fields that hold whole numbers, beside the number of the trial and of its attempt
_NUMBERS = ("step", "memory", "call", "rank", "backups")


def encode(event: Event | GangEvent) -> str:
    """An event as JSON."""
    kind = next(kind for kind, type_ in _KINDS.items() if type(event) is type_)
    # Not `asdict`, which would copy metrics deeply first.
    return json.dumps({"kind": kind, **{name: getattr(event, name) for name in type(event).__slots__}})


def decode(text: str) -> Event | GangEvent:
    """The event that `encode` made `text` of."""
    values = json.loads(text)
    kind = _KINDS[values.pop("kind")]
    if kind is Result:
        values["state"] = TrialState(values["state"])
    return kind(**values)


def seal(study: str, event: Event | GangEvent, signer: Signer) -> str:
    """An event as it travels: its JSON, after its signature where messages are signed."""
    text = encode(event)
    return signer.sign(study + text) + text


def unseal(study: str, text: str, signer: Signer) -> Event | GangEvent | None:
    """The event in `text`; None where it is unsigned although it should be, or no event at all."""
    signature, brace, rest = text.partition("{")
    if not signer.check(study + brace + rest, signature):
        return None
    try:
        event = decode(brace + rest)
        return event if _is_sound(event) else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _is_sound(event: Event | GangEvent) -> bool:
    """Whether the numbers in an event are numbers, and such as a store can keep."""
    numbers = [event.number, event.attempt, *(getattr(event, name, None) or 0 for name in _NUMBERS)]
    times = [getattr(event, name, None) or 0.0 for name in ("at", "seconds", "loss")]
    return all(type(n) is int and abs(n) < 2**63 for n in numbers) and all(isinstance(t, (int, float)) for t in times)
