"""Reaper: the parent of a slot's process, which kills the process tree.

It is started with ``python -m shadho_celery.runner.reaper LIFELINE MODULE ...``, or forked (`fork_server`).

It runs MODULE's `main` in a child process, and waits until the child ends or the lifeline closes. The lifeline is a
pipe from the worker, which closes when the worker ends for any reason. Then the reaper kills the child's process tree,
and ends with the child's exit status. On Linux it adopts every orphan of the tree, even an orphan that has left its
session (prctl's PR_SET_CHILD_SUBREAPER). On other systems it kills the child's process group.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from shadho_celery.runner import process_tree
from shadho_celery.runner.process_tree import KILL_SECONDS, PR_SET_PDEATHSIG, adopt_orphans, descendants, kill, prctl


def _notice_children() -> tuple[int, int]:
    """Return both ends of a pipe that becomes readable when a child has ended (the self-pipe trick)."""
    noticed, note = os.pipe()
    os.set_blocking(noticed, False)
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return noticed, note


def _start_session(reaper: int) -> None:
    """In the child: start a new session, and ask the kernel to kill this process when the reaper ends."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process_tree.leave_to_worker()
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != reaper:
        os._exit(1)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        # If memory runs out, the system should kill this process and not the worker.
        file.write("500")


def _wait(child: int, lifeline: int, noticed: int) -> int | None:
    """Wait for the child. Return its wait status, or None if the lifeline closed first."""
    # `select.select` cannot wait for descriptors above 1,023, so use `poll`.
    poll = select.poll()
    for each in (lifeline, noticed):
        poll.register(each, select.POLLIN)
    while True:
        readable = [each for each, _ in poll.poll()]
        with suppress(BlockingIOError):
            os.read(noticed, 4096)
        # This also collects the exit status of orphans that this process has adopted.
        with suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == child:
                    return reaped[1]
        if lifeline in readable and not os.read(lifeline, 1):
            return None


def _end_children(child: int) -> None:
    """Kill all descendants. All of them become children of this process sooner or later, because it adopts orphans."""
    deadline = time.monotonic() + KILL_SECONDS
    kill(child)
    if sys.platform != "linux":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in descendants(os.getpid()):
            kill(pid)
        time.sleep(0.002)


def _end_like(code: int) -> None:
    """End this process as the child ended: with the same exit code, or by the same signal."""
    if code < 0:
        import resource

        # Prevent a core dump of this process; only the child's is useful.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def run(lifeline: int, module: str, arguments: Sequence[str], spare: Sequence[int] = ()) -> int:
    """Run `main` of a module in a child process. Kill its process tree once the child ends or the lifeline closes.

    Returns the child's exit code, or the negative number of the signal that ended it, or 0 if the lifeline closed. In
    the child, this function does not return: the child exits. `spare` are further descriptors that only the reaper
    needs.
    """
    process_tree.ignore()
    noticed, note = _notice_children()
    adopt_orphans()
    own = {lifeline, noticed, note, *spare}
    reaper = os.getpid()
    child = os.fork()
    if child == 0:
        for descriptor in own:
            os.close(descriptor)
        _start_session(reaper)
        sys.argv = [module, *arguments]
        importlib.import_module(module).main(arguments)
        sys.exit(0)
    # Close the child's descriptors here. Otherwise readers of its pipes would not notice that the child has ended.
    for descriptor in {*range(3, 256)} - own:
        with suppress(OSError):
            os.close(descriptor)
    status = _wait(child, lifeline, noticed)
    _end_children(child)
    return 0 if status is None else os.waitstatus_to_exitcode(status)


def main() -> None:
    """Run `main` of the module named by the second argument. The first argument is the lifeline's descriptor."""
    lifeline, module, *arguments = sys.argv[1:]
    _end_like(run(int(lifeline), module, arguments))


if __name__ == "__main__":
    main()
