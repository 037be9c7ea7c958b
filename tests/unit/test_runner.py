"""A slot's real process: whatever a trial does to it is an outcome, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import services

from shadho_celery.context import Outcome
from shadho_celery.runner import Runner
from shadho_celery.trial import TrialState

#: what every test's study module can be asked to do, by the value of its one param
STUDY = '''
import multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
from hyperopt import hp

SPACE = {"do": hp.choice("do", %(deeds)s), "x": hp.uniform("x", 0, 1)}

def objective(params, context):
    return globals()[params["do"]](params, context)

def plain(params, context):
    print("a plain trial printed this\\n" * 100)
    return {"loss": params["x"], "twice": 2 * params["x"], "pid": os.getpid()}

def tell(params, context):
    assert isinstance(context.checkpoint_dir, Path)
    return {"loss": 0.0, **{name: str(value) for name, value in vars(context).items()},
            "visible": os.environ["CUDA_VISIBLE_DEVICES"], "threads": os.environ["OMP_NUM_THREADS"]}

def reporting(params, context):
    for step in range(50):
        context.report(step, step / 2)
    return 0.0

def raising(params, context):
    raise ArithmeticError("größer als erlaubt")

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

def stubborn(params, context):
    context.report(0, 0.0)
    time.sleep(60)

def large(params, context):
    return {"loss": 0.0, "text": "ü" * 300_000}

def hungry(params, context):
    return len(b"x" * 200_000_000)

def starving(params, context):
    held = b"x" * 200_000_000
    raise MemoryError(len(held))
'''

DEEDS = [line.split()[1].partition("(")[0] for line in STUDY.splitlines() if line.startswith("def ")][1:]

Reports = list[Mapping[str, Any]]


#: Stands in for the compiler of search spaces, which takes a second to import hyperopt: a process with it is there at
#: once. It is put in place before anything else runs in the process.
STAND_IN = """
import sys, types

class Space:
    def evaluate(self, params):
        return {**params, "do": %(deeds)s[params["do"]]}

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
    (folder / "light" / "sitecustomize.py").write_text(STAND_IN % {"deeds": DEEDS})
    (folder / "deeds.py").write_text(STUDY % {"deeds": DEEDS}, encoding="utf-8")
    (folder / "broken.py").write_text("raise RuntimeError('it cannot be imported')\n")
    (folder / "lacking.py").write_text("SPACE = {}\n")
    return folder


def environment(folder: Path, *, real: bool = False) -> dict[str, str]:
    path = f"{folder}" if real else f"{folder}{os.pathsep}{folder / 'light'}"
    # Python's own buffering, whatever the tests themselves run with.
    return {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Runner]:
    """One runner for many tests: a new process is made only after a death, as in a worker."""
    runner = Runner(["deeds", "broken", "lacking"], environment(folder))
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
def own(folder: Path) -> Iterator[Runner]:
    runner = Runner(["deeds"], environment(folder))
    yield runner
    runner.kill()


def trial(deed: str, **changes: Any) -> dict[str, Any]:
    return {
        "number": 4,
        "attempt": 2,
        "seed": 11,
        "module": "deeds",
        "params": {"do": DEEDS.index(deed), "x": 0.25},
        "checkpoint_dir": "/checkpoints/4",
        "compute_class": "gpu_large",
        "slot": 1,
        **changes,
    }


def run(runner: Runner, deed: str, **changes: Any) -> Outcome:
    return runner.run(trial(deed, **changes), lambda record: None)


def run_until_report(runner: Runner, deed: str, then: Callable[[], None]) -> Outcome:
    """Run the deed; once it has reported do `then`, in another thread as the worker does."""
    threads: list[threading.Thread] = []

    def on_report(record: Mapping[str, Any]) -> None:
        threads.append(threading.Thread(target=then))
        threads[-1].start()

    outcome = runner.run(trial(deed), on_report)
    for thread in threads:
        thread.join()
    return outcome


# Outcomes


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
    metrics = run(shared, "tell").metrics
    expected = {"trial": "4", "attempt": "2", "seed": "11", "checkpoint_dir": "/checkpoints/4", "device": "cpu"}
    assert metrics.items() >= {**expected, "compute_class": "gpu_large", "slot": "1", "budget": "None"}.items()
    assert (metrics["visible"], metrics["threads"]) == ("", "1")


def test_a_budget_reaches_the_objective(shared: Runner) -> None:
    assert run(shared, "tell", budget=0.5).metrics["budget"] == "0.5"


@linux
@pytest.mark.parametrize(("deed", "state"), [("hungry", TrialState.COMPLETE), ("starving", TrialState.FAILED)])
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


def test_of_a_process_that_died_the_peak_memory_is_unknown(own: Runner) -> None:
    assert run(own, "vanishing").memory is None


def test_reports_come_in_order(shared: Runner) -> None:
    reports: Reports = []
    assert shared.run(trial("reporting"), reports.append).state is TrialState.COMPLETE
    assert reports == [{"step": step, "loss": step / 2} for step in range(50)]


def test_a_result_of_any_size_comes_back(shared: Runner) -> None:
    assert run(shared, "large").metrics == {"text": "ü" * 300_000}


@pytest.mark.parametrize(
    ("deed", "says"), [("raising", "ArithmeticError: größer als erlaubt"), ("leaving", "SystemExit: told to go")]
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
        ("unusual", f"signal {signal.SIGRTMIN + 3}", ""),
        ("loud", "exit code 1", "the last words"),
    ],
)
def test_a_death_is_a_failed_outcome_with_its_cause_and_what_was_printed_last(
    shared: Runner, deed: str, end: str, printed: str
) -> None:
    run(shared, "plain")
    outcome = run(shared, deed)
    assert (outcome.state, outcome.loss) == (TrialState.FAILED, None)
    assert end in str(outcome.error)
    assert printed in str(outcome.error)
    assert "a plain trial printed this" not in str(outcome.error), "that was another trial's"
    assert len(str(outcome.error)) < 10_000


def test_after_a_death_the_next_trial_runs_in_a_new_process(shared: Runner) -> None:
    before = run(shared, "plain").metrics["pid"]
    run(shared, "vanishing")
    after = run(shared, "plain")
    assert after.state is TrialState.COMPLETE
    assert after.metrics["pid"] != before


def test_a_process_that_died_in_idleness_costs_no_trial(shared: Runner) -> None:
    pid = run(shared, "plain").metrics["pid"]
    os.kill(pid, signal.SIGKILL)
    # Without burying it: that is the runner's to do.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    outcome = run(shared, "plain")
    assert outcome.state is TrialState.COMPLETE
    assert outcome.metrics["pid"] != pid


def test_a_death_is_noticed_though_a_child_of_the_trial_lives_on(own: Runner, no_orphans: None) -> None:
    outcome = run(own, "forking")
    assert outcome.state is TrialState.FAILED
    assert "SIGKILL" in str(outcome.error)


# Stopping


def test_a_stop_flag_ends_the_trial_and_is_down_for_the_next_one(shared: Runner) -> None:
    outcome = run_until_report(shared, "obedient", shared.stop_trial)
    assert (outcome.state, outcome.loss) == (TrialState.CANCELLED, None)
    assert run(shared, "plain").state is TrialState.COMPLETE


def test_a_stop_flag_before_the_first_process_or_between_trials_is_harmless(own: Runner) -> None:
    own.stop_trial()
    assert run(own, "plain").state is TrialState.COMPLETE
    own.stop_trial()
    assert run(own, "plain").state is TrialState.COMPLETE


def test_kill_ends_the_trial_and_its_children_at_once(no_orphans: None, folder: Path) -> None:
    runner = Runner(["deeds"], environment(folder))
    outcome = run_until_report(runner, "parenting", runner.kill)
    assert outcome.state is TrialState.FAILED
    assert "killed" in str(outcome.error) or "SIGKILL" in str(outcome.error)
    # `no_orphans` looks for the children.


def test_a_killed_runner_starts_anew_and_killing_twice_is_harmless(own: Runner) -> None:
    own.kill()
    own.start()
    own.kill()
    own.kill()
    assert run(own, "plain").state is TrialState.COMPLETE


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
        "import sys; from shadho_celery.runner import Runner;"
        f"runner = Runner(['deeds'], {environment(folder)!r});"
        f"runner.run({trial('parenting')!r}, lambda record: print('reported', flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        said = worker.stdout.readline()
        running = services.marked_processes(os.environ[services.MARK])
        worker.kill()
    assert said == "reported\n"
    # The worker, the slot's process and two children.
    assert len(running) == 4, running
    services.wait_until(lambda: not services.marked_processes(os.environ[services.MARK]), seconds=5)


def test_a_runner_that_is_killed_leaves_nothing_open(folder: Path) -> None:
    before = open_files()
    runner = Runner(["deeds"], environment(folder))
    runner.start()
    runner.kill()
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
