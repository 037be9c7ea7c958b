"""How long a study takes to start and to end: ``python tests/benchmarks/start.py [--kinds plain svm torch]``.

The unit is the time of ``python -c "import hyperopt"``, measured before each run. From the command to its first line,
to the line that names the study, to the first trial's start and to its end; and from the last trial's end to the
prompt. For a plain study, for tasks.svm, and for a study that imports torch; with workers of its own (embedded), and
beside a waiting worker that has run the study before. A study's own libraries are added to the goals of its start:
what their import takes after hyperopt's.
"""

from __future__ import annotations

import compileall
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from figures import ROOT, finish, goal, make_parser, show
from workers import await_workers, lent_redis, python

PLAIN = """
from hyperopt import hp
SPACE = {"x": hp.uniform("x", 0, 1)}
def objective(params):
    return params["x"]
"""

#: study by its kind: module, text of its file, and the libraries that it imports besides hyperopt
KINDS: Mapping[str, tuple[str, str, str]] = {
    "plain": ("plain", PLAIN, "hyperopt"),
    "svm": ("tasks.svm", "", "tasks.svm"),
    "torch": ("with_torch", f"import torch\n{PLAIN}", "torch"),
}
STAGES = ("first line", "study named", "first trial begun", "first trial ended", "prompt after the last result")

#: goals of the first trial's start, by place, and of the prompt, in units
BEGUN = {"embedded": 1.5, "fleet": 0.7}
PROMPT = 0.15


def seconds_of(code: str, folder: Path) -> float:
    """Seconds that an interpreter takes for `code`."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return time.monotonic() - began


def stages(folder: Path, environment: Mapping[str, str], module: str, trials: int) -> list[float]:
    """Run a study, and return the seconds of each of STAGES."""
    store = folder / f"{uuid.uuid4().hex}.db"
    words = ["-u", "-m", "shadho_celery", "run", module, "--trials", str(trials), "--store", f"sqlite:///{store}"]
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **environment}
    command = [sys.executable, *words]
    began = time.time()
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        lines = [(time.time(), line.decode()) for line in process.stdout]
        code, ended = process.wait(), time.time()
    if code:
        raise SystemExit("".join(line for _, line in lines))
    named = next(at for at, line in lines if re.match(r"study \S+ \(seed", line))
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        query = "select min(started_at), min(finished_at), max(finished_at) from trials"
        first_begun, first_ended, last_ended = connection.execute(query).fetchone()
    return [lines[0][0] - began, named - began, first_begun - began, first_ended - began, ended - last_ended]


@contextmanager
def waiting_worker(folder: Path, url: str, modules: Sequence[str]) -> Iterator[dict[str, str]]:
    """Start a worker of two slots. Yields the variables with its servers, once it is ready."""
    environment = {"CELERY_BROKER_URL": url, "SHADHO_REDIS_URL": url, "CUDA_VISIBLE_DEVICES": ""}
    words = [word for module in modules for word in ("--import", module)]
    with python(folder, environment, "-m", "shadho_celery.worker", "--class", "cpu", "--slots", "2", *words):
        await_workers(url, ["cpu"])
        yield environment


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="studies [all]")
    parser.add_argument("--places", nargs="+", choices=BEGUN, default=[*BEGUN], help="workers [both]")
    parser.add_argument("--trials", type=int, default=4, help="trials of a study [4]")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each study, by turns [3]")
    given = parser.parse_args()
    if sys.dont_write_bytecode:  # as pip does when it installs; else each process would compile the package
        for folder_of_code in ("shadho_celery", "tasks"):
            compileall.compile_dir(ROOT / folder_of_code, quiet=2)

    runs: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    units: list[float] = []
    own: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        (folder / "tasks").symlink_to(ROOT / "tasks")
        for module, text, _ in (KINDS[kind] for kind in given.kinds):
            if text:
                (folder / f"{module}.py").write_text(text)
        environments: dict[str, dict[str, str]] = {"embedded": {}}
        modules = [KINDS[kind][0] for kind in given.kinds]
        if "fleet" in given.places:
            url = opened.enter_context(lent_redis())
            environments["fleet"] = opened.enter_context(waiting_worker(folder, url, modules))
            for module in modules:
                stages(folder, environments["fleet"], module, given.trials)
        for _ in range(given.repeats):
            for kind in given.kinds:
                module, _, libraries = KINDS[kind]
                for place in given.places:
                    unit = seconds_of("import hyperopt", folder)
                    units.append(unit)
                    own[kind].append(seconds_of(f"import hyperopt, {libraries}", folder) / unit - 1)
                    found = stages(folder, environments[place], module, given.trials)
                    runs[place, kind].append([seconds / unit for seconds in found])

    figures: dict[str, Any] = {"unit_seconds": units, "own_libraries": {}}
    goals: dict[str, dict[str, Any]] = {}
    rows = {}
    for (place, kind), found in runs.items():
        medians = dict(zip(STAGES, map(statistics.median, zip(*found, strict=True)), strict=True))
        figures[f"{place} {kind}"] = medians
        rows[f"{place} {kind}"] = {stage: f"{value:.2f}" for stage, value in medians.items()}
        extra = figures["own_libraries"][kind] = max(0.0, statistics.median(own[kind]))
        begun = medians["first trial begun"] - (0.0 if kind == "plain" else extra)
        goals[f"{place} {kind}: first trial begun, less its own libraries"] = goal(begun, at_most=BEGUN[place])
        goals[f"{place} {kind}: prompt"] = goal(medians["prompt after the last result"], at_most=PROMPT)
    show(rows, "study", f"units of {statistics.median(units):.2f} s, those of import hyperopt")
    finish(figures, goals, vars(given))


if __name__ == "__main__":
    main()
