"""Functions for a script that runs as a command: its params, reports, stop flag and checkpoints.

They use files that environment variables name, so they also work in a child process of the command. In a script that
runs alone, there are no params, a report is printed, and nothing stops it. This module imports little, because scripts
import it for these functions only.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

#: environment variables with the path of a JSON file with the values of the trial, of the file to which reports are
#: appended, of a file that exists once the trial should stop, and of the folder of the checkpoints
PARAMS, REPORTS, STOP = "SHADHO_PARAMS", "SHADHO_REPORTS", "SHADHO_STOP"
CHECKPOINT_DIR = "SHADHO_CHECKPOINT_DIR"
#: name of a file beside that of STOP that exists once `should_stop` was called
WATCHED = f"{STOP}.watched"


def params() -> Any:
    """Return the values of the trial in the shape of the space; {} in a script that runs alone."""
    if (path := os.environ.get(PARAMS)) is None:
        return {}
    return json.loads(Path(path).read_text(encoding="utf-8"))


def report(step: int, loss: float) -> None:
    """Report the loss at `step`, as `Context.report` does. The last report is the result if there is no other one."""
    # A step that is not whole is refused with its line.
    line = json.dumps({"step": int(step) if step == int(step) else float(step), "loss": float(loss)}) + "\n"
    if (path := os.environ.get(REPORTS)) is None:
        sys.stdout.write(line)
        sys.stdout.flush()
        return
    with open(path, "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(line)


def should_stop() -> bool:
    """Return whether the trial should stop, as `Context.should_stop` does; False in a script that runs alone.

    A command that calls this gets time to return before it gets SIGTERM.
    """
    path = os.environ.get(STOP)
    if path is None:
        return False
    _watch(path)
    return Path(path).exists()


def checkpoint_dir() -> Path:
    """Return the folder of the trial's checkpoints; a temporary folder in a script that runs alone."""
    return Path(os.environ.get(CHECKPOINT_DIR) or _temporary())


@cache
def _watch(path: str) -> None:
    Path(path).with_name(WATCHED).touch()


@cache
def _temporary() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="shadho-")
