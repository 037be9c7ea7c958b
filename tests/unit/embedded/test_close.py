"""The end of an embedded fleet, as its scheduler's process sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from shadho_celery.embedded.embedded import Embedded


def test_a_run_ends_though_the_system_refuses_the_thread_that_waits_for_the_supervisor(
    refuse_threads: Callable[[str], None],
) -> None:
    refuse_threads("_reap")
    embedded = Embedded.__new__(Embedded)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as supervisor:
        embedded._supervisor = supervisor
        embedded.close()
        assert supervisor.wait() == 0
