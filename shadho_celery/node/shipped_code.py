"""Shipped code: the sources of studies that this worker got through Redis, each version in a folder of its own.

The folders are ``.shadho/code/STUDY_KEY/DIGEST``. The slot's process compares the digest once more after the import. A
version that cannot be imported, or is not what its digest says, is refused for a while; then it is written again.
"""

from __future__ import annotations

import threading
from pathlib import Path

from shadho_celery.core.clock import Clock
from shadho_celery.core.files import replacing
from shadho_celery.core.folders import below
from shadho_celery.core.payload import Payload
from shadho_celery.errors import UsageError
from shadho_celery.transport.shipping import Shipping

#: seconds after which a version that could not run here is tried again
AGAIN_SECONDS = 60.0


class ShippedCode:
    """Folders of shipped code. Its methods may be called from any thread."""

    def __init__(self, shipping: Shipping, folder: Path, clock: Clock) -> None:
        """`folder` is that of all studies."""
        self._shipping = shipping
        self._folder = folder
        self._clock = clock
        #: folders that this worker has written
        self._written: set[Path] = set()
        #: by digest, why a version cannot run here, and the moment at which that was found
        self._unfit: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    @property
    def unfit(self) -> dict[str, str]:
        """By digest, why versions cannot run here."""
        now = self._clock.now()
        with self._lock:
            self._unfit = {code: each for code, each in self._unfit.items() if now - each[1] < AGAIN_SECONDS}
            return {code: reason for code, (reason, _) in self._unfit.items()}

    def refuse(self, payload: Payload, reason: str) -> None:
        """Note that the code of a message cannot run here."""
        with self._lock:
            self._written.discard(self.folder(payload))
            self._unfit[payload.code] = reason, self._clock.now()

    def folder(self, payload: Payload) -> Path:
        """Return the folder of a message's code."""
        return self._folder / payload.study / payload.code

    def lacks(self, payload: Payload) -> str:
        """Return why this worker cannot run a message's code, "" if it can or may; write it, if it is not there.

        Raises redis-py's errors.
        """
        if reason := self.unfit.get(payload.code):
            return reason
        with self._lock:
            if self.folder(payload) in self._written:
                return ""
            sources = self._shipping.fetch(payload.study)
            # Somebody may have laid down an earlier version again, which is signed too.
            if sources is None or sources.code != payload.code:
                return "its study's code is not in Redis"
            try:
                self._write(below(self._folder, payload.study, payload.code), sources.files)
            except UsageError as error:
                return str(error)
            except OSError as error:
                return f"its study's code cannot be written to this disk: {error.strerror}"
            self._written.add(self.folder(payload))
        return ""

    def _write(self, folder: Path, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            path = below(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            # In one step: a process may be reading it.
            with replacing(path) as file:
                file.write(content)
