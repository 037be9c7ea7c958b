"""The same training on torch's own DistributedDataParallel over gloo: what synchronous SGD costs without backups."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from backup_played import Stragglers
from backup_replicas import (
    BATCH,
    LEARNING_RATE,
    Course,
    forks,
    held_out_accuracy,
    mean_loss,
    network,
    pictures,
)
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def train(replicas: int, law: Stragglers, *, steps: int, seed: int) -> Course | None:
    """Train on so many processes; None where gloo does not run here."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return None
    forkserver = forks()
    answers: Any = forkserver.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/rendezvous", replicas, law, steps, seed)
        processes = [
            forkserver.Process(target=_replica, args=(answers, k, *given), daemon=True) for k in range(replicas)
        ]
        for process in processes:
            process.start()
        try:
            return _first(answers, processes)
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def _first(answers: Any, processes: list[Any]) -> Course | None:
    """The first answer; None once a process has failed."""
    while True:
        try:
            course: Course = answers.get(timeout=1)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                return None
        else:
            return course


def _replica(answers: Any, rank: int, rendezvous: str, replicas: int, law: Stragglers, steps: int, seed: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = distributed.FileStore(rendezvous, replicas)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=replicas, timeout=timedelta(seconds=120))
    model = DistributedDataParallel(network(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    (x, y), order, delay = pictures(), np.random.default_rng([seed, rank]), law.delay(seed)
    ends, accuracies = [time.perf_counter()], []
    for step in range(steps):
        chosen = torch.from_numpy(order.integers(0, len(x), BATCH))
        time.sleep(delay(rank, step))
        optimizer.zero_grad()
        mean_loss(model, (x[chosen], y[chosen])).backward()
        optimizer.step()
        if rank == 0:
            accuracies.append(held_out_accuracy(model.module))
            ends.append(time.perf_counter())
    if rank == 0:
        answers.put(Course(seconds=np.diff(ends).tolist(), gradients_a_step=1, accuracies=accuracies))
    distributed.destroy_process_group()
