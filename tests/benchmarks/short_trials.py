"""A study of short trials on two embedded workers, by `auto` and by random search: trials a second by progress."""

from __future__ import annotations

import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from figures import goal

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]

TRIALS, SLOTS = 5000, 2
#: `auto` beside random search, and its slowest part beside its fastest, from trial FIRST on
OF_RANDOM, FLAT, FIRST = 0.8, 0.8, 100
#: parts of the study whose rates are compared
PARTS = 5

STUDY = """
import time
from hyperopt import hp
SPACE = {"x": hp.uniform("x", -5, 10), "y": hp.uniform("y", 0, 15), "option": hp.choice("option", [0, 1, 2])}
def objective(params):
    time.sleep(0.01)
    return (params["x"] - 1) ** 2 + (params["y"] - 3) ** 2 + params["option"]
"""


def ends(sampler: str, seed: int, trials: int) -> list[float]:
    """Return the moments at which the trials of a study ended, in order."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "short_study.py").write_text(STUDY)
        command = [sys.executable, "-m", "shadho_celery.launch", "short_study", "--store", "sqlite:///trials.db"]
        settings = ["--trials", str(trials), "--sampler", sampler, "--seed", str(seed), "--workers", f"cpu={SLOTS}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [*command, *settings, "--no-speculation"], cwd=folder, env=environment, check=True, capture_output=True
        )
        with sqlite3.connect(Path(folder) / "trials.db") as store:
            return sorted(moment for (moment,) in store.execute("SELECT finished_at FROM trials"))


def rate(moments: list[float]) -> float:
    """Return trials a second between the first and the last of some ends."""
    return (len(moments) - 1) / (moments[-1] - moments[0])


def short(arguments: Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return trials a second by sampler, side by side; one at a time, whatever `processes`."""
    trials = 1500 if arguments.quick else TRIALS
    repeats = 1 if arguments.quick else 3
    figures: Json = {"random": [], "auto": [], "auto, by part": []}
    for seed in range(repeats):
        for sampler in ("random", "auto") if seed % 2 == 0 else ("auto", "random"):
            moments = ends(sampler, seed, trials)
            figures[sampler].append(rate(moments))
            if sampler == "auto":
                size = (trials - FIRST) // PARTS
                figures["auto, by part"].append(
                    [rate(moments[start : start + size]) for start in range(FIRST, FIRST + PARTS * size, size)]
                )
        print(f"trials/s: random {figures['random'][-1]:.0f}, auto {figures['auto'][-1]:.0f}", end="; ")
        print(f"from trial {FIRST}, by part:", " ".join(f"{part:.0f}" for part in figures["auto, by part"][-1]))
    of_random = statistics.median(ours / other for ours, other in zip(figures["auto"], figures["random"], strict=True))
    flat = statistics.median(min(parts) / max(parts) for parts in figures["auto, by part"])
    return figures, {
        "trials/s of auto, in those of random search": goal(of_random, at_least=OF_RANDOM),
        "trials/s of auto, slowest part in those of the fastest": goal(flat, at_least=FLAT),
    }
