"""Reaper: the parent of a slot's process, which kills the process tree; and functions about process trees.

It is started with ``python -m shadho_celery.runner.reaper LIFELINE MODULE ...``, or forked (`fork_server`).

It runs MODULE's `main` in a child process, and waits until the child ends or the lifeline closes. The lifeline is a
pipe from the reaper's parent, which closes when that parent ends for any reason. Then the reaper kills the child's
process tree, and ends with the child's exit status. On Linux it adopts every orphan of the tree, even one that has left
its session (prctl's PR_SET_CHILD_SUBREAPER). On other systems it kills the child's process group.

psutil is imported in the functions, because a trial's process rarely needs it: most trials leave no children. A service
manager or a batch system may send signals to all processes of a worker, but only the worker may end trials.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

#: environment variable that marks the processes of a slot, so that they can be found if their reaper was killed
MARK = "SHADHO_RUNNER"
#: value of MARK in a prepared process; it has the length of a real mark, which later overwrites it
UNMARKED = "0" * 32

#: seconds after which killing is given up; only processes that hang in the kernel or belong to another user are left
#: then
KILL_SECONDS = 10.0

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (Linux only)."""
    if sys.platform == "linux":
        # Imported here because nothing else needs it, and it takes time.
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def hide_memory() -> None:
    """Prevent other processes of this user from reading this process's memory, environment and files (Linux only).

    Programs that this process starts are not protected.
    """
    prctl(PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies (Linux only)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(of: int) -> dict[int, str]:
    """Return the live descendants of the process `of`: process id -> name of the program."""
    import psutil

    found = {}
    with suppress(psutil.Error):
        for child in psutil.Process(of).children(recursive=True):
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found[child.pid] = child.name()
    return found


def kill(pid: int) -> None:
    """Send SIGKILL to a process. Do nothing if it is gone or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_all(find: Callable[[], Mapping[int, str]], seconds: float = KILL_SECONDS) -> set[str]:
    """Kill the processes that `find` returns, until it finds no more or `seconds` are over. Return the names of the
    killed processes.
    """
    deadline = time.monotonic() + seconds
    names: set[str] = set()
    while found := find():
        names.update(found.values())
        for pid in found:
            kill(pid)
        time.sleep(0.002)
        if time.monotonic() > deadline:
            break
    return names


def kill_marked(mark: str) -> None:
    """Kill every process in whose environment the variable MARK has the value `mark`."""
    import psutil

    def marked() -> dict[int, str]:
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process.name()
        return found

    kill_all(marked)


#: signals that may be meant for the worker alone. SIGXCPU is not included, because the system sends it to a trial that
#: exceeds its own limit of CPU seconds
FOR_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def shielded() -> Iterator[None]:
    """Block the signals FOR_WORKER in programs that start within a `with` block, until they call `ignore`.

    Without this, a signal could end a new interpreter before it calls `ignore`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_WORKER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore the signals FOR_WORKER, and unblock them."""
    for number in FOR_WORKER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_WORKER)


def leave_to_worker() -> None:
    """In a trial's process: make the signals FOR_WORKER have no effect here, but their usual effect in the trial's
    children.

    `multiprocessing` may terminate a forked process before that process has reset its handlers. Therefore the signals
    are blocked from the fork until the reset.
    """
    for number in FOR_WORKER[1:]:
        # SIGINT stays ignored, also in programs that the trial starts, because Ctrl-C at a terminal is meant for the
        # scheduler.
        signal.signal(number, _do_nothing)
    forking = threading.local()

    def block() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_WORKER)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def reset() -> None:
        for number in FOR_WORKER:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def _do_nothing(number: int, frame: object) -> None:
    """Handle a signal by doing nothing.

    If the signal was ignored instead, programs that a trial starts would inherit that and could not be terminated. A
    handler is not inherited.
    """


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
    leave_to_worker()
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
    ignore()
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
    # Close the child's descriptors here, so that whoever reads from them notices the child's end.
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
