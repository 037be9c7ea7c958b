"""Cleanup after a trial on systems other than this one, and of open files; the rest the runner's tests drive."""

from __future__ import annotations

import subprocess
import sys

LEAKING = """
import os, resource
from shadho_celery.runner.process_state import Cleanup

resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
cleanup = Cleanup()
cleanup.note()
for count in (10, 40, 200):
    try:
        for _ in range(count):
            os.dup(0)
    except OSError:
        pass
    print(cleanup.clear())
"""

CODE = """
import os, psutil, sys, threading, time
from shadho_celery.runner.process_state import Cleanup

sys.platform = "darwin"
del os.waitid
cleanup = Cleanup()
threading.Thread(target=time.sleep, args=(0.05,)).start()
print(cleanup.clear())
"""


def test_on_macos_before_python_3_13_a_trial_may_leave_a_thread_that_is_about_to_end() -> None:
    """There is no os.waitid."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_open_files_that_later_trials_would_lack_are_remains() -> None:
    done = subprocess.run([sys.executable, "-c", LEAKING], capture_output=True, text=True, check=False)
    left = "['so many open files that later trials may lack them']"
    assert (done.stdout.splitlines(), done.stderr) == (["[]", left, left], "")


ENDING = """
import faulthandler, time
from shadho_celery.runner.process_state import Cleanup

cleanup = Cleanup()
faulthandler.dump_traceback_later(1.0, exit=True)
print(cleanup.clear())
time.sleep(1.2)
"""


def test_an_end_that_a_trial_has_planned_for_its_process_does_not_come_in_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)
