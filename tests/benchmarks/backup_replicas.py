"""Trainings of a digits network on real processes: gangs with stragglers, gangs on a slowed wire, and torch's ranks.

Slow gradients are played by waiting, drawn by (seed, place, step): two runs of one seed meet the same luck.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backup_played import TARGET, Stragglers, Trained, held_out_accuracy, last_tenth, mean_loss, network, pictures
from services.proxy import Proxy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.objective.context import LocalContext, ReplicaDone
from shadho_celery.ranks import DropCompute
from shadho_celery.ranks.launch import RankContext
from shadho_celery.training.gang import gang
from shadho_celery.training.report import Report
from shadho_celery.training.strategies import Strategy
from shadho_celery.training.wire.vectors import Quantize

#: pictures of one gradient, and parts of which a rank's batch is made
BATCH, MICRO_BATCHES = 16, 4
#: of a step over all replicas
LEARNING_RATE = 0.8


def train_in_processes(strategy: Strategy, law: Stragglers, *, steps: int, seed: int) -> Trained:
    """Train under stragglers; `steps` as many as a synchronous training has, or as many gradients as they take."""
    model = network(seed)
    each = 1 if strategy.lockstep else strategy.replicas
    accuracies: list[float] = []

    def look(step: int, loss: float) -> None:
        if step % each == 0:
            accuracies.append(held_out_accuracy(model))

    with tempfile.TemporaryDirectory() as folder:
        context = LocalContext(checkpoints=Path(folder))
        with gang(context, strategy=strategy, delay=law.delay(seed)) as g:
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / each)
            report = g.fit(
                model, optimizer, pictures(), mean_loss, batch=BATCH, steps=steps * each, seed=seed, on_step=look
            )
    return _trained(np.cumsum([step.seconds for step in report.log.steps])[each - 1 :: each].tolist(), accuracies)


def _trained(moments: Sequence[float], accuracies: Sequence[float]) -> Trained:
    """Return what came of a training by the second at which each step ended, and the accuracy after it."""
    course = list(zip(moments, accuracies, strict=True))
    return Trained(
        seconds=moments[-1],
        steps=len(moments),
        reached=next((moment for moment, accuracy in course if accuracy >= TARGET), None),
        accuracy=last_tenth(accuracies),
        course=course,
    )


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A training by torch's process group, with DistributedDataParallel or with DropCompute."""

    law: Stragglers
    steps: int
    seed: int
    rate: float = LEARNING_RATE
    momentum: float = 0.0
    drops: bool = False

    def run(self, context: RankContext) -> tuple[Trained, float]:
        """Train in one rank. Return what came of it, and the share of the micro-batches that counted."""
        plain = network(self.seed)
        model = plain if self.drops else DistributedDataParallel(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=self.rate, momentum=self.momentum)
        drop = DropCompute(context, plain) if self.drops else None
        (x, y), order = pictures(), np.random.default_rng([self.seed, context.rank])
        delay, moments, accuracies, kept = self.law.delay(self.seed), [], [], 0
        began = time.perf_counter()
        for step in range(self.steps):
            chosen = torch.from_numpy(order.integers(0, len(x), (MICRO_BATCHES, BATCH // MICRO_BATCHES)))
            seconds = delay(context.rank, step) / MICRO_BATCHES
            optimizer.zero_grad()
            for number, part in enumerate(chosen if drop is None else drop.parts(chosen)):
                until = time.perf_counter() + seconds
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = number == MICRO_BATCHES - 1
                loss = mean_loss(model, (x[part], y[part]))
                time.sleep(max(0.0, until - time.perf_counter()))
                (loss if drop else loss / MICRO_BATCHES).backward()
            kept += context.size * MICRO_BATCHES if drop is None else drop.reduce()
            optimizer.step()
            moments.append(time.perf_counter() - began)
            accuracies.append(held_out_accuracy(plain))
        return _trained(moments, accuracies), kept / (self.steps * context.size * MICRO_BATCHES)


def in_ranks(jobs: Sequence[Ranks], ranks: int) -> list[tuple[Trained, float]]:
    """Train one job after the other in the same ranks, which are processes of this machine."""
    found: list[tuple[Trained, float]] = LocalContext(gpus=ranks, slots=ranks).launch(_each, jobs)
    return found


def _each(context: RankContext, jobs: Sequence[Ranks]) -> list[tuple[Trained, float]]:
    torch.set_num_threads(1)
    return [job.run(context) for job in jobs]


@dataclass(frozen=True, kw_only=True)
class Called:
    """A training whose replicas are called, as those of a fleet are: its own process and the replicas' run the same."""

    strategy: Strategy
    codec: Quantize | None = None
    law: Stragglers
    steps: int
    seed: int = 0
    network: Callable[[int], nn.Module]
    rate: float = 0.1
    momentum: float
    #: pictures that it is not trained on
    test: int

    def run(self, context: LocalContext) -> tuple[nn.Module, Report]:
        torch.set_num_threads(1)
        model = self.network(self.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate, momentum=self.momentum)
        with gang(
            context,
            strategy=self.strategy,
            codec=self.codec,
            host="127.0.0.1",
            delay=self.law.delay(self.seed),
            # The gang shrinks as soon as a replica is lost.
            grace_seconds=0.0,
        ) as g:
            data = pictures(self.test)
            g.fit(model, optimizer, data, mean_loss, batch=BATCH, steps=self.steps, seed=self.seed)
        return model, g.report

    def take_part(self, seat: ReplicaSeat) -> None:
        """Take a seat of the gang."""
        with suppress(ReplicaDone):
            self.run(LocalContext(slots=self.strategy.replicas, replica=seat))

    def lead(self, bandwidth: float) -> tuple[nn.Module, Report]:
        """Train on a wire that lets so many bytes a second pass in each direction."""
        processes: list[Any] = []
        with ExitStack() as stack:

            def call(address: str, token: str, backups: int) -> None:
                proxy = stack.enter_context(Proxy(int(address.rpartition(":")[2])))
                proxy.bandwidth = bandwidth
                for rank in range(1, self.strategy.replicas):
                    seat = ReplicaSeat(address=f"127.0.0.1:{proxy.port}", token=token, rank=rank)
                    processes.append(forks().Process(target=self.take_part, args=(seat,), daemon=True))
                    processes[-1].start()

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            context = LocalContext(checkpoints=folder, slots=self.strategy.replicas, on_call_replicas=call)
            try:
                return self.run(context)
            finally:
                for process in processes:
                    process.join(5)
                    process.kill()


def forks() -> Any:
    """Ways to start processes from one that has torch imported already, and no threads."""
    context = multiprocessing.get_context("forkserver")
    # Older Pythons look for them on a path without this folder. An optimizer imports _dynamo, which takes seconds.
    libraries = ["sklearn.datasets", "sklearn.model_selection", "scipy.stats", "rich.progress", "torch._dynamo"]
    context.set_forkserver_preload([*libraries, "shadho_celery.training.gang"])
    return context
