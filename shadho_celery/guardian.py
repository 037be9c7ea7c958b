"""A process that lets nothing of another one stay behind: ``python -m shadho_celery.guardian LIFELINE MODULE ...``.

It runs MODULE's `main` in a child and waits for the child's end, or for that of the lifeline: a pipe whose other end
its parent holds, which closes however the parent dies. Then it kills all that the child has started, and ends as the
child did. Linux hands it every orphan among them, also one that has left its session (prctl's PR_SET_CHILD_SUBREAPER);
elsewhere it kills the child's process group.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

#: in the environment of what a guardian guards, so that it is found where the guardian itself was killed
MARK = "SHADHO_RUNNER"

#: seconds after which killing is given up: only what hangs in the kernel, or belongs to another user, lives so long
KILL_SECONDS = 10.0

#: what the child's end must not be made by: those who stop a service signal all of its processes
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(of: int) -> list[int]:
    """Live descendants of the process `of`; none are seen where there is no /proc."""
    parents = _parents()
    found = [of]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def end_marked(mark: str) -> None:
    """Kill every process that was started with `mark` as its MARK, until there is none."""
    wanted = f"{MARK}={mark}".encode()
    _until_none(lambda: [pid for pid in _parents() if wanted in _read(f"/proc/{pid}/environ").split(b"\0")])


def kill(pid: int) -> None:
    """SIGKILL, where it still lives and is ours to kill."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def name_of(pid: int) -> str:
    """The name of the program it runs."""
    return _read(f"/proc/{pid}/comm").decode(errors="replace").strip() or "already gone"


def _until_none(living: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := living()) and time.monotonic() < deadline:
        for pid in pids:
            kill(pid)
        time.sleep(0.005)


def _parents() -> dict[int, int]:
    """The parent of every live process."""
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 -- pathlib would be imported for it
    except OSError:
        return {}
    found = {}
    for name in names:
        # A command's name may hold blanks and parentheses: what follows its end is "state parent ...".
        fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split(None, 2)
        if len(fields) == 3 and fields[0] not in b"ZX":
            found[int(name)] = int(fields[1])
    return found


def _read(path: str) -> bytes:
    """A file of /proc; empty where the process has ended or is another user's."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 -- pathlib would be imported for it
            return file.read()
    except OSError:
        return b""


def _prctl(*arguments: int) -> None:
    if sys.platform == "linux":
        # Not needed anywhere else, and not free.
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(*arguments, 0, 0, 0)


def _notice_children() -> tuple[int, int]:
    """Both ends of a pipe whose first turns readable when a child has ended."""
    noticed, note = os.pipe()
    os.set_blocking(noticed, False)
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return noticed, note


def _be_guarded(guardian: int) -> None:
    """In the child: a session of its own, that ends with the guardian."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_IGNORED[1:]):
        # Not SIGINT: Ctrl-C at a terminal is for the scheduler.
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(1)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        # Where memory runs out it shall be the trial that is killed, not its worker.
        file.write("500")


def _wait(child: int, lifeline: int, noticed: int) -> int | None:
    """The child's wait status; None where the lifeline ended first."""
    while True:
        readable, _, _ = select.select([lifeline, noticed], [], [])
        with suppress(BlockingIOError):
            os.read(noticed, 4096)
        # Orphans that were handed to this process end here too.
        with suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == child:
                    return reaped[1]
        if lifeline in readable and not os.read(lifeline, 1):
            return None


def _end_children(child: int) -> None:
    """Kill until there is no child left, and so no descendant: whoever loses its parent is handed to this process."""
    deadline = time.monotonic() + KILL_SECONDS
    if sys.platform != "linux":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _end_like(status: int | None) -> None:
    """End with the same exit code, or by the same signal, as the child."""
    if status is not None and os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        # The child's own core is worth keeping, where the machine keeps any; this one is not.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF)


def main() -> None:
    """Guard the `main` of the module that the second argument names; the first is the lifeline's descriptor."""
    lifeline, module, *arguments = sys.argv[1:]
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    noticed, note = _notice_children()
    adopt_orphans()
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        for descriptor in (int(lifeline), noticed, note):
            os.close(descriptor)
        _be_guarded(guardian)
        sys.argv = [module, *arguments]
        importlib.import_module(module).main(arguments)
        return
    # What the child was given must be open nowhere else, or nobody would see its end.
    for descriptor in range(3, 256):
        if descriptor not in {int(lifeline), noticed, note}:
            with suppress(OSError):
                os.close(descriptor)
    status = _wait(child, int(lifeline), noticed)
    _end_children(child)
    _end_like(status)


if __name__ == "__main__":
    main()
