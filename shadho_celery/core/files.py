"""Atomic replacement of a file."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

#: suffix of the temporary name of a file that is being written
PART = ".part"


@contextmanager
def replacing(target: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces the file `target` at the end of the block.

    An existing `target` is unchanged until then, and after an error: a full disk or a killed process does not destroy
    it. `mode` are the permissions of the new file, by default those of the existing file, or of any new file. If
    `target` is a link, the file that it leads to is replaced. A device or a pipe cannot be replaced, so it is written
    to. Raises OSError.
    """
    target = target.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    if mode is None and target.exists():
        mode = stat.S_IMODE(target.stat().st_mode)
    # In the same folder, because a rename is atomic only within a file system. A file name has at most 255 bytes.
    part = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}{PART}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        if mode is not None:
            part.chmod(mode)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
