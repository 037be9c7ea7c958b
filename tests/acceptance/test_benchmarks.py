"""Those parts of the benchmarks whose figures do not depend on the machine reach their goals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import services
from acceptance.commands import ROOT

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What backup_sgd.py says of the parts that have a virtual clock, or none."""
    only = [word for part in ("4", "5", "6", "curve") for word in ("--only", part)]
    command = [sys.executable, "tests/benchmarks/backup_sgd.py", *only, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=220 * services.PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_every_goal_of_backup_workers_is_reached(found: dict[str, Any]) -> None:
    goals = {words: row for part in ("4", "5", "6", "curve") for words, row in found[part]["goals"].items()}
    assert len(goals) >= 8
    assert not {words: row for words, row in goals.items() if not row["reached"]}


def test_with_a_hundred_workers_time_falls_and_rises_with_the_backups(found: dict[str, Any]) -> None:
    """The valley of the paper's figure: both ends are far above it, and neither is the lowest."""
    figures = found["curve"]["figures"]
    assert figures["backups"][0] == 0
    for law in ("1 of 20 is slow", "1 of 100 is slow"):
        line = figures[law]
        assert 0 < line.index(min(line)) < len(line) - 1
        assert min(line[0], line[-1]) > 1.5 * min(line)
