"""Shipped code: the sources of studies that this worker got through Redis, each version in a folder of its own.

The folders are ``.shadho/code/STUDY_KEY/DIGEST``. A file that was changed there since is written again: the digest of
each version names its contents, and the slot's process compares them once more after the import.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from shadho_celery.core.payload import Payload
from shadho_celery.transport.shipping import Shipping


class ShippedCode:
    """Folders of shipped code. `folder` may be called from any thread."""

    def __init__(self, shipping: Shipping, folder: Path) -> None:
        """`folder` is that of all studies."""
        self._shipping = shipping
        self._folder = folder
        #: folders that this worker has written
        self._written: set[Path] = set()
        self._lock = threading.Lock()

    def folder(self, payload: Payload) -> Path | None:
        """Return the folder with the code of a message; None while Redis does not have it.

        Raises OSError, and redis-py's errors.
        """
        folder = self._folder / payload.study / payload.code
        with self._lock:
            if folder in self._written and folder.is_dir():
                return folder
            sources = self._shipping.fetch(payload.study)
            if sources is None or sources.code != payload.code:
                # Not there yet; or somebody has written an earlier version again, which is signed too.
                return None
            for name, content in sources.files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                # In one step: a process may be reading it.
                new = path.with_suffix(f".{os.getpid()}")
                new.write_bytes(content)
                new.replace(path)
            self._written.add(folder)
        return folder
