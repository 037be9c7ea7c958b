"""Copies of the folders that trials leave: from this folder, or from the disk of a fleet's worker."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shadho_celery.core.checks import one_line
from shadho_celery.core.files import CHECKPOINTS, PART, below, holds_files
from shadho_celery.core.folders import MAX_DIGESTED, MAX_PIECE, LeftFile, digest
from shadho_celery.core.units import size_text
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet.control import ListFolder, LogAnswer, ReadFile, WorkerDeed
from shadho_celery.node.logs import answered
from shadho_celery.results.trial import TrialResult
from shadho_celery.session.control import NoLog, TrialLogs

#: maximum number of files of a folder
MAX_FILES = 100_000


class TrialFolder:
    """The folder that a trial has left. Methods raise ServiceError if it cannot be read."""

    def __init__(self, workers: TrialLogs, study: str, trial: TrialResult) -> None:
        """Look for the folder here, then on `workers`. `study` is the study's key."""
        self._workers, self._study, self._trial = workers, study, trial
        self._number = trial.number if trial.origin is None else trial.origin
        self._is_here = holds_files(below(CHECKPOINTS, study, str(self._number)))
        self._source: str | None = None
        #: its files, in the order of their paths
        self.files: list[LeftFile] = []
        while more := self._ask(ListFolder(study=study, number=self._number, after=len(self.files))).files:
            self.files += more
            if len(self.files) > MAX_FILES:
                raise UsageError(f"the folder of trial {trial.number} has over {MAX_FILES:,} files; copy it by hand")
        #: bytes of all of them
        self.size = sum(file.size for file in self.files)

    def _ask(self, deed: WorkerDeed) -> Any:
        """Return the answer to a request about the folder."""
        host, number = self._trial.host, self._trial.number
        found: Any = None
        nothing = f"trial {number} has left no files, or they were deleted"
        if self._is_here:
            found = answered(CHECKPOINTS, deed, lambda study: ())
        elif self._workers.is_fleet:
            found = self._workers.from_workers(deed, host, self._source, f"the folder of trial {number}", nothing)
            if isinstance(found, NoLog):
                raise ServiceError(found.reason)
            found, self._source = found
        if found is None or isinstance(found, LogAnswer):
            where = f"its worker on {host} ran in another folder: run this command there, or give --redis"
            raise ServiceError(f"{nothing}, or {where}")
        return found

    def copy(self, file: LeftFile, target: Path, update: Callable[[int], object]) -> None:
        """Copy a file to `target`, which must not exist, and compare digests. `update` gets the bytes of each piece.

        Of a file that grows, its listed size is copied. Raises ServiceError if its content has changed, and OSError.
        """
        name = one_line(os.fsdecode(file.path))
        facts: dict[str, Any] = {"study": self._study, "number": self._number, "path": file.path}
        with target.open("xb") as copy:
            for start in range(0, file.size, MAX_PIECE):
                size = min(MAX_PIECE, file.size - start)
                data = self._ask(ReadFile(start=start, size=size, **facts)).data
                if len(data) != size:
                    raise ServiceError(f"{name} became shorter while it was fetched; fetch it again")
                copy.write(data)
                update(size)
        with target.open("rb") as copy:
            for start in range(0, file.size, MAX_DIGESTED):
                part = copy.read(MAX_DIGESTED)
                if self._ask(ReadFile(start=start, size=len(part), is_digest=True, **facts)).data != digest(part):
                    raise ServiceError(f"{name} was written while it was fetched; fetch it again")


def fetch(folder: TrialFolder, to: Path, update: Callable[[int], object]) -> None:
    """Copy the folder of a trial to the folder `to`, which is new or empty. It appears once it is complete.

    Raises UsageError if it cannot be written, and ServiceError if the trial's folder cannot be read.
    """
    try:
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise UsageError(f"{to} is not empty; give -o another folder")
        with _new_folder(to) as part:
            if (free := shutil.disk_usage(part).free) < folder.size:
                raise UsageError(f"the folder takes {size_text(folder.size)}, and {to} has room for {size_text(free)}")
            for file in folder.files:
                target = _inside(part, file.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                folder.copy(file, target, update)
    except OSError as error:
        raise UsageError(f"{to} cannot be written: {error.strerror}; nothing was left there") from None


def _inside(folder: Path, path: bytes) -> Path:
    """Return the place of a file below a new folder, in which there are no links. Raises UsageError for a bad path."""
    if b"\0" in path or {*path.split(b"/")} & {b"", b".", b".."}:
        raise UsageError(f"the worker sent the path {one_line(os.fsdecode(path))!r}, which leads out of the folder")
    return folder / os.fsdecode(path)


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` at the end of the block, and is deleted after an error."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}{PART}")
    part.mkdir()
    try:
        yield part
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
