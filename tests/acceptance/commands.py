"""The commands that people type, in a folder of their own: as real processes, or within the test's process."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import pty
import runpy
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import termios
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import services
from click.testing import CliRunner

from shadho_celery.cli.group import commands

ROOT = Path(__file__).parents[2]

#: folders from which Python imports before any test runs. Those of the checkout and of the environment may lie below
#: the temporary folder, too
IMPORTED_FROM = tuple(os.path.join(path, "") for path in sys.path if path not in ("", tempfile.gettempdir()))  # noqa: PTH118

#: what would tell the commands something else than the test does
CLEARED = ("CELERY_BROKER_URL", "SHADHO_REDIS_URL", "SHADHO_IMPORTS", "SHADHO_CORES", "CELERY_CONFIG_MODULE")

#: A study of two subspaces whose trials take `{seconds}`, and say in runs.log that they began and that they ended.
STUDY = """
import os, time
from hyperopt import hp

SPACE = hp.choice("side", [
    {{"side": "left", "x": hp.uniform("x", 0, 1)}},
    {{"side": "right", "x": hp.uniform("x2", 0, 1), "n": hp.quniform("n", 0, 10, 1)}},
])
STUDY = {settings}

def note(*words):
    with open({log!r}, "a") as log:
        log.write("\\t".join(map(str, words)) + "\\n")

def objective(params, context):
    note("began", context.trial, context.attempt, context.compute_class, os.getpid())
    {body}
    time.sleep({seconds})
    note("ended", context.trial, context.attempt, context.compute_class, os.getpid())
    return params["x"]
"""


class Answer:
    """What a command has answered: its exit code and what it printed."""

    out: str
    err: str
    code: int | None

    @property
    def messages(self) -> list[str]:
        """The lines on standard error, but for the one with which a run begins."""
        return [line for line in self.err.splitlines() if not line.startswith("shadho_celery: reading ")]

    def json(self) -> dict[str, Any]:
        """Standard output, which must be one JSON object and nothing else."""
        assert self.out.count("\n") == 1, self.out
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


@dataclass(frozen=True, kw_only=True)
class Told(Answer):
    """The answer of a command that ran within the test's process."""

    out: str
    err: str
    code: int | None


class Command(Answer):
    """A running command, in a session of its own as a terminal would start it; its output goes to files."""

    def __init__(self, words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        number = len(list(folder.glob("command-*.out")))
        self.out_path, self.err_path = (folder / f"command-{number}.{kind}" for kind in ("out", "err"))
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        return self.out_path.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_path.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def wait(self, seconds: float = 60.0) -> Command:
        seconds *= services.PATIENCE
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {seconds} s\n{self.out}\n{self.err}") from None
        return self

    def says(self, text: str, seconds: float = 90.0) -> None:
        """Wait until it has printed `text`."""
        until(lambda: text in self.out + self.err or self.code is not None, seconds, lambda: self.out + self.err)
        assert text in self.out + self.err, f"it ended with {self.code}\n{self.out}\n{self.err}"

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to everything that the terminal runs in the foreground."""
        os.killpg(self.pid, signal.SIGINT)

    def send(self, sign: signal.Signals) -> None:
        self.process.send_signal(sign)

    def end(self) -> None:
        """End it by force."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


class Terminal:
    """A command with a terminal around it: `screen` is all that it has written there."""

    def __init__(self, words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env={**environment, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 -- Ctrl-C needs it
        )
        os.close(theirs)
        self.screen = ""

    def read(self) -> str:
        with contextlib.suppress(OSError):  # nothing there now, or nobody there any more
            while part := os.read(self._ours, 65536):
                self.screen += part.decode(errors="replace")
        return self.screen

    def says(self, text: str, seconds: float = 90.0) -> None:
        until(lambda: text in self.read(), seconds, self.read)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def wait(self, seconds: float = 60.0) -> int:
        def ended() -> bool:
            self.read()  # or it would wait for room in the terminal
            return self.process.poll() is not None

        until(ended, seconds, self.read)
        self.read()
        return int(self.process.returncode)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)


class Desk:
    """A folder in which somebody works: study files, a store, and the commands typed there."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder = folder
        self.temporary = temporary
        self.environment = {name: value for name, value in os.environ.items() if name not in CLEARED}
        self.environment |= {
            # The checkout, whether it is installed or not; and the programs beside this Python, the same.
            "PYTHONPATH": str(ROOT),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "TMPDIR": str(temporary),
            # The classes of a test are those it names, on machines with a GPU too.
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "120",
        }
        self.commands: list[Command | Terminal] = []

    # Files

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def study(
        self,
        name: str = "my_study",
        *,
        seconds: float = 0.05,
        body: str = "",
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Write a study file whose trials run the statement `body` and take `seconds`."""
        log = str(self.folder / "runs.log")
        text = STUDY.format(log=log, seconds=seconds, body=body, settings={"sampler": "random", **settings})
        self.write(f"{name}.py", text)
        return name

    def slots(self) -> set[int]:
        """The processes that trials have run in."""
        return {pid for *_, pid in self.runs()}

    def runs(self, what: str = "began") -> list[tuple[int, int, str, int]]:
        """(trial, attempt, class, process) of every run that began, or ended, so far."""
        path = self.folder / "runs.log"
        lines = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(n), int(attempt), name, int(pid)) for word, n, attempt, name, pid in lines if word == what]

    def await_runs(self, count: int, what: str = "began", seconds: float = 90.0) -> None:
        def enough() -> bool:
            for command in self.commands:
                if isinstance(command, Terminal):
                    command.read()  # or it would wait for room in the terminal
            return len(self.runs(what)) >= count

        until(enough, seconds, lambda: f"{self.runs()} {self.said()}")

    def trials(self, store: str = "shadho.db") -> list[dict[str, Any]]:
        """The trials in the store, with the name of their study."""
        with contextlib.closing(sqlite3.connect(f"file:{self.folder / store}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            query = "select studies.name as name, trials.* from trials join studies on studies.key = trials.study"
            found = [dict(row) for row in connection.execute(query + " order by name, number")]
        return [{**row, "params": json.loads(row["params"])} for row in found]

    def states(self) -> Counter[str]:
        return Counter(trial["state"] for trial in self.trials())

    def states_folder(self) -> Path:
        """The state folder of the one embedded study."""
        [folder] = (self.folder / ".shadho/embedded").iterdir()
        return folder

    def logs(self) -> str:
        """Return the logs of the embedded processes."""
        return "\n".join(f"{path.name}: {path.read_text()}" for path in self.folder.glob(".shadho/embedded/*/*.log"))

    # Commands

    def start(self, *words: str, **environment: str) -> Command:
        command = Command(list(words), self.folder, {**self.environment, **environment})
        self.commands.append(command)
        return command

    def launch(self, *words: str, **environment: str) -> Command:
        return self.start(sys.executable, "-m", "shadho_celery.launch", *words, **environment)

    def launch_in_terminal(self, *words: str) -> Terminal:
        terminal = Terminal([sys.executable, "-m", "shadho_celery.launch", *words], self.folder, self.environment)
        self.commands.append(terminal)
        return terminal

    def told(self, *words: str, **environment: str) -> Told:
        """``shadho-celery WORDS`` within this process.

        It spares an interpreter's start where a test asks only what a command prints.
        """
        values = {**dict.fromkeys(CLEARED), **self.environment, **environment}
        with as_a_process(self.folder):
            result = CliRunner().invoke(commands, words, prog_name="shadho-celery", env=values)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Told(out=result.stdout, err=result.stderr, code=result.exit_code)

    def ran(self, script: str | Path, *words: str) -> Told:
        """``python SCRIPT WORDS`` within this process, as `told` for scripts."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        before = sys.argv
        with as_a_process(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            sys.argv = [str(script), *words]
            sys.path.insert(0, str(Path(script).resolve().parent))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("default")
                    runpy.run_path(str(script), run_name="__main__")
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            finally:
                sys.argv = before
        return Told(out=out.getvalue(), err=err.getvalue(), code=code)

    def worker(self, queue: str, *words: str, **environment: str) -> Command:
        """``celery -A shadho_celery worker -Q QUEUE``."""
        return self.start("celery", "-A", "shadho_celery", "worker", "-Q", queue, *words, **environment)

    def said(self) -> str:
        """All that the commands have printed, for the message of a test that fails."""
        parts = []
        for command in self.commands:
            if isinstance(command, Terminal):
                parts.append(command.read())
            else:
                ended = f"{command.process.args!r} -> {command.code}"
                parts += [ended, command.out[-3000:], command.err[-3000:]]
        return "\n".join(parts) + self.logs()[-3000:]

    def close(self) -> None:
        for command in reversed(self.commands):
            command.end()

    # What is alive

    def processes(self) -> dict[int, str]:
        """Command lines of all live processes that this test has started, by process id.

        Those that work in its folder, too: a Redis overwrites its environment with its title, and the mark with it.
        """
        found = dict(services.marked_processes(os.environ.get(services.MARK, "of no test")))
        for place in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if f"{place.readlink()}/".startswith(f"{self.folder}/"):
                    line = (place.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(place.parent.name)] = line.decode(errors="replace").strip()
        return found

    def pids(self, *words: str) -> list[int]:
        """Live processes whose command line has all of `words`."""
        return [pid for pid, line in self.processes().items() if all(word in line for word in words)]

    def sockets(self) -> list[Path]:
        """Sockets, and folders made for one, that are there."""
        places = [*self.folder.rglob("*"), *self.temporary.rglob("*")]
        return [path for path in places if path.is_socket() or path.parent == self.temporary]

    def nothing_left(self, seconds: float = 20.0) -> float:
        """Wait until no process and no socket is left; seconds that it took, to be reported rather than asserted."""
        began = time.monotonic()
        until(lambda: not self.processes() and not self.sockets(), seconds, lambda: f"{self.processes()}")
        return time.monotonic() - began


def signing_key(desk: Desk) -> dict[str, str]:
    """Write a signing key to the desk's folder, and return the environment that names it."""
    key = desk.write("shadho.key", "a key of more than sixteen bytes\n")
    key.chmod(0o600)
    return {"SHADHO_SIGNING_KEY_FILE": str(key)}


def signed_fleet(desk: Desk, redis_url: str) -> dict[str, str]:
    """Return the environment of a fleet with a `signing_key`, whose broker is this Redis."""
    return {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url, **signing_key(desk)}


def worker_elsewhere(
    desk: Desk, folder: Path, study: str, redis_url: str, *words: str
) -> tuple[Desk, Command, dict[str, str], dict[str, str]]:
    """Start a worker of a signed fleet in another folder, as on another machine. Both folders get the study file.

    Return its desk and command, and the environment of the fleet with and without the key.
    """
    there, signed = Desk(folder, desk.temporary), signed_fleet(desk, redis_url)
    for each in (desk, there):
        each.write("my_study.py", study)
    worker = there.worker("cpu", *words, **signed, SHADHO_IMPORTS="my_study")
    desk.commands.append(worker)
    return there, worker, signed, {name: url for name, url in signed.items() if name.endswith("_URL")}


@contextlib.contextmanager
def as_a_process(folder: Path) -> Iterator[None]:
    """Work in `folder`; afterwards this process has the folder, path, modules and environment that it had."""
    before, path, environment = Path.cwd(), list(sys.path), dict(os.environ)
    _forget_modules_of_tests()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        _forget_modules_of_tests()


def _forget_modules_of_tests() -> None:
    """Forget the modules that tests have written, because many of them have one name."""
    for name, module in list(sys.modules.items()):
        path = str(getattr(module, "__file__", None) or "")
        if path.startswith(tempfile.gettempdir()) and not path.startswith(IMPORTED_FROM):
            del sys.modules[name]
    importlib.invalidate_caches()


def until(ready: Callable[[], Any], seconds: float, told: Callable[[], str] = str) -> None:
    """Wait until `ready()` is true; the test fails after `seconds`, times PATIENCE, with what `told()` says."""
    seconds *= services.PATIENCE
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {told()}")
        time.sleep(0.05)


@contextlib.contextmanager
def desk(folder: Path) -> Iterator[Desk]:
    """A desk in `folder`; all that was started there ends with the block."""
    # A short path: a socket is put into the temporary folder where the state folder's own path is too long for one.
    with tempfile.TemporaryDirectory(prefix="sh-", dir="/tmp") as temporary:
        made = Desk(folder, Path(temporary))
        try:
            yield made
        finally:
            made.close()
            try:
                until(lambda: not made.processes(), 10, lambda: f"left behind: {made.processes()}")
            finally:
                for pid in made.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
