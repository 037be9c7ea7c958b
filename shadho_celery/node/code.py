"""Code that a worker can run: versions of its study modules, and sources that studies ship through Redis.

Shipped code has one folder per version, ``.shadho/code/STUDY_KEY/DIGEST``. The files of a command are copied from a
cache by their digests, ``.shadho/code/.inputs``. The slot's process compares the version's digest again after the
import. A version that cannot be imported, or whose files do not have its digest, is refused for a while and then
written again.

A token file in the folder of checkpoints shows workers whether they share that folder: workers that read the same token
share it. The first worker that finds no token creates one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shadho_celery.core.code import CodeVersion, FullDigest
from shadho_celery.core.files import STORAGE_TOKEN, below, replacing, study_folder
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Clock
from shadho_celery.errors import UsageError
from shadho_celery.fleet.channel import Shipping
from shadho_celery.objective.sources import DiskWatch
from shadho_celery.objective.study_file import form_of

log = logging.getLogger(__name__)

#: folder of the cache; a study's folder cannot have this name
INPUTS = ".inputs"
#: permissions of the cached files, which may be programs
READ_ONLY = 0o555
#: seconds after which a version that could not run here is tried again
AGAIN_SECONDS = 60.0


class ShippedCode:
    """Writes shipped code to folders, and remembers which versions cannot run on this worker. Any thread may call the
    methods.
    """

    def __init__(self, shipping: Shipping, folder: Path, clock: Clock) -> None:
        """`folder` contains the folders of all studies."""
        self._shipping = shipping
        self._folder = folder
        self._clock = clock
        #: folders that this worker has written, each with the name of the study's module
        self._written: set[Path] = set()
        #: digest of a version that cannot run on this worker -> the reason, and the time at which it was found
        self._unfit: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    @property
    def unfit(self) -> dict[str, str]:
        """Reasons why shipped versions cannot run on this worker, by digest. They expire after AGAIN_SECONDS."""
        now = self._clock.now()
        with self._lock:
            self._unfit = {code: each for code, each in self._unfit.items() if now - each[1] < AGAIN_SECONDS}
            return {code: reason for code, (reason, _) in self._unfit.items()}

    def refuse(self, payload: Payload, reason: str) -> None:
        """Record why the code of a message cannot run on this worker."""
        with self._lock:
            self._written.discard(self.folder(payload) / payload.module)
            self._unfit[payload.code] = reason, self._clock.now()

    def folder(self, payload: Payload) -> Path:
        """Return the folder for a message's code."""
        return self._folder / payload.study / payload.code

    def lacks(self, payload: Payload) -> str:
        """Return why this worker cannot run a message's code, or "" if it can. Write the code to its folder if needed.

        Raises redis-py's errors.
        """
        if reason := self.unfit.get(payload.code):
            return reason
        with self._lock:
            if (place := self.folder(payload) / payload.module) in self._written:
                return ""
            sources = self._shipping.fetch(payload.study)
            # Another client may have put back an earlier version, whose signature is valid too. A study that is not a
            # module, such as a function that is sent by value, is loaded from its file, which must be in the sources.
            is_sent = sources is not None and (payload.module in sources.files or form_of(payload.module) is None)
            if sources is None or sources.code != payload.code or not is_sent:
                return "its study's code is not in Redis"
            try:
                folder = below(self._folder, payload.study, payload.code)
                for name, digest in sources.inputs.items():
                    if not self._copy(below(folder, name), payload.study, digest):
                        return f"the file {name} of its study is not in Redis"
                for name, content in sources.files.items():
                    # A script must be executable, because it can be the program of a command. No other user may write
                    # to the files, because a function that is sent by value is not loaded from such a file.
                    _put(below(folder, name), content, 0o755 if content.startswith(b"#!") else 0o644)
            except UsageError as error:
                return str(error)
            except OSError as error:
                return f"its study's code cannot be written to this disk: {error.strerror}"
            self._written.add(place)
        return ""

    def _copy(self, path: Path, study: str, digest: FullDigest) -> bool:
        """Copy a file from the cache, after it was fetched if needed. Return False if Redis does not have it."""
        kept = self._folder / INPUTS / digest
        content = kept.read_bytes() if kept.is_file() else None
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            if (content := self._shipping.fetch_input(study, digest)) is None:
                return False
            _put(kept, content, READ_ONLY)
        _put(path, content, READ_ONLY)
        return True


def _put(path: Path, content: bytes, mode: int) -> None:
    """Write a file. It appears in one step, because a process may be reading the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode) as file:
        file.write(content)


class CodeGate:
    """Decides whether this worker has the code that a message needs. One thread calls `follow`; any thread may call the
    other methods.

    A module's known version is the one that the newest process has imported. It becomes unknown when one of the
    module's files is edited, because the next process imports the edited files.
    """

    def __init__(self, imports: Sequence[str], checkpoints: Path, shipped: ShippedCode | None) -> None:
        """`imports` are the modules whose objectives may run here; `shipped` manages shipped code; None refuses it."""
        self._imports, self._checkpoints, self._shipped = imports, checkpoints, shipped
        #: module -> its known version; a change replaces the whole mapping
        self.known: Mapping[str, CodeVersion] = {}
        #: slot -> versions, by module, that its process had imported at the last `follow`
        self._seen: dict[int, Mapping[str, CodeVersion]] = {}
        self._disk = DiskWatch()
        self._lock = threading.Lock()

    @property
    def facts(self) -> dict[str, object]:
        """Versions that this worker has, and shipped versions that it cannot run, as fields of its announcement."""
        return {"codes": {**self.known}, "unfit": {} if self._shipped is None else self._shipped.unfit}

    def _learn(self, codes: Mapping[str, CodeVersion]) -> None:
        """Record the versions that a new process has imported. Log the modules that it could not import."""
        with self._lock:
            for module, code in codes.items():
                if code.problem and self.known.get(module) != code:
                    log.warning("no trials of %s run here until this is fixed: %s", module, code.problem)
            self.known = {**self.known, **codes}

    def follow(self, imported: Sequence[Mapping[str, CodeVersion]]) -> None:
        """Learn the versions that each slot's process has `imported`, and forget versions whose files were edited."""
        for slot, codes in enumerate(imported):
            if codes and codes is not self._seen.get(slot):
                self._seen[slot] = codes
                self._learn(codes)
        for module, code in self.known.items():
            if path := self._disk.edited(code):
                log.info("%s was edited; trials of its new version get new processes", path)
                with self._lock:
                    self.known = {name: each for name, each in self.known.items() if name != module}

    def folder(self, payload: Payload) -> str:
        """Return the folder for the code of a message; "" for this machine's own modules."""
        return str(self._shipped.folder(payload)) if self._shipped is not None and payload.is_shipped else ""

    def lacks(self, payload: Payload) -> str:
        """Return why this worker cannot run a message's attempts, or "" if it can or this is not known yet.

        Raises redis-py's errors.
        """
        try:
            study_folder(self._checkpoints, payload.study)
        except UsageError as error:
            return str(error)
        if self._shipped is not None and payload.is_shipped:
            return self._shipped.lacks(payload)
        if payload.module not in self._imports:
            return f"this worker was not started with {payload.module}, only with {', '.join(self._imports)}"
        code = self.known.get(payload.module)
        if code is None or code.is_usable(payload.code):
            return ""
        versions = f"version {code.digest} here, but the trials need version {payload.code}"
        return code.problem or f"{payload.module} has {versions}"

    def refuse(self, payload: Payload, found: CodeVersion) -> str:
        """Record that a new process has found another version than a message needs. Return why it cannot be used."""
        reason = found.problem or "its code was edited meanwhile"
        if self._shipped is not None and payload.is_shipped:
            self._shipped.refuse(payload, reason)
            return reason
        self._learn({payload.module: found})
        return self.lacks(payload) or reason


def storage_id(folder: Path) -> str:
    """Return the id of the storage that contains a folder of checkpoints.

    Creates the folder, and the token file in it from which the id is made, if they are missing. Returns "" if the
    folder cannot be read or written, or if its file system has no hard links; the folder then counts as not shared.
    """
    token = folder / STORAGE_TOKEN
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if not token.exists():
            # Another process may be faster. The hard link makes the file appear complete, in one step.
            draft = token.with_name(f"{STORAGE_TOKEN}.{uuid.uuid4().hex}")
            try:
                draft.write_text(uuid.uuid4().hex)
                with suppress(FileExistsError):
                    os.link(draft, token)
            finally:
                draft.unlink(missing_ok=True)
        return _read(token)
    return ""


def _read(token: Path) -> str:
    # Trials may write to this folder, so reading must not block if the file is a named pipe.
    descriptor = os.open(token, os.O_RDONLY | os.O_NONBLOCK)
    try:
        content, found = os.read(descriptor, 100).decode("ascii", "replace"), os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not (stat.S_ISREG(found.st_mode) and re.fullmatch(r"[0-9a-f]{32}", content)):
        return ""
    # The id includes the inode number: a copy of the folder on another disk has the same token but is not shared.
    return f"{content}-{found.st_ino:x}"
