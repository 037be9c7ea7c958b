"""CUDA as it is: trials use, share and exhaust the first GPU of this machine, and train in groups and gangs on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance.commands import Desk
from acceptance.commands import desk as make_desk

from shadho_celery.core.hardware import detect, gpus_text

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

MIB = 2**20


@pytest.fixture(name="desk")
def _desk(no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """A desk whose commands use the first GPU."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.version.cuda is None or not torch.cuda.device_count():
        pytest.skip("torch finds no CUDA GPU")
    with make_desk(tmp_path) as made:
        first = detect().visible.partition(",")[0]
        made.environment |= {"CUDA_VISIBLE_DEVICES": first, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        yield made


def ran(desk: Desk, study: str, workers: str, trials: int, **environment: str) -> list[dict[str, Any]]:
    """Run a study and return its trials, which have completed, with their metrics as a dict."""
    words = ("--workers", workers, "--trials", str(trials), "--seed", "1", "--json")
    command = desk.launch(study, *words, **environment).wait(120)
    assert command.code == 0, desk.said()
    found = desk.trials()
    assert [trial["number"] for trial in found] == [*range(trials)]
    assert {trial["state"] for trial in found} == {"COMPLETE"}, desk.said()
    return [{**trial, "metrics": json.loads(trial["metrics"] or "{}")} for trial in found]


#: Prints what torch says of each GPU that it sees.
SEEN = """
import json, torch
found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
print(json.dumps([[each.name, each.total_memory, f"GPU-{each.uuid}"] for each in found]))
"""


def test_torch_sees_the_gpu_of_its_slot_and_doctor_names_all(desk: Desk) -> None:
    machine = detect()
    for slot, card in enumerate(machine.cards):
        environment = machine.slot_environment("gpu", [slot], len(machine.cards))
        command = desk.start(sys.executable, "-c", SEEN, **environment).wait()
        assert command.code == 0, desk.said()
        [[name, memory, uuid]] = json.loads(command.out)
        assert name == card.name
        # CUDA keeps some of the memory that the driver shows.
        assert memory == pytest.approx(card.memory, rel=0.1)
        # torch tells no UUID of a part of a GPU (MIG).
        assert uuid == card.uuid or card.uuid.startswith("MIG-")
    doctor = desk.told("doctor", "--json", CUDA_VISIBLE_DEVICES=machine.visible)
    [finding] = [each for each in doctor.json()["checks"] if each["name"] == "gpus"]
    assert (finding["state"], finding["text"]) == ("ok", gpus_text(machine.cards))


#: A trial takes `mib` of the GPU, and leaves it in a cycle of references. Above 256, it asks for more than there is.
#: Until then the CPU's slot is busy with one trial, because it might run all others while CUDA starts.
PLAIN = """
import sys, time
from pathlib import Path
from hyperopt import hp

SPACE = {"mib": hp.quniform("mib", 64, 512, 64)}

def objective(params, context):
    was_imported = int("torch" in sys.modules)
    import torch
    mib = int(params["mib"])
    if context.device == "cuda" and mib > 256:
        Path("outgrown").touch()
        mib = 10_000_000
    until = time.monotonic() + 60
    while context.device == "cpu" and not Path("outgrown").exists() and time.monotonic() < until:
        time.sleep(0.05)
    model = torch.nn.Linear(64, 64).to(context.device)
    model.own = [model, torch.empty(mib * 2**20, dtype=torch.uint8, device=context.device)]
    loss = model(torch.rand(8, 64, device=context.device)).square().mean()
    loss.backward()
    return {"loss": loss.item(), "was_imported": was_imported}
"""


@pytest.mark.parametrize("preload", [[], ["torch"]], ids=["imported", "preloaded"])
def test_a_trials_gpu_memory_is_recorded_and_the_cpu_takes_what_the_gpu_cannot_hold(
    desk: Desk, preload: list[str]
) -> None:
    settings = {"sampler": "random", "preload": preload}
    desk.write("plain.py", f"STUDY = {settings}\n{PLAIN}")
    trials = ran(desk, "plain", "gpu=1,cpu=1", 12)
    outgrown = [trial for trial in trials if trial["outgrown"]]
    places = {(trial["outgrown"], trial["outgrown_memory"], trial["compute_class"]) for trial in outgrown}
    assert places == {("gpu", "gpu", "cpu")}
    on_gpu = [trial for trial in trials if trial["compute_class"] == "gpu"]
    for trial in on_gpu:
        took = trial["params"]["mib"] * MIB
        # The rest is for CUDA's libraries. Earlier trials have left nothing.
        assert took <= trial["gpu_memory"] < took + 128 * MIB
    assert min(trial["metrics"]["was_imported"] for trial in on_gpu) == len(preload)


#: Trials of two sizes, which note the bytes that they take and give back. The first attempt of trial 20 waits until
#: another trial has memory, and asks for more than there is.
SHARING = """
import time
import torch
from hyperopt import hp

SPACE = hp.choice("share", [{"share": 1 / 8}, {"share": 3 / 8}])
STUDY = {"sampler": "random", "preload": ["torch"]}

def note(context, size):
    with open("sharing.log", "a") as log:
        log.write(f"{context.trial} {size}\\n")

def taken():
    with open("sharing.log") as log:
        return sum(int(line.split()[1]) for line in log)

def take(size):
    return torch.zeros(size, dtype=torch.uint8, device="cuda")

def objective(params, context):
    total = torch.cuda.get_device_properties(0).total_memory
    if (context.trial, context.attempt) == (20, 1):
        until = time.monotonic() + 30
        while not taken() and time.monotonic() < until:
            time.sleep(0.01)
        take(2 * total)
    size = int(params["share"] * total)
    held = take(size)
    note(context, size)
    time.sleep(0.5)
    note(context, -size)
    return params["share"]
"""


def test_trials_share_the_gpu_as_far_as_its_memory_suffices(desk: Desk) -> None:
    """One that runs out of memory beside others is repeated alone."""
    desk.write("sharing.py", SHARING)
    trials = ran(desk, "sharing", "gpu=8", 36, SHADHO_SLOTS_PER_GPU="auto")
    assert not [trial for trial in trials if trial["outgrown"]]
    assert {trial["number"] for trial in trials if trial["attempt"] > 1} == {20}, "the others had enough memory"
    [card] = detect().cards[:1]
    here: dict[int, int] = {}
    most = 0
    for line in (desk.folder / "sharing.log").read_text().splitlines():
        trial, size = map(int, line.split())
        if size < 0:
            del here[trial]
            continue
        here[trial] = size
        most = max(most, len(here))
        assert sum(here.values()) <= card.memory
        assert 20 not in here or len(here) == 1
    assert most > 1


#: Ranks with NCCL: trial 0 is a process group, the others are launches. In the first attempt of trial 2 the rank is
#: killed.
RANKS = """
import os, signal
import torch
from hyperopt import hp
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from shadho_celery.ranks import process_group

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"sampler": "random"}

def train(context, device):
    assert "cuda:nccl" in distributed.get_backend_config()
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    loss = model(torch.rand(8, 64, device=device)).square().mean()
    loss.backward()
    distributed.all_reduce(loss.detach())
    if (context.trial, context.attempt) == (2, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return loss.item()

def rank(context):
    loss = train(context, context.device)
    context.report(1, loss)
    return None if context.should_stop() else loss

def objective(params, context):
    if context.trial > 0:
        return context.launch(rank)
    with process_group(context) as pg:
        loss = train(context, pg.device)
        pg.save({"loss": torch.tensor(loss, device=pg.device)})
        return None if pg.should_stop() else pg.load()["loss"].item()
"""


def test_ranks_use_nccl_and_the_trial_of_a_killed_one_is_tried_again(desk: Desk) -> None:
    desk.write("ranks.py", RANKS)
    trials = ran(desk, "ranks", "gpu=1", 3)
    assert [(trial["attempt"], trial["lost"]) for trial in trials] == [(1, 0), (1, 0), (2, 1)]
    assert all(trial["gpu_memory"] for trial in trials), "also that of the launched ranks"


#: Trains the same gang on the CPU and on the GPU. The loss is the largest difference of a parameter.
GANG = """
import torch
from hyperopt import hp
from torch import nn
from torch.nn.functional import mse_loss
from shadho_celery.training import gang

SPACE = {"x": hp.uniform("x", 0, 1)}
X = torch.rand(1000, 64, generator=torch.Generator().manual_seed(0))
Y = X.sum(dim=1, keepdim=True)

def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))

def parameters(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()

def loss(model, batch):
    x, y = (each.to(next(model.parameters()).device) for each in batch)
    return mse_loss(model(x), y)

def trained(context, device):
    model = made().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    with gang(context, replicas=2) as g:
        g.fit(model, optimizer, (X, Y), loss, steps=50, batch=32)
    return parameters(model)

def objective(params, context):
    on_cpu, on_gpu = (trained(context, device) for device in ("cpu", context.device))
    change = (on_gpu - parameters(made())).abs().max().item()
    return {"loss": (on_gpu - on_cpu).abs().max().item(), "change": change}
"""


def test_a_gang_trains_on_the_gpu_as_on_the_cpu(desk: Desk) -> None:
    desk.write("on_both.py", GANG)
    [trial] = ran(desk, "on_both", "gpu=1", 1)
    assert trial["loss"] < 1e-4
    assert trial["metrics"]["change"] > 0.01
    assert trial["gpu_memory"]
