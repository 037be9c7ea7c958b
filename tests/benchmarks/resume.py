"""What a long study costs: ``python tests/benchmarks/resume.py [TRIALS ...]``, ``--growth [--sampler NAME]``.

How long a study of N finished trials takes to resume, by sampler and policy: seconds to read and understand the history
(`open_study` and `make_scheduler`), of them those for reading alone. With ``--memory`` instead, in JSON, what a
scheduler's process has resident after the resumption of a study with 30 metrics a trial.

With ``--growth`` instead, CPU of the scheduler by trial as one study grows to N trials (100,000, five minutes). Its
trials take no time: the scheduler, its sampler and its store have the process to themselves. CPU is measured over
blocks of trials, each divided by the CPU that the same loop took within the block, because a machine may become slower
or faster meanwhile. The goal compares the later blocks with the first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from figures import ROOT, calibration, goal, make_parser
from hyperopt import hp

from shadho_celery import minimize
from shadho_celery.core.settings import StudySettings
from shadho_celery.scheduler.executors import InlineExecutor
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits

SIZES = (5_000, 100_000)
CLASSES = ("gpu_large", "gpu_small", "cpu")
CHOICES = [("random", "cost"), ("random", "paper"), ("random", "fifo"), ("tpe", "cost"), ("tpe", "paper")]

#: four subspaces of three to five labels
SPACE = hp.choice(
    "model",
    [
        {
            "name": "net",
            "rate": hp.loguniform("rate", -9, 0),
            "width": hp.quniform("width", 16, 512, 16),
            "act": hp.choice("act", ["relu", "tanh"]),
        },
        {"name": "forest", "trees": hp.randint("trees", 10, 500), "depth": hp.randint("depth", 20)},
        {"name": "svm", "C": hp.loguniform("C", -5, 10), "gamma": hp.loguniform("gamma", -10, 3)},
    ],
)

#: the last trials of the blocks that are compared, as far as the study has so many, and the trials of a block
ENDS, BLOCK = (1_500, 28_000, 100_000), 1_000
#: trials between two passes of the loop for calibration
PASSES = 20

GROWING = {
    "rate": hp.loguniform("rate", -7, 0),
    "decay": hp.loguniform("decay", -10, -2),
    "depth": hp.randint("depth", 2, 20),
    "solver": hp.choice("solver", ["adam", "sgd", "lion"]),
}


def build(url: str, module: str, trials: int, metrics: int = 0) -> None:
    """A store with one study of so many finished trials: rows of the real tables, inserted in bulk."""
    space = compile_space(SPACE)
    subspaces = split(space)
    generator = np.random.default_rng(0)
    with closing(SqlStore(url)) as store:
        study = open_study(store, space.describe(), module=module, name="long", seed=0)
        per_subspace = -(-trials // len(subspaces))
        drawn = {s.name: [json.dumps(params) for params in s.sample(generator, per_subspace)] for s in subspaces}
        rows = (row(number, list(drawn), drawn, generator, metrics) for number in range(trials))
        first = row(0, list(drawn), drawn, generator, metrics)
        names, places = ", ".join(["study", *first]), ", ".join("?" * (len(first) + 1))
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            for part in iter(lambda: [(study.record.key, *each.values()) for each in islice(rows, 10_000)], []):
                connection.executemany(f"INSERT INTO trials ({names}) VALUES ({places})", part)
                connection.commit()
        store.unlock(study.record.key, 1)


def row(
    number: int, names: list[str], drawn: dict[str, list[str]], generator: np.random.Generator, metrics: int
) -> dict[str, Any]:
    name = names[number % len(names)]
    chance, noise, size, place = generator.random(4).tolist()
    failed = chance < 0.02
    seconds = math.exp(number % len(names) + noise - 0.5)
    values = ", ".join(f'"metric_{each:02}": {noise + each!r}' for each in range(metrics))
    return {
        "number": number,
        "subspace": name,
        "params": drawn[name][number // len(names)],
        "seed": number,
        "state": "FAILED" if failed else "COMPLETE",
        "attempt": 1,
        "lost": 0,
        "compute_class": CLASSES[int(3 * place)],
        "loss": None if failed else 7 * size,
        "metrics": f"{{{values}}}",
        "error": "Traceback\nValueError: no" if failed else None,
        "host": "here",
        "asked_at": 1.7e9 + number,
        "started_at": 1.7e9 + number,
        "finished_at": 1.7e9 + number + seconds,
        "seconds": seconds,
        "memory": int(1e8 + 9e8 * size),
        "slots": 1,
    }


def take_up(url: str, module: str, trials: int, sampler: str, policy: str, more: int = 1) -> tuple[float, float, float]:
    """Seconds to read the history, to read and understand it, and to draw and run the next trials."""
    space = compile_space(SPACE)
    began = time.perf_counter()
    with closing(SqlStore(url)) as store:
        study = open_study(store, space.describe(), module=module, resume=True)
        read = time.perf_counter()
        executor = InlineExecutor(lambda params: 0.5, space.evaluate)
        settings = StudySettings(sampler=sampler, policy=policy)
        scheduler = make_scheduler(Plan.of(space, settings, Limits(trials=trials + more)), study, executor)
        understood = time.perf_counter()
        for _ in range(more):
            scheduler.turn()
        drawn = time.perf_counter()
        study.close()
    return read - began, understood - began, drawn - understood


def remembered(url: str, module: str, trials: int) -> dict[str, float]:
    """Resume in this process, as a scheduler does, and run some trials; seconds, and MiB that are resident then."""
    # What the command imports is resident too.
    import shadho_celery.cli.run  # noqa: F401

    bare, looped = resident("VmRSS"), calibration()
    read, understood, _ = take_up(url, module, trials, "random", "cost", more=500)
    return {
        "trials": trials,
        "calibration_seconds": looped,
        "read_seconds": read,
        "resume_seconds": understood,
        "bare_mib": bare,
        "resident_mib": resident("VmRSS"),
        "peak_mib": resident("VmHWM"),
    }


def resident(kind: str) -> float:
    """MiB that this process has in memory, by its name in /proc."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1024


def loop() -> None:
    """Make some work for the interpreter, of always the same length."""
    found = 0
    for number in range(2_000):
        found += number * number % 7


def grow(limit: int, sampler: str) -> None:
    """Run the study and print a line for each block, then one JSON object with the goals."""
    ends = [end for end in ENDS if end < limit] + [limit]
    block = min(BLOCK, ends[0] // 2)
    seconds = dict.fromkeys(ends, 0.0)
    loops = dict.fromkeys(ends, 0.0)
    trials, last = 0, time.process_time()

    def objective(params: dict[str, float]) -> float:
        nonlocal trials, last
        trials += 1
        end = next(end for end in ends if trials <= end)
        if trials <= end - block:
            return (params["rate"] - 0.01) ** 2 + params["decay"]
        now = time.process_time()
        if trials > end - block + 1:
            seconds[end] += now - last
        if trials % PASSES == 0:
            loop()
            loops[end] += time.process_time() - now
        last = time.process_time()
        return (params["rate"] - 0.01) ** 2 + params["decay"]

    minimize(objective, GROWING, trials=limit, sampler=sampler, seed=0)
    rows = {}
    for end in ends:
        milliseconds, passes = seconds[end] / block * 1e3, loops[end] / (block / PASSES) * 1e3
        rows[end] = milliseconds / passes
        print(f"trials {end - block:>7,} to {end:>7,}: {milliseconds:6.2f} ms of CPU each; a loop {passes:.3f} ms")
    first, *later = ends
    print(json.dumps({f"{end} beside {first}": goal(rows[end] / rows[first], at_most=1.2) for end in later}))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trials", nargs="*", type=int, help="by default 5000 and 100000")
    parser.add_argument("--memory", action="store_true", help="resident memory with 30 metrics a trial instead")
    parser.add_argument("--growth", action="store_true", help="CPU of the scheduler as a study grows instead")
    parser.add_argument("--sampler", default="tpe", help="of --growth (default tpe)")
    parser.add_argument("--in-this-process", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.in_this_process:
        print(json.dumps(remembered(given.in_this_process, "long_study", given.trials[0])))
        return
    if given.growth:
        grow(given.trials[0] if given.trials else ENDS[-1], given.sampler)
        return
    for trials in given.trials or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            url = f"sqlite:///{folder}/s.db"
            build(url, "long_study", trials, metrics=30 if given.memory else 0)
            if given.memory:
                # In a process of its own.
                words = [sys.executable, __file__, str(trials), "--in-this-process", url]
                subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
                continue
            for sampler, policy in CHOICES:
                read, understood, drawn = take_up(url, "long_study", trials, sampler, policy)
                line = f"{trials:7} trials, {sampler:6} {policy:5}: read {read:5.2f} s, understood {understood:5.2f} s"
                print(f"{line}, first turn {drawn:.2f} s", flush=True)


if __name__ == "__main__":
    main()
