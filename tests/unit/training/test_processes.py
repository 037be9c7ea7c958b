"""A replica that cannot be started is one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shadho_celery.errors import UsageError
from shadho_celery.objective.context import ReplicaSeat
from shadho_celery.training import Sync
from shadho_celery.training.coordinator.listener import listen
from shadho_celery.training.replica.processes import Processes
from shadho_celery.training.replica.replica import Workload
from shadho_celery.training.wire.codecs import Raw

#: a lambda has no importable name, even at the top level of a module
AT_THE_TOP = [lambda model, batch: model(batch).mean()]


@pytest.mark.parametrize(
    "loss", [AT_THE_TOP[0], lambda model, batch: model(batch).mean()], ids=["at the top", "inside another"]
)
def test_a_lambda_that_is_to_be_spawned_is_one_clear_error_with_a_remedy(loss: Any) -> None:
    model = nn.Linear(1, 1)
    job = Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data=(torch.zeros(4, 1),),
        loss=loss,
        strategy=Sync(replicas=1),
        codec=Raw(),
        digest="same",
    )
    processes = Processes("spawn")
    with listen("127.0.0.1") as server:
        seat = ReplicaSeat(address="127.0.0.1:1", token="secret", rank=0)
        with pytest.raises(UsageError, match=r"lambda.*; define the loss .* by `def` or `class` at the top"):
            processes.start(seat, job, server)
    assert processes.alive() == 0
    processes.close()
