"""A slot's real process: whatever a trial does to it is an outcome, and nothing of it stays behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from msgspec.structs import replace
from services.clocks import MachineTime

from shadho_celery.core.code import CodeVersion, digest_of
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, GangCall, Memory, Outcome, ReplicaSeat, TrialState
from shadho_celery.runner import output
from shadho_celery.runner.output import unstamped
from shadho_celery.runner.protocol import Reported, RunAttempt, encode
from shadho_celery.runner.runner import OtherCode, Runner
from shadho_celery.runner.starting import ForkServers
from shadho_celery.runner.trial_process import TrialProcess

#: what every test's study module can be asked to do, by the value of its one param
STUDY = '''
import contextvars, multiprocessing, os, random, resource, signal, subprocess, sys, tempfile, threading, time
from pathlib import Path
from hyperopt import hp
from shadho_celery.runner.protocol import HARD_SECONDS

SPACE = {"do": hp.choice("do", %(deeds)s), "x": hp.uniform("x", 0, 1)}
VARIABLE = contextvars.ContextVar("VARIABLE")

def objective(params, context):
    return globals()[params["do"]](params, context)

def plain(params, context):
    print("a plain trial printed this\\n" * 100)
    return {"loss": params["x"], "twice": 2 * params["x"], "pid": os.getpid()}

def tell(params, context):
    assert isinstance(context.checkpoint_dir, Path)
    return {"loss": 0.0, "checkpoint_dir": str(context.checkpoint_dir),
            **{name: str(value) for name, value in vars(context).items()},
            "visible": os.environ["CUDA_VISIBLE_DEVICES"], "threads": os.environ["OMP_NUM_THREADS"],
            "pid": os.getpid()}

def reporting(params, context):
    for step in range(50):
        context.report(step, step / 2)
    return 0.0

def raising(params, context):
    raise ArithmeticError("größer als erlaubt")

def nesting(params, context):
    from shadho_celery.objective.study_file import refuse_nested
    refuse_nested()

def leaving(params, context):
    sys.exit("told to go")

def vanishing(params, context):
    print("printed and not flushed")
    os._exit(3)

def crashing(params, context):
    print("about to crash")
    os.kill(os.getpid(), signal.SIGSEGV)

def unusual(params, context):
    os.kill(os.getpid(), signal.SIGRTMIN + 3)

def loud(params, context):
    os.write(1, b"x" * 1_000_000 + b"\\xff\\x00 the last words")
    os._exit(1)

def forking(params, context):
    """Dies and leaves a child that holds all that it had open."""
    if os.fork() == 0:
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)

def parenting(params, context):
    """Stays, with children of two kinds."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
    context.report(0, 0.0)
    time.sleep(60)

def obedient(params, context):
    context.report(0, 0.0)
    while not context.should_stop():
        time.sleep(0.005)
    return 0.0

def deaf(params, context):
    context.report(0, 0.0)
    time.sleep(0.1)
    return 0.5

def stubborn(params, context):
    context.report(0, 0.0)
    time.sleep(60)

def large(params, context):
    return {"loss": 0.0, "text": "ü" * 300_000}

def hungry(params, context):
    return len(b"x" * 200_000_000)

def failing_large(params, context):
    held = b"x" * 200_000_000
    raise ArithmeticError(len(held))

def starving(params, context):
    raise MemoryError("no room")

def outliving(params, context):
    """Leaves an orphan in a session of its own, and kills its reaper."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)

def taking_its_group_along(params, context):
    os.killpg(0, signal.SIGKILL)

def segfaulting(params, context):
    import ctypes
    ctypes.string_at(0)

def interrupting(params, context):
    raise KeyboardInterrupt

def closing_all(params, context):
    os.closerange(0, 1000)
    return 0.0

def closing_standard(params, context):
    os.closerange(0, 3)
    return 0.0

def garbling(params, context):
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, b"not a record\\n")
        except OSError:
            pass
    return 0.0

def endless_garbling(params, context):
    for descriptor in range(3, 100):
        try:
            if os.fstat(descriptor).st_mode & 0o170000 == 0o140000:
                while True:
                    os.write(descriptor, b"x" * 100_000)
        except OSError:
            pass

def forging(params, context):
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, b'{"kind": "ended", "order": 1, "outcome": {"state": "COMPLETE", "wings": 2}}\\n')
        except OSError:
            pass
    return 0.0

def forging_readiness(params, context):
    [pipe] = [number for number in range(3, 100)
              if os.path.exists(f"/proc/self/fd/{number}") and "socket" in os.readlink(f"/proc/self/fd/{number}")]
    for _ in range(40):
        os.write(pipe, b'{"kind": "ready"}\\n')
        time.sleep(0.05)
    return 0.0

def forging_an_error(params, context):
    said = "\\\\ud800" + "x" * 50_000 + "\\\\udfff"
    outcome = '{"state": "FAILED", "error": "%%s", "warning": "%%s"}' %% (said, said)
    record = '{"kind": "ended", "order": 1, "outcome": %%s}\\n' %% outcome
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, record.encode())
        except OSError:
            pass
    return 0.0

def forking_and_returning(params, context):
    os.fork()
    return 0.0

def unsettling(params, context):
    """Changes what belongs to the whole process."""
    os.chdir(folder := tempfile.mkdtemp())
    os.rmdir(folder)
    os.environ["LEFT"] = "behind"
    os.environ.pop("OMP_NUM_THREADS")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    random.seed(1)
    sys.setrecursionlimit(77)
    os.umask(0o777)
    multiprocessing.set_start_method("spawn")
    VARIABLE.set("of one trial")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    sys.stdout = None
    return 0.0

def looking(params, context):
    time.sleep(0.1)
    print("it can print")
    os.umask(umask := os.umask(0))
    return {"loss": 0.0, "folder": os.getcwd(), "environment": sorted(os.environ.items()),
            "handler": str(signal.getsignal(signal.SIGTERM)),
            "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "random": random.random(), "recursion": sys.getrecursionlimit(), "umask": umask,
            "method": multiprocessing.get_start_method(allow_none=True), "variable": VARIABLE.get(None),
            "limit": resource.getrlimit(resource.RLIMIT_FSIZE),
            "streams": [stream.fileno() for stream in (sys.stdout, sys.stderr)],
            "threads": threading.active_count()}

def leaving_threads(params, context):
    threading.Thread(target=time.sleep, args=(60,), name="left-alone").start()
    return 0.0

def leaving_unnamed_threads(params, context):
    import _thread
    _thread.start_new_thread(time.sleep, (60,))
    time.sleep(0.1)
    return 0.0

def keeping_files(params, context):
    """Opens its file under every number that it may close, but that of the pipe."""
    for number in range(3, 40):
        try:
            if "socket" not in os.readlink(f"/proc/self/fd/{number}"):
                os.close(number)
        except OSError:
            pass
    global kept
    kept = [open(context.checkpoint_dir / "kept", "ab") for _ in range(40)]
    for file in kept:
        file.write(b"x" * 25)
        file.flush()
    return 0.0

def leaving_a_moment(params, context):
    threading.Thread(target=time.sleep, args=(0.05,)).start()
    return 0.0

def leaving_children(params, context):
    """Of all kinds: plain, in a session of its own, and one whose parents are gone."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    return 0.0

def pooling(params, context):
    """Leaves multiprocessing's own helpers, which may stay, and waits for all else."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(pool.apply(abs, (-1,)))

def killed_as_by_the_system(params, context):
    os.kill(os.getpid(), signal.SIGKILL)

def endless(params, context):
    context.report(0, 0.0)
    while True:
        pass

def cut_off(params, context):
    try:
        time.sleep(60)
    except Exception as error:
        assert type(error).__name__ == "TrialTimeout", error
        assert context.should_stop()
        return {"loss": 0.5, "limit": context.timeout}

def cut_off_with_nothing(params, context):
    try:
        time.sleep(60)
    except Exception:
        return None

def swallowing(params, context):
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def hanging_in_c(params, context):
    """Holds Python's lock, so that nothing can be raised in it."""
    import ctypes
    ctypes.PyDLL(None).sleep(60)

def leaving_a_reporter(params, context):
    def report():
        while True:
            context.report(7, 7.0)
            time.sleep(0.001)
    threading.Thread(target=report, daemon=True).start()
    time.sleep(0.05)
    return 0.0

def coordinating(params, context):
    for backups in (0, 2):
        context.call_replicas("10.0.0.1:5000", "secret", backups)
        context.gang_assembled()
    return context.slots

def coordinating_without_cryptography(params, context):
    sys.modules["cryptography"] = None
    try:
        return coordinating(params, context)
    finally:
        del sys.modules["cryptography"]

def gathering(params, context):
    """Trains two gangs, both of which come later than the limit, and then until it is interrupted."""
    trained = 0.0
    for last in (False, True):
        context.call_replicas("10.0.0.1:5000", "secret", 0)
        time.sleep(1.2)
        context.gang_assembled()
        began = time.monotonic()
        try:
            time.sleep(60 if last else 0.3)
        except Exception as error:
            assert last and type(error).__name__ == "TrialTimeout", error
        trained += time.monotonic() - began
    return {"loss": 0.0, "trained": trained}

def gathering_in_vain(params, context):
    context.call_replicas("10.0.0.1:5000", "secret", 0)
    return obedient(params, context)

def gathering_and_vanishing(params, context):
    """Waits beyond the moment at which it would have been said to hang."""
    context.call_replicas("10.0.0.1:5000", "secret", 0)
    time.sleep(1.5 * HARD_SECONDS)
    context.gang_assembled()
    os._exit(3)

def assembling_at_home(params, context):
    context.gang_assembled()
    return 0.0

def training_and_killed(params, context):
    context.call_replicas("10.0.0.1:5000", "secret", 0)
    context.gang_assembled()
    os.kill(os.getpid(), signal.SIGKILL)

def miscalling(params, context):
    context.call_replicas(["10.0.0.1"], "secret", 0)

def forging_a_call(params, context):
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, b'{"kind": "gang", "order": 1, "call": {"address": "x y:1", "token": "t"}}\\n')
        except OSError:
            pass
    return 0.0

def replicating(params, context):
    from shadho_celery.context import ReplicaDone
    context.report(1, 0.5)
    print(context.replica)
    assert (context.replica.address, context.replica.token, context.replica.rank) == ("10.0.0.1:5000", "secret", 2)
    assert context.slots == 3
    raise ReplicaDone

def talking(params, context):
    import logging, warnings
    print("printed", params["x"])
    logging.getLogger("my_study").info("logged")
    warnings.warn("warned of", stacklevel=1)
    for percent in range(101):
        sys.stderr.write(f"\\r{percent}%%")
    sys.stderr.write("\\n")
    subprocess.run([sys.executable, "-c", "print('a child said this')"], check=True)
    subprocess.run(["sh", "-c", "printf 'and so did another' >&2"], check=True)
    return 0.0

def talking_and_failing(params, context):
    print("it is about to fail")
    raise ArithmeticError("on purpose")

def adding_a_handler(params, context):
    import logging
    logging.getLogger().addHandler(logging.StreamHandler())
    logging.getLogger().setLevel("DEBUG")
    logging.debug("once")
    return 0.0

def flooding(params, context):
    for _ in range(300):
        os.write(1, b"a line\\n" * 10_000)
    return 0.0

def unblocking(params, context):
    os.set_blocking(1, False)
    print("it does not wait")
    return 0.0

def telling_all_it_finds(params, context):
    """Its environment, arguments, descriptors, and the files below its folder; its reaper's, too."""
    found = [repr(sorted(os.environ.items()))]
    for process in ("self", os.getppid()):
        found += [Path(f"/proc/{process}/{name}").read_bytes().decode() for name in ("environ", "cmdline")]
        found += [f"{path} {os.readlink(path)}" for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    found += [path.read_bytes().decode(errors="replace") for path in Path().rglob("*") if path.is_file()]
    return {"loss": 0.0, "found": "\\n".join(found)}
'''

DEEDS = [line.split()[1].partition("(")[0] for line in STUDY.splitlines() if line.startswith("def ")][1:]


#: seconds of which the runner waits for a process that should have ended
HARD_SECONDS = 1.5

#: Stands in for the compiler of search spaces, which takes a second to import hyperopt: a process with it is there at
#: once. It is put in place before anything else runs in the process.
STAND_IN = """
import sys, types
from shadho_celery.runner import protocol
protocol.HARD_SECONDS = %(hard)s

class Space:
    def evaluate(self, params):
        return {**params, "do": %(deeds)s[params["do"]]}

    def describe(self):
        return {}

stand_in = types.ModuleType("shadho_celery.space.compile")
stand_in.compile_space = lambda expression: Space()
sys.modules["shadho_celery.space.compile"] = stand_in
sys.modules["hyperopt"] = types.SimpleNamespace(hp=types.SimpleNamespace(
    choice=lambda *_: None, uniform=lambda *_: None
))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    (folder / "light").mkdir()
    (folder / "light" / "sitecustomize.py").write_text(STAND_IN % {"deeds": DEEDS, "hard": HARD_SECONDS})
    (folder / "deeds.py").write_text(STUDY % {"deeds": DEEDS}, encoding="utf-8")
    (folder / "broken.py").write_text("raise RuntimeError('it cannot be imported')\n")
    (folder / "lacking.py").write_text("SPACE = {}\n")
    return folder


def environment(folder: Path, *, real: bool = False) -> dict[str, str]:
    path = f"{folder}" if real else f"{folder}{os.pathsep}{folder / 'light'}"
    # Python's own buffering, whatever the tests themselves run with.
    return {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[ForkServers]:
    servers = ForkServers()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(folder).items():
            patch.setenv(name, value)
        servers.prepare()
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def shared(folder: Path, servers: ForkServers) -> Iterator[Runner]:
    """One runner for many tests: a new process is made only after a death, as in a worker."""
    runner = Runner(["deeds", "broken", "lacking"], environment(folder), start=servers.start)
    yield runner
    runner.kill()


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[Runner]:
    """A runner with the real compiler."""
    runner = Runner(["deeds", "broken", "lacking"], environment(folder, real=True))
    runner.start()
    yield runner
    runner.kill()


@pytest.fixture
def own(folder: Path, servers: ForkServers) -> Iterator[Runner]:
    runner = Runner(["deeds"], environment(folder), start=servers.start)
    yield runner
    runner.kill()


#: made only when an objective asks for it
CHECKPOINTS = str(Path(tempfile.gettempdir()) / "shadho-no-checkpoints" / "4")


def order(deed: str, *, slots: int = 1, budget: float | None = None, **changes: Any) -> RunAttempt:
    """Return the record that has a process run the deed; `changes` are of the order, the others of its attempt."""
    params = changes.pop("params", {"do": DEEDS.index(deed), "x": 0.25})
    attempt = Attempt(number=4, attempt=2, subspace="all", seed=11, params=params, slots=slots, budget=budget)
    sent = {name: changes.pop(name) for name in Payload.__struct_fields__ if name in changes}
    told = {"checkpoint_dir": CHECKPOINTS, "compute_class": "gpu_large", "slot": 1, **changes}
    return RunAttempt(payload=Payload(**{"study": "s", "module": "deeds", "attempts": [attempt], **sent}), **told)


def promoted(folder: Path) -> RunAttempt:
    """Return an order of a trial that goes on from what is in the folder."""
    made = order("plain", checkpoint_dir=str(folder))
    return replace(made, payload=replace(made.payload, attempts=[made.attempt.evolve(origin=3)]))


def run(runner: Runner, deed: str, **changes: Any) -> Outcome:
    return runner.run(order(deed, **changes), lambda report: None)


def run_until_report(runner: Runner, deed: str, then: Callable[[], None]) -> Outcome:
    """Run the deed; once it has reported do `then`, in another thread as the worker does."""
    threads: list[threading.Thread] = []

    def on_report(report: Reported) -> None:
        threads.append(threading.Thread(target=then))
        threads[-1].start()

    outcome = runner.run(order(deed), on_report)
    for thread in threads:
        thread.join()
    return outcome


# Outcomes


def test_a_promoted_trial_tells_whether_a_checkpoint_was_there(own: Runner, tmp_path: Path) -> None:
    (tmp_path / "parts" / "empty").mkdir(parents=True)
    for checkpoint in (False, True):
        outcome = own.run(promoted(tmp_path), lambda report: None)
        assert (outcome.state, outcome.continued) == (TrialState.COMPLETE, checkpoint)
        (tmp_path / "parts" / "weights").touch()
    # A second attempt of a trial that is not promoted tells it, too, and a first one does not.
    assert run(own, "plain", checkpoint_dir=str(tmp_path)).continued is True
    second = order("plain", checkpoint_dir=str(tmp_path))
    first = replace(second, payload=replace(second.payload, attempts=[second.attempt.evolve(attempt=1)]))
    assert own.run(first, lambda report: None).continued is None


def test_the_seconds_of_a_process_that_died_are_never_negative(own: Runner, machine_time: MachineTime) -> None:
    def die() -> None:
        machine_time.set_by(-3600.0)
        own.kill()

    outcome = run_until_report(own, "obedient", die)
    assert (outcome.state, outcome.seconds) == (TrialState.FAILED, 0.0)


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be set back")


def test_a_trial_gets_its_params_and_its_outcome_comes_back(real: Runner) -> None:
    outcome = run(real, "plain")
    assert (outcome.state, outcome.loss, outcome.metrics["twice"]) == (TrialState.COMPLETE, 0.25, 0.5)
    assert outcome.error is None
    assert outcome.seconds >= 0


def test_one_process_runs_one_trial_after_another_and_is_not_the_workers(shared: Runner) -> None:
    pids = {run(shared, "plain").metrics["pid"] for _ in range(3)}
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_the_context_and_the_slots_environment_reach_the_objective(shared: Runner) -> None:
    metrics = run(shared, "tell", budget=0.5).metrics
    expected = {"trial": "4", "attempt": "2", "seed": "11", "checkpoint_dir": CHECKPOINTS, "device": "cpu"}
    assert metrics.items() >= {**expected, "compute_class": "gpu_large", "slot": "1", "budget": "0.5"}.items()
    assert (metrics["visible"], metrics["threads"]) == ("", "1")


def test_the_number_of_threads_changes_between_two_trials_of_one_process_and_stays_in_the_next_process(
    own: Runner,
) -> None:
    def trial(threads: int) -> tuple[object, object]:
        own.set_threads(threads)
        outcome = run(own, "tell")
        assert outcome.warning is None
        return outcome.metrics["pid"], outcome.metrics["threads"]

    (first, before), (second, after) = trial(1), trial(3)
    assert (before, after, first) == ("1", "3", second)
    run(own, "unsettling")
    assert run(own, "tell").metrics["threads"] == "3"
    own.kill()
    assert run(own, "tell").metrics["threads"] == "3"


@linux
@pytest.mark.parametrize(("deed", "state"), [("hungry", TrialState.COMPLETE), ("failing_large", TrialState.FAILED)])
def test_a_trials_peak_memory_is_its_own_and_not_that_of_the_one_before(
    shared: Runner, deed: str, state: TrialState
) -> None:
    outcomes = [run(shared, each) for each in ("plain", deed, "plain")]
    before, peak, after = (outcome.memory or 0 for outcome in outcomes)
    assert outcomes[1].state is state
    assert outcomes[0].metrics["pid"] == outcomes[2].metrics["pid"], "all in one process"
    assert peak >= 200_000_000
    assert 0 < before <= peak - 150_000_000
    assert 0 < after <= peak - 150_000_000


def test_reports_of_what_is_to_be_maximised_come_minimised_like_the_result(own: Runner, folder: Path) -> None:
    (folder / "upwards.py").write_text(
        "SPACE = {}\ndef objective(params, context): context.report(1, 0.5); return 0.75\n"
    )
    reports: list[Reported] = []
    upwards = order("plain", module="upwards", objectives={"gain": "maximize"})
    assert own.run(upwards, reports.append).loss == -0.75
    assert [(each.step, each.loss) for each in reports] == [(1, -0.5)]


def test_a_result_of_any_size_comes_back(shared: Runner) -> None:
    assert run(shared, "large").metrics == {"text": "ü" * 300_000}


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("raising", "ArithmeticError: größer als erlaubt"),
        ("leaving", "SystemExit: told to go"),
        ("interrupting", "KeyboardInterrupt"),
        ("nesting", "NestedStart: a study on workers is started within a trial"),
    ],
)
def test_an_exception_fails_the_trial_and_the_process_stays(shared: Runner, deed: str, says: str) -> None:
    before = run(shared, "plain").metrics["pid"]
    outcome = run(shared, deed)
    assert (outcome.state, outcome.loss) == (TrialState.FAILED, None)
    assert says in str(outcome.error)
    assert run(shared, "plain").metrics["pid"] == before


@pytest.mark.parametrize(
    ("module", "says"),
    [("broken", "it cannot be imported"), ("lacking", "lacks objective"), ("no_such_module", "no_such_module")],
)
def test_a_module_that_cannot_be_used_fails_its_own_trials_only(shared: Runner, module: str, says: str) -> None:
    outcome = run(shared, "plain", module=module)
    assert outcome.state is TrialState.FAILED
    assert says in str(outcome.error)
    assert run(shared, "plain").state is TrialState.COMPLETE


def test_params_that_do_not_fit_the_space_fail_the_trial(real: Runner) -> None:
    outcome = run(real, "plain", params={"x": 0.5})
    assert outcome.state is TrialState.FAILED
    assert "SpaceError" in str(outcome.error)
    assert "'do'" in str(outcome.error)


# Deaths


@pytest.mark.parametrize(
    ("deed", "end", "printed"),
    [
        ("vanishing", "exit code 3", "printed and not flushed"),
        ("crashing", "SIGSEGV", "about to crash"),
        ("segfaulting", "SIGSEGV", "in segfaulting"),
        ("unusual", f"signal {signal.SIGRTMIN + 3}", ""),
        ("loud", "exit code 1", "the last words"),
    ],
)
def test_a_death_is_a_failed_outcome_with_its_cause_and_what_was_printed_last(
    shared: Runner, deed: str, end: str, printed: str
) -> None:
    before = run(shared, "plain").metrics["pid"]
    outcome = run(shared, deed)
    assert (outcome.state, outcome.loss, outcome.memory) == (TrialState.FAILED, None, None)
    assert not outcome.out_of_memory
    assert end in str(outcome.error)
    assert printed in str(outcome.error)
    assert "Extension modules" not in str(outcome.error)
    assert "a plain trial printed this" not in str(outcome.error), "that was another trial's"
    assert len(str(outcome.error)) < 10_000
    assert run(shared, "plain").metrics["pid"] != before


def test_a_process_that_died_in_idleness_costs_no_trial(shared: Runner) -> None:
    pid = run(shared, "plain").metrics["pid"]
    os.kill(pid, signal.SIGKILL)
    services.wait_until(lambda: not Path(f"/proc/{pid}").exists())
    outcome = run(shared, "plain")
    assert outcome.state is TrialState.COMPLETE
    assert outcome.metrics["pid"] != pid


def test_a_death_is_noticed_though_a_child_of_the_trial_lives_on(own: Runner, no_orphans: None, tmp_path: Path) -> None:
    """The folder of the attempt is removed."""
    (left := tmp_path / "4.attempt-4.2" / "folder").mkdir(parents=True)
    outcome = run(own, "forking", checkpoint_dir=str(tmp_path / "4"))
    assert outcome.state is TrialState.FAILED
    assert "SIGKILL" in str(outcome.error)
    assert not left.parent.exists()


@linux
@pytest.mark.parametrize("deed", ["outliving", "taking_its_group_along"])
def test_a_trial_that_kills_its_own_reaper_or_group_fails_and_leaves_nothing(
    own: Runner, deed: str, no_orphans: None
) -> None:
    assert "SIGKILL" in str(run(own, deed).error)
    assert run(own, "plain").state is TrialState.COMPLETE
    own.kill()


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("closing_all", "closed the pipe"),
        ("garbling", "not a record"),
        ("endless_garbling", "an incomplete record"),
        ("forging", "not a record"),
        ("forging_a_call", "not a record"),
    ],
)
def test_a_trial_that_spoils_the_pipe_fails_and_the_next_one_gets_a_new_process(
    shared: Runner, deed: str, says: str
) -> None:
    before = run(shared, "plain").metrics["pid"]
    outcome = run(shared, deed)
    assert (outcome.state, outcome.loss) == (TrialState.FAILED, None)
    assert says in str(outcome.error)
    after = run(shared, "plain")
    assert after.state is TrialState.COMPLETE
    assert after.metrics["pid"] != before


def test_an_error_that_a_trial_forged_is_cut_and_can_be_sent_on(own: Runner) -> None:
    outcome = run(own, "forging_an_error")
    assert outcome.state is TrialState.FAILED
    for text in (outcome.error, outcome.warning):
        assert text is not None
        assert text.startswith("?xxx")
        assert len(text) < 20_000
        assert text.encode()


def test_a_trial_that_forks_and_returns_twice_has_one_outcome(shared: Runner) -> None:
    assert run(shared, "forking_and_returning").state is TrialState.COMPLETE
    assert run(shared, "plain").loss == 0.25


# Memory


@pytest.mark.parametrize("deed", ["starving", "killed_as_by_the_system"])
def test_want_of_memory_is_told_and_costs_the_process(shared: Runner, deed: str) -> None:
    before = run(shared, "plain").metrics["pid"]
    outcome = run(shared, deed)
    assert (outcome.state, outcome.out_of_memory) == (TrialState.FAILED, Memory.HOST)
    after = run(shared, "plain")
    assert not after.out_of_memory
    assert after.metrics["pid"] != before, "the old one may still hold some"


# What a trial leaves


@linux
@pytest.mark.parametrize("deed", ["unsettling", "closing_standard"])
def test_what_a_trial_changes_in_its_process_is_put_back(own: Runner, deed: str) -> None:
    before = run(own, "looking")
    pid = run(own, "plain").metrics["pid"]
    outcome = run(own, deed)
    assert (outcome.state, outcome.warning) == (TrialState.COMPLETE, None)
    after = run(own, "looking")
    assert after.state is TrialState.COMPLETE, after.error
    assert after.metrics == before.metrics
    assert run(own, "plain").metrics["pid"] == pid, "in the same process"


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        ("leaving_threads", "threads (left-alone)"),
        ("leaving_unnamed_threads", "threads (without a name)"),
        pytest.param("leaving_children", "child processes (python", marks=linux),
    ],
)
def test_what_a_trial_leaves_running_is_told_and_ended_with_its_process(
    own: Runner, deed: str, says: str, no_orphans: None
) -> None:
    """Children are gone when the outcome is there."""
    pid = run(own, "plain").metrics["pid"]
    outcome = run(own, deed)
    assert not [line for _, line in services.marked_processes(os.environ[services.MARK]) if "sleep" in line]
    assert outcome.state is TrialState.COMPLETE
    assert says in str(outcome.warning)
    assert run(own, "plain").metrics["pid"] != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    own.kill()


def test_a_thread_may_report_but_not_once_its_trial_is_over(own: Runner) -> None:
    reports: list[Reported] = []
    own.run(order("leaving_a_reporter"), reports.append)
    assert Reported(order=1, step=7, loss=7.0) in reports
    reports.clear()
    own.run(order("looking"), reports.append)
    assert not reports


@pytest.mark.parametrize("deed", ["leaving_a_moment", "pooling"])
def test_what_ends_by_itself_or_serves_the_process_is_let_be(own: Runner, deed: str) -> None:
    pid = run(own, "plain").metrics["pid"]
    for _ in range(2):
        outcome = run(own, deed)
        assert (outcome.state, outcome.warning) == (TrialState.COMPLETE, None), outcome.error
    assert run(own, "plain").metrics["pid"] == pid


@linux
def test_a_trial_finds_no_credential_and_what_is_its_users_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of broker, Redis, store and key; a password under another name is none of the user's own."""
    secrets = {
        "CELERY_BROKER_URL": "amqp://user:of-the-broker@host;amqp://user:of-another@host",
        "SHADHO_REDIS_URL": "rediss://:of-redis@host/0",
        "SHADHO_SIGNING_KEY_FILE": "/the/key/file",
        "SHADHO_USER_KEY_FILE": "/the/key/of/the/user",
        "SHADHO_TLS_KEY": "/the/tls/key",
        "PGPASSWORD": "of-the-store",
        "PGPASSFILE": "/the/pgpass/file",
        "REDISCLI_AUTH": "of-the-cli",
        "RABBITMQ_DEFAULT_PASS": "of-rabbitmq",
        "FLEET_BROKER": "amqp://user:of-another@host",
        "FLEET_PASSWORD": "of-redis",
        "DATABASE_URL": "postgresql://me:of-the-store@db/x",
        "DATABASE_DSN": "host=db user=me password=of-the-store",
        "REDISCLI_URL": "redis://:of%2Dthe%2Dencoded@host",
        "CACHE_PASS": "of-the-encoded",
    }
    own = {"WANDB_API_KEY": "own-key", "MLFLOW_TRACKING_URI": "http://me:own-password@host", "SHADHO_LISTEN": "0.0.0.0"}
    # A password may be the name of a user by chance.
    secrets["PGPASSWORD_OF_ANOTHER"] = own["USER"] = "postgres"
    for name, value in {**secrets, **own, "PGUSER": "own-user", "SHADHO_PASS": "PGUSER, PGPORT"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    runner = Runner(["deeds"], environment(folder))
    found = run(runner, "telling_all_it_finds").metrics["found"]
    runner.kill()
    parts = {part for value in secrets.values() for part in re.findall(r"of-[-\w]+|^/.*", value)}
    assert [part for part in parts if part in found] == []
    assert [name for name in secrets if name in found] == []
    assert [value for value in (*own.values(), "own-user") if value not in found] == []


# Code


def edit(folder: Path, text: str) -> CodeVersion:
    """Write a study whose objective says `text`; return its version."""
    source = f"SPACE = {{}}\ndef objective(params): return {{'loss': 0.0, 'said': {text!r}}}\n"
    (folder / "edited.py").write_text(source)
    return CodeVersion(files={"edited.py": digest_of(source.encode())}).with_space({})


@pytest.fixture
def editing(folder: Path) -> Iterator[Runner]:
    """A runner whose process has imported a study that says "old"."""
    edit(folder, "old")
    runner = Runner(["edited"], environment(folder))
    assert run(runner, "plain", module="edited").metrics["said"] == "old"
    yield runner
    runner.kill()


def test_a_trial_runs_under_the_code_that_it_is_for_though_its_process_had_another(
    editing: Runner, folder: Path
) -> None:
    """The file has been edited since: a new process reads it. The next trial needs no other one."""
    new = edit(folder, "new")
    outcomes = [run(editing, "plain", module="edited", code=new.digest) for _ in range(2)]
    assert [(each.metrics["said"], each.code) for each in outcomes] == [("new", new.digest)] * 2
    assert editing.codes()["edited"].digest == new.digest


@pytest.mark.slow
def test_an_attempt_is_not_begun_where_the_file_itself_is_another_version(editing: Runner, folder: Path) -> None:
    here = edit(folder, "here")
    editing.send_ahead([order("plain", module="edited", code="0123456789ab")] * 2)
    for _ in range(2):
        with pytest.raises(OtherCode) as refused:
            run(editing, "plain", module="edited", code="0123456789ab")
        assert (refused.value.code.digest, refused.value.code.root) == (here.digest, str(folder))
    assert run(editing, "plain", module="edited", code=here.digest).metrics["said"] == "here"


def test_an_attempt_is_not_begun_where_its_code_cannot_be_imported(shared: Runner) -> None:
    with pytest.raises(OtherCode) as refused:
        run(shared, "plain", module="broken", code="0123456789ab")
    assert "it cannot be imported" in refused.value.code.problem
    assert refused.value.code.files.keys() == {"broken.py"}


def test_a_process_tells_which_code_it_has_before_its_first_trial(folder: Path) -> None:
    runner = Runner(["deeds", "broken", "no_such_study"], environment(folder))
    runner.start()
    until = time.monotonic() + 30
    while not (codes := runner.codes()) and time.monotonic() < until:
        time.sleep(0.02)
    runner.kill()
    assert codes["deeds"].files == {"deeds.py": digest_of((folder / "deeds.py").read_bytes())}
    assert [bool(codes[name].problem) for name in ("deeds", "broken", "no_such_study")] == [False, True, True]


# Gangs


SEAT = ReplicaSeat(address="10.0.0.1:5000", token="secret", rank=2)


def told_by(runner: Runner, asked: RunAttempt) -> tuple[Outcome, list[Reported | GangCall]]:
    """The outcome, and what was reported and called for on the way."""
    told: list[Reported | GangCall] = []
    return runner.run(asked, told.append, told.append), told


def test_a_trial_of_several_slots_calls_for_replicas(shared: Runner) -> None:
    outcome, told = told_by(shared, order("coordinating", slots=3))
    assert outcome.loss == 3
    assert told == [
        GangCall(address="10.0.0.1:5000", token="secret", backups=backups, assembled=come)
        for backups in (0, 2)
        for come in (False, True)
    ]


@pytest.mark.parametrize(
    ("deed", "changes", "says"),
    [
        ("coordinating", {}, "the trial has one slot"),
        ("coordinating", {"slots": 3, "replica": SEAT}, "from a replica"),
        ("miscalling", {"slots": 2}, "give host:port, a token"),
        ("replicating", {}, "AttributeError"),
        ("assembling_at_home", {"slots": 3}, None),
    ],
    ids=["one slot", "replica", "no address", "no replica", "nobody called"],
)
def test_nobody_else_does(shared: Runner, deed: str, changes: dict[str, Any], says: str | None) -> None:
    outcome, told = told_by(shared, order(deed, **changes))
    assert (outcome.state is TrialState.FAILED) is (says is not None)
    assert says is None or says in str(outcome.error)
    assert [each for each in told if isinstance(each, GangCall)] == []


def test_with_a_signing_key_a_gang_needs_the_library_that_encrypts_it_and_says_so(shared: Runner) -> None:
    outcome, told = told_by(shared, order("coordinating", slots=3, encrypted=True))
    assert (outcome.loss, len(told)) == (3, 4)
    outcome, told = told_by(shared, order("coordinating_without_cryptography", slots=3, encrypted=True))
    assert 'install it on all workers, in the checkout: pip install -e ".[torch]"' in str(outcome.error)
    assert told == []


def test_a_replica_knows_its_seat_and_gives_no_result_and_no_reports(shared: Runner) -> None:
    outcome, told = told_by(shared, order("replicating", slots=3, replica=SEAT))
    assert (outcome.state, outcome.loss) == (TrialState.CANCELLED, None)
    assert outcome.error == "its gang does not need it any more"
    assert told == []


# Time limits


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ignores its time limit is killed soon. The processes have the same time from their stand-in."""
    monkeypatch.setattr("shadho_celery.runner.protocol.HARD_SECONDS", HARD_SECONDS)


def test_at_its_limit_a_trial_is_interrupted_and_its_process_stays(shared: Runner) -> None:
    pid = run(shared, "plain").metrics["pid"]
    outcome = run(shared, "endless", timeout=0.2)
    assert (outcome.state, outcome.loss) == (TrialState.FAILED, None)
    assert str(outcome.error).startswith("timed out after 0.2 s (trial timeout)\nTraceback")
    assert "in endless" in str(outcome.error)
    assert run(shared, "plain").metrics["pid"] == pid


def test_what_it_returns_after_its_limit_counts_with_a_warning(shared: Runner) -> None:
    outcome = run(shared, "cut_off", timeout=0.2)
    assert (outcome.state, outcome.loss) == (TrialState.COMPLETE, 0.5), outcome.error
    assert outcome.metrics == {"limit": 0.2}
    assert outcome.warning == "stopped at its time limit of 0.2 s"
    outcome = run(shared, "cut_off_with_nothing", timeout=0.2)
    assert outcome.state is TrialState.FAILED
    assert "timed out after 0.2 s (trial timeout)" in str(outcome.error)


def test_slow_reports_do_not_take_the_time_in_which_a_trial_may_still_return(
    shared: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Redis does not answer, each report takes seconds. This trial returns long before its limit."""
    monkeypatch.setattr("shadho_celery.runner.protocol.HARD_SECONDS", 0.5)
    outcome = shared.run(order("reporting", timeout=1.0), lambda report: time.sleep(1.2))
    assert outcome.state is TrialState.COMPLETE, outcome.error


@linux
def test_only_the_first_record_that_a_process_is_ready_starts_the_time_limit(shared: Runner) -> None:
    outcome = run(shared, "forging_readiness", timeout=0.5)
    assert outcome.state is TrialState.FAILED
    assert str(outcome.error).startswith("timed out after 0.5 s (trial timeout)\nTraceback")


def test_a_trial_that_was_interrupted_before_its_process_was_ready_is_interrupted_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadho_celery.runner.runner.IMPORT_SECONDS", 0.0)
    runner = Runner(["deeds"], environment(folder))
    outcome = run(runner, "endless", timeout=0.1)
    assert str(outcome.error).startswith("timed out after 0.1 s (trial timeout)\nTraceback")
    runner.kill()


def test_while_a_trial_waits_for_replicas_its_limit_stands_still(shared: Runner) -> None:
    outcome = run(shared, "gathering", timeout=1.0, slots=2)
    assert outcome.warning == "stopped at its time limit of 1 s", outcome.error
    assert 0.7 < outcome.metrics["trained"] < 1.5


def test_a_trial_that_waits_for_replicas_can_be_stopped(shared: Runner) -> None:
    timer = threading.Timer(0.4, shared.stop_trial)
    outcome = shared.run(order("gathering_in_vain", timeout=0.2, slots=2), lambda _: timer.start())
    assert outcome.state is TrialState.CANCELLED


def test_a_trial_that_waits_for_replicas_is_not_said_to_hang(shared: Runner) -> None:
    outcome = run(shared, "gathering_and_vanishing", timeout=0.2, slots=2)
    assert outcome.error == "the trial's process ended with exit code 3"


def test_a_gang_whose_first_process_is_killed_has_lost_a_rank_and_other_trials_fail(shared: Runner) -> None:
    lost = run(shared, "training_and_killed", slots=2)
    assert lost.rank_lost
    assert "SIGKILL" in str(lost.error)
    assert not run(shared, "vanishing", slots=2).rank_lost, "it ended by itself"
    assert not run(shared, "killed_as_by_the_system").rank_lost, "it has no gang"


@pytest.mark.usefixtures("soon")
def test_a_trial_that_swallows_its_interruption_is_killed(shared: Runner) -> None:
    outcome = run(shared, "swallowing", timeout=0.2)
    assert (outcome.state, outcome.out_of_memory) == (TrialState.FAILED, None)
    assert str(outcome.error).startswith("timed out after 0.2 s (trial timeout)")
    assert run(shared, "plain").state is TrialState.COMPLETE


@pytest.mark.usefixtures("soon")
def test_a_trial_that_python_cannot_interrupt_is_killed_and_shows_where_it_hung(shared: Runner) -> None:
    outcome = run(shared, "hanging_in_c", timeout=0.2)
    assert outcome.state is TrialState.FAILED
    assert str(outcome.error).startswith("timed out after 0.2 s (trial timeout)")
    assert "in hanging_in_c" in str(outcome.error)
    assert run(shared, "plain").state is TrialState.COMPLETE


# Stopping


def test_a_preempted_trial_that_was_told_has_no_result_and_one_that_was_not_keeps_it(shared: Runner) -> None:
    """The next trial is not preempted, and not stopped."""
    assert run_until_report(shared, "obedient", shared.stop_trial).state is TrialState.CANCELLED
    assert run(shared, "plain").state is TrialState.COMPLETE
    assert run_until_report(shared, "obedient", shared.preempt).state is TrialState.CANCELLED
    assert run(shared, "plain").state is TrialState.COMPLETE
    assert run_until_report(shared, "deaf", shared.preempt).loss == 0.5


def test_a_trial_that_does_not_read_is_told_of_a_preemption_once_so_that_telling_never_waits(own: Runner) -> None:
    """A worker repeats it several times a second, for minutes, while it holds the lock of all its leases."""
    pid = run(own, "plain").metrics["pid"]

    def tell_a_stopped_process() -> None:
        os.kill(pid, signal.SIGSTOP)
        teller = threading.Thread(target=lambda: [own.preempt() for _ in range(100_000)], daemon=True)
        teller.start()
        teller.join(20.0)
        os.kill(pid, signal.SIGCONT)
        assert not teller.is_alive()

    assert run_until_report(own, "obedient", tell_a_stopped_process).state is TrialState.CANCELLED


def test_a_trial_that_is_told_of_a_preemption_before_its_process_has_imported_the_study_is_told_later(
    own: Runner,
) -> None:
    told = threading.Timer(0.0, own.preempt)
    began = own._begin

    def begin(order: RunAttempt) -> Any:
        begun = began(order)
        told.start()
        return begun

    own._begin = begin  # type: ignore[method-assign]
    assert run(own, "obedient").state is TrialState.CANCELLED


@linux
def test_a_trial_whose_process_has_not_started_yet_can_be_killed(
    own: Runner, servers: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may have learned meanwhile that the trial was cancelled."""
    assert servers._server is not None
    server, await_start = servers._server.process, TrialProcess.await_start

    def kill_it(process: TrialProcess) -> bool:
        monkeypatch.undo()
        own.kill()
        server.send_signal(signal.SIGCONT)
        return await_start(process)

    monkeypatch.setattr(TrialProcess, "await_start", kill_it)
    server.send_signal(signal.SIGSTOP)
    assert run(own, "plain").error == "the slot's process cannot be started: it was killed"
    assert run(own, "plain").state is TrialState.COMPLETE


def test_a_stop_flag_before_the_first_process_or_between_trials_is_harmless(own: Runner) -> None:
    own.stop_trial()
    assert run(own, "plain").state is TrialState.COMPLETE
    own.stop_trial()
    assert run(own, "plain").state is TrialState.COMPLETE


def test_kill_ends_the_trial_and_its_children_at_once(no_orphans: None, folder: Path) -> None:
    runner = Runner(["deeds"], environment(folder))
    outcome = run_until_report(runner, "parenting", runner.kill)
    assert (outcome.state, outcome.out_of_memory) == (TrialState.FAILED, None)
    assert "killed" in str(outcome.error)
    # Killing twice is harmless; `no_orphans` looks for the children.
    runner.kill()
    assert run(runner, "plain").state is TrialState.COMPLETE
    runner.kill()


def test_ctrl_c_at_the_terminal_does_not_reach_the_trial(own: Runner) -> None:
    """The process has a session of its own, and ignores the signal besides."""
    pid = run(own, "plain").metrics["pid"]
    assert os.getsid(pid) != os.getsid(0)

    def interrupt() -> None:
        os.kill(pid, signal.SIGINT)
        own.stop_trial()

    assert run_until_report(own, "obedient", interrupt).state is TrialState.CANCELLED
    assert run(own, "plain").metrics["pid"] == pid


# The pipe


def test_when_the_worker_dies_the_process_and_its_children_end(no_orphans: None, folder: Path) -> None:
    """The worker is killed without a word while a trial with children runs."""
    code = (
        "from shadho_celery.runner.protocol import decode_to_child; from shadho_celery.runner.runner import Runner;"
        f"runner = Runner(['deeds'], {environment(folder)!r});"
        f"runner.run(decode_to_child({encode(order('parenting'))!r}), lambda report: print('reported', flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        said = worker.stdout.readline()
        # The worker, the reaper, the slot's process and two children; one that has just begun shows no mark yet.
        until = time.monotonic() + 10
        while len(running := services.marked_processes(os.environ[services.MARK])) < 5 and time.monotonic() < until:
            time.sleep(0.01)
        worker.kill()
    assert said == "reported\n"
    assert len(running) == 5, running
    services.wait_until(lambda: not services.marked_processes(os.environ[services.MARK]), seconds=5)


def test_a_runner_that_is_killed_leaves_nothing_open(folder: Path) -> None:
    before = open_files()
    runner = Runner(["deeds"], environment(folder))
    runner.start()
    runner.kill()
    assert open_files() == before


def test_a_report_that_cannot_be_passed_on_ends_the_trial_with_it(own: Runner) -> None:
    """It must not go on beside the next one."""

    def broken(report: Reported) -> None:
        raise LookupError("nobody to tell")

    pid = run(own, "plain").metrics["pid"]
    with pytest.raises(LookupError):
        own.run(order("stubborn"), broken)
    assert not Path(f"/proc/{pid}").exists()
    assert run(own, "plain").state is TrialState.COMPLETE


def full() -> tuple[int, int]:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("holder", "name", "value", "says"),
    [(sys, "executable", "/no/such/python", "cannot be started"), (socket, "socketpair", full, "Too many open files")],
    ids=["no interpreter", "no descriptor"],
)
def test_where_a_process_cannot_be_started_the_trial_fails_and_nothing_stays_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, holder: object, name: str, value: object, says: str
) -> None:
    gc.collect()
    runner, before, threads = Runner(["deeds"], environment(folder)), open_files(), threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, value)
        outcome = run(runner, "plain")
    gc.collect()
    assert says in str(outcome.error)
    assert (open_files(), threading.active_count()) == (before, threads)
    assert run(runner, "plain").state is TrialState.COMPLETE
    runner.kill()


def test_where_the_system_refuses_a_thread_the_trial_fails_with_that_and_the_slot_goes_on(
    folder: Path, refuse_threads: Callable[[str], None]
) -> None:
    """As where it refuses a process: a thread reads the output."""
    runner, before, threads = Runner(["deeds"], environment(folder)), open_files(), threading.active_count()
    refuse_threads("_read")
    outcome = run(runner, "plain")
    runner.kill()
    services.wait_until(lambda: threading.active_count() == threads, seconds=5)
    assert outcome.state is TrialState.FAILED
    assert "the system refuses another thread" in str(outcome.error)
    assert open_files() == before
    refuse_threads("")
    assert run(runner, "plain").state is TrialState.COMPLETE
    runner.kill()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# Orders that are sent ahead


def quick(**changes: Any) -> RunAttempt:
    return order("plain", params={"do": DEEDS.index("plain"), "x": changes.pop("x", 0.25)}, **changes)


def losses_of(runner: Runner, orders: list[RunAttempt]) -> list[float | None]:
    return [runner.run(each, lambda report: None).loss for each in orders]


def test_orders_that_were_sent_ahead_run_in_one_process_each_with_its_own_result(own: Runner) -> None:
    orders = [quick(x=place / 10) for place in range(10)]
    own.send_ahead(orders)
    outcomes = [own.run(each, lambda report: None) for each in orders]
    assert [outcome.loss for outcome in outcomes] == [place / 10 for place in range(10)]
    pids = {outcome.metrics["pid"] for outcome in outcomes}
    assert {run(own, "plain").metrics["pid"]} == pids
    assert len(pids) == 1


def test_reports_belong_to_the_trial_that_made_them(own: Runner) -> None:
    orders = [quick(), order("reporting"), quick()]
    own.send_ahead(orders)
    steps: list[list[int]] = []
    for each in orders:
        steps.append([])
        own.run(each, lambda report: steps[-1].append(report.step))
    assert steps == [[], list(range(50)), []]


@pytest.mark.parametrize("deed", ["crashing", "vanishing", "leaving_threads"])
def test_after_a_trial_that_ends_its_process_those_that_were_sent_ahead_run_in_the_next_one(
    own: Runner, deed: str
) -> None:
    orders = [quick(x=0.1), order(deed), quick(x=0.2), quick(x=0.3)]
    own.send_ahead(orders)
    before, odd, *after = [own.run(each, lambda report: None) for each in orders]
    assert (odd.loss is None) is (deed != "leaving_threads")
    assert [outcome.loss for outcome in [before, *after]] == [0.1, 0.2, 0.3]
    assert after[0].metrics["pid"] == after[1].metrics["pid"] != before.metrics["pid"]


def test_the_output_of_a_trial_is_told_before_the_next_one_ends(own: Runner) -> None:
    orders = [order("raising"), order("stubborn")]
    own.send_ahead(orders)
    began = time.monotonic()
    outcome = own.run(orders[0], lambda report: None)
    assert "größer" in (outcome.error or "")
    assert time.monotonic() - began < output.LAST_SECONDS


def test_the_output_of_an_import_between_two_trials_is_in_no_log(
    folder: Path, servers: ForkServers, tmp_path: Path
) -> None:
    (folder / "noisy.py").write_text("print('imported', flush=True)\nSPACE = {}\ndef objective(params): return 0.0\n")
    code = CodeVersion(files={"noisy.py": digest_of((folder / "noisy.py").read_bytes())}).with_space({}).digest
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    orders = [order("plain", log=str(logs[0])), order("plain", log=str(logs[1]), module="noisy", code=code)]
    runner = Runner(["deeds"], environment(folder), start=servers.start)
    runner.send_ahead(orders)
    assert losses_of(runner, orders) == [0.25, 0.0]
    runner.kill()
    assert "a plain trial" in logs[0].read_text()
    assert "imported" not in logs[0].read_text()
    assert not logs[1].exists()


def test_a_time_limit_is_that_of_each_trial(own: Runner) -> None:
    orders = [quick(timeout=0.5), order("cut_off", timeout=0.5), quick(timeout=0.5)]
    own.send_ahead(orders)
    assert losses_of(own, orders) == [0.25, 0.5, 0.25]


def test_what_was_recalled_is_not_run(own: Runner, tmp_path: Path) -> None:
    orders = [order("obedient"), quick(checkpoint_dir=str(tmp_path))]
    own.send_ahead(orders)

    def recall_and_stop() -> None:
        own.recall()
        time.sleep(0.2)
        own.stop_trial()

    first = run_until_report(own, "obedient", recall_and_stop)
    assert first.state is TrialState.CANCELLED
    pid = own._process
    assert losses_of(own, [quick(x=0.7)]) == [0.7]
    assert own._process is pid, "it has run nothing else, and is used again"


def test_a_recall_spares_the_order_that_a_new_process_has_not_begun(own: Runner) -> None:
    orders = [quick(x=0.1), quick(x=0.2)]
    own.send_ahead(orders)
    recall = threading.Timer(0.02, own.recall)
    recall.start()
    assert losses_of(own, orders[:1]) == [0.1]
    recall.join()


def test_a_process_that_may_have_begun_what_was_recalled_ends_at_once(own: Runner) -> None:
    orders = [quick(x=0.1), order("endless")]
    own.send_ahead(orders)
    assert losses_of(own, orders[:1]) == [0.1]
    process = own._process
    own.recall()
    assert process is not None
    assert not process.is_idle()
    assert losses_of(own, [quick(x=0.2)]) == [0.2]


def test_only_so_many_orders_are_sent_ahead_as_a_process_that_reads_nothing_leaves_room_for(own: Runner) -> None:
    orders = [quick(x=place / 10, checkpoint_dir="x" * 30_000) for place in range(5)]
    own.send_ahead(orders)
    assert len(own._ahead) == 2
    assert losses_of(own, orders) == [place / 10 for place in range(5)]


def test_the_next_trial_leaves_a_file_alone_that_has_the_number_of_a_closed_descriptor(
    own: Runner, tmp_path: Path
) -> None:
    assert run(own, "keeping_files", checkpoint_dir=str(tmp_path)).state is TrialState.COMPLETE
    assert run(own, "plain").state is TrialState.COMPLETE
    assert (tmp_path / "kept").read_bytes() == b"x" * 1000


def test_a_stop_is_for_the_trial_that_runs(own: Runner) -> None:
    orders = [quick(), order("obedient"), quick()]
    own.send_ahead(orders)
    assert losses_of(own, orders[:1]) == [0.25]
    assert run_until_report(own, "obedient", own.stop_trial).state is TrialState.CANCELLED
    assert losses_of(own, orders[2:]) == [0.25]


def test_another_order_than_the_one_that_was_sent_ahead_is_run(own: Runner) -> None:
    own.send_ahead([quick(x=0.1), quick(x=0.2)])
    assert losses_of(own, [quick(x=0.3), quick(x=0.1)]) == [0.3, 0.1]


# Output


def said(path: Path) -> list[str]:
    """The lines of a log, which a thread writes, without their time stamps."""
    services.wait_until(path.exists, seconds=5)
    before = None
    while (text := path.read_text()) != before:
        before = text
        time.sleep(0.1)
    return unstamped(text).splitlines()


def test_a_trials_log_has_all_that_it_and_its_children_said(shared: Runner, tmp_path: Path) -> None:
    """Of each of several trials in one process: Python shows a warning only once, if it is left to it."""
    logs = [tmp_path / "logs" / f"{number}.log" for number in range(2)]
    for log in logs:
        assert run(shared, "talking", log=str(log)).state is TrialState.COMPLETE
    for log in logs:
        lines = said(log)
        assert lines[:2] == ["printed 0.25", "INFO my_study: logged"]
        assert lines[2].endswith("UserWarning: warned of")
        assert lines[-3:] == ["100%", "a child said this", "and so did another"]


def test_the_output_of_each_trial_that_was_sent_ahead_is_in_its_own_log(own: Runner, tmp_path: Path) -> None:
    deeds = ["plain", "reporting", "talking_and_failing", "reporting"] * 5
    orders = [order(deed, log=str(tmp_path / f"{number}.log")) for number, deed in enumerate(deeds)]
    own.send_ahead(orders)
    outcomes = [own.run(each, lambda report: None) for each in orders]
    assert [outcome.log is not None for outcome in outcomes] == [deed == "talking_and_failing" for deed in deeds]
    own.kill()
    assert {path.stem for path in tmp_path.iterdir()} == {
        str(number) for number, deed in enumerate(deeds) if deed != "reporting"
    }
    for number, deed in enumerate(deeds):
        if deed == "plain":
            assert said(tmp_path / f"{number}.log").count("a plain trial printed this") == 100
        elif deed == "talking_and_failing":
            assert said(tmp_path / f"{number}.log") == ["it is about to fail"]


def test_the_last_lines_of_a_trial_that_fails_come_with_its_outcome(shared: Runner) -> None:
    assert unstamped(run(shared, "talking_and_failing").log or "") == "it is about to fail"
    assert unstamped(run(shared, "crashing").log or "").splitlines()[0] == "about to crash"
    assert run(shared, "raising").log is None
    assert run(shared, "plain").log is None


def test_a_handler_that_a_trial_adds_is_gone_with_it(shared: Runner, tmp_path: Path) -> None:
    for number in range(3):
        run(shared, "adding_a_handler", log=str(tmp_path / f"{number}.log"))
    assert said(tmp_path / "2.log") == ["once"]


def test_a_trial_that_prints_without_end_has_a_log_of_limited_size(shared: Runner, tmp_path: Path) -> None:
    log = tmp_path / "flood.log"
    assert run(shared, "flooding", log=str(log)).state is TrialState.COMPLETE
    lines = said(log)
    assert log.stat().st_size <= output.HEAD + output.TAIL + 100
    assert {line for line in lines if "left out" not in line} == {"a line"}
    assert sum("bytes are left out here" in line for line in lines) == 1


def test_a_trial_may_make_its_output_non_blocking(shared: Runner, tmp_path: Path) -> None:
    assert run(shared, "unblocking", log=str(tmp_path / "1.log")).state is TrialState.COMPLETE
    assert run(shared, "flooding", log=str(tmp_path / "2.log")).state is TrialState.COMPLETE
    assert said(tmp_path / "1.log") == ["it does not wait"]


@pytest.mark.slow
def test_a_log_that_cannot_be_written_is_complained_of_and_the_trial_goes_on(folder: Path, tmp_path: Path) -> None:
    complaints: list[str] = []
    runner = Runner(["deeds"], environment(folder), complaints.append)
    outcome = run(runner, "talking_and_failing", log=str(tmp_path))
    assert "on purpose" in str(outcome.error)
    assert unstamped(outcome.log or "") == "it is about to fail"
    runner.kill()
    assert complaints == ["logs of trials are incomplete: Is a directory"]
