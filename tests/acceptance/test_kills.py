"""The scheduler is killed at random instants, again and again, and each time the study goes on where it was."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import services
from acceptance.commands import Command, Desk, until

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

#: kills of each of the two tests
KILLS = 4

#: A study whose trials take .05 to .3 s, and say in executions.log when they began and when they ended.
STUDY = """
import os, subprocess, time
from hyperopt import hp

SPACE = hp.choice("side", [
    {{"side": "left", "x": hp.uniform("x", 0, 1)}},
    {{"side": "right", "x": hp.uniform("x2", 0, 1)}},
])
STUDY = {{"classes": ["cpu"], "sampler": "random"}}

def note(*words):
    log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, (" ".join(map(str, words)) + "\\n").encode())
    os.close(log)

def objective(params, context):
    note("began", context.trial, time.time())
    subprocess.Popen(["sleep", "60"])
    time.sleep(0.05 + 0.25 * params["x"])
    note("ended", context.trial, time.time())
    return params["x"]
"""


@dataclass
class Case:
    """A study that is killed and resumed, and what is known of it from outside."""

    desk: Desk
    words: list[str]
    random: random.Random
    killed: int = 0
    running: int = 0

    def launch(self, trials: int) -> Command:
        resume = ["--resume"] if self.is_begun() else ["--study", "killed"]
        return self.desk.launch("my_study", *resume, "--trials", str(trials), "--json", *self.words)

    def trials(self) -> list[dict[str, Any]]:
        return self.desk.trials() if self.is_begun() else []

    def is_begun(self) -> bool:
        """True where the store has the study."""
        if not (self.desk.folder / "shadho.db").exists():
            return False
        with closing(sqlite3.connect(f"file:{self.desk.folder / 'shadho.db'}?mode=ro", uri=True)) as connection:
            names = connection.execute("select name from sqlite_master where name = 'studies'").fetchall()
            return bool(names) and bool(connection.execute("select key from studies").fetchall())

    def executions(self, what: str) -> list[tuple[int, float]]:
        """(trial, moment) of each execution that began, or ended."""
        path = self.desk.folder / "executions.log"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(number), float(moment)) for word, number, moment in lines if word == what]

    def under_way(self, since: int) -> int:
        """Executions that have not ended, of those that began after the first `since`."""
        return len({n for n, _ in self.executions("began")[since:]} - {n for n, _ in self.executions("ended")})

    def counted(self) -> int:
        return sum(trial["state"] == "COMPLETE" for trial in self.trials())

    def sent(self) -> int:
        """Trials that have been counted, or will be: on a fleet they go on without a scheduler."""
        return sum(trial["state"] != "WAITING" for trial in self.trials())

    def run_until_killed(self) -> None:
        """Start the study, or resume it, for a few trials more, and kill it at some instant unless it ends before."""
        asked = self.sent() + self.random.randint(1, 30)
        began = len(self.executions("began"))
        command = self.launch(asked)
        if self.random.random() < 0.5:
            # While trials run; else at any moment, also while it starts.
            until(lambda: len(self.executions("began")) > began or command.code is not None, 40, self.desk.said)
            time.sleep(self.random.uniform(0.0, 0.8))
        else:
            time.sleep(self.random.uniform(0.3, 4.0))
        if command.code is None:
            command.send(signal.SIGKILL)
            command.wait(10)
            self.killed += 1
            self.running += self.under_way(began) > 0
        else:
            self.ended(command, asked)

    def ended(self, command: Command, asked: int) -> None:
        """Exactly as many trials as asked are counted, each of them once."""
        assert command.code == 0, self.desk.said()
        report = command.json()
        assert report["trials"] == {"total": asked, "complete": asked, "failed": 0, "pruned": 0, "cancelled": 0}
        assert self.counted() == asked

    def check(self) -> None:
        """No trial was executed again after it had finished, and what the store has was executed."""
        trials = self.trials()
        assert [trial["number"] for trial in trials] == list(range(len(trials)))
        finished = {trial["number"]: trial["finished_at"] for trial in trials if trial["state"] == "COMPLETE"}
        again = [(number, moment) for number, moment in self.executions("began") if moment > finished.get(number, 9e99)]
        assert not again, f"{again}\n{self.desk.said()}"
        assert finished.keys() <= {number for number, _ in self.executions("ended")}
        assert all(json.loads(str(trial["metrics"])) == {} and trial["loss"] is not None for trial in self.complete())

    def complete(self) -> list[dict[str, Any]]:
        return [trial for trial in self.trials() if trial["state"] == "COMPLETE"]

    def play(self) -> None:
        """Kill it KILLS times, then let it end."""
        while self.killed < KILLS:
            self.run_until_killed()
        asked = self.sent() + 10
        self.ended(self.launch(asked).wait(90), asked)
        self.check()
        print(f"{self.killed} kills, {self.running} of them while trials ran; {asked} trials")


def case(desk: Desk, seed: int, *words: str) -> Case:
    Path(desk.folder / "my_study.py").write_text(STUDY.format(log=str(desk.folder / "executions.log")))
    return Case(desk, [*words], random.Random(seed))


def test_an_embedded_study_whose_scheduler_is_killed_again_and_again_counts_each_trial_once(desk: Desk) -> None:
    """Trials that ran end with the scheduler and are sent again; being killed with it is not held against them.

    A scheduler that is started again at once waits until the old processes have ended: both Redis write to one file.
    """
    played = case(desk, 1, "--workers", "cpu=2")
    played.play()
    assert all(trial["lost"] == 0 for trial in played.trials())
    desk.nothing_left()
    log = (desk.states_folder() / "redis.log").read_text()
    lives = [line for line in log.splitlines() if "Server initialized" in line or "bye bye" in line]
    assert ["bye bye" in line for line in lives] == [False, True] * (len(lives) // 2), "one Redis after the other"


def test_on_a_fleet_trials_outlive_their_scheduler_and_none_is_executed_twice(
    desk: Desk, private_redis: services.RedisServer
) -> None:
    """Two workers live on while one scheduler after the other dies: what runs is adopted by the next one."""
    desk.environment |= {"CELERY_BROKER_URL": private_redis.url, "SHADHO_REDIS_URL": private_redis.url}
    played = case(desk, 2)
    workers = [desk.worker("cpu", "-c", "2", SHADHO_IMPORTS="my_study") for _ in range(2)]
    played.play()
    assert all(worker.code is None for worker in workers)
    executed = Counter(number for number, _ in played.executions("began"))
    assert set(executed.values()) == {1}, executed
    assert all(trial["lost"] == 0 for trial in played.trials())
