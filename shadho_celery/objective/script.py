"""Functions for a script that runs as the command of a trial: its params, reports, stop flag and checkpoints.

They use files whose paths are in environment variables, so they also work in a child process of the command. In a
script that is run outside of a trial, there are no params, a report is printed, and nothing stops the script. To keep
the start of scripts short, this module imports little.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

#: JSON file with the values of a command's trial, in the shape that a function gets
PARAMS = "SHADHO_PARAMS"
#: folder of the checkpoints of a command's trial; a later attempt on the same disk finds them there
CHECKPOINT_DIR = "SHADHO_CHECKPOINT_DIR"
#: file to which a command may append reports, as lines of JSON
REPORTS = "SHADHO_REPORTS"
#: path of a file that exists once a command's trial should stop
STOP = "SHADHO_STOP"
#: name of a file beside that of PARAMS for the result of the trial, which is preferred to what is printed or reported
RESULT = "performance.json"
#: name of a file beside that of STOP that exists once `should_stop` was called
WATCHED = f"{STOP}.watched"


def params() -> Any:
    """Return the params of the trial in the shape of the space; {} outside of a trial."""
    if (path := os.environ.get(PARAMS)) is None:
        return {}
    return json.loads(Path(path).read_text(encoding="utf-8"))


def report(step: int, loss: float | Mapping[str, float]) -> None:
    """Report the loss at `step`, as `Context.report` does. Without another result, the last report is the result."""
    told = {name: float(each) for name, each in (loss if isinstance(loss, Mapping) else {"loss": loss}).items()}
    losses: dict[str, Any] = {"losses": told} if isinstance(loss, Mapping) else {**told}
    # A step with a fraction is written as it is, so that the trial fails with an error that shows the line.
    line = json.dumps({"step": int(step) if step == int(step) else float(step), **losses})
    path = os.environ.get(REPORTS)
    with nullcontext(sys.stdout) if path is None else Path(path).open("a", encoding="utf-8") as file:
        print(line, file=file, flush=True)


def should_stop() -> bool:
    """Return whether the trial should stop, as `Context.should_stop` does; False outside of a trial.

    A command that has called this gets SIGTERM only some time after it should stop; other commands get it at once.
    """
    if (path := os.environ.get(STOP)) is None:
        return False
    Path(path).with_name(WATCHED).touch()
    return Path(path).exists()


def checkpoint_dir() -> Path:
    """Return the folder of the trial's checkpoints; a temporary folder outside of a trial."""
    if CHECKPOINT_DIR not in os.environ:
        # Imported here, because trials do not need it.
        from tempfile import mkdtemp

        os.environ[CHECKPOINT_DIR] = mkdtemp(prefix="shadho-")
    return Path(os.environ[CHECKPOINT_DIR])
