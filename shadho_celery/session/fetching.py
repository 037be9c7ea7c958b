"""Copies of the folders that trials leave: from this folder, or from the disk of a fleet's worker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shadho_celery.core.checks import one_line
from shadho_celery.core.files import MAX_DIGESTED, MAX_FILES, MAX_PIECE, LeftFile
from shadho_celery.core.units import size_text
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet.control import LeftDeed, ListFolder, ReadFile, WorkerAnswer
from shadho_celery.results.trial import TrialResult
from shadho_celery.session.control import TrialLogs


class TrialFolder:
    """The folder that a trial has left. Methods raise ServiceError if it cannot be read."""

    def __init__(self, workers: TrialLogs, study: str, trial: TrialResult) -> None:
        """Look for the folder in the working directory, then on `workers`. `study` is the study's key."""
        number = trial.record.folder
        self._workers, self._trial = workers, trial
        self._facts: dict[str, Any] = {"study": study, "number": number}
        #: worker that has the folder; None if it is in the working directory
        self._source: str | None = None
        #: files in the folder
        self.files: list[LeftFile] = self._ask(ListFolder(**self._facts)).files
        if len(self.files) > MAX_FILES:
            raise UsageError(f"the folder of trial {trial.number} has over {MAX_FILES:,} files; copy it by hand")
        #: total bytes of these files
        self.size = sum(file.size for file in self.files)

    def _ask(self, deed: LeftDeed) -> WorkerAnswer:
        """Return the answer to a request about the folder."""
        of = f"trial {self._trial.number}"
        nothing = f"{of} has left no files, or they were deleted"
        answer, self._source = self._workers.ask(deed, self._trial.host, f"the folder of {of}", nothing, self._source)
        return answer

    def copy(self, file: LeftFile, target: Path, update: Callable[[int], object]) -> None:
        """Copy a file to `target`, which must not exist, and compare digests. `update` gets the bytes of each piece.

        If a file has grown since it was listed, only its listed size is copied. Raises ServiceError if its content has
        changed, and OSError.
        """
        facts, name = self._facts | {"path": file.path}, one_line(os.fsdecode(file.path))
        with target.open("x+b") as copy:
            for start in range(0, file.size, MAX_PIECE):
                size = min(MAX_PIECE, file.size - start)
                data = self._ask(ReadFile(start=start, size=size, **facts)).data
                if len(data) != size:
                    raise ServiceError(f"{name} became shorter while it was fetched; fetch it again")
                copy.write(data)
                update(size)
            copy.seek(0)
            for start in range(0, file.size, MAX_DIGESTED):
                part = copy.read(MAX_DIGESTED)
                there = self._ask(ReadFile(start=start, size=len(part), is_digest=True, **facts)).data
                if there != blake2b(part).digest():
                    raise ServiceError(f"{name} was written while it was fetched; fetch it again")


def fetch(folder: TrialFolder, to: Path, update: Callable[[int], object] = lambda size: None) -> None:
    """Copy the folder of a trial to the folder `to`, which is new or empty. `to` is complete, or unchanged.

    Raises UsageError if it cannot be written, and ServiceError if the trial's folder cannot be read.
    """
    try:
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise UsageError(f"{to} is not empty; give -o another folder")
        to.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".shadho", dir=to.parent) as temporary:
            part = Path(temporary, "part")
            part.mkdir()
            if (free := shutil.disk_usage(part).free) < folder.size:
                raise UsageError(f"the folder takes {size_text(folder.size)}, and {to} has room for {size_text(free)}")
            for file in folder.files:
                target = _inside(part, file.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                folder.copy(file, target, update)
            part.rename(to)
    except OSError as error:
        raise UsageError(f"{to} cannot be written: {error.strerror}; nothing was left there") from None


def _inside(folder: Path, path: bytes) -> Path:
    """Return the place of a file below a new folder, in which there are no links. Raises UsageError for a bad path."""
    if b"\0" in path or {*path.split(b"/")} & {b"", b".", b".."}:
        raise UsageError(f"the worker sent the path {one_line(os.fsdecode(path))!r}, which leads out of the folder")
    return folder / os.fsdecode(path)
