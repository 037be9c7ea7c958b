"""Folders that trials leave below a folder of checkpoints: their files, and the deletion of those that are not needed.

A set of trials is a text of bits: bit N, the lowest of each byte first, stands for trial N. The functions follow no
links, and neither read nor delete anything outside of the folder of checkpoints.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from shadho_celery.core.files import below
from shadho_celery.core.trial import Bytes

#: maximum bytes of a piece of a file, and of the part of a file of which one digest is made
MAX_PIECE, MAX_DIGESTED = 2**20, 2**26

#: maximum number of files of a folder that is fetched, so that their list fits in one answer
MAX_FILES = 1000

#: maximum bytes of a path; a longer one cannot be opened
MAX_PATH = 4096


#: name of the folder of a trial's checkpoints, or of that of an attempt beside it
_NAME = re.compile(r"(0|[1-9][0-9]{0,14})(\.attempt-[0-9]+\.[0-9]+)?")


class LeftFile(Struct, frozen=True):
    """A file in the folder of a trial."""

    #: path below the folder, which need not be text
    path: Annotated[bytes, Meta(min_length=1, max_length=MAX_PATH)]
    size: Bytes


def attempt_folder(checkpoints: str | Path, trial: int, attempt: int) -> Path:
    """Return the folder of an attempt of a command, which is beside the folder of the trial's checkpoints."""
    folder = Path(checkpoints).absolute()
    return folder.with_name(f"{folder.name}.attempt-{trial}.{attempt}")


def files_in(folder: Path) -> Iterator[LeftFile]:
    """Yield the regular files in a folder and below it. Links are left out, and a missing folder has no files."""
    for here, _, names in os.walk(folder):
        for path in [Path(here, name) for name in names]:
            with suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield LeftFile(os.fsencode(path.relative_to(folder)), found.st_size)


def read_part(root: Path, folder: str, path: bytes, start: int, size: int) -> bytes:
    """Return `size` bytes of a file from the position `start`, or fewer at its end.

    The file is at `path` below the `folder` below `root`. Raises UsageError if `path` leads out of the `folder` or this
    out of `root`, and OSError if it is no regular file or cannot be read.
    """
    file_path = below(below(root, folder), os.fsdecode(path))
    # A named pipe must not block.
    with os.fdopen(os.open(file_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        file.seek(start)
        return file.read(size)


def sweep(
    root: Path, study: str, unneeded: bytes | None, in_use: Collection[int] = (), *, is_sure: bool = True
) -> tuple[int, int]:
    """Delete the folders of the `unneeded` trials of a study; None means all of the study, unless a trial is in use.

    Return the number of the folders and the bytes in them. Unless `is_sure`, nothing is deleted. Folders of trials
    `in_use` are left. Raises UsageError if the study's folder leads out of `root`.
    """
    folder = below(root, study)
    found = [] if in_use else [folder]
    if unneeded is not None:
        numbers = {each: _number_of(each) for each in (folder.iterdir() if folder.is_dir() else ())}
        found = [
            each
            for each, n in numbers.items()
            if n not in in_use and n < 8 * len(unneeded) and unneeded[n // 8] >> n % 8 & 1
        ]
    found = [each for each in found if each.is_dir() and not (each.is_symlink() or folder.is_symlink())]
    sizes = {each: sum(file.size for file in files_in(each)) for each in found}
    for each in found if is_sure else ():
        shutil.rmtree(each, ignore_errors=True)
    # Folders of another user may still be there.
    done = [size for each, size in sizes.items() if not (is_sure and each.exists())]
    return len(done), sum(done)


def _number_of(folder: Path) -> int:
    """Return the number of the trial whose folder this may be; one that no trial has, if it is none."""
    return int(found[1]) if (found := _NAME.fullmatch(folder.name)) else sys.maxsize
