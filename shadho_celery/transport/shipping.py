"""Shipping of a study's sources through Redis to workers that accept code: ``shadho:{study}:sources``.

Code that runs on workers is always signed. Without a key, nothing is sent and nothing is accepted.
"""

from __future__ import annotations

from shadho_celery.core.code import MAX_SOURCES, Sources
from shadho_celery.errors import UsageError
from shadho_celery.transport.channel import ERASED_SECONDS
from shadho_celery.transport.redis import Redis, keys
from shadho_celery.transport.signing import Sealed, Signer

#: maximum number of characters of sealed sources: their bytes in base64, with paths and signature
MAX_SEALED = 2 * MAX_SOURCES

_SOURCES = Sealed[Sources](Sources, MAX_SEALED)


class Shipping:
    """Both ends of shipping."""

    def __init__(self, client: Redis, signer: Signer) -> None:
        """Raise UsageError without a signing key."""
        if not signer.fingerprint:
            raise UsageError("code is shipped to workers on a signed fleet only; give --signing-key-file on both sides")
        self._client = client
        self._signer = signer

    def send(self, study: str, sources: Sources) -> None:
        """Store the sources for the workers, again if Redis has lost its data."""
        [key] = keys(study, "sources")
        self._client.set(key, self._signer.seal(key, sources), ex=ERASED_SECONDS)

    def fetch(self, study: str) -> Sources | None:
        """Return a study's sources, or None if there are none with our signature."""
        [key] = keys(study, "sources")
        return _SOURCES.read(key, self._client.get(key) or "", self._signer)
