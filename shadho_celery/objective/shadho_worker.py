"""Copy of a module of the original SHADHO, for scripts that call ``shadho_worker.run(function)``.

This file is copied to the folder of an attempt. It runs in the Python of the command, in which this package may not be
installed.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def run(task: Callable[[Any], Any]) -> None:
    """Call `task` with the params of the trial, and write what it returns to the file of the result.

    `task` returns a number, or a dict with a loss.
    """
    returned = task(json.loads(Path("hyperparameters.json").read_text(encoding="utf-8")))
    result = {**returned} if isinstance(returned, Mapping) else {"loss": returned}
    text = json.dumps(result, default=lambda value: value.tolist())
    Path("performance.json").write_text(text, encoding="utf-8")
    with tarfile.open("out.tar.gz", "w:gz") as archive:
        archive.add("performance.json")
