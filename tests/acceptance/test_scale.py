"""Workers on demand: from none to what a study wants, and back to none."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from acceptance.commands import Command, Desk, until
from acceptance.commands import desk as make_desk
from acceptance.test_fleet import Fleet

pytestmark = pytest.mark.timeout(180)

#: starts workers in the background and returns
START = """#!/bin/sh
echo "$SHADHO_CLASS $SHADHO_COUNT" >> started
for each in $(seq "$SHADHO_COUNT"); do
    {python} -m shadho_celery.worker --class "$SHADHO_CLASS" --slots 1 --import my_study >> workers.log 2>&1 &
done
"""


@pytest.fixture(name="desk")
def _desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    with make_desk(tmp_path) as made:
        yield made


@pytest.fixture
def fleet(desk: Desk, redis_url: str, unique: Callable[[str], str]) -> Fleet:
    made = Fleet(redis_url, redis_url, *(unique(name) for name in ("gpu_large", "gpu_small", "cpu")))
    key = desk.folder / "shadho.key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    desk.environment |= made.environment | {"SHADHO_SIGNING_KEY_FILE": str(key), "SHADHO_CORES": "2"}
    return made


def test_workers_come_when_a_study_wants_them_and_end_when_none_does(desk: Desk, fleet: Fleet) -> None:
    """Three of one machine and class, each of which is ended by itself; a study begins without any worker."""
    desk.study(seconds=0.5)
    scaler = scaling(desk, fleet, START)
    study = desk.launch("my_study", "--trials", "12", "--class-spec", "classes.toml")
    assert study.wait(90).code == 0, desk.said()
    until(lambda: ended(scaler) == 3, 30, desk.said)
    pattern = "serving class " + fleet.cpu
    assert (desk.folder / "workers.log").read_text().count(pattern) == 3, desk.said()
    until(lambda: (desk.folder / "workers.log").read_text().count("stopping after the running trials, as") == 3, 30)
    assert (desk.folder / "started").read_text() == f"{fleet.cpu} 3\n"
    assert {trial["state"] for trial in desk.trials()} == {"COMPLETE"}
    assert not _left(desk)
    scaler.interrupt()
    assert scaler.wait(20).code == 130
    assert "Warning" not in scaler.err


def scaling(desk: Desk, fleet: Fleet, start: str = "") -> Command:
    """`scale --command`, with at most three workers; `start` is a new program that starts them."""
    if start:
        desk.write("start.sh", start.format(python=sys.executable)).chmod(0o755)
    desk.write("classes.toml", f"[classes.{fleet.cpu}]\nmax_workers = 3\nstartup_seconds = 5\n")
    words = ["--class-spec", "classes.toml", "--max", "3", "--cooldown", "1s", "--command", "./start.sh"]
    scaler = desk.start(sys.executable, "-m", "shadho_celery", "scale", *words)
    scaler.says("to at most 3 workers")
    return scaler


def ended(scaler: Command) -> int:
    """Number of workers that it has asked to end."""
    return sum(map(int, re.findall(r"ending (\d+) idle", scaler.out)))


def _left(desk: Desk) -> list[str]:
    """Command lines of the workers that still run after a while."""
    lines: list[str] = []

    def are_gone() -> bool:
        lines[:] = [line for line in desk.processes().values() if "shadho_celery.worker" in line]
        return not lines

    until(are_gone, 30, desk.said)
    return lines
