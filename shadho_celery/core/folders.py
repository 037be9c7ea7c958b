"""Folders that trials leave below a folder of checkpoints: their files, those that are not needed, and their deletion.

A set of trials is a text of bits: bit N, the lowest of each byte first, stands for trial N. The functions follow no
links, and neither read nor delete anything outside of the folder of checkpoints.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from shadho_celery.core.files import below
from shadho_celery.core.trial import Bytes
from shadho_celery.errors import UsageError

#: maximum bytes of a piece of a file, and of the part of a file of which one digest is made
MAX_PIECE, MAX_DIGESTED = 2**20, 2**26

#: maximum bytes of a path; a longer one cannot be opened
MAX_PATH = 4096


class LeftFile(Struct, frozen=True):
    """A file in the folder of a trial."""

    #: path below the folder, which need not be text
    path: Annotated[bytes, Meta(min_length=1, max_length=MAX_PATH)]
    size: Bytes


def files_in(folder: Path) -> Iterator[LeftFile]:
    """Yield the regular files in a folder and below it. Links are left out, and a missing folder has no files."""
    top = os.fsencode(folder)
    for here, _, names in os.walk(top):
        for name in names:
            with suppress(OSError):
                found = os.lstat(os.path.join(here, name))  # noqa: PTH118 -- a Path has no bytes
                if stat.S_ISREG(found.st_mode):
                    yield LeftFile(os.path.relpath(os.path.join(here, name), top), found.st_size)  # noqa: PTH118


def read_part(root: Path, folder: str, path: bytes, start: int, size: int) -> bytes:
    """Return `size` bytes of a file from the position `start`, or fewer at its end.

    The file is at `path` below the `folder` below `root`. Raises UsageError if that leads out of `root`, and OSError if
    it is no regular file or cannot be read.
    """
    place = below(root, folder, os.fsdecode(path))
    # A named pipe must not block.
    with os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        file.seek(start)
        return file.read(size)


def digest(data: bytes) -> bytes:
    """Return the digest by which a part of a file is compared with its copy."""
    return blake2b(data, digest_size=32).digest()


def unneeded_folders(root: Path, study: str, unneeded: bytes | None, in_use: Collection[int] = ()) -> list[Path]:
    """Return the folders of the `unneeded` trials of a study, except of those `in_use`; None means the whole study.

    Raises UsageError if the study's folder leads out of `root`.
    """
    folder = below(root, study)
    if unneeded is None:
        return [folder] if folder.is_dir() and not in_use else []
    names = [each.name for each in folder.iterdir() if not each.is_symlink()] if folder.is_dir() else []
    numbers = sorted({int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 16})
    return [
        folder / str(number)
        for number in numbers
        if number < 8 * len(unneeded) and unneeded[number // 8] >> number % 8 & 1 and number not in in_use
    ]


def delete(root: Path, folder: Path) -> None:
    """Delete a folder below `root`, as far as this is possible. A link is neither followed nor deleted."""
    with suppress(UsageError):
        shutil.rmtree(below(root, *folder.relative_to(root).parts), ignore_errors=True)
