"""A script of PyTorch as it is published runs as trials: tuned unchanged, pruned with two more lines, resumed from a
checkpoint.

The two examples of the original SHADHO run unchanged, too.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator

import pytest
import redis
from acceptance.commands import Command, Desk, signing_key, until
from acceptance.commands import desk as make_desk

# Each trial imports torch.
pytestmark = pytest.mark.timeout(480)

#: a network on scikit-learn's digits; it continues from its checkpoint if there is one
TRAIN = """
import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--hold", help="wait after an epoch until this file exists")
args = parser.parse_args()

torch.manual_seed(0)
data, labels = load_digits(return_X_y=True)
data, labels = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(labels)
train, test = slice(0, 1200), slice(1200, None)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
criterion, first = nn.CrossEntropyLoss(), 1
if args.checkpoint and os.path.exists(args.checkpoint):
    saved = torch.load(args.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
    print(f"continued at epoch {first}")

for epoch in range(first, args.epochs + 1):
    for batch in torch.randperm(1200).split(100):
        optimizer.zero_grad()
        criterion(model(data[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        val_loss = criterion(model(data[test]), labels[test]).item()
    print(f"epoch {epoch}/{args.epochs} - val_loss: {val_loss:.5f}")
    if args.checkpoint:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, args.checkpoint + ".tmp")
        os.replace(args.checkpoint + ".tmp", args.checkpoint)
    time.sleep(args.pause)
    while args.hold and not os.path.exists(args.hold):
        time.sleep(0.05)
"""

STUDY = """
command = ["python", "train.py", "{{args}}", {more}]
loss = "val_loss"
sampler = "random"
{settings}

[space]
lr = {{log = [1e-3, 1.0]}}
momentum = {{uniform = [0.0, 0.9]}}
"""


def test_a_published_script_is_tuned_as_it_is_and_continues_from_its_own_checkpoint_after_a_kill(desk: Desk) -> None:
    desk.write("train.py", TRAIN)
    # No trial may have ended at the kill, however late the other one begins.
    more = '"--epochs", "20", "--hold", "go", "--checkpoint", "{checkpoint_dir}/last.pt"'
    desk.write("study.toml", STUDY.format(more=more, settings="trials = 3"))
    words = ("study.toml", "--workers", "cpu=2", "--seed", "0", "--json")
    command = desk.launch(*words, "--study", "s")
    until(lambda: len([*desk.folder.glob(".shadho/checkpoints/*/*/last.pt")]) == 2, 90, desk.said)
    command.send(signal.SIGKILL)
    until(lambda: not desk.processes(), 30, desk.said)
    desk.write("go", "")
    assert desk.launch(*words, "--resume", "s").wait(120).code == 0, desk.said()
    trials = desk.trials()
    assert [trial["state"] for trial in trials] == ["COMPLETE"] * 3
    assert len({trial["loss"] for trial in trials}) == 3
    assert all(0 < trial["loss"] < 2.5 for trial in trials), trials
    logs = [desk.told("logs", "s", str(number)).out for number in range(3)]
    assert ["continued at epoch" in log for log in logs] == [True, True, False], logs
    assert all("epoch 20/20 - val_loss: " in log for log in logs)
    assert not [*desk.folder.glob(".shadho/checkpoints/*/*.attempt-*")]


def test_with_two_more_lines_it_is_pruned(desk: Desk) -> None:
    changed = TRAIN.replace("import torch\n", "import shadho_celery as sh\nimport torch\n", 1)
    changed = changed.replace("    if args.checkpoint:\n", "    sh.report(epoch, val_loss)\n    if args.checkpoint:\n")
    assert len(changed.splitlines()) == len(TRAIN.splitlines()) + 2
    desk.write("train.py", changed)
    settings = 'trials = 6\npruner = "asha"'
    desk.write("study.toml", STUDY.format(more='"--epochs", "27", "--pause", "0.1"', settings=settings))
    command = desk.launch("study.toml", "--study", "s", "--workers", "cpu=2", "--seed", "0", "--json").wait(120)
    assert command.code == 0, desk.said()
    trials = command.json()["trials"]
    assert trials["pruned"] > 1
    assert trials["complete"] + trials["pruned"] == 6
    assert all(trial["step"] < 27 for trial in desk.trials() if trial["state"] == "PRUNED")


#: the examples of the original
TASK = r"""#!/usr/bin/env bash
sleep .2
x=$(sed 's/.*"x": *\([-0-9.e]*\).*/\1/' hyperparameters.json)
echo "$x $(head -c 1 offset.txt)" | awk '{printf "{\"loss\": %f}", ($1 - $2) ^ 2}' > performance.json
"""
SIN_TASK = """#!/usr/bin/env bash

python sin.py
"""
SIN = """import math

import shadho_worker


def sin(params):
    return math.sin(params['x'])


if __name__ == '__main__':
    shadho_worker.run(sin)
"""
#: their commands and input files, by the names of their studies
EXAMPLES: dict[str, tuple[list[str], dict[str, str]]] = {
    "shell": (["bash", "task.sh"], {"offset.txt": "3" * 2_000_000, "task.sh": TASK}),
    "module": (["bash", "./sin_task.sh"], {"sin_task.sh": SIN_TASK, "sin.py": SIN}),
}


def write_examples(desk: Desk) -> None:
    for name, (command, files) in EXAMPLES.items():
        for each, content in files.items():
            desk.write(each, content)
        settings = {"command": command, "inputs": [*files], "outputs": ["out.tar.gz"]}
        desk.write(
            f"{name}.py", f"from hyperopt import hp\nSPACE = {{'x': hp.uniform('x', 0, 3)}}\nSTUDY = {settings}\n"
        )


def check_examples(desk: Desk, trials: int) -> None:
    found = desk.trials()
    assert [trial["state"] for trial in found] == ["COMPLETE"] * trials
    for trial in found:
        x = trial["params"]["x"]
        wanted = (x - 3) ** 2 if trial["name"] == "shell" else math.sin(x)
        assert trial["loss"] == pytest.approx(wanted, abs=1e-5)
        assert (trial["warning"] is None) == (trial["name"] == "module")


def test_the_examples_of_the_original_run_unchanged(desk: Desk) -> None:
    """A shell script with one input file; and a Python script that uses the original's module."""
    write_examples(desk)
    for name in EXAMPLES:
        command = desk.launch(name, "--study", name, "--workers", "cpu=2", "--trials", "4", "--json").wait(120)
        assert command.code == 0, desk.said()
    check_examples(desk, 8)
    assert len([*desk.folder.glob(".shadho/checkpoints/*/*/out.tar.gz")]) == 4
    assert not desk.folder.joinpath("performance.json").exists()


@pytest.fixture
def on_fleet(
    redis_url: str, amqp_url: str, no_orphans: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    """A desk on RabbitMQ and Redis with a signing key. It is cleared before the Redis of its workers is."""
    with make_desk(tmp_path_factory.mktemp("scheduler")) as made:
        made.environment |= {"CELERY_BROKER_URL": amqp_url, "SHADHO_REDIS_URL": redis_url, "SHADHO_LEASE_SECONDS": "5"}
        made.environment |= {**signing_key(made), "SHADHO_IMPORTS": "", "SHADHO_ACCEPT_CODE": "1"}
        yield made


def test_on_a_fleet_the_examples_get_their_files_and_survive_a_killed_worker(
    on_fleet: Desk, redis_url: str, unique: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two workers in empty folders get commands and inputs through Redis, one of them of two megabytes."""
    write_examples(on_fleet)
    queue, folders = unique("cpu"), [tmp_path_factory.mktemp("worker") for _ in "12"]
    for number, folder in enumerate(folders):
        words = ["celery", "-A", "shadho_celery", "worker", "-Q", queue, "-c", "1", "-n", f"w{number}@%h"]
        on_fleet.commands.append(Command(words, folder, on_fleet.environment))
    workers = on_fleet.commands[:2]
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        until(lambda: len([*client.scan_iter("shadho:worker:*")]) == 2, 60, on_fleet.said)
        options = ("--code", "ship", "--trials", "8", "--json")
        command = on_fleet.launch("shell", "--study", "shell", *options)
        until(lambda: all([*folder.glob(".shadho/checkpoints/*/*.attempt-*")] for folder in folders), 60, on_fleet.said)
        workers[0].end()
        assert command.wait(120).code == 0, on_fleet.said()
        assert on_fleet.launch("module", "--study", "module", *options).wait(120).code == 0, on_fleet.said()
        check_examples(on_fleet, 16)
        assert not [*client.scan_iter("shadho:*:inputs")]
    assert not [*folders[1].glob("*.sh")]
    assert len([*folders[1].glob(".shadho/code/.inputs/*")]) == 4
