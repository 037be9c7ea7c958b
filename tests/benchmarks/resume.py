"""How long a study of N finished trials takes to resume: ``python tests/benchmarks/resume.py [TRIALS ...]``.

By sampler and policy: seconds to read and understand the history (`open_study` and `make_scheduler`), of them those for
reading alone. With ``--launch`` also seconds from the start of the command to the first new trial being sent, in
embedded mode.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from hyperopt import hp

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.executors.inline import InlineExecutor
from shadho_celery.scheduler.build import make_scheduler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.limits import Limits
from shadho_celery.study.open import open_study

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

MODULE = """
import sys
sys.path.insert(0, {here!r})
from resume import SPACE

def objective(params):
    return 0.5
"""


def build(url: str, module: str, trials: int) -> None:
    """A store with one study of so many finished trials."""
    space = compile_space(SPACE)
    subspaces = split(space)
    generator = np.random.default_rng(0)
    with closing(SqlStore(url)) as store:
        study = open_study(store, space.describe(), module=module, name="long", seed=0)
        per_subspace = -(-trials // len(subspaces))
        drawn = {s.name: s.sample(generator, per_subspace) for s in subspaces}
        names = [s.name for s in subspaces]
        made = [finished(number, names, drawn, generator) for number in range(trials)]
        for start in range(0, trials, 5_000):
            store.write(study.record.key, 1, time.time(), new=made[start : start + 5_000])
        store.unlock(study.record.key, 1)


def finished(number: int, names: list[str], drawn: dict[str, Any], generator: np.random.Generator) -> Trial:
    name = names[number % len(names)]
    params = drawn[name][number // len(names)]
    seconds = float(np.exp(generator.normal(number % len(names), 0.5)))
    failed = generator.random() < 0.02
    loss = None if failed else float(sum(abs(float(v)) for v in params.values()) % 7 + generator.normal(0, 0.1))
    outcome = Outcome(
        state=TrialState.FAILED if failed else TrialState.COMPLETE,
        loss=loss,
        error="Traceback\nValueError: no" if failed else None,
        seconds=seconds,
        memory=int(generator.integers(10**8, 10**9)),
    )
    return Trial(
        number=number,
        subspace=name,
        params=params,
        seed=number,
        state=outcome.state,
        attempt=1,
        compute_class=CLASSES[int(generator.integers(len(CLASSES)))],
        outcome=outcome,
        host="here",
        asked_at=1.7e9 + number,
        started_at=1.7e9 + number,
        finished_at=1.7e9 + number + seconds,
    )


def take_up(url: str, module: str, trials: int, sampler: str, policy: str) -> tuple[float, float, float]:
    """Seconds to read the history, to read and understand it, and to draw the next trial."""
    space = compile_space(SPACE)
    began = time.perf_counter()
    with closing(SqlStore(url)) as store:
        study = open_study(store, space.describe(), module=module, resume=True)
        read = time.perf_counter()
        executor = InlineExecutor(lambda params: 0.5, space.evaluate)
        settings = StudySettings(sampler=sampler, policy=policy)
        scheduler = make_scheduler(space, study, executor, Limits(trials=trials + 1), settings)
        understood = time.perf_counter()
        scheduler.turn()
        drawn = time.perf_counter()
        study.close()
    return read - began, understood - began, drawn - understood


def launch(folder: Path, url: str, trials: int, sampler: str, policy: str) -> float:
    """Seconds from the command's start until the store has its first trial as sent; the study is then left."""
    words = [sys.executable, "-m", "shadho_celery.launch", "long_study", "--resume", "--trials", str(trials + 10**6)]
    words += ["--sampler", sampler, "--policy", policy, "--store", url]
    with closing(sqlite3.connect(folder / "s.db")) as before:
        [attempts] = before.execute("select sum(attempt) from trials")
        began = time.perf_counter()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            while list(before.execute("select sum(attempt) from trials")) == [attempts]:
                if process.poll() is not None:
                    raise SystemExit((folder / "log").read_text())
                time.sleep(0.01)
            return time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trials", nargs="*", type=int, default=SIZES)
    parser.add_argument("--launch", action="store_true")
    given = parser.parse_args()
    for trials in given.trials:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            url = f"sqlite:///{folder}/s.db"
            here = str(Path(__file__).parent)
            (folder / "long_study.py").write_text(MODULE.format(here=here))
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
            )
            build(url, "long_study", trials)
            for sampler, policy in CHOICES:
                read, understood, drawn = take_up(url, "long_study", trials, sampler, policy)
                line = f"{trials:7} trials, {sampler:6} {policy:5}: read {read:5.2f} s, understood {understood:5.2f} s"
                line += f", first turn {drawn:.2f} s"
                if given.launch:
                    line += (
                        f"; from the command to the first trial {launch(folder, url, trials, sampler, policy):.2f} s"
                    )
                print(line, flush=True)


if __name__ == "__main__":
    main()
