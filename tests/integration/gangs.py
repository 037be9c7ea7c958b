"""What the processes of the gang tests run: one small training, as the coordinator of a trial or as a replica of it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.objective.context import LocalContext, ReplicaDone
from shadho_celery.training import gang, replay
from shadho_celery.training.report import Log

GENERATOR = torch.Generator().manual_seed(0)
PIXELS = torch.randn(300, 12, generator=GENERATOR)
DATA = (PIXELS, (PIXELS[:, 0] > 0).long())
BATCH = 12


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def replayed(log: Log) -> nn.Module:
    """The model that one process makes of a log."""
    model = network()
    list(replay(model, descent(model), DATA, loss, log, batch=BATCH))
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    """True where all that training changes is equal to float tolerance."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def replica(address: str, token: str, rank: int, replicas: int, backups: int) -> None:
    """Run the objective as a replica, as a worker of the queue does."""
    torch.set_num_threads(1)
    context = LocalContext(replica=ReplicaSeat(address=address, token=token, rank=rank), slots=replicas)
    model = network()
    try:
        with gang(context, replicas, backups) as g:
            g.fit(model, descent(model), DATA, loss, steps=1, batch=BATCH)
    except ReplicaDone:
        return
    raise AssertionError("a replica's fit came back")


def coordinator(folder: str, replicas: int, steps: int, call: str) -> None:
    """Run the objective as a trial with slots; `call` names a file for where the replicas shall come."""
    torch.set_num_threads(1)

    def called(address: str, token: str, backups: int) -> None:
        if not Path(call).exists():
            part = Path(f"{call}.part")
            part.write_text(json.dumps([address, token]))
            part.replace(call)

    def note(step: int, _: float) -> None:
        print(step, flush=True)
        time.sleep(0.01)

    context = LocalContext(slots=replicas, checkpoints=Path(folder), on_call_replicas=called)
    model = network()
    with gang(context, replicas, host="127.0.0.1", start_seconds=90) as g:
        report = g.fit(model, descent(model), DATA, loss, steps=steps, batch=BATCH, on_step=note, checkpoint_every=5)
    ended: dict[str, Any] = {
        "resumed": report.log.resumed_from,
        "steps": report.steps,
        "places": sorted(report.log.accepted),
        "replays": same(replayed(report.log), model),
    }
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    numbers = [int(each) if each.isdecimal() else each for each in rest]
    {"replica": replica, "coordinator": coordinator}[what](*numbers)  # type: ignore[operator]
    os._exit(0)
