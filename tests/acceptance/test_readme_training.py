"""Commands of the documents on training: each does what its document says of it."""

from __future__ import annotations

import re

import pytest
from acceptance.commands import Desk
from acceptance.documents import COMMANDS, TRAINING, blocks, in_tests, shell

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
    out = shell(desk, study, seconds=450)
    assert "4 complete, 0 failed" in out
    assert max(trial["slots"] for trial in desk.trials()) > 1


def test_the_gang_of_the_training_readme(desk: Desk) -> None:
    """The example of a gang is a study file."""
    desk.write("my_gang.py", blocks(TRAINING, "python")[0])
    command = next(line for line in COMMANDS if "run my_gang" in line)
    assert "4 complete, 0 failed" in shell(desk, command)
    assert {trial["slots"] for trial in desk.trials()} == {2}


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.endswith("--trials 2")])
def test_the_other_tasks(desk: Desk, command: str) -> None:
    """Each of the other tasks of training is a study file; the seed keeps to learning rates that do not diverge."""
    assert "2 complete, 0 failed" in shell(desk, f"{command} --seed 1")


def test_the_picture_of_backups(desk: Desk) -> None:
    """The benchmark of backup replicas draws the picture of the training README."""
    command = next(line for line in COMMANDS if "--only curve" in line)
    shell(desk, in_tests(command.replace(".readme/", ""), "--seeds 1"))
    assert (desk.folder / "backups.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("backup_sgd.py", "--only 4 --json"),
        ("modes.py", '--seeds 1 --only "sync, 2-bit"'),
        ("adsaga.py", "--simulated"),
    ],
)
def test_the_benchmarks_of_training(desk: Desk, script: str, options: str) -> None:
    """The other benchmarks run and end with their figures; here one part of each."""
    command = next(line for line in COMMANDS if line.endswith(script))
    assert "figures" in shell(desk, in_tests(command, options))
