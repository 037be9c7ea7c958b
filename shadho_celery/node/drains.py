"""Which drain a worker obeys: the latest that it has seen, also before it was restarted."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from shadho_celery.core.files import replacing
from shadho_celery.transport.drains import MAX_DRAIN, Drain, Drains

log = logging.getLogger(__name__)

#: folder, below a worker's folder, with the latest record of each place
FOLDER = Path(".shadho/drains")


class Obeyed:
    """The record that the workers of one place obey.

    An older record in Redis is refused: somebody has put it back. A record that is missing changes nothing.
    """

    def __init__(self, drains: Drains, place: str, folder: Path | None = None) -> None:
        """Keep the record in `folder`, so that a restarted worker knows it. With None, only keep it in memory."""
        self._drains, self._place = drains, place
        # A place may have characters that a file's name cannot have.
        name = hashlib.blake2b(place.encode(), digest_size=16).hexdigest()
        self._file = None if folder is None else folder / name
        #: the latest record; None before there is one
        self.latest: Drain | None = drains.read(place, self._kept())
        self._has_warned = self._has_failed = False

    @property
    def drain(self) -> Drain | None:
        """Who has drained the worker; None if it is not drained."""
        return self.latest if self.latest is not None and self.latest.is_drained else None

    def follow(self) -> None:
        """Read the record in Redis, and obey it if it is new. Raises redis-py's errors."""
        text = self._drains.text(self._place)
        found = self._drains.read(self._place, text)
        before = 0 if self.latest is None else self.latest.sequence
        if found is None or text is None or found.sequence == before:
            return
        if found.sequence > before:
            self.latest = found
            self._keep(text)
        elif not self._has_warned:
            self._has_warned = True
            log.warning("an old drain or undrain of this worker was put back into Redis; it is refused")

    def _kept(self) -> str | None:
        if self._file is None:
            return None
        try:
            with self._file.open(encoding="utf-8") as file:
                return file.read(MAX_DRAIN + 1)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read, so an old drain may be obeyed: %s", self._file, error)
            return None

    def _keep(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._file) as file:
                file.write(text.encode())
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning("%s cannot be written, so a restarted worker may obey an old drain: %s", self._file, error)
