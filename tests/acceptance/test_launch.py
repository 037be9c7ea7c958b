"""A trial with a process in each of its slots is pruned; a rank fails, or is killed."""

from __future__ import annotations

import pytest
from acceptance.commands import Desk

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

#: Two ranks. In trial 1 rank 1 raises, and in the first attempt of trial 2 it is killed. Later trials are worse than
#: earlier ones, so that a pruner stops them.
STUDY = """
import os, signal, time
from hyperopt import hp
from torch import distributed

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"gpus": 2, "sampler": "random", "preload": ["torch"]}

def note(*words):
    with open("ranks.log", "a") as log:
        log.write(" ".join(map(str, words)) + "\\n")

def train(context):
    note("begins", context.trial, context.attempt, context.rank, os.getpid())
    if context.trial == 1 and context.rank == 1:
        raise RuntimeError("a rank's own error")
    if context.trial == 2 and context.attempt == 1 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.trial == 0:
        len(b"x" * 400_000_000)
    # Rank 0 reports nothing before the others are here.
    distributed.barrier()
    for step in range(1, 10):
        context.report(step, context.trial)
        time.sleep(0.05)
        if context.should_stop():
            break
    note("ends", context.trial, context.rank, step, context.stop_reason or "none")
    return context.trial

def objective(params, context):
    return context.launch(train)
"""


def notes(desk: Desk, what: str) -> list[list[str]]:
    path = desk.folder / "ranks.log"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [line[1:] for line in lines if line[0] == what]


def test_ranks_are_pruned_together_and_a_rank_that_dies_ends_its_trial(desk: Desk) -> None:
    desk.write("ranks.py", STUDY)
    command = desk.launch("ranks", "--workers", "cpu=2", "--trials", "3", "--pruner", "asha", "--json").wait(200)
    assert command.code == 0, desk.said()
    trials = {trial["number"]: trial for trial in desk.trials()}
    assert [trials[number]["state"] for number in range(3)] == ["COMPLETE", "FAILED", "PRUNED"], desk.said()
    error = str(trials[1]["error"])
    assert "RankFailed: rank 1 failed: RuntimeError: a rank's own error" in error
    assert "in train" in error
    assert trials[2]["attempt"] == 2, "its rank was killed in the first one"
    # Of trial 2 it is unknown where a busy machine has killed the trial before its ranks had ended.
    assert trials[0]["memory"] > 800_000_000, "the peaks of both ranks"
    steps = {(trial, rank): (step, why) for trial, rank, step, why in notes(desk, "ends")}
    for trial, why in {"0": "none", "2": "stopped"}.items():
        assert steps[trial, "0"] == steps[trial, "1"], "both at the same step"
        assert steps[trial, "0"][1] == why
