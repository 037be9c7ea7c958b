"""Count what a trial passes: ``python tests/benchmarks/trial_path.py [--list] [CHECKOUT ...]``.

Modules and functions, of eight trials that run embedded, in one slot of one class. Every call of the package's own
functions is noted, with its moment, in scheduler, worker and runner (`sys.setprofile`); counted are those from the
third trial's start to the last one's end. Comprehensions belong to the function that they stand in, as from Python 3.12
on; the embedded supervisor is not asked.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parents[2]

#: code that is no function of its own
NOT_COUNTED = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>")

#: what every Python process of the run imports first
NOTES_CALLS = r"""
import os, sys, threading, time

PACKAGE = os.environ["TRIAL_PATH_PACKAGE"]
FOLDER = os.environ["TRIAL_PATH_FOLDER"]
seen = {}


def note(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(PACKAGE):
        return
    moment = int(time.time() * 100)
    if seen.get(code) == moment:
        return
    seen[code] = moment
    # Opened each time: the reaper closes every descriptor that it does not know.
    with open(os.path.join(FOLDER, str(os.getpid())), "ab", buffering=0) as file:
        file.write(f"{moment} {code.co_filename[len(PACKAGE):]} {code.co_firstlineno}:{code.co_qualname}\n".encode())


threading.setprofile(note)
sys.setprofile(note)
"""

STUDY = """
import time

from hyperopt import hp

SPACE = {"x": hp.uniform("x", 0, 1), "kind": hp.choice("kind", [{"a": hp.uniform("a", 0, 1)}, {"b": 1}])}
STUDY = {"sampler": "random"}


def objective(params, context):
    time.sleep(0.3)
    context.report(1, 2.0)
    return params["x"]
"""


def calls(checkout: Path, trials: int = 8) -> set[tuple[str, str]]:
    """Run the study on the package of `checkout`; (module, function) of what the trials passed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "notes").mkdir()
        (folder / "sitecustomize.py").write_text(NOTES_CALLS)
        (folder / "path_study.py").write_text(STUDY)
        words = ["path_study", "--trials", str(trials), "--seed", "0", "--workers", "one=1", "--json"]
        subprocess.run(
            [sys.executable, "-m", "shadho_celery.launch", *words],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": f"{folder}:{checkout.absolute()}",
                "TRIAL_PATH_PACKAGE": f"{checkout.absolute()}/shadho_celery/",
                "TRIAL_PATH_FOLDER": str(folder / "notes"),
            },
            capture_output=True,
            check=True,
        )
        with sqlite3.connect(folder / "shadho.db") as store:
            [(began,)] = store.execute("SELECT started_at FROM trials ORDER BY started_at LIMIT 1 OFFSET 2")
            [(ended,)] = store.execute("SELECT max(finished_at) FROM trials")
        store.close()
        found = set()
        for path in (folder / "notes").iterdir():
            for line in path.read_text().splitlines():
                moment, module, function = line.split(" ", 2)
                if began * 100 <= int(moment) <= ended * 100 + 1:
                    found.add((module, function))
        return {each for each in found if not each[1].endswith(NOT_COUNTED) and "supervisor" not in each[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="[default: this one]")
    parser.add_argument("--list", action="store_true", help="Name the functions of each module.")
    arguments = parser.parse_args()
    for checkout in arguments.checkouts or [HERE]:
        found = calls(checkout)
        modules = Counter(module for module, _ in found)
        print(f"{checkout}: {len(modules)} modules, {len(found)} functions")
        for module, number in sorted(modules.items()) if arguments.list else ():
            print(f"  {module:36s} {number:3d}  {', '.join(sorted(name for of, name in found if of == module))}")


if __name__ == "__main__":
    main()
