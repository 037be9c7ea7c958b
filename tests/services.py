"""Real Redis, RabbitMQ and PostgreSQL for the tests.

Each is looked for in this order: a URL in the environment (SHADHO_TEST_REDIS_URL, SHADHO_TEST_AMQP_URL,
SHADHO_TEST_POSTGRES_URL); a server on its standard port of 127.0.0.1; the system's own programs, started as private
processes on free ports; Docker with the images of deploy/compose.yml. Where none is found the test is skipped, and
fails where CI=true.

Private servers keep everything in one temporary folder each, and are children of the test session.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pwd
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
from urllib.parse import quote, urlsplit

import amqp
import pytest
import redis
import sqlalchemy
import yaml

COMPOSE = Path(__file__).parents[1] / "deploy" / "compose.yml"
#: Set in the environment of everything a test starts, so that what it leaves behind is found whoever its parent is now.
MARK = "SHADHO_TEST_MARK"
#: The databases of a shared Redis that tests may fill and flush; the others belong to whoever runs it.
TEST_DBS = range(9, 16)


class Unavailable(Exception):
    """This way to a service is closed; the message says why."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody holds at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(ready: Callable[[], object], seconds: float = 30.0, alive: Callable[[], bool] = lambda: True) -> None:
    """Poll `ready` until it neither raises nor returns False; `alive` turning false ends the wait early."""
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
    """Return (pid, command line) of every live process that inherited `mark` (Linux; elsewhere none are seen)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end, or turn out to be another user's, while it is looked at.
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append((int(folder.name), command))
    return found


class Server:
    """A private server process: `kill` is SIGKILL, `restart` comes back on the same port with the same files."""

    url: str
    log: Path

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="shadho-test-"))
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def check(self) -> object:
        """Raise unless the server answers."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def credentials(self) -> dict[str, Any]:
        """Return who shall run it, as Popen's arguments, where that is not the one who runs the tests."""
        return {}

    def start(self) -> Server:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

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
            wait_until(self.check, alive=lambda: self.process is not None and self.process.poll() is None)
        except Unavailable as error:
            raise Unavailable(f"{error}; its log ends: {self.log.read_text(errors='replace')[-500:]}") from error

    def kill(self, sign: signal.Signals = signal.SIGKILL) -> None:
        """End the process and whatever it started; its files stay."""
        if self.process is None:
            return
        if sign is not signal.SIGKILL and self.process.poll() is None:
            self.process.send_signal(sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def restart(self) -> None:
        """Kill it and start it again, with what it had kept."""
        self.kill()
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


class RedisServer(Server):
    """Redis or Valkey with an append-only file: killed and restarted, it has everything it had answered for."""

    def __init__(self, conf: Path | None = None) -> None:
        self.binary = program("redis-server", "valkey-server")
        self.conf = conf
        super().__init__()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        settings = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "yes"}
        settings |= {"appendfsync": "everysec", "dir": str(self.folder), "maxmemory-policy": "noeviction"}
        conf = [str(self.conf)] if self.conf else []
        return [self.binary, *conf, *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def check(self) -> object:
        return redis_answers(self.url)


class RabbitServer(Server):
    """A RabbitMQ node with its own epmd, beside any other node of the machine; `conf` is its rabbitmq.conf."""

    def __init__(self, conf: str = "") -> None:
        self.conf = conf
        # Debian's wrapper insists on its own user; the script behind it runs as anybody.
        script = Path(program("rabbitmq-server"))
        self.scripts = script.resolve().parent if script.is_symlink() else script.parent
        if not (self.scripts / "rabbitmq-server").exists():
            raise Unavailable(f"no rabbitmq-server beside {script.resolve()}")
        self.epmd_binary = program("epmd")
        super().__init__()
        self.epmd_port = free_port()
        self.epmd: subprocess.Popen[bytes] | None = None
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def environment(self) -> dict[str, str]:
        # All three are given, or the machine's own would be read.
        for name, text in {"env.conf": "", "rabbitmq.conf": self.conf, "plugins": "[].\n"}.items():
            (self.folder / name).write_text(text)
        loopback = "{127,0,0,1}"
        return {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))} | {
            "HOME": str(self.folder),  # the cookie lies there
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_FLAGS": f"-kernel inet_dist_use_interface {loopback}",
            "RABBITMQ_NODENAME": f"shadho-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "logs"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "env.conf"),
        }

    def command(self) -> list[str]:
        return [str(self.scripts / "rabbitmq-server")]

    def check(self) -> object:
        return amqp_answers(self.url)

    def ctl(self, *words: str) -> str:
        """Run rabbitmqctl against this node."""
        return rabbitmqctl(str(self.scripts / "rabbitmqctl"), words, self.environment())

    def _start(self) -> None:
        # Started here rather than by Erlang, whose own would outlive the node.
        if self.epmd is None:
            words = [self.epmd_binary, "-port", str(self.epmd_port), "-address", "127.0.0.1"]
            self.epmd = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        super()._start()

    def stop(self) -> None:
        super().stop()
        if self.epmd is not None:
            self.epmd.kill()
            self.epmd.wait()
            self.epmd = None


class PostgresServer(Server):
    """A PostgreSQL cluster of its own; it refuses to run as root, who lends it to another user."""

    def __init__(self) -> None:
        newest = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
        initdb = newest[-1] if newest else Path(program("initdb")).resolve()
        self.binaries = initdb.parent
        super().__init__()
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"
        self.data = self.folder / "data"

    def credentials(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        users = {entry.pw_name: entry for entry in pwd.getpwall()}
        user = users.get("postgres") or users.get("nobody")
        if user is None:
            raise Unavailable("PostgreSQL does not run as root, and there is no user postgres or nobody")
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def command(self) -> list[str]:
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self.binaries / "postgres"), "-D", str(self.data), "-p", str(self.port), *words]

    def check(self) -> object:
        return postgres_answers(self.url)

    def _start(self) -> None:
        if not self.data.exists():
            credentials = self.credentials()
            if credentials:
                os.chown(self.folder, credentials["user"], credentials["group"])
            made = subprocess.run(
                [self.binaries / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"],
                cwd=self.folder,
                capture_output=True,
                text=True,
                check=False,
                **credentials,
            )
            if made.returncode != 0:
                raise Unavailable(f"initdb: {made.stderr.strip()[-300:]}")
        super()._start()


class Container:
    """A service of deploy/compose.yml in Docker, on a free port."""

    def __init__(self, service: str, port: int, url: str, answers: Callable[[str], object]) -> None:
        self.docker = program("docker")
        services = yaml.safe_load(COMPOSE.read_text())["services"]
        if service not in services:
            raise Unavailable(f"deploy/compose.yml has no {service}")
        self.id = self._docker("run", "-d", "--rm", "-p", f"127.0.0.1::{port}", services[service]["image"])
        try:
            self.url = url.format(port=self._docker("port", self.id, str(port)).splitlines()[0].rpartition(":")[2])
            wait_until(lambda: answers(self.url), seconds=90)
        except BaseException:
            self.stop()
            raise

    def _docker(self, *words: str) -> str:
        done = subprocess.run([self.docker, *words], capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            raise Unavailable(f"docker {words[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        return done.stdout.strip()

    def stop(self) -> None:
        self._docker("rm", "-f", self.id)


def redis_answers(url: str) -> object:
    with redis.Redis.from_url(url, socket_connect_timeout=2) as client:
        return client.ping()


def amqp_answers(url: str) -> object:
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port or 5672}"
    vhost = parts.path[1:].replace("%2F", "/").replace("%2f", "/") or "/"
    user, password = parts.username or "guest", parts.password or "guest"
    with amqp.Connection(host, userid=user, password=password, virtual_host=vhost, connect_timeout=2):
        return True


def postgres_answers(url: str) -> object:
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, connect_args={"connect_timeout": 2})
    with engine.connect() as connection:
        return connection.execute(sqlalchemy.text("select 1")).scalar() == 1


def rabbitmqctl(command: str, words: tuple[str, ...], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run([command, "-q", *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"rabbitmqctl {words[0]}: {done.stderr.strip()[-300:]}")
    return done.stdout


def system_rabbitmqctl(*words: str) -> str:
    """Run the rabbitmqctl that belongs to the machine's own broker."""
    return rabbitmqctl(program("rabbitmqctl"), words)


@contextlib.contextmanager
def service(
    variable: str,
    standard: tuple[str, ...],
    answers: Callable[[str], object],
    *started: Callable[[], Server | Container],
) -> Iterator[tuple[str, Server | Container | None]]:
    """Yield (URL, the server where it is ours) by the order above; `started` are what may be started, tried in turn."""
    if url := os.environ.get(variable):
        answers(url)  # who names one means it: no silent other
        yield url, None
        return
    for url in standard:
        with contextlib.suppress(Exception):
            answers(url)
            break
    else:
        url = None
    if url:
        yield url, None
        return
    server = start_any(f"nothing answers on {standard[0]}, {variable} is not set", *started)
    try:
        yield server.url, server
    finally:
        server.stop()


def start_any(tried: str, *started: Callable[[], Server | Container]) -> Server | Container:
    """Start the first that can be started; where none can, skip the test, and fail it where CI=true."""
    reasons = [tried]
    for make in started:
        try:
            server = make()
            return server.start() if isinstance(server, Server) else server
        except Unavailable as error:
            reasons.append(str(error))
    message = "no service: " + "; ".join(reasons)
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def redis_service() -> contextlib.AbstractContextManager[tuple[str, Server | Container | None]]:
    docker = functools.partial(Container, "redis", 6379, "redis://127.0.0.1:{port}/0", redis_answers)
    return service("SHADHO_TEST_REDIS_URL", ("redis://127.0.0.1:6379/0",), redis_answers, RedisServer, docker)


def amqp_service() -> contextlib.AbstractContextManager[tuple[str, Server | Container | None]]:
    docker = functools.partial(Container, "rabbitmq", 5672, "amqp://guest:guest@127.0.0.1:{port}//", amqp_answers)
    standard = ("amqp://guest:guest@127.0.0.1:5672//",)
    return service("SHADHO_TEST_AMQP_URL", standard, amqp_answers, RabbitServer, docker)


def postgres_service() -> contextlib.AbstractContextManager[tuple[str, Server | Container | None]]:
    address = "127.0.0.1:5432/postgres"
    standard = (f"postgresql+psycopg://postgres@{address}", f"postgresql+psycopg://postgres:postgres@{address}")
    return service("SHADHO_TEST_POSTGRES_URL", standard, postgres_answers, PostgresServer)


@contextlib.contextmanager
def redis_db(server_url: str) -> Iterator[str]:
    """Lend one empty database of that server, and flush it afterwards."""
    base = urlsplit(server_url)
    for number in TEST_DBS:
        url = base._replace(path=f"/{number}").geturl()
        # The lock keeps this machine's test sessions apart and ends with its process. It is one per number, whatever
        # the server: a name per private server would leave a file behind for each.
        lock_path = Path(tempfile.gettempdir()) / f"shadho-test-redis-{os.getuid()}-{number}.lock"
        with lock_path.open("a") as lock, redis.Redis.from_url(url) as client:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if client.dbsize() and not client.exists(MARK):
                continue  # somebody's data; what a killed session left carries the mark
            client.flushdb()
            client.set(MARK, os.getpid())
            try:
                yield url
            finally:
                client.flushdb()
            return
    message = f"databases {TEST_DBS[0]} to {TEST_DBS[-1]} of {base.hostname}:{base.port} are all in use: flush one"
    raise Unavailable(message)


@contextlib.contextmanager
def amqp_vhost(url: str, ctl: Callable[..., str]) -> Iterator[str]:
    """Lend a virtual host of that broker; where `ctl` may not make one, the URL as it is."""
    name = f"shadho-test-{uuid.uuid4().hex[:12]}"
    parts = urlsplit(url)
    lent = parts._replace(path=f"/{name}").geturl()
    made = False
    try:
        try:
            ctl("add_vhost", name)
            made = True
            ctl("set_permissions", "-p", name, parts.username or "guest", ".*", ".*", ".*")
            amqp_answers(lent)
        except (Unavailable, OSError, amqp.AMQPError):
            lent = url  # its rabbitmqctl is not ours to call, or is another broker's
        yield lent
    finally:
        if made:
            ctl("delete_vhost", name)


@contextlib.contextmanager
def postgres_database(server_url: str) -> Iterator[str]:
    """Lend a fresh database of that server, and drop it afterwards with whoever is still connected."""
    name = f"shadho_test_{uuid.uuid4().hex[:12]}"
    engine = sqlalchemy.create_engine(server_url, poolclass=sqlalchemy.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f'create database "{name}"'))
    try:
        yield urlsplit(server_url)._replace(path=f"/{quote(name)}").geturl()
    finally:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(f'drop database "{name}" with (force)'))
