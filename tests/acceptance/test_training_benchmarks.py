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
    script = in_tests(command.replace(".readme", "pictures"), "--quick --seeds 1 || true")
    found = json.loads(shell(desk, script, seconds=440).splitlines()[-1])["goals"]
    assert sum(row["reached"] for row in found.values()) >= goals
    if picture is not None:
        assert (desk.folder / "pictures" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("part", ["modes", "adsaga", "drop"])
def test_the_other_benchmarks_of_training(desk: Desk, part: str) -> None:
    """They run and end with their figures, of which a busy machine changes neither bytes nor evaluations."""
    command = next(line for line in COMMANDS if line.endswith(f"--only {part}"))
    out = shell(desk, in_tests(command, "--quick --seeds 1 || true"), seconds=440).splitlines()[-1]
    found = json.loads(out)["goals"]
    assert found
    assert all(row["reached"] for name, row in found.items() if "bytes" in name or "evaluations" in name)
