"""A server as a private process of the tests, and how what is left of one is found."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Set in the environment of everything a test starts, so that what it leaves behind is found under any parent.
MARK = "MARK_OF_A_SHADHO_TEST"

#: The factor of every limit in seconds of the tests: a slower machine needs more. A test that passes takes no longer,
#: since it polls for what it waits for.
PATIENCE = float(os.environ.get("SHADHO_TEST_PATIENCE", "2"))


class Unavailable(Exception):
    """This way to a service is closed; the message says why."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody holds at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(ready: Callable[[], object], seconds: float = 30.0, alive: Callable[[], bool] = lambda: True) -> None:
    """Poll `ready` until it neither raises nor returns False; `alive` turning false ends the wait early."""
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    while True:
        try:
            if ready() is not False:
                return
            error: Exception | None = None
        except Exception as caught:
            error = caught
        if not alive() or time.monotonic() > deadline:
            raise Unavailable(f"it did not come up within {seconds:.0f} s: {error}")
        time.sleep(0.05)


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Return (pid, command line) of every live process that inherited `mark` (Linux; elsewhere none are seen).

    A worker hides its environment from all but root: it counts if its parent or one of its children has the mark.
    """
    found, hidden = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            is_hidden = False
            try:
                # Tests poll this, so that nothing else is read of the many that are not marked.
                if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
            except PermissionError:
                is_hidden = True
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            if not is_hidden:
                found[int(folder.name)] = parent, command
            elif "shadho_celery" in command:
                hidden[int(folder.name)] = parent, command
    while related := {
        pid: (parent, command)
        for pid, (parent, command) in hidden.items()
        if pid not in found and (parent in found or pid in {parent for parent, _ in found.values()})
    }:
        found |= related
    return [(pid, command) for pid, (_, command) in found.items()]


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Mark what is started within the block: soon after it nothing of that is alive, under any parent."""
    mark, before = uuid.uuid4().hex, os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]
        if before is not None:
            os.environ[MARK] = before
    deadline = time.monotonic() + 5 * PATIENCE
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid, _ in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind: {left}"


class Server:
    """A private server process: `kill` is SIGKILL, `restart` comes back on the same port with the same files."""

    url: str
    log: Path

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="shadho-test-"))
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        # When it is started again within a test it is not one of the processes that the test may not leave behind.
        self._inherited = dict(os.environ)

    @property
    def is_up(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.poll() is None

    def command(self) -> list[str]:
        raise NotImplementedError

    def check(self) -> object:
        """Raise unless the server answers."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return self._inherited

    def credentials(self) -> dict[str, Any]:
        """Return who shall run it, as Popen's arguments, where that is not the one who runs the tests."""
        return {}

    def start(self) -> None:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests; and the group is how everything of it is ended
                **self.credentials(),
            )
        try:
            wait_until(self.check, alive=lambda: self.is_up)
        except Unavailable as error:
            raise Unavailable(f"{error}; its log ends: {self.log.read_text(errors='replace')[-500:]}") from error

    def kill(self, sign: signal.Signals = signal.SIGKILL) -> None:
        """End the process and whatever it started; its files stay."""
        if self.process is None:
            return
        if sign is not signal.SIGKILL and self.is_up:
            self.process.send_signal(sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def restart(self, sign: signal.Signals = signal.SIGKILL) -> None:
        """Kill it and start it again, with what it had kept."""
        self.kill(sign)
        self.start()

    def stop(self) -> None:
        """End it and remove its files."""
        self.kill(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)


def program(*names: str) -> str:
    """Return the first of these programs that is on PATH (or among Debian's server programs)."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    raise Unavailable(f"no {' or '.join(names)} on PATH")
