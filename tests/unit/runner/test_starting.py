"""A slot's process is the same whether it is forked from a prepared process or is a new interpreter."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import services

from shadho_celery.core.hardware import thread_variables
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.runner import protocol, starting
from shadho_celery.runner.protocol import RunAttempt
from shadho_celery.runner.runner import Runner
from shadho_celery.runner.starting import ForkServers, Start, execute, is_readable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, slots' processes are not forked")

STUDY = """
import multiprocessing, os, random, resource, signal, sys, threading, time
from pathlib import Path
import numpy as np
from hyperopt import hp

SPACE = {"x": hp.uniform("x", 0, 1)}
DRAWN = [random.random(), np.random.random()]

def status(pid, name):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(name + ":"))

def environ(pid):
    return dict(part.split("=", 1) for part in Path(f"/proc/{pid}/environ").read_text().split("\\0") if part)

def targets(pid):
    paths = [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return sorted(os.readlink(path).split(":")[0] for path in paths)

def nothing():
    pass

def objective(params):
    me, reaper = os.getpid(), os.getppid()
    signals = [number for number in signal.Signals if signal.getsignal(number) == signal.SIG_IGN]
    child = multiprocessing.get_context("fork").Process(target=nothing)
    child.start()
    child.join()
    return {
        "loss": params["x"],
        "pid": me,
        "session": os.getsid(0) == me,
        "sessions": len({os.getsid(0), os.getsid(reaper), os.getsid(int(status(reaper, "PPid")) or 1)}),
        "reaper": reaper,
        "environment": sorted(set(os.environ) - {"SHADHO_RUNNER", "_"}),
        "threads": os.environ["OMP_NUM_THREADS"],
        "mark": [environ(pid)["SHADHO_RUNNER"] == os.environ["SHADHO_RUNNER"] for pid in (me, reaper)],
        "shown": sorted(set(environ(me)) | set(environ(reaper))),
        "ignored": signals,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "limits": resource.getrlimit(resource.RLIMIT_CORE),
        "folder": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv[0],
        "stdin": os.readlink("/proc/self/fd/0"),
        "descriptors": targets(me),
        "below": targets(reaper),
        "daemonic": multiprocessing.current_process().daemon,
        "child": child.exitcode,
        "thread_count": len(os.listdir("/proc/self/task")),
        "hidden": [type(sys.modules[name]).__name__ for name in ("hyperopt", "numpy", "scipy")],
        "scheduler": [name for name in sys.modules if name.startswith(("celery", "kombu", "sqlalchemy", "redis"))],
        "drawn": DRAWN,
        "oom": Path("/proc/self/oom_score_adj").read_text().strip(),
        "main": threading.current_thread() is threading.main_thread(),
        "gc": __import__("gc").isenabled(),
        "streams": [(s.fileno(), s.encoding, s.errors, s.line_buffering) for s in (sys.stdout, sys.stderr)],
    }
"""

#: facts that differ between two processes
OWN = {"pid", "reaper", "drawn", "below"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    (folder / "facts.py").write_text(STUDY)
    (folder / "bare.py").write_text(
        "import os\nfrom hyperopt import hp\nSPACE = {'x': hp.uniform('x', 0, 1)}\n"
        "def objective(params):\n    return {'loss': 0.0, 'pid': os.getpid(), 'told': os.environ.get('TOLD', '')}\n"
    )
    return folder


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv(starting.START, raising=False)
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://user:a-secret@host")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def library(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a library into a folder on the path of the prepared process."""
    place = tmp_path / "site-packages"
    place.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(place))
    (folder / "using.py").write_text(USING)

    def write(name: str, text: str) -> None:
        (place / f"{name}.py").write_text(text)

    return write


@pytest.fixture
def servers(complaints: list[str]) -> Iterator[ForkServers]:
    servers = ForkServers(complain=complaints.append)
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[ForkServers]:
    """For tests that neither disturb the prepared process nor depend on its own environment."""
    servers = ForkServers()
    yield servers
    servers.close()


def study(name: str, body: str, head: str = "") -> str:
    """Write a study whose objective has this body; return its name."""
    lines = ["import os, sys, time", "from hyperopt import hp", head, "SPACE = {'x': hp.uniform('x', 0, 1)}"]
    Path(f"{name}.py").write_text("\n".join([*lines, "def objective(params):", textwrap.indent(body, "    ")]))
    return name


ENVIRONMENT = {**thread_variables(2), "CUDA_VISIBLE_DEVICES": ""}


def run(start: Start, module: str = "bare", environment: dict[str, str] = ENVIRONMENT) -> Outcome:
    """Run one trial in a new process."""
    runner = Runner([module], environment, start=start)
    try:
        return run_in(runner, module)
    finally:
        runner.kill()


def run_in(runner: Runner, module: str = "bare", number: int = 1) -> Outcome:
    return runner.run(order_of(module, number), lambda report: None)


def order_of(module: str, number: int) -> RunAttempt:
    attempt = Attempt(number=number, attempt=1, subspace="all", seed=0, params={"x": 0.25})
    payload = Payload(study="s", module=module, attempts=[attempt])
    return RunAttempt(payload=payload, checkpoint_dir="/no/such", compute_class="cpu", slot=0)


def pid_of(servers: ForkServers) -> int:
    server = servers._server
    assert server is not None
    return server.process.pid


def test_a_forked_process_is_like_a_new_interpreter(shared: ForkServers) -> None:
    forked, executed = (run(start, "facts") for start in (shared.start, execute))
    assert (forked.state, executed.state) == (TrialState.COMPLETE, TrialState.COMPLETE), (forked.error, executed.error)
    facts = [{name: value for name, value in each.metrics.items() if name not in OWN} for each in (forked, executed)]
    assert facts[0] == facts[1]
    # The reaper of a fork also has the socket for its status.
    assert sorted([*executed.metrics["below"], "socket"]) == forked.metrics["below"]
    assert forked.metrics["session"]
    assert forked.metrics["sessions"] == 3
    assert forked.metrics["mark"] == [True, True]
    assert forked.metrics["threads"] == "2"
    assert forked.metrics["ignored"] == executed.metrics["ignored"]
    assert not forked.metrics["scheduler"]
    assert not [name for name in forked.metrics["shown"] if name.startswith("CELERY")]
    assert forked.metrics["child"] == 0
    assert tuple(forked.metrics["limits"]) == resource.getrlimit(resource.RLIMIT_CORE)


def test_forks_draw_different_random_numbers(shared: ForkServers) -> None:
    first, second = (run(shared.start, "facts").metrics["drawn"] for _ in range(2))
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_memory_that_a_fork_shares_is_not_counted(shared: ForkServers) -> None:
    """The imports of the prepared process take much of a new interpreter's memory."""
    forked, executed = run(shared.start).memory, run(execute).memory
    assert forked is not None
    assert executed is not None
    assert 0 < forked < 0.7 * executed


def test_each_fork_has_its_own_environment_and_number_of_threads(shared: ForkServers) -> None:
    body = (
        "from threadpoolctl import threadpool_info\n"
        "pools = [each['num_threads'] for each in threadpool_info()]\n"
        "return {'loss': 0.0, 'pools': pools, 'told': os.environ['TOLD']}"
    )
    study("pools", body, "import numpy")
    for threads in (1, 2):
        metrics = run(shared.start, "pools", {**thread_variables(threads), "TOLD": f"to {threads}"}).metrics
        assert set(metrics["pools"]) == {threads}
        assert metrics["told"] == f"to {threads}"


def test_edited_code_is_read_anew(shared: ForkServers) -> None:
    for loss in (1.0, 2.5, 3.25):
        assert run(shared.start, study("edited_often", f"return {loss}")).loss == loss


def test_each_trial_of_a_fresh_study_has_a_new_process_of_one_prepared_process(shared: ForkServers) -> None:
    """A trial that was sent ahead has one, too. Nothing of the trials before stays, whatever it is."""
    body = (
        "builtins.remains = getattr(builtins, 'remains', 0) + 1\nreturn {'loss': builtins.remains, 'pid': os.getpid()}"
    )
    study("renewed", body, "import builtins\nSTUDY = {'fresh': True}")
    runner = Runner(["renewed"], ENVIRONMENT, start=shared.start)
    try:
        runner.send_ahead([order_of("renewed", number) for number in range(3)])
        outcomes = [run_in(runner, "renewed", number) for number in range(5)]
    finally:
        runner.kill()
    assert [(each.state, each.loss, each.warning) for each in outcomes] == [(TrialState.COMPLETE, 1.0, None)] * 5
    assert len({each.metrics["pid"] for each in outcomes}) == 5


@pytest.mark.slow
def test_sixty_four_slots_start_from_one_prepared_process(servers: ForkServers) -> None:
    runners = [Runner(["bare"], {**ENVIRONMENT, "TOLD": str(i)}, start=servers.start) for i in range(64)]
    for runner in runners:
        runner.start()
    outcomes = [run_in(runner) for runner in runners]
    killers = [threading.Thread(target=runner.close) for runner in runners]
    for each in killers:
        each.start()
    for each in killers:
        each.join()
    assert [each.metrics["told"] for each in outcomes] == [str(i) for i in range(64)]
    assert len({each.metrics["pid"] for each in outcomes}) == 64


# Faults of the prepared process


@pytest.mark.slow
def test_a_prepared_process_that_was_killed_costs_no_trial_and_is_replaced(
    servers: ForkServers, complaints: list[str]
) -> None:
    runner = Runner(["bare"], ENVIRONMENT, start=servers.start)
    before = run_in(runner).metrics["pid"]
    killed = pid_of(servers)
    os.kill(killed, signal.SIGKILL)
    assert run_in(runner).metrics["pid"] == before, "a process that has started goes on"
    services.wait_until(lambda: not Path(f"/proc/{killed}/maps").read_text(), seconds=5)
    runner.kill()
    assert run_in(runner).state is TrialState.COMPLETE
    assert pid_of(servers) != killed
    assert not complaints
    runner.kill()


def test_a_prepared_process_that_dies_with_a_request_costs_no_trial(
    servers: ForkServers, complaints: list[str]
) -> None:
    servers.prepare()
    os.kill(pid_of(servers), signal.SIGSTOP)
    runner = Runner(["bare"], ENVIRONMENT, start=servers.start)
    outcomes: list[Outcome] = []
    waiting = threading.Thread(target=lambda: outcomes.append(run_in(runner)))
    waiting.start()
    services.wait_until(lambda: runner._process is not None, seconds=5)
    os.kill(pid_of(servers), signal.SIGKILL)
    waiting.join()
    assert [each.state for each in outcomes] == [TrialState.COMPLETE]
    assert [each.split(";")[0] for each in complaints] == [
        "the prepared process of the slots does not answer or was ended"
    ]
    runner.kill()


def test_a_prepared_process_that_hangs_costs_no_trial(
    servers: ForkServers, complaints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.prepare()
    monkeypatch.setattr(starting, "FORK_SECONDS", 0.3)
    hanging = pid_of(servers)
    os.kill(hanging, signal.SIGSTOP)
    outcomes = [run(servers.start) for _ in range(2)]
    assert [each.state for each in outcomes] == [TrialState.COMPLETE] * 2
    assert len(complaints) == 1
    assert servers.complaints() == complaints
    assert not Path(f"/proc/{hanging}").exists()


@pytest.mark.timeout(20)
def test_complaints_are_told_without_waiting_for_a_prepared_process_that_is_used(servers: ForkServers) -> None:
    """The thread that tells them renews the leases."""
    servers.prepare()
    os.kill(pid_of(servers), signal.SIGSTOP)
    assert servers.complaints() == []
    with servers._lock:
        assert servers.complaints() == []


def test_complaints_are_short_printable_lines_and_few(servers: ForkServers) -> None:
    """A library that a prepared process imports may send anything."""
    os.write(servers._complaints, "".join(f"{number} \x1b[2J\n{'x' * 1000}\n" for number in range(100)).encode())
    told = servers.complaints()
    assert len(told) == protocol.MAX_COMPLAINTS
    assert all(each.isprintable() and len(each) <= protocol.MAX_COMPLAINT for each in told)


def test_a_start_that_another_thread_notices_first_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system looks again for what woke a waiting thread, and lets it wait on if that was received meanwhile."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forked = starting._Forked(ours, MagicMock(), servers := MagicMock())
    waited: list[float] = []

    def received_meanwhile(end: socket.socket | int, seconds: float | None) -> bool:
        if seconds:
            assert forked.poll() is None
            waited.append(seconds)
            return False
        return is_readable(end, seconds)

    monkeypatch.setattr(starting, "is_readable", received_meanwhile)
    with theirs:
        socket.send_fds(theirs, [b"started"], [os.pidfd_open(os.getpid())])
        assert forked.await_start()
    assert sum(waited) < 1 < starting.FORK_SECONDS
    assert (servers.give_up.call_count, servers.on_complaints.call_count) == (0, 1)


def test_a_runner_that_is_closed_before_its_process_is_forked_does_not_wait(servers: ForkServers) -> None:
    servers.prepare()
    os.kill(pid_of(servers), signal.SIGSTOP)
    runner = Runner(["bare"], ENVIRONMENT, start=servers.start)
    runner.start()
    servers.close()
    runner.close()
    assert run_in(runner).error == "the slot's process cannot be started: its worker stops"


def test_a_process_that_is_killed_before_its_fork_costs_no_prepared_process(
    servers: ForkServers, complaints: list[str], no_orphans: None
) -> None:
    """It may be killed while the prepared process still imports, which is stopped here instead."""
    servers.prepare()
    importing = pid_of(servers)
    os.kill(importing, signal.SIGSTOP)
    runner = Runner(["bare"], ENVIRONMENT, start=servers.start)
    outcomes: list[Outcome] = []
    waiting = threading.Thread(target=lambda: outcomes.append(run_in(runner)))
    waiting.start()
    services.wait_until(lambda: runner._process is not None, seconds=5)
    runner.kill()
    os.kill(importing, signal.SIGCONT)
    waiting.join()
    assert [each.error for each in outcomes] == ["the slot's process cannot be started: it was killed"]
    assert run_in(runner).state is TrialState.COMPLETE
    runner.close()
    assert pid_of(servers) == importing
    assert not complaints
    # The prepared process is expected to live until here.
    servers.close()


#: the prepared process gets an error instead of a fork where `where` is true
REFUSING = """
import os, sys
main, real = os.getpid(), os.fork
def fork():
    if {where}:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()
if "shadho_celery.runner.fork_server" in " ".join(sys.orig_argv):
    os.fork = fork
"""


@pytest.mark.slow
def test_where_the_fork_of_a_reaper_is_refused_the_trial_runs_in_a_new_interpreter(
    servers: ForkServers, complaints: list[str], library: Callable[[str, str], None]
) -> None:
    """The prepared process may have no memory or no number left for another one; a new interpreter may have."""
    library("sitecustomize", REFUSING.format(where="True"))
    assert run(servers.start).state is TrialState.COMPLETE
    assert len(complaints) == 1


@pytest.mark.slow
def test_where_the_fork_of_the_trial_itself_is_refused_no_memory_is_blamed(
    servers: ForkServers, library: Callable[[str, str], None]
) -> None:
    """The reaper was forked, and the limit of processes is reached then."""
    library("sitecustomize", REFUSING.format(where="os.getpid() != main"))
    outcome = run(servers.start)
    assert outcome.error is not None
    assert outcome.error.startswith("the trial's process ended with exit code 1")
    assert "Resource temporarily unavailable" in outcome.error
    assert outcome.out_of_memory is None


def test_on_a_system_without_pidfds_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    servers = ForkServers()
    servers.prepare()
    assert servers._server is None


def test_a_reaper_whose_pidfd_found_no_room_in_the_worker_counts_as_killed() -> None:
    """The system drops the descriptors of a message if the receiver may open no more files."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reaper = starting._Forked(ours, MagicMock(), servers := MagicMock())
    with theirs:
        theirs.send(b"started")
        assert not reaper.await_start()
        assert reaper.wait() == -signal.SIGKILL
    assert (servers.give_up.call_count, servers.on_complaints.call_count) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_forked", [True, False])
def test_a_worker_may_have_more_descriptors_than_select_can_wait_for(servers: ForkServers, is_forked: bool) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 4096), before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    runner = Runner(["bare"], ENVIRONMENT, start=servers.start if is_forked else execute)
    try:
        outcomes = [run_in(runner) for _ in range(2)]
        runner.kill()
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len({each.metrics["pid"] for each in outcomes}) == 1, outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    "closed", [pytest.param("1", marks=pytest.mark.slow), pytest.param("2", marks=pytest.mark.slow), "0 1 2"]
)
def test_a_worker_may_have_closed_standard_streams(folder: Path, closed: str) -> None:
    code = f"""
import os, sys
for number in map(int, sys.argv[2].split()):
    os.close(number)
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt
from shadho_celery.runner.protocol import RunAttempt
from shadho_celery.runner.runner import Runner
from shadho_celery.runner.starting import ForkServers

attempt = Attempt(number=1, attempt=1, subspace="all", seed=0, params={{"x": 0.25}})
payload = Payload(study="s", module="printing", attempts=[attempt])
order = RunAttempt(payload=payload, checkpoint_dir="/no/such", compute_class="cpu", slot=0)
servers = ForkServers()
runner = Runner(["printing"], {ENVIRONMENT}, start=servers.start)
outcome = runner.run(order, lambda report: None)
runner.close()
servers.close()
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write(f"{{outcome.error}} {{outcome.log}}")
"""
    study("printing", "print('to output')\nprint('to errors', file=sys.stderr)\nraise ValueError('as planned')")
    subprocess.run([sys.executable, "-c", code, "told.txt", closed], check=True, timeout=60)
    told = Path("told.txt").read_text()
    assert all(text in told for text in ("as planned", "to output", "to errors")), told


def test_a_request_of_any_size_is_fulfilled(shared: ForkServers) -> None:
    assert run(shared.start, environment={**ENVIRONMENT, "TOLD": "x" * 100_000}).metrics["told"] == "x" * 100_000


def test_a_prepared_process_ends_with_its_worker(folder: Path, no_orphans: None) -> None:
    code = (
        "import time; from shadho_celery.runner.starting import ForkServers;"
        "servers = ForkServers(); servers.prepare(); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        assert len(services.marked_processes(os.environ[services.MARK])) >= 1
        worker.kill()
    # `no_orphans` looks for the prepared process.


def test_spawn_does_without_a_prepared_process(servers: ForkServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(starting.START, "spawn")
    spawning = ForkServers()
    spawning.prepare()
    assert run(spawning.start).state is TrialState.COMPLETE
    assert spawning._server is None


def test_another_way_to_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(starting.START, "thread")
    with pytest.raises(UsageError, match="SHADHO_START='thread' is not allowed; set it to fork or spawn, or leave it"):
        ForkServers()


# Preloaded libraries

HARMLESS = "VALUE = 1\n"
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
DEVICED = "import os\nDEVICE = os.open(os.path.join(os.path.dirname(__file__), 'device'), os.O_RDONLY)\n"
FAILING = "raise RuntimeError('it needs a display')\n"
EXITING = "raise SystemExit('no licence')\n"

RENAMING = """
import os
read = os.readlink
os.readlink = lambda path: "/dev/nvidia0" if read(path).endswith("/device") else read(path)
"""

USING = """
from hyperopt import hp
import os, sys
HAD = "harmless_library" in sys.modules
OTHERS = {name for name in sys.modules if name.endswith("_library") and name != "harmless_library"}
SPACE = {"x": hp.uniform("x", 0, 1)}
def objective(params):
    return {"loss": 0.0, "had": HAD, "others": sorted(OTHERS), "pid": os.getpid()}
"""


@pytest.mark.slow
def test_libraries_that_cannot_be_preloaded_are_imported_in_the_slot_and_said_once(
    library: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    found = {
        "threaded_library": (THREADED, "it has started 1 threads"),
        "failing_library": (FAILING, "its import failed: RuntimeError: it needs a display"),
        "exiting_library": (EXITING, "its import failed: SystemExit: no licence"),
    }
    library("harmless_library", HARMLESS)
    for name, (text, _) in found.items():
        library(name, text)
    servers = ForkServers([*found, "harmless_library"])
    outcomes = [run(servers.start, "using") for _ in range(2)]
    complaints = servers.complaints()
    servers.close()
    assert [(each.metrics["had"], each.metrics["others"]) for each in outcomes] == [(True, [])] * 2
    assert [each.partition("(STUDY['preload']): ")[2] for each in complaints] == [
        reason for _, reason in found.values()
    ]
    said = capfd.readouterr().err
    assert [said.count(reason) for _, reason in found.values()] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("text", [FAILING, THREADED, "import os\nos.abort()\n"])
def test_why_a_library_is_not_preloaded_is_known_before_the_first_trial_begins(
    library: Callable[[str, str], None], text: str
) -> None:
    """The trial may be the only one of its study."""
    library("the_library", text)
    servers = ForkServers(["the_library"], complain=lambda reason: None)
    known: list[Sequence[str]] = []
    servers.on_complaints = lambda: known.append(servers.complaints())
    runner = Runner(["using"], ENVIRONMENT, start=servers.start)
    runner.start()
    assert not known
    outcomes = [run_in(runner, "using") for _ in range(2)]
    runner.kill()
    servers.close()
    assert [each.state for each in outcomes] == [TrialState.COMPLETE] * 2
    assert known
    assert all("the_library" in complaint for [complaint] in known)


@pytest.mark.slow
def test_a_library_that_opens_a_device_at_its_import_is_not_preloaded(
    library: Callable[[str, str], None], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The device is a file here, which looks like a device to the prepared process."""
    library("the_library", DEVICED)
    library("sitecustomize", RENAMING)
    (tmp_path / "site-packages" / "device").touch()
    servers = ForkServers(["the_library"])
    outcome = run(servers.start, "using")
    servers.close()
    assert outcome.metrics["others"] == []
    assert "it has opened /dev/nvidia0" in capfd.readouterr().err


@pytest.mark.slow
def test_a_library_that_cleans_up_at_the_end_of_a_program_does_not_do_so_for_each_trial(
    library: Callable[[str, str], None],
) -> None:
    library("the_library", "import tempfile\nFOLDER = tempfile.TemporaryDirectory()\n")
    body = "return {'loss': 0.0, 'reaper': os.getppid(), 'exists': os.path.exists(the_library.FOLDER.name)}"
    study("needing", body, "import the_library")
    servers = ForkServers(["the_library"])
    first = run(servers.start, "needing").metrics
    services.wait_until(lambda: not Path(f"/proc/{first['reaper']}").exists(), seconds=5)
    second = run(servers.start, "needing").metrics
    servers.close()
    assert (first["exists"], second["exists"]) == (True, True)


@pytest.mark.slow
def test_a_library_can_run_a_program_at_its_import(library: Callable[[str, str], None]) -> None:
    library("the_library", "import subprocess\nCODE = subprocess.run(['false']).returncode\n")
    study("telling", "return {'loss': 0.0, 'code': sys.modules['the_library'].CODE}")
    servers = ForkServers(["the_library"])
    outcome = run(servers.start, "telling")
    servers.close()
    assert outcome.metrics["code"] == 1


def test_the_mark_of_a_fork_can_be_found_though_its_reaper_was_killed(no_orphans: None, servers: ForkServers) -> None:
    """A process that a trial forks shows the mark of its own trial, and not that of the prepared process."""
    body = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nos.kill(os.getppid(), 9)\ntime.sleep(60)"
    study("leaving", body)
    assert run(servers.start, "leaving").state is TrialState.FAILED


@pytest.mark.slow
def test_files_of_a_study_do_not_hide_libraries_from_the_prepared_process(
    servers: ForkServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper may have the name of a library that only other libraries import; the study gets its own."""
    monkeypatch.chdir(tmp_path)
    body = "return {'loss': calendar.LOSS, 'of_library': _parseaddr.calendar.__file__}"
    study("with_helper", body, "import calendar\nfrom email import _parseaddr")
    for loss in (1.0, 2.0):
        Path("calendar.py").write_text(f"LOSS = {loss}\n")
        outcome = run(servers.start, "with_helper")
        assert outcome.loss == loss, outcome.error
        assert not outcome.metrics["of_library"].startswith(str(tmp_path))


@pytest.mark.slow
def test_where_libraries_start_threads_slots_are_not_forked_and_it_is_said_once(
    servers: ForkServers, complaints: list[str], library: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    library("sitecustomize", THREADED)
    assert [run(servers.start).state for _ in range(2)] == [TrialState.COMPLETE] * 2
    assert capfd.readouterr().err.count("cannot be forked: it has started 1 threads") == 1
    assert not complaints
    assert servers.complaints() == ["the slots' processes cannot be forked: it has started 1 threads"]


@pytest.mark.slow
def test_a_library_that_ends_the_prepared_process_is_left_out_afterwards(
    complaints: list[str], library: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "RETRY_SECONDS", 0.0)
    library("the_library", "import os\nos.abort()\n")
    servers = ForkServers(["the_library"], complaints.append)
    outcomes = [run(servers.start, "using") for _ in range(3)]
    servers.close()
    assert [each.state for each in outcomes] == [TrialState.COMPLETE] * 3
    assert [each.rpartition("; ")[2] for each in complaints] == ["afterwards it does not import the_library"]
