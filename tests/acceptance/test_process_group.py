"""DistributedDataParallel as part of a search: a real broker, real workers, one of which is killed in the middle."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from acceptance.commands import until
from integration import fleets
from integration.fleets import Fleet
from integration.test_gangs import whose

from shadho_celery.ranks.process_group import CHECKPOINT

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

#: A trial of two slots. Its first attempt trains until it loses a rank; a later one goes on from the checkpoint. Each
#: rank notes its process, and how it has left.
RANKS = """
import os, time
from pathlib import Path
import torch
from hyperopt import hp
from torch.nn.parallel import DistributedDataParallel
from shadho_celery.ranks import process_group

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"slots": 2}
PLAIN = {}

def note(*words):
    with open("runs.log", "a") as log:
        log.write(" ".join(map(str, words)) + "\\n")

def objective(params, context):
    first = 0
    try:
        with process_group(context, **PLAIN) as pg:
            torch.manual_seed(context.seed)
            model = DistributedDataParallel(torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            if (state := pg.load()) is not None:
                model.load_state_dict(state["model"])
                first = state["step"]
            note("trains", context.attempt, pg.rank, os.getpid(), first)
            step = first
            while step < 20 or (context.attempt == 1 and Path("hold").exists()):
                model(torch.full((8, 4), float(pg.rank))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                pg.save({"model": model.state_dict(), "step": step})
                if step % 10 == 0:
                    context.report(step, params["x"])
                    time.sleep(0.05)
                if pg.should_stop():
                    note("stops", pg.rank, step)
                    break
    finally:
        note("left", context.attempt, 0 if context.replica is None else context.replica.rank)
    return {"loss": params["x"], "first": first, "steps": step, "ranks": pg.size}
"""


def made(stack: ExitStack, *where: str | Path, **environment: str) -> Fleet:
    folder, broker, redis_url, compute_class = map(str, where)
    environment = {"SHADHO_IMPORTS": "ranks", "SHADHO_LEASE_SECONDS": "5", **environment}
    fleet = stack.enter_context(fleets.fleet(Path(folder), broker, redis_url, compute_class, **environment))
    fleet.desk.write("ranks.py", RANKS)
    return fleet


@pytest.fixture
def fleet(
    no_orphans: None, amqp_url: str, redis_url: str, tmp_path: Path, unique: Callable[[str], str]
) -> Iterator[Fleet]:
    """A RabbitMQ and a Redis."""
    with ExitStack() as stack:
        yield made(stack, tmp_path / "fleet", amqp_url, redis_url, unique("cpu"))


def log(fleet: Fleet) -> list[list[str]]:
    path = fleet.desk.folder / "runs.log"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def pids(fleet: Fleet) -> dict[int, int]:
    """Process of each rank of the first attempt."""
    return {int(line[2]): int(line[3]) for line in log(fleet) if line[:2] == ["trains", "1"]}


def training(fleet: Fleet) -> dict[int, int]:
    """Wait until both ranks train and rank 0 has saved a checkpoint; return their processes."""
    checkpoints = fleet.desk.folder / ".shadho" / "checkpoints"
    until(lambda: len(pids(fleet)) == 2 and [*checkpoints.rglob(CHECKPOINT)], 90, fleet.desk.said)
    return pids(fleet)


def test_a_worker_dies_and_the_trial_goes_on_from_its_checkpoint_on_the_other(fleet: Fleet) -> None:
    (fleet.desk.folder / "hold").touch()
    two = fleet.workers(2, slots=2)
    command = fleet.launch("ranks", 1)
    dead = whose(training(fleet)[0], two)
    other = next(pid for each, pid in pids(fleet).items() if each != 0)
    is_alone = whose(other, two) is not dead
    dead.send(signal.SIGKILL)
    if is_alone:  # the document names 30 seconds
        until(lambda: ["left", "1", "1"] in log(fleet), 60, fleet.desk.said)
    [trial] = fleet.ended_well(command, "ranks", 1, 120)
    metrics = json.loads(trial["metrics"])
    assert trial["lost"] == 1
    assert trial["attempt"] == 2
    assert metrics["first"] > 0
    assert metrics["ranks"] == 2


def test_a_cancelled_trial_ends_in_both_ranks(fleet: Fleet) -> None:
    """At one step where rank 0 asks in time whether to stop, else as soon as rank 0 is interrupted."""
    (fleet.desk.folder / "hold").touch()
    fleet.workers(2)
    command = fleet.desk.launch("ranks", "--trials", "1", "--study", "ranks", "--allow-unsigned-control")
    training(fleet)
    assert fleet.desk.start("shadho-celery", "cancel", "ranks", "0").wait(30).code == 0, fleet.desk.said()
    until(lambda: {("left", "1", "0"), ("left", "1", "1")} <= {*map(tuple, log(fleet))}, 60, fleet.desk.said)
    (fleet.desk.folder / "hold").unlink()
    assert command.wait(120).code == 0, fleet.desk.said()
    assert [trial["state"] for trial in fleet.trials("ranks")] == ["CANCELLED", "COMPLETE"], fleet.desk.said()
    steps = {line[2] for line in log(fleet) if line[0] == "stops"}
    assert len(steps) <= 1


def test_a_fleet_with_a_key_needs_plain(
    no_orphans: None, amqp_url: str, redis_url: str, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    with ExitStack() as stack:
        key = tmp_path / "key"
        key.write_text("0123456789abcdef0123456789abcdef")
        key.chmod(0o600)
        facts = {"SHADHO_SIGNING_KEY_FILE": str(key)}
        fleet = made(stack, tmp_path / "fleet", amqp_url, redis_url, unique("cpu"), **facts)
        fleet.workers(2)
        command = fleet.launch("ranks", 1, name="refused").wait(120)
        assert command.code != 0, fleet.desk.said()
        [trial] = fleet.trials("refused")
        assert trial["state"] == "FAILED"
        assert "give plain=True" in trial["error"]
        fleet.desk.write("ranks.py", RANKS.replace("PLAIN = {}", 'PLAIN = {"plain": True}'))
        fleet.ended_well(fleet.launch("ranks", 1, name="plain"), "plain", 1, 120)
