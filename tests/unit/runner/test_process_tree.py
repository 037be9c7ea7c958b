"""What runs below a process is found and killed, however it is called and wherever it has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shadho_celery.runner.process_tree import MARK, descendants, kill, kill_marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the child's group is ended")


def test_descendants_are_seen_however_they_are_called(tmp_path: Path) -> None:
    """The name of a command may hold what separates the fields of /proc."""
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as process:
        assert process.pid in descendants(os.getpid())
        kill(process.pid)
    assert process.pid not in descendants(os.getpid())
    kill(process.pid)


def test_what_was_started_with_a_mark_is_found_and_killed() -> None:
    environment = {**os.environ, MARK: "of-this-test"}
    with (
        subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True) as marked,
        subprocess.Popen(["sleep", "60"], env={**environment, MARK: "of-another"}) as other,
    ):
        kill_marked("of-this-test")
        assert marked.wait(5) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has it")
def test_a_process_that_hides_its_memory_is_not_dumpable_and_what_it_starts_is() -> None:
    """A worker and the trials below it. 3 is PR_GET_DUMPABLE."""
    ask = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)"
    code = f"""
import subprocess, sys
from shadho_celery.runner.process_tree import hide_memory
hide_memory()
{ask}
subprocess.run([sys.executable, "-c", {ask!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
