"""Storage of checkpoints: a token file in their folder, by which workers detect whether they share the folder.

The first worker that finds no token creates one. Workers that read the same token see the same folder.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
from contextlib import suppress
from pathlib import Path

#: file in the folder of checkpoints; the names of its other entries are keys of studies
TOKEN = ".storage"


def storage_id(folder: Path) -> str:
    """Return the id of the storage of a folder of checkpoints. Create the folder and its token if needed.

    Returns "" if the folder cannot be read or written, or if its file system has no hard links. The folder then counts
    as one that no other worker shares.
    """
    token = folder / TOKEN
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if not token.exists():
            _make(token)
        return _read(token)
    return ""


def _make(token: Path) -> None:
    """Create a token unless another process is faster. A hard link makes the file appear at once with its content."""
    draft = token.with_name(f"{TOKEN}.{uuid.uuid4().hex}")
    try:
        draft.write_text(uuid.uuid4().hex)
        with suppress(FileExistsError):
            os.link(draft, token)
    finally:
        draft.unlink(missing_ok=True)


def _read(token: Path) -> str:
    # Trials may write here, so this must not block on a named pipe.
    descriptor = os.open(token, os.O_RDONLY | os.O_NONBLOCK)
    try:
        content, found = os.read(descriptor, 100).decode("ascii", "replace"), os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not (stat.S_ISREG(found.st_mode) and re.fullmatch(r"[0-9a-f]{32}", content)):
        return ""
    # The id includes the inode number: a copy of the folder on another disk has the same token but is not shared.
    return f"{content}-{found.st_ino:x}"
