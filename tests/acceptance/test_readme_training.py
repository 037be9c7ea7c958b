"""Commands of the documents on training: each does what its document says of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from acceptance.commands import Desk
from acceptance.commands import desk as desk_in
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
    out = shell(desk, f"{study} --seed 0", seconds=450)
    assert "2 complete, 0 failed" in out
    assert max(trial["slots"] for trial in desk.trials()) > 1


def test_the_gang_of_the_training_readme(desk: Desk) -> None:
    """The example of a gang is a study file."""
    desk.write("my_gang.py", blocks(TRAINING, "python")[0])
    command = next(line for line in COMMANDS if "run my_gang" in line)
    assert "2 complete, 0 failed" in shell(desk, command)
    assert {trial["slots"] for trial in desk.trials()} == {2}


def test_the_loop_of_ones_own(desk: Desk) -> None:
    """The objective with a loop of its own takes the place of the one with `fit`."""
    first, second = blocks(TRAINING, "python")[:2]
    desk.write("my_gang.py", f"{first}\n{second}")
    command = next(line for line in COMMANDS if "run my_gang" in line)
    assert "2 complete, 0 failed" in shell(desk, command)
    assert {trial["slots"] for trial in desk.trials()} == {2}


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if re.search(r"run tasks\.(?!sync_sgd).* --trials 2$", line)]
)
def test_the_other_tasks(desk: Desk, command: str) -> None:
    """Each of the other tasks of training is a study file; the seed keeps to learning rates that do not diverge."""
    assert "2 complete, 0 failed" in shell(desk, f"{command} --seed 1")


@pytest.mark.parametrize(
    ("task", "options", "rows"),
    [
        ("federated_blockcyclic", "--seeds 2", ["fedavg", "mm", "mc"]),
        ("gnn_delayed", "--seeds 1", ["one process", "delay 0", "delay 1", "delay 2", "delay 5", "delay 10"]),
        ("tensor_parallel_25d", "", ["1-D", "2-D", "1-D", "2.5-D"]),
    ],
)
def test_a_task_alone_compares_methods(desk: Desk, task: str, options: str, rows: list[str]) -> None:
    command = next(line for line in COMMANDS if line == f"python -m tasks.{task}")
    printed = shell(desk, in_tests(command, options)).strip().splitlines()
    for line, row in zip(printed[-len(rows) :], rows, strict=True):
        assert re.match(rf"{re.escape(row)}\s.*\d", line), printed


@pytest.fixture(scope="module")
def backups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what backup_sgd.py tells of the parts that have a virtual clock, or none; it has drawn the picture."""
    command = next(line for line in COMMANDS if "--only curve" in line)
    folder = tmp_path_factory.mktemp("backups")
    with desk_in(folder) as made:
        out = shell(made, in_tests(command.replace(".readme/", ""), "--only 4 --only 5 --only 6 --json"), seconds=220)
    assert (folder / "backups.png").read_bytes().startswith(b"\x89PNG")
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_every_goal_of_backup_workers_is_reached(backups: dict[str, Any]) -> None:
    """So are those of the other parts, which measure real processes, on a machine that has nothing else to do."""
    goals = {words: row for part in ("4", "5", "6", "curve") for words, row in backups[part]["goals"].items()}
    assert len(goals) >= 8
    assert not {words: row for words, row in goals.items() if not row["reached"]}


def test_with_a_hundred_workers_time_falls_and_rises_with_the_backups(backups: dict[str, Any]) -> None:
    """The valley of the paper's figure: both ends are far above it, and neither is the lowest."""
    figures = backups["curve"]["figures"]
    assert figures["backups"][0] == 0
    for law in ("1 of 20 is slow", "1 of 100 is slow"):
        line = figures[law]
        assert 0 < line.index(min(line)) < len(line) - 1
        assert min(line[0], line[-1]) > 1.5 * min(line)


def test_automatic_backups_are_few_without_stragglers_and_near_the_best_with_them(desk: Desk) -> None:
    command = next(line for line in COMMANDS if "--only auto" in line)
    answer = json.loads(shell(desk, in_tests(command, "--quick --json"), seconds=400))
    assert len(answer["auto"]["goals"]) == 5
    assert not {words: row for words, row in answer["auto"]["goals"].items() if not row["reached"]}


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("modes.py", '--seeds 1 --only "sync, 2-bit"'),
        ("adsaga.py", "--simulated"),
    ],
)
def test_the_benchmarks_of_training(desk: Desk, script: str, options: str) -> None:
    """The other benchmarks run and end with their figures; here one part of each."""
    command = next(line for line in COMMANDS if line.endswith(script))
    assert "figures" in shell(desk, in_tests(command, options))
