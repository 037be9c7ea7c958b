"""Code of a worker's study modules: the versions that its processes have imported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from shadho_celery.core.code import CodeVersion
from shadho_celery.objective.sources import DiskWatch

log = logging.getLogger(__name__)


class Codes:
    """Versions of a worker's study modules. `follow` is for one thread, the other methods for any.

    A version is known from the newest process that has imported the module, until one of its files is edited: nobody
    knows then what the next process will find.
    """

    def __init__(self) -> None:
        self._known: dict[str, CodeVersion] = {}
        #: by slot, what its process had imported at the last look
        self._seen: dict[int, Mapping[str, CodeVersion]] = {}
        self._disk = DiskWatch()
        self._lock = threading.Lock()

    @property
    def known(self) -> dict[str, CodeVersion]:
        """The known versions by module."""
        with self._lock:
            return dict(self._known)

    def learn(self, codes: Mapping[str, CodeVersion]) -> None:
        """Note what a new process has imported; log what it could not import."""
        with self._lock:
            for module, code in codes.items():
                if code.problem and self._known.get(module) != code:
                    log.warning("no trials of %s run here until that is fixed: %s", module, code.problem)
                self._known[module] = code

    def follow(self, imported: Sequence[Mapping[str, CodeVersion]]) -> None:
        """Learn what each slot's process has `imported`, and forget the versions whose files were edited."""
        for slot, codes in enumerate(imported):
            if codes and codes is not self._seen.get(slot):
                self._seen[slot] = codes
                self.learn(codes)
        edited = {module: path for module, code in self.known.items() if (path := self._disk.edited(code))}
        with self._lock:
            for module, path in edited.items():
                log.info("%s was edited: trials for its new version get new processes", path)
                del self._known[module]

    def lacks(self, module: str, digest: str) -> str:
        """Return why trials for the code with this digest cannot run here; "" if they can, or that is not known."""
        code = self.known.get(module)
        if code is None or code.is_usable(digest):
            return ""
        return code.problem or f"{module} has version {code.digest} here, and they are for version {digest}"
