"""Scripts as they are published run as trials: tuned unchanged, pruned with two more lines, resumed from a checkpoint.

The two examples of the original SHADHO run unchanged, too.
"""

from __future__ import annotations

import math
import signal

import pytest
from acceptance.commands import Desk, until

pytestmark = pytest.mark.timeout(240)

#: softmax regression on data of its own; it continues from its checkpoint if there is one
TRAIN = """
import argparse
import os
import time

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--decay", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--checkpoint")
parser.add_argument("--pause", type=float, default=0.0)
args = parser.parse_args()

generator = np.random.default_rng(0)
labels = generator.integers(10, size=1797)
data, targets = np.eye(10, 64)[labels] + generator.normal(0, 0.3, (1797, 64)), np.eye(10)[labels]
train, test = slice(0, 1200), slice(1200, None)
weights, first = np.zeros((64, 10)), 1
if args.checkpoint and os.path.exists(args.checkpoint):
    with np.load(args.checkpoint) as saved:
        weights, first = saved["weights"], int(saved["epoch"]) + 1
    print(f"continued at epoch {first}")


def probabilities(rows):
    scores = rows @ weights
    exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


for epoch in range(first, args.epochs + 1):
    for _ in range(10):
        gradient = data[train].T @ (probabilities(data[train]) - targets[train]) / 1200
        weights -= args.lr * (gradient + args.decay * weights)
    val_loss = -np.mean(np.log(probabilities(data[test])[targets[test] == 1] + 1e-12))
    print(f"epoch {epoch}/{args.epochs} - val_loss: {val_loss:.5f}")
    if args.checkpoint:
        np.savez(args.checkpoint + ".tmp.npz", weights=weights, epoch=epoch)
        os.replace(args.checkpoint + ".tmp.npz", args.checkpoint)
    time.sleep(args.pause)
"""

STUDY = """
command = ["python", "train.py", "{{args}}", {more}]
loss = "val_loss"
sampler = "random"
{settings}

[space]
lr = {{log = [1e-4, 3.0]}}
decay = {{uniform = [0.0, 0.01]}}
"""


def test_a_published_script_is_tuned_as_it_is(desk: Desk) -> None:
    desk.write("train.py", TRAIN)
    desk.write("study.toml", STUDY.format(more="", settings="trials = 8"))
    command = desk.launch("study.toml", "--study", "s", "--workers", "cpu=2", "--seed", "0", "--json").wait(120)
    assert command.code == 0, desk.said()
    assert command.json()["trials"]["complete"] == 8
    losses = [trial["loss"] for trial in desk.trials()]
    assert len({*losses}) == 8
    assert 0 < min(losses) < 1 < max(losses) < 3, losses
    assert "epoch 8/8 - val_loss: " in desk.told("logs", "s", "0").out


def test_with_two_more_lines_it_is_pruned(desk: Desk) -> None:
    changed = TRAIN.replace("import numpy as np\n", "import numpy as np\nimport shadho_celery as sh\n")
    changed = changed.replace("    if args.checkpoint:\n", "    sh.report(epoch, val_loss)\n    if args.checkpoint:\n")
    assert len(changed.splitlines()) == len(TRAIN.splitlines()) + 2
    desk.write("train.py", changed)
    settings = 'trials = 12\npruner = "asha"'
    desk.write("study.toml", STUDY.format(more='"--epochs", "27", "--pause", "0.02"', settings=settings))
    command = desk.launch("study.toml", "--study", "s", "--workers", "cpu=2", "--seed", "0", "--json").wait(120)
    assert command.code == 0, desk.said()
    trials = command.json()["trials"]
    assert trials["pruned"] > 3
    assert trials["complete"] + trials["pruned"] == 12
    assert all(trial["step"] < 27 for trial in desk.trials() if trial["state"] == "PRUNED")


def test_after_a_kill_it_continues_from_its_own_checkpoint(desk: Desk) -> None:
    desk.write("train.py", TRAIN)
    more = '"--epochs", "40", "--pause", "0.05", "--checkpoint", "{checkpoint_dir}/last.npz"'
    desk.write("study.toml", STUDY.format(more=more, settings="trials = 2"))
    words = ("study.toml", "--workers", "cpu=2", "--json")
    command = desk.launch(*words, "--study", "s")
    until(lambda: len([*desk.folder.glob(".shadho/checkpoints/*/*/last.npz")]) == 2, 90, desk.said)
    command.send(signal.SIGKILL)
    until(lambda: not desk.processes(), 30, desk.said)
    assert desk.launch(*words, "--resume", "s").wait(120).code == 0, desk.said()
    assert [trial["state"] for trial in desk.trials()] == ["COMPLETE"] * 2
    logs = [desk.told("logs", "s", str(number)).out for number in (0, 1)]
    assert all("continued at epoch" in log for log in logs), logs
    assert not [*desk.folder.glob(".shadho/checkpoints/*/attempts/*")]


def test_the_examples_of_the_original_run_unchanged(desk: Desk) -> None:
    """A shell script with one input file; and a Python script that uses the original's module."""
    desk.write("offset.txt", "3")
    desk.write(
        "task.sh",
        "#!/usr/bin/env bash\n"
        "x=$(sed 's/.*\"x\": *\\([-0-9.e]*\\).*/\\1/' hyperparameters.json)\n"
        'awk "BEGIN {d = $x - $(cat offset.txt); printf \\"{\\\\\\"loss\\\\\\": %f}\\", d * d}" > performance.json\n',
    )
    desk.write("sin_task.sh", "#!/usr/bin/env bash\n\npython sin.py\n")
    desk.write(
        "sin.py",
        "import math\n\nimport shadho_worker\n\n\ndef sin(params):\n    return math.sin(params['x'])\n\n\n"
        "if __name__ == '__main__':\n    shadho_worker.run(sin)\n",
    )
    study = (
        "from hyperopt import hp\nSPACE = {{'x': hp.uniform('x', 0, 3)}}\n"
        "STUDY = {{'command': {command}, 'inputs': {inputs}, 'outputs': ['out.tar.gz'], 'trials': 4}}\n"
    )
    desk.write("shell.py", study.format(command=["bash", "task.sh"], inputs=["offset.txt", "task.sh"]))
    desk.write("module.py", study.format(command=["bash", "./sin_task.sh"], inputs=["sin_task.sh", "sin.py"]))
    for name in ("shell", "module"):
        command = desk.launch(name, "--study", name, "--workers", "cpu=2", "--json").wait(120)
        assert command.code == 0, desk.said()
    for trial in desk.trials():
        x = trial["params"]["x"]
        wanted = (x - 3) ** 2 if trial["name"] == "shell" else math.sin(x)
        assert trial["loss"] == pytest.approx(wanted, abs=1e-5)
        assert (trial["warning"] is None) == (trial["name"] == "module")
    assert len([*desk.folder.glob(".shadho/checkpoints/*/*/out.tar.gz")]) == 4
    assert not desk.folder.joinpath("performance.json").exists()
