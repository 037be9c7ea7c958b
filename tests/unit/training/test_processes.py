"""A replica that cannot be started is one clear error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from services.cases import cases
from torch import nn

from shadho_celery.core.addresses import listen
from shadho_celery.errors import UsageError
from shadho_celery.objective.context import LocalContext, ReplicaSeat
from shadho_celery.training import Sync, gang
from shadho_celery.training.replica.batches import Batches, Computer
from shadho_celery.training.replica.processes import Processes, _copy, move, own_device
from shadho_celery.training.replica.replica import Workload
from shadho_celery.training.replica.update import Update

#: a lambda has no importable name, even at the top level of a module
AT_THE_TOP = [lambda model, batch: model(batch).mean()]


def workload(model: nn.Module, optimizer: torch.optim.Optimizer, **changes: Any) -> Workload:
    batches = Batches((torch.zeros(4, 1),), batch=1, seed=0)
    given = {"batches": batches, "loss": lambda model, batch: model(batch[0]).mean(), **changes}
    computer = Computer(model, **given)
    return Workload(computer=computer, update=Update(optimizer), strategy=Sync(replicas=1), codec=None, digest="same")


@pytest.mark.parametrize(
    "loss", [AT_THE_TOP[0], lambda model, batch: model(batch).mean()], ids=["at the top", "inside another"]
)
def test_a_lambda_that_is_to_be_spawned_is_one_clear_error_with_a_remedy(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(1, 1)
    job = workload(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    monkeypatch.setattr(Processes, "method", "spawn")
    processes = Processes()
    with listen("127.0.0.1") as server:
        seat = ReplicaSeat(address="127.0.0.1:1", token="secret", rank=0)
        with pytest.raises(UsageError, match=r"lambda.*; define the loss .* by `def` or `class` at the top"):
            processes.start(seat, job, server)
    assert processes.alive() == 0
    processes.close()


def test_processes_are_spawned_if_cuda_is_used_after_the_gang_was_constructed(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes()
    for in_use in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        assert processes.method == ("fork" if sys.platform == "linux" and not in_use else "spawn")


def test_a_copy_for_another_gpu_has_its_model_and_the_optimizers_state_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(1, 1)
    given = workload(model, torch.optim.SGD(model.parameters(), lr=0.1))
    moved = Mock()
    monkeypatch.setattr(nn.Module, "cpu", moved.model)
    monkeypatch.setattr(torch.optim.SGD, "load_state_dict", moved.state)
    for on_cpu, names in ((False, []), (True, ["model", "state"])):
        moved.reset_mock()
        own = _copy(given, on_cpu=on_cpu)
        assert [name for name, *_ in moved.mock_calls] == names
        assert own.computer.model is not model
        assert own.computer.batches is given.computer.batches


def test_the_gpu_memory_of_a_gangs_replicas_counts_as_its_trials(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    context = LocalContext(checkpoints=tmp_path, on_ranks=lambda host, gpu: told.append((host, gpu)))
    with gang(context, replicas=3) as g:
        g.processes._peaks += [(torch.device("cuda", rank % 2), [10**9 * (rank + 1)]) for rank in range(3)]
    assert told == [(0, 4 * 10**9)]
    with gang(context, replicas=3) as g:
        pass
    assert len(told) == 1


def model_on(*devices: str) -> Any:
    """Return a stand-in for a model with a parameter on each of these devices."""
    return SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device(each)) for each in devices])


def test_the_replicas_of_a_machine_take_its_gpus_in_turn_from_that_of_the_model_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for at in (0, 3):
        devices = [own_device(model_on(f"cuda:{at}", f"cuda:{at}"), rank) for rank in range(6)]
        assert devices == [torch.device("cuda", (at + rank) % 4) for rank in range(6)]


@cases("model", [model_on("cpu"), model_on("cuda:0", "cuda:1"), model_on("cpu", "cuda:0")])
def test_a_model_on_the_cpu_or_on_several_devices_stays_there(model: Any) -> None:
    assert own_device(model, 1) is None


def test_a_replica_moves_its_model_and_data_that_are_on_a_gpu_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device, moved = torch.device("cuda", 3), Mock()
    monkeypatch.setattr(torch.cuda, "set_device", moved.device)
    model, here, there = nn.Linear(1, 1), torch.zeros(4, 1), Mock(spec=torch.Tensor, is_cuda=True)
    batches = Batches((here, here), batch=1, seed=0)
    batches._tensors = [here, there]
    monkeypatch.setattr(model, "to", moved.model)
    move(workload(model, torch.optim.SGD(model.parameters(), lr=0.1), batches=batches), device)
    assert moved.mock_calls == [call.device(device), call.model(device)]
    assert batches._tensors == [here, there.to.return_value]
    there.to.assert_called_once_with(device)
