"""Commands of the documents on training and on process groups: each does what its document says of it."""

from __future__ import annotations

import re
from textwrap import indent

import pytest
from acceptance.commands import Desk
from acceptance.documents import COMMANDS, RANKS, TRAINING, blocks, forked, shell

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]


def test_training_in_several_slots(desk: Desk) -> None:
    """The digits are learned by a gang alone, and as a study whose gangs come from the queue."""
    lines = [line for line in COMMANDS if "tasks.sync_sgd" in line]
    alone = next(line for line in lines if " run " not in line)
    out = shell(desk, alone, seconds=450)
    accuracy = re.search(r"accuracy (\S+)", out)
    assert accuracy
    assert float(accuracy[1]) > 0.9
    (study,) = {line for line in lines if " run " in line}
    out = shell(desk, f"{study} --seed 0", seconds=450)
    assert "2 complete, 0 failed" in out
    assert max(trial["slots"] for trial in desk.trials()) > 1


def test_the_gang_of_the_training_readme(desk: Desk) -> None:
    """The example of a gang is a study file."""
    desk.write("my_gang.py", blocks(TRAINING, "python")[0])
    command = next(line for line in COMMANDS if "run my_gang" in line)
    assert "2 complete, 0 failed" in shell(desk, command)
    assert {trial["slots"] for trial in desk.trials()} == {2}


def test_the_replay_and_the_loop_of_ones_own_of_the_training_readme(desk: Desk) -> None:
    """The loop takes the place of `fit`. The program asserts that its replay is equal to the bit."""
    first, second = blocks(TRAINING, "python")[:2]
    desk.write("my_gang.py", first.partition("    with gang(")[0] + second)
    [program] = [text for text in blocks(TRAINING, "python") if "replay(" in text]
    own = "import my_gang\nprint('steps', step + 1, my_gang.objective({'rate': 0.1}, LocalContext())['steps'])\n"
    desk.write("my_replay.py", program + own)
    assert "steps 200 200" in shell(desk, "python my_replay.py", OMP_NUM_THREADS="1")


def test_the_process_group_of_the_ranks_readme(desk: Desk) -> None:
    """The example of a process group is a study file; its loss falls."""
    desk.write("my_ranks.py", next(text for text in blocks(RANKS, "python") if "process_group" in text))
    command = next(line for line in COMMANDS if "run my_ranks" in line)
    assert "2 complete, 0 failed" in shell(desk, f"{command} --seed 0")
    assert {trial["slots"] for trial in desk.trials()} == {2}
    assert min(trial["loss"] for trial in desk.trials()) < 0.1


def test_the_launch_of_the_ranks_readme(desk: Desk) -> None:
    """The example of `context.launch` is a study file, whose trials take one or two slots of the worker."""
    desk.write("my_launch.py", next(text for text in blocks(RANKS, "python") if "context.launch" in text))
    command = next(line for line in COMMANDS if "run my_launch" in line)
    assert "2 complete, 0 failed" in shell(desk, f"{command} --seed 1")
    assert {trial["slots"] for trial in desk.trials()} <= {1, 2}


#: What the document's loop with DropCompute needs around it.
DROP = """
import torch
from torch.nn.functional import mse_loss
from shadho_celery.context import LocalContext
from shadho_celery.ranks import DropCompute, process_group

with process_group(LocalContext()) as pg:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(400, 4)
{loop}
print("loss", (model(torch.ones(1, 4)) - 4).square().item(), "share", drop.share)
"""


def test_the_loop_with_drop_compute_learns(desk: Desk) -> None:
    [loop] = [text for text in blocks(RANKS, "python") if "drop.reduce()" in text]
    desk.write("drop.py", DROP.format(loop=indent(loop, "    ")))
    found = re.search(r"loss (\S+) share (\S+)", shell(desk, "python drop.py"))
    assert found
    assert float(found[1]) < 0.1
    assert 0 < float(found[2]) <= 1


@pytest.mark.parametrize("command", [line for line in COMMANDS if "tasks.ddp" in line])
def test_a_process_group_is_searched(desk: Desk, command: str) -> None:
    """Alone, it has one rank. In a study, the others come from the queue."""
    if "--trials" not in command:
        accuracy = re.search(r"accuracy (\S+)", shell(desk, command))
        assert accuracy
        assert float(accuracy[1]) > 0.9
        return
    assert "2 complete, 0 failed" in shell(desk, f"{command} --seed 0")
    assert min(trial["slots"] for trial in desk.trials()) > 1


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if re.search(r"run tasks\.(?!sync_sgd|ddp).* --trials 2$", line)]
)
def test_the_other_tasks(desk: Desk, command: str) -> None:
    """Each of the other tasks of training is a study file; the seed keeps to learning rates that do not diverge."""
    assert "2 complete, 0 failed" in shell(desk, f"{command} --seed 1")


@pytest.mark.parametrize(
    ("task", "options", "rows"),
    [
        ("federated_blockcyclic", "--seeds 1", ["fedavg", "mm", "mc"]),
        ("gnn_delayed", "--seeds 1 --epochs 10", ["one process", *(f"delay {delay}" for delay in (0, 1, 2, 5, 10))]),
        ("tensor_parallel_25d", "", ["1-D", "2-D", "1-D", "2.5-D"]),
    ],
)
def test_a_task_alone_compares_methods(desk: Desk, task: str, options: str, rows: list[str]) -> None:
    command = next(line for line in COMMANDS if line == f"python -m tasks.{task}")
    printed = shell(desk, forked(desk, command, options)).strip().splitlines()
    for line, row in zip(printed[-len(rows) :], rows, strict=True):
        assert re.match(rf"{re.escape(row)}\s.*\d", line), printed
