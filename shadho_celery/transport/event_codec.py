"""Event codec: an event as it travels, as JSON behind its signature if messages are signed."""

from __future__ import annotations

import json

import msgspec

from shadho_celery.core.trial import Event, GangEvent, Result
from shadho_celery.transport.signing import Signer


def seal(study: str, event: Event | GangEvent, signer: Signer) -> str:
    """Return an event as it travels: its JSON, after its signature if messages are signed."""
    text = json.dumps(msgspec.to_builtins(event))
    return signer.sign(study + text) + text if signer.fingerprint else text


def unseal(study: str, text: str, signer: Signer) -> Event | GangEvent | None:
    """Return the event in `text`; None if it lacks a required signature, or is not an event."""
    signature, brace, rest = text.partition("{")
    if signer.fingerprint and not signer.is_signed(study + brace + rest, signature):
        return None
    try:
        event: Event | GangEvent = msgspec.convert(json.loads(brace + rest), Event | GangEvent)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    # Only the study's scheduler decides on retries.
    return None if isinstance(event, Result) and event.retry is not None else event
