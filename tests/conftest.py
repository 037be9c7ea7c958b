"""Fixtures that several folders of tests share; where the services come from is told in services/."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import services
import sqlalchemy as sa
import threadpoolctl
from services.clocks import MachineTime

import shadho_celery
from shadho_celery.core import system
from shadho_celery.fleet.redis import connect
from shadho_celery.store import engine, sql

#: folders in the order in which their tests run: fast ones first, so that a failure shows early
FOLDERS = ("unit", "contract", "integration", "acceptance")
#: the longest files begin first among those of their folder, so that no process waits for the other at the end
LONGEST = (
    "test_readme_training",
    "test_readme_long",
    "test_readme",
    "test_operate",
    "test_command_output",
    "test_dashboard",
    "test_site",
    "test_fleet",
    "test_embedded",
    "test_training",
    "test_preemption",
    "test_process_group",
    "test_code",
    "test_ends",
    "test_report",
    "test_cards",
    "test_track",
    "test_shadho_svm",
    "test_gpus",
    "test_kills",
    "test_faults",
    "test_starts",
    "test_streams",
    "test_gangs",
    "test_copies",
    "test_security",
    "test_store_faults",
    "test_hostile",
    "test_outages",
)
#: fixtures, and their names as parameters, whose tests are slow: a server that takes long to start, or commands
SLOW = {"amqp_server", "amqp_url", "amqp", "rabbitmq", "rabbitmq_node", "no_orphans"}
SLOW |= {"postgres_server", "postgres_url", "postgres", "postgresql", "private_postgres", "guarded", "vhost"}
SLOW |= {"desk", "table", "fleet"}
#: fixtures that are set up before the test's others, and so end after them: a worker that outlives the loan of its
#: database announces itself in the next test's
SERVICES = ("redis_url", "amqp_url", "postgres_url")


# The same examples everywhere, however long one of them takes beside other processes.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job has lost the meaning of Ctrl-C, which tests send to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Recorded names do not depend on the machine.
    os.environ["SHADHO_USER"] = "tester"
    worker = getattr(config, "workerinput", None)
    # Tests start processes by the thousand: where Python writes no bytecode, each would compile the package.
    if sys.dont_write_bytecode and worker is None:
        compileall.compile_dir(shadho_celery.__path__[0], quiet=2)
    # pytest rewrites the asserts of each test file, which takes longer than all imports, and keeps what it made.
    sys.dont_write_bytecode = False
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args[:] = _from_another_file(worker["workerid"], worker["workercount"])


def _from_another_file(worker: str, count: int) -> list[str]:
    """Return all test files, from another one on for each process, so that no two rewrite the same files at once."""
    files = sorted(str(path) for path in Path(__file__).parent.rglob("test_*.py"))
    begin = int(worker.removeprefix("gw")) * len(files) // count
    return files[begin:] + files[:begin]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests in the order in which they run, and mark the slow ones.

    Slow are those of the folder acceptance and those that use `SLOW`, except the ones marked `sample`.
    """

    def place(item: pytest.Item) -> tuple[int, int, str]:
        folder = next((FOLDERS.index(name) for name in item.path.parts if name in FOLDERS), -1)
        rank = LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)
        return folder, rank, str(item.path)

    items.sort(key=place)
    for item in items:
        if isinstance(item, pytest.Function):
            item.fixturenames.sort(key=lambda name: name not in SERVICES)
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        uses = {*getattr(item, "fixturenames", ()), *(value for value in parameters if isinstance(value, str))}
        if ("acceptance" in item.path.parts or uses & SLOW) and not item.get_closest_marker("sample"):
            item.add_marker("slow")
        if limit := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit.args[0] * services.PATIENCE), append=False)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections, and of the memory that forks copy."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Give libraries one thread in each of the processes that share the cores: more would only wait for each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    with threadpoolctl.threadpool_limits(1):
        yield


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a Redis that tests share."""
    with services.redis_service() as (url, _):
        yield url


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """URL of an empty Redis database that is this test's alone (one key in it says that it is lent)."""
    with services.redis_db(redis_server) as url:
        yield url


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    """A client of the Redis database that is this test's alone."""
    with connect(redis_url) as client:
        yield client


@pytest.fixture(scope="session")
def amqp_server() -> Iterator[tuple[str, Callable[..., str]]]:
    """URL of a RabbitMQ that tests share, and its rabbitmqctl."""
    with services.amqp_service() as (url, server):
        yield url, server.ctl if isinstance(server, services.RabbitServer) else services.system_rabbitmqctl


@pytest.fixture(scope="module")
def amqp_url(amqp_server: tuple[str, Callable[..., str]]) -> Iterator[str]:
    """URL of a virtual host that is this file's alone; where none can be made, of the broker: use `unique`.

    A test does not have its own: each call of rabbitmqctl starts an Erlang.
    """
    with services.amqp_vhost(*amqp_server) as url:
        yield url


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """SQLAlchemy URL of a PostgreSQL that tests share."""
    with services.postgres_service() as (url, _):
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """SQLAlchemy URL of an empty database that is this test's alone."""
    with services.postgres_database(postgres_server) as url:
        yield url


@pytest.fixture
def private_redis() -> Iterator[services.RedisServer]:
    """A Redis of this test's own, to be killed and restarted at will."""
    with services.private(services.RedisServer) as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq_node() -> Iterator[services.RabbitServer]:
    """A RabbitMQ node with the settings of deploy/, for tests that disturb others on it; it takes long to boot."""
    conf = (services.COMPOSE.parent / "rabbitmq" / "rabbitmq.conf").read_text()
    with services.private(lambda: services.RabbitServer(conf)) as node:
        yield node


@pytest.fixture
def private_rabbitmq(rabbitmq_node: services.RabbitServer) -> services.RabbitServer:
    """A RabbitMQ node that is no other test's meanwhile, to be killed and restarted at will."""
    if not rabbitmq_node.is_up:
        rabbitmq_node.start()
    return rabbitmq_node


@pytest.fixture
def unique() -> Callable[[str], str]:
    """Make a unique name: of a queue on a shared broker, of a study in a shared store."""
    return lambda name: f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def machine_time(monkeypatch: pytest.MonkeyPatch) -> MachineTime:
    """The time that every `SystemClock` tells; it passes only in their `sleep`, and the time of day can be set."""
    found = MachineTime()
    for name, read in {"now": found.monotonic, "wall": found.time, "sleep": found.sleep}.items():
        monkeypatch.setattr(system.SystemClock, name, staticmethod(read))
    return found


@pytest.fixture
def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the system refuse, from now on, the threads whose functions have this name; "" for none."""
    refused, begin = "", threading.Thread.start

    def start(thread: Any) -> None:
        function = getattr(thread, "function", None) or thread._target
        if refused and getattr(function, "__name__", "") == refused:
            raise RuntimeError("can't start new thread")
        begin(thread)

    def refuse(name: str) -> None:
        nonlocal refused
        refused = name

    monkeypatch.setattr(threading.Thread, "start", start)
    return refuse


@pytest.fixture
def forked_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks of `context.launch`, which start at once."""
    # An optimizer imports it, which takes seconds, and each fork would do so again.
    import torch._dynamo  # noqa: F401
    from services.ranks import Forking

    from shadho_celery.ranks import launch

    monkeypatch.setattr(launch, "SPAWN", Forking())


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Take back the environment variables that a command has set in this process, such as options of workers."""
    before = dict(os.environ)
    yield
    # Pytest's own variable, the test that runs, changes all the time.
    changed = {**os.environ, "PYTEST_CURRENT_TEST": before.get("PYTEST_CURRENT_TEST", "")} != before
    if changed:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def closed_databases(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test's stores have opened; Python 3.13 warns of a connection that is merely forgotten."""
    engines = []

    def make_engine(url: str, *, read_only: bool = False) -> sa.Engine:
        made = engine.make_engine(url, read_only=read_only)
        if made.dialect.name == "sqlite":
            # No test pulls the plug: nothing waits for the disk.
            sa.event.listen(made, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        engines.append(made)
        return made

    monkeypatch.setattr(sql, "make_engine", make_engine)
    yield
    for opened in engines:
        opened.dispose()


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """Soon after the test nothing that it started is alive, under any parent (Linux only)."""
    with services.nothing_left_behind():
        yield
