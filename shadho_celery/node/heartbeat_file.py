"""The file by which others see that a worker lives. This module imports nothing heavy, like `stay`."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from shadho_celery.core.system import HEARTBEAT_FILE
from shadho_celery.errors import UsageError

log = logging.getLogger(__name__)


class HeartbeatFile:
    """File that a living worker touches every second, also while broker and Redis do not answer.

    A health check by the age of the file restarts a worker that hangs, and none because of an outage.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` is None for no file. Raises UsageError if the file cannot be written."""
        self._path, self._is_written = path, True
        self.touch()
        if path is not None and not self._is_written:
            raise UsageError(
                f"{HEARTBEAT_FILE}: {path} cannot be written; name a file in a folder in which this user may write"
            )

    @classmethod
    def configured(cls) -> HeartbeatFile:
        """Return the file that the environment names. Raises UsageError if it cannot be written."""
        path = os.environ.get(HEARTBEAT_FILE)
        return cls(Path(path).absolute() if path else None)

    def touch(self) -> None:
        """Set the time of the file to now, by the clock of its file system. If that fails, log it once."""
        if self._path is None:
            return
        try:
            self._path.touch()
            self._is_written = True
        except OSError as error:
            if self._is_written:
                log.warning("%s cannot be touched: %s", self._path, error.strerror)
            self._is_written = False

    def remove(self) -> None:
        """Remove the file, because the worker ends."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
