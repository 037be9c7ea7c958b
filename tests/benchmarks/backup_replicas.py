"""Trainings of a digits network on real processes of this machine: gangs, with stragglers, deaths and late joiners.

Slow gradients are played by waiting, drawn by (seed, place, step): two runs of one seed meet the same luck.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backup_played import TARGET, Stragglers, held_out_accuracy, last_tenth, mean_loss, network, pictures

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.objective.context import LocalContext, ReplicaDone
from shadho_celery.training.gang import Gang, gang
from shadho_celery.training.replay import replay
from shadho_celery.training.replica.batches import Batches
from shadho_celery.training.replica.replica import Delay
from shadho_celery.training.strategies import Strategy, Sync

#: pictures of one gradient
BATCH = 16
#: of a step over all replicas
LEARNING_RATE = 0.8
#: seconds of a gradient where none is slow: the least and the most
EVEN = (0.040, 0.050)


@dataclass(frozen=True, kw_only=True)
class Course:
    """One training as it went."""

    #: seconds of each step; in the asynchronous mode of each gradient
    seconds: Sequence[float]
    #: gradients that do the work of one synchronous step
    gradients_a_step: int
    #: test accuracy after each synchronous step, or so many gradients
    accuracies: Sequence[float]

    @property
    def rate(self) -> float:
        """Synchronous steps a second, or as many gradients as they take."""
        return len(self.seconds) / self.gradients_a_step / sum(self.seconds)

    @property
    def reached(self) -> float | None:
        """Seconds until the test accuracy first reached TARGET; None where it never did."""
        steps = next((place for place, accuracy in enumerate(self.accuracies, 1) if accuracy >= TARGET), None)
        return None if steps is None else sum(self.seconds[: steps * self.gradients_a_step])

    @property
    def accuracy(self) -> float:
        """Mean test accuracy over the last tenth of the run."""
        return last_tenth(self.accuracies)


def even(seed: int) -> Delay:
    """Seconds by place and step, none of them slow."""
    return lambda place, step: float(np.random.default_rng([seed, place, step]).uniform(*EVEN))


def train(strategy: Strategy, law: Stragglers, *, steps: int, seed: int) -> Course:
    """Train under stragglers; `steps` as many as a synchronous training has."""
    model = network(seed)
    each = 1 if strategy.lockstep else strategy.replicas
    accuracies: list[float] = []

    def look(step: int, loss: float) -> None:
        if step % each == 0:
            accuracies.append(held_out_accuracy(model))

    with local(strategy, law.delay(seed)) as g:
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / each)
        report = g.fit(
            model, optimizer, pictures(), mean_loss, batch=BATCH, steps=steps * each, seed=seed, on_step=look
        )
    return Course(seconds=[step.seconds for step in report.log.steps], gradients_a_step=each, accuracies=accuracies)


@contextmanager
def local(strategy: Strategy, delay: Delay | None = None) -> Iterator[Gang]:
    """A gang of processes of this machine; its checkpoints go with it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        gang(LocalContext(checkpoints=Path(folder)), strategy=strategy, delay=delay) as g,
    ):
        yield g


class Diary(logging.Handler):
    """What the coordinator notes, and when."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[tuple[float, str]] = []
        self._logger = logging.getLogger("shadho_celery.training.coordinator.coordinator")

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.created, record.getMessage()))

    def first(self, words: str) -> float | None:
        """Moment of the first note with these words."""
        return next((moment for moment, text in self.said if words in text), None)

    def __enter__(self) -> Diary:
        self._level = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


@dataclass(frozen=True, kw_only=True)
class Death:
    """One replica's, by SIGKILL."""

    #: seconds from the signal to the coordinator's notice
    detection: float
    #: seconds of the median step
    median: float
    #: seconds of the longest of the three steps from the one under way at the signal on
    stall: float
    #: of all steps before it, where no death can be the reason, and of all from it on
    longest_before: float
    longest_after: float
    #: whether all steps were taken
    finished: bool

    @property
    def allowed(self) -> float:
        return 2 * self.median + self.detection


def kill_one(replicas: int, backups: int, *, steps: int, seed: int) -> Death:
    """Kill one replica with SIGKILL at a random moment between a tenth and nine tenths of the run."""
    generator = np.random.default_rng(seed)
    ends: list[float] = []
    killed: list[float] = []
    model = network(seed)
    with Diary() as diary, local(Sync(replicas=replicas, backups=backups), even(seed)) as g:
        victim = int(generator.integers(replicas + backups))
        after = float(generator.uniform(0.1, 0.9)) * steps * EVEN[1]

        def kill() -> None:
            killed.append(time.time())
            os.kill(g.processes.children[victim].pid or 0, signal.SIGKILL)

        timer = threading.Timer(after, kill)

        def look(step: int, loss: float) -> None:
            if step == 1:
                timer.start()
            ends.append(time.time())

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        g.fit(model, optimizer, pictures(), mean_loss, batch=BATCH, steps=steps, seed=seed, on_step=look)
        timer.join()
    noticed = diary.first(f"replica {victim} left")
    assert noticed is not None, diary.said
    gaps = list(zip(ends[1:], map(float, np.diff(ends)), strict=True))
    since = [gap for end, gap in gaps if end >= killed[0]]
    return Death(
        detection=max(0.0, noticed - killed[0]),
        median=statistics.median(gap for _, gap in gaps),
        stall=max(since[:3], default=0.0),
        longest_before=max((gap for end, gap in gaps if end < killed[0]), default=0.0),
        longest_after=max(since, default=0.0),
        finished=len(ends) == steps,
    )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One whose replicas are called, as those of a fleet are: its own process and the replicas' run the same."""

    #: N, b, and steps
    replicas: int
    backups: int
    steps: int
    #: of the gradients' seconds
    seed: int

    def run(self, context: LocalContext, on_step: Callable[[int, float], None] | None = None) -> Gang:
        strategy = Sync(replicas=self.replicas, backups=self.backups)
        model = network(0)
        # Without a grace the gang shrinks as soon as a replica is lost.
        with gang(context, strategy=strategy, host="127.0.0.1", delay=even(self.seed), grace_seconds=0.0) as g:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            g.fit(model, optimizer, pictures(), mean_loss, batch=BATCH, steps=self.steps, seed=0, on_step=on_step)
        return g

    def take_part(self, seat: ReplicaSeat, go: Any) -> None:
        """Take a seat of the gang, once `go` is set; starting a process takes longer than a few steps."""
        torch.set_num_threads(1)
        pictures()
        torch.optim.SGD(network(0).parameters(), lr=0.1)
        if go is not None:
            go.wait()
        with suppress(ReplicaDone):
            self.run(LocalContext(slots=self.replicas, replica=seat))


def join_late(trial: Trial, rank: int, *, at: int) -> int | None:
    """Steps from a late replica's joining to the first that its gradient is part of, that one counted; None for never.

    It joins when step `at` is done; where one of its rank was there before, that was killed ten steps earlier.
    """
    forkserver = forks()
    go, processes = forkserver.Event(), {}

    def call(address: str, token: str, backups: int) -> None:
        seats = [(number, None) for number in range(1, trial.replicas)]
        for place, (number, moment) in enumerate([*seats, (rank, go)]):
            seat = ReplicaSeat(address=address, token=token, rank=number)
            processes[place] = forkserver.Process(target=trial.take_part, args=(seat, moment), daemon=True)
            processes[place].start()

    def look(step: int, loss: float) -> None:
        if step == at - 10 and rank < trial.replicas:
            processes[rank - 1].kill()
        if step == at:
            go.set()

    try:
        with tempfile.TemporaryDirectory() as folder:
            context = LocalContext(checkpoints=Path(folder), slots=trial.replicas, on_call_replicas=call)
            log = trial.run(context, look).log
    finally:
        for process in processes.values():
            process.join(5)
            process.kill()
    words = f"replica {rank} joined at step "
    joined = next((int(note.removeprefix(words)) for note in log.notes if note.startswith(words)), trial.steps)
    return next((step.step - joined + 1 for step in log.steps[joined:] if rank in step.accepted), None)


def forks() -> Any:
    """Ways to start processes from one that has torch imported already, and no threads."""
    context = multiprocessing.get_context("forkserver")
    # Older Pythons look for them on a path without this folder. An optimizer imports _dynamo, which takes seconds.
    libraries = ["sklearn.datasets", "sklearn.model_selection", "scipy.stats", "rich.progress", "torch._dynamo"]
    context.set_forkserver_preload([*libraries, "shadho_celery.training.gang"])
    return context


def replayed(law: Stragglers, *, steps: int, seed: int) -> tuple[float, bool]:
    """Largest difference of a parameter after a replay, and whether all bits are equal.

    The training that is replayed has stragglers, and loses a replica halfway: it must not shrink, having backups.
    """
    strategy = Sync(replicas=4, backups=2)
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with local(strategy, law.delay(seed)) as g:

        def look(step: int, loss: float) -> None:
            if step == steps // 2:
                os.kill(g.processes.children[1].pid or 0, signal.SIGKILL)

        g.fit(model, optimizer, pictures(), mean_loss, batch=BATCH, steps=steps, seed=seed, on_step=look)
    again = network(seed)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    for _ in replay(again, optimizer, pictures(), mean_loss, g.log, batch=BATCH, seed=seed):
        pass
    pairs = [(a.detach(), b.detach()) for a, b in zip(model.parameters(), again.parameters(), strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs), all(torch.equal(a, b) for a, b in pairs)


def alone_equals_plain(optimizer: Callable[[Any], torch.optim.Optimizer], *, steps: int, seed: int) -> bool:
    """True where a gang of one leaves the very bits that a plain loop does."""
    one, plain = network(seed), network(seed)
    with local(Sync(replicas=1)) as g:
        g.fit(one, optimizer(one.parameters()), pictures(), mean_loss, batch=BATCH, steps=steps, seed=seed)
    x, y = pictures()
    batches = Batches((x, y), batch=BATCH, seed=seed)
    rule = optimizer(plain.parameters())
    for step in range(steps):
        chosen = batches.indices(step, 0)
        rule.zero_grad()
        mean_loss(plain, (x[chosen], y[chosen])).backward()
        rule.step()
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), plain.parameters(), strict=True))
