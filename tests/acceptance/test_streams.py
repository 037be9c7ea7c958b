"""Commands whose standard streams are closed, or on a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from acceptance.commands import Desk
from services.cases import cases

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full"),
]

#: redirections, and the reason why standard output cannot be written; "" where it can
LOST = {">/dev/full": "No space left on device", ">&-": "Bad file descriptor"}
KEPT = ("2>/dev/full", "2>&-", "<&-")
CLOSED = ">&- 2>&- <&-"
WIDE = "print('.' * 200_000, flush=True)"


def shell(desk: Desk, words: str, redirected: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``python -m shadho_celery WORDS`` in a shell, or ``python -m shadho_celery.worker`` for ``.worker``."""
    command = f"{sys.executable} -m shadho_celery{words if words.startswith('.') else f' {words}'} {redirected}"
    options: dict[str, Any] = {"cwd": desk.folder, "env": desk.environment, "timeout": 240}
    return subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def recorded(shared_desk: Desk) -> Desk:
    """A desk with a study of three trials."""
    shared_desk.study(seconds=0.0)
    assert shared_desk.told("run", "my_study", "--trials", "3", "--workers", "cpu=1", "--study", "s").code == 0
    return shared_desk


def test_a_command_without_standard_output_ends_with_one_line_and_2(recorded: Desk) -> None:
    commands = ("--help", "--version", "studies", "best s --json", "export s", ".simulate --example", ".worker --help")
    for number, words in enumerate(commands):
        redirected, reason = [*LOST.items()][number % len(LOST)]
        done = shell(recorded, words, redirected)
        said = [line for line in done.stderr.splitlines() if "latest" not in line]
        assert (done.returncode, said) == (2, [f"Error: standard output cannot be written: {reason}"]), words
    for redirected in KEPT:
        done = shell(recorded, "best s --json", redirected)
        assert (done.returncode, done.stderr) == (0, ""), redirected
        assert done.stdout.startswith("{")
    assert shell(recorded, "studies", CLOSED).returncode == 2


@cases("redirected", [*LOST, "2>/dev/full", CLOSED, "--json >/dev/full", "2>&1 | true; exit ${PIPESTATUS[0]}"])
def test_a_run_goes_on_without_its_streams_and_ends_by_its_result(desk: Desk, redirected: str) -> None:
    """Its study file prints more than a pipe holds, and more than a disk may have room for."""
    module = desk.study(seconds=0.0)
    path = desk.folder / f"{module}.py"
    path.write_text(f"{WIDE}\n{path.read_text()}")
    before = len(desk.trials()) if (desk.folder / "shadho.db").exists() else 0
    words = f"run {module} --trials 2 --workers cpu=1"
    done = shell(desk, words, redirected)
    assert done.returncode == 0, done.stderr
    assert len(desk.trials()) == before + 2
    assert "Traceback" not in done.stderr
    reason = LOST.get(redirected.removeprefix("--json "))
    assert (f"Warning: standard output cannot be written: {reason}" in done.stderr) == (reason is not None)


def test_a_reader_that_goes_away_ends_a_command_without_a_line(recorded: Desk) -> None:
    done = shell(recorded, "trials s", "| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) in ((0, ""), (1, ""))


def test_a_file_that_a_command_opens_does_not_get_the_number_of_a_closed_stream(recorded: Desk) -> None:
    """Otherwise what is printed would be written to the store."""
    shell(recorded, "run my_study --trials 2 --workers cpu=1 --study t", CLOSED)
    assert (recorded.folder / "shadho.db").read_bytes().startswith(b"SQLite format 3")
    assert recorded.told("studies").out.count("my_study") == 2
