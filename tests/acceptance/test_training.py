"""Synchronous SGD as part of a search: real brokers, real workers, two of which are killed in the middle of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from acceptance.commands import until
from integration import fleets
from integration.fleets import Fleet

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

#: how far the recomputed parameters may be from the trained ones: their sums are taken in another order
TOLERANCE = 1e-4


@pytest.fixture
def fleet(
    no_orphans: None, amqp_url: str, redis_url: str, tmp_path: Path, unique: Callable[[str], str]
) -> Iterator[Fleet]:
    """A RabbitMQ and a Redis; who falls silent is given up after five seconds."""
    environment = {"SHADHO_IMPORTS": "gangs,folds", "SHADHO_LEASE_SECONDS": "5"}
    with fleets.fleet(tmp_path / "fleet", amqp_url, redis_url, unique("cpu"), **environment) as made:
        yield made


#: The digits task in gangs of three only, which train for long enough to die in the middle of it, and reach no goal.
GANGS = """
from dataclasses import replace
from hyperopt import hp
from tasks import sync_sgd

sync_sgd.SETTINGS = replace(sync_sgd.SETTINGS, steps=300, accuracy=2.0)
SPACE = {"learning_rate": hp.loguniform("learning_rate", -4, -1), "replicas": 3, "backups": 0}
STUDY = {"slots": 3}
objective = sync_sgd.objective
"""


#: A trial of three slots that trains two folds: their models look alike, their targets do not.
FOLDS = """
import torch
from hyperopt import hp
from torch import nn
from shadho_celery.training import gang, replay

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"slots": 3}
X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))

def made():
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def trained(context, target):
    (model, optimizer), data = made(), (X, torch.full((300, 1), target))
    with gang(context, replicas=3) as g:
        report = g.fit(model, optimizer, data, loss, steps=60, batch=16)
    again, optimizer = made()
    list(replay(again, optimizer, data, loss, report.log, batch=16, seed=context.seed))
    return model.bias.item(), (model.weight - again.weight).abs().max().item()

def objective(params, context):
    (first, a), (second, b) = trained(context, 10.0), trained(context, -10.0)
    return {"loss": params["x"], "biases": [first, second], "replay_difference": max(a, b)}
"""


def steps(fleet: Fleet) -> int:
    """The furthest step that any trial has reported."""
    path = fleet.desk.folder / "shadho.db"
    if not path.exists():
        return 0
    with (
        contextlib.suppress(sqlite3.OperationalError),  # its tables are not there yet
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection,
    ):
        return int(connection.execute("select coalesce(max(step), 0) from reports").fetchone()[0])
    return 0


def test_two_of_five_workers_die_in_the_middle_of_training(fleet: Fleet) -> None:
    """Both are in a gang that trains. The study finishes, and one process recomputes what each gang has trained."""
    fleet.desk.write("gangs.py", GANGS)
    fleet.workers(5)
    command = fleet.launch("gangs", 2, name="digits")
    until(lambda: steps(fleet) > 0 and len(fleet.busy()) >= 3, 90, fleet.desk.said)
    for pid in sorted(fleet.busy())[:2]:
        os.kill(pid, signal.SIGKILL)
    found = fleet.ended_well(command, "digits", 2, 150)
    metrics = [json.loads(trial["metrics"]) for trial in found]
    # Either the coordinator was hit, and its trial begun again or gone on with, or both were replicas.
    left = re.findall(r"left at step ([1-9]\d*)", str([each["notes"] for each in metrics]))
    assert left or sum(trial["lost"] for trial in found) == 1
    for trial, each in zip(found, metrics, strict=True):
        assert trial["slots"] == each["replicas"] == 3
        assert each["steps"] == 300
        assert each["replay_difference"] < TOLERANCE


def test_a_trial_trains_two_gangs_each_replica_in_its_own(fleet: Fleet) -> None:
    """Replicas run the objective from its beginning: those of the second gang let the first one pass."""
    fleet.desk.write("folds.py", FOLDS)
    fleet.workers(3)
    [trial] = fleet.ended_well(fleet.launch("folds", 1, name="folds"), "folds", 1, 60)
    metrics = json.loads(trial["metrics"])
    assert metrics["biases"] == [pytest.approx(10, abs=0.01), pytest.approx(-10, abs=0.01)]
    assert metrics["replay_difference"] < TOLERANCE
