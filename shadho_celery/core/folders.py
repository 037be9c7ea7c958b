"""Folders below the working directory. In each of them, a study has a folder whose name is its key, which is unique
among all stores.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from functools import lru_cache
from pathlib import Path

from shadho_celery.errors import UsageError

#: checkpoints and logs
CHECKPOINTS = Path(".shadho/checkpoints")
#: code that studies have shipped to a worker
SHIPPED_CODE = Path(".shadho/code")
#: files of the embedded servers and workers of a study
EMBEDDED = Path(".shadho/embedded")
#: all of these folders
FOLDERS = (CHECKPOINTS, SHIPPED_CODE, EMBEDDED)

#: file that an embedded supervisor keeps locked while it lives
LOCK = "lock"
#: seconds to wait for that lock; a supervisor ends at most about three seconds after its scheduler
LOCK_SECONDS = 15.0


def new_key() -> str:
    """Return the key of a new study: 16 random hexadecimal digits."""
    return uuid.uuid4().hex[:16]


def below(root: Path, *parts: str) -> Path:
    """Return the path of `parts` below the folder `root`. The parts come from data, so they are not trusted.

    Raises UsageError if the path is outside of `root`, because of ``..`` or a link.
    """
    path = root.joinpath(*parts)
    top = os.path.realpath(root)
    try:
        real = os.path.realpath(path)
        is_outside = "\0" in str(path) or os.path.commonpath([top, real]) != top or real == top
    except ValueError:
        # A path cannot have an unpaired surrogate, and some versions of Python refuse NUL.
        is_outside = True
    if is_outside:
        raise UsageError(f"{str(path)!r} leads out of {root}; remove the link there, or do not use data of strangers")
    return path


@lru_cache(maxsize=1000)
def study_folder(root: Path, study: str) -> Path:
    """Return the folder of a study's checkpoints and logs below `root`. Raises like `below`.

    A process checks each folder once: a worker needs it several times per trial, and a check takes as long as all other
    work on a trial's message.
    """
    return below(root, study, "logs").parent


def is_locked(path: Path, seconds: float = 0.0) -> bool:
    """Return whether a live process still holds the lock of a file after `seconds`.

    It returns as soon as the lock is free. Returns False if that cannot be found out.
    """
    deadline = time.monotonic() + seconds
    while _is_locked(path):
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.02)
    return False


def _is_locked(path: Path) -> bool:
    try:
        # A link could lead elsewhere, and opening a pipe without a writer would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def holds_files(folder: Path) -> bool:
    """Return whether there is a regular file in a folder or below it. A missing or unreadable folder has none."""
    return any(Path(top, name).is_file() for top, _, names in os.walk(folder) for name in names)
