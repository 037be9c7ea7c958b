"""Benchmarks of the document on training: each prints its figures, and reaches the goals that one seed can show."""

from __future__ import annotations

import json

import pytest
from acceptance.commands import Desk
from acceptance.documents import COMMANDS, in_tests, shell

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]


@pytest.mark.parametrize(
    ("part", "picture", "goals"),
    [
        ("a", "staleness.png", 1),
        ("b", "backups.png", 2),
        # With one seed only the comparison with no backups is sure.
        ("c", "against.png", 1),
        ("slow", None, 9),
    ],
)
def test_every_goal_of_played_gangs_is_reached(desk: Desk, part: str, picture: str | None, goals: int) -> None:
    """With one seed, whose figures must reach the goals.

    The parts that measure real processes reach theirs on a machine that has nothing else to do.
    """
    command = next(line for line in COMMANDS if f"--only {part}" in line)
    out = shell(
        desk, in_tests(command.replace(".readme", "pictures"), "--quick --seeds 1 || true"), seconds=440
    ).splitlines()[-1]
    found = [each["goals"] for name, each in json.loads(out).items() if name != "machine"]
    assert sum(reaches(row["value"], row["goal"]) for each in found for row in each.values()) >= goals
    if picture is not None:
        assert (desk.folder / "pictures" / picture).read_bytes().startswith(b"\x89PNG")


def reaches(value: float, goal: str) -> bool:
    """Return True if a value is as its goal says, such as ``>= 1.5``."""
    sign, bound = goal.split()
    return value >= float(bound) if sign == ">=" else value <= float(bound)


def test_a_replay_and_a_gang_of_one_are_exact(desk: Desk) -> None:
    command = next(line for line in COMMANDS if line.endswith("backup_sgd.py"))
    answer = json.loads(shell(desk, in_tests(command, "--only 4 --only 5"), seconds=220).splitlines()[-1])
    goals = {words: row for part in ("4", "5") for words, row in answer[part]["goals"].items()}
    assert len(goals) == 4
    assert not {words: row for words, row in goals.items() if not row["reached"]}


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("modes.py", '--seeds 1 --only "sync, 2 bits"'),
        ("adsaga.py", "--simulated"),
        ("drop_compute.py", "--seeds 1 --steps 30"),
    ],
)
def test_the_benchmarks_of_training(desk: Desk, script: str, options: str) -> None:
    """The other benchmarks run and end with their figures; here one part of each."""
    command = next(line for line in COMMANDS if line.endswith(script))
    assert "figures" in shell(desk, in_tests(command, options))
