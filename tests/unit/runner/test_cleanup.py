"""Cleanup after a trial on systems other than this one; on this one the runner's tests drive it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, psutil, sys, threading, time
from shadho_celery.runner.cleanup import Cleanup

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
