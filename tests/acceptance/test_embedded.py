"""Embedded mode as people use it: one command, no server anywhere, and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import services
import sqlalchemy as sa
from acceptance.commands import Answer, Desk, until
from acceptance.commands import desk as open_desk

import shadho_celery
from shadho_celery.core import columns
from shadho_celery.embedded import embedded
from shadho_celery.embedded.embedded import Embedded
from shadho_celery.embedded.supervisor import MAX_LOG
from shadho_celery.errors import ServiceError

pytestmark = pytest.mark.timeout(180)


def check_schema(report: dict[str, Any]) -> None:
    """The object of ``--json`` has the fields that scripts were promised, and no others."""
    fields = {"study", "store", "seconds", "trials", "best", "classes", "sampler", "placed_by_params", "subspaces"}
    fields |= {"objectives", "front", "hypervolume", "warm_start", "pruner", "rungs", "state", "running_on", "module"}
    fields |= {"seed", "created_at", "active_seconds", "settings", "in_force", "space", "open", "failures", "notices"}
    fields |= {"command", "hosts", "codes", "actions", "money", "money_to_best", "money_plan", "repeated", "owner"}
    fields |= {"notes"}
    assert set(report) == fields
    assert isinstance(report["study"], str)
    assert isinstance(report["store"], str)
    assert report["seconds"] > 0
    assert set(report["trials"]) == {"total", "complete", "failed", "pruned", "cancelled"}
    if report["best"] is not None:
        assert set(report["best"]) == {"number", "values", *columns.names()}
    assert [set(rung) for rung in report["rungs"]] == [{"budget", "classes", "agreement"}] * len(report["rungs"])
    for counts in report["classes"].values():
        assert set(counts) == {"complete", "pruned", "failed", "slots"}
    for counts in report["subspaces"].values():
        assert set(counts) == {"complete", "pruned", "failed", "best", "classes"}
    for state in ("complete", "failed"):
        assert sum(counts[state] for counts in report["classes"].values()) == report["trials"][state]
        assert sum(counts[state] for counts in report["subspaces"].values()) == report["trials"][state]


def reference(desk: Desk, trials: int, seed: int, name: str = "my_study") -> Counter[str]:
    """Return the params that an undisturbed study of that file and seed tries, in any order."""
    spec = importlib.util.spec_from_file_location(f"reference_{desk.folder.name}", desk.folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    study = shadho_celery.minimize(lambda _: 0.0, module.SPACE, trials=trials, seed=seed, sampler="random")
    return Counter(repr(sorted(trial.params.items())) for trial in study.trials)


def tried(desk: Desk) -> Counter[str]:
    """The params of the trials in the store that count."""
    counted = [trial for trial in desk.trials() if trial["state"] in ("COMPLETE", "PRUNED", "FAILED")]
    return Counter(repr(sorted(trial["params"].items())) for trial in counted)


def test_a_study_runs_in_any_folder_and_under_any_name(no_orphans: None, tmp_path: Path) -> None:
    """Paths that a socket cannot have, names of which an URL would lose a part, and another project's celeryconfig."""
    name = "a#b?c%25;d"
    folder = tmp_path / f"папка {name}" / ("x" * 200)
    folder.mkdir(parents=True)
    with open_desk(folder) as desk:
        desk.study(settings={"classes": ["cpu"]})
        desk.write("celeryconfig.py", "import nothing_of_that_name\n")
        for trials, which in (("1", "--study"), ("2", "--resume")):
            command = desk.launch("my_study", "--trials", trials, which, name, "--json").wait(120)
            assert command.code == 0, desk.said()
            assert command.json()["trials"]["complete"] == int(trials)
            assert command.err.count("celeryconfig.py is not read") == 1


@pytest.mark.sample
def test_a_study_finishes_without_any_server_and_stdout_is_one_json_object(desk: Desk) -> None:
    """Exactly the trials asked for, every subspace tried, at least two classes used; all gone at the end."""
    # The workers start one after another.
    desk.study(seconds=0.4)
    typed_at = time.time()
    command = desk.launch("my_study", "--trials", "20", "--seed", "0", "--json", "--demo").wait()
    assert command.code == 0, desk.said()
    report = command.json()
    check_schema(report)
    assert report["trials"] == {"total": 20, "complete": 20, "failed": 0, "pruned": 0, "cancelled": 0}
    assert set(report["subspaces"]) == {"side=left", "side=right"}
    assert all(counts["complete"] for counts in report["subspaces"].values())
    assert {name: counts["slots"] for name, counts in report["classes"].items()} == {
        "gpu_large": 1,
        "gpu_small": 1,
        "cpu": 1,
    }
    assert sum(counts["complete"] > 0 for counts in report["classes"].values()) >= 2
    trials = desk.trials()
    waited = min(trial["started_at"] for trial in trials) - typed_at
    print(f"the first trial started {waited:.1f} s after the command")
    assert waited < 20 * services.PATIENCE, "5 s on a machine that has nothing else to do"
    assert report["best"]["loss"] == min(trial["loss"] for trial in trials)
    assert trials[report["best"]["number"]]["params"] == report["best"]["params"]
    # Each trial was run once, on the class that the store names.
    assert sorted((number, name) for number, _, name, _ in desk.runs("ended")) == [
        (trial["number"], trial["compute_class"]) for trial in trials
    ]
    assert tried(desk) == reference(desk, 20, 0)
    desk.nothing_left()
    assert desk.states_folder().is_dir(), "the state folder stays"


def test_a_trial_does_not_find_the_password_of_the_store_that_was_given_as_an_option(
    desk: Desk, postgres_url: str
) -> None:
    """As from `run --store "$DATABASE_URL"`; SHADHO_PASS passes a variable on."""
    space = "import os\nfrom hyperopt import hp\nSPACE = {'x': hp.uniform('x', 0, 1)}\n"
    desk.write("my_study.py", f"{space}def objective(params): return {{'loss': 0, **os.environ}}\n")
    url = sa.make_url(postgres_url).set(password="of-the-store").render_as_string(hide_password=False)
    variables = {"DATABASE_URL": url, "DB_PASS": "of-the-store", "PASSED": "of-the-store", "OWN": "own"}
    words = ("my_study", "--store", url, "--trials", "1", "--json")
    command = desk.launch(*words, **variables, SHADHO_PASS="PASSED").wait()
    assert command.code == 0, desk.said()
    assert {*variables} & {*command.json()["best"]["metrics"]} == {"PASSED", "OWN"}


def test_workers_of_ones_own_choice_have_the_slots_asked_for(desk: Desk) -> None:
    """Here the path is short, and the socket lies in the state folder; elsewhere it is too long for a socket."""
    desk.folder = desk.temporary
    desk.study(seconds=0.3)
    words = ["--workers", "cpu=2", "--workers", "rack-7.fast=1", "--json", "--study", "short"]
    command = desk.launch("my_study", "--trials", "30", "--seed", "1", *words)
    desk.await_runs(1)
    socket = desk.states_folder() / "redis.sock"
    assert socket.is_socket()
    command.wait()
    assert command.code == 0, desk.said()
    classes = command.json()["classes"]
    assert {name: counts["slots"] for name, counts in classes.items()} == {"cpu": 2, "rack-7.fast": 1}
    assert classes["cpu"]["complete"] + classes["rack-7.fast"]["complete"] == 30
    assert len({trial["host"] for trial in desk.trials()}) == 1
    assert len(desk.slots()) == 3, "each slot has a process that is used again and again"
    assert "stand in" not in command.err
    until(lambda: not desk.processes(), 20, lambda: f"{desk.processes()}")
    assert not socket.exists()


def test_a_trial_that_goes_on_with_a_greater_budget_finds_the_checkpoints_of_the_one_it_carries_on(desk: Desk) -> None:
    """The folder of a trial that carries on no other is empty."""
    body = """
    kept = context.checkpoint_dir / "kept"
    before = kept.read_text() if kept.exists() else "nothing"
    open(f"found-{context.trial}", "w").write(before)
    assert (before == "nothing") == (context.budget == 1), before
    kept.write_text(f"{context.trial} of budget {context.budget:g}")
"""
    desk.study(body=body.strip(), settings={"fidelity": {"least": 1, "most": 9, "eta": 3, "how": "halving"}})
    command = desk.launch("my_study", "--trials", "13", "--workers", "cpu=2", "--seed", "0", "--json").wait()
    assert command.code == 0, desk.said()
    trials = {trial["number"]: trial for trial in desk.trials()}
    found = {number: (desk.folder / f"found-{number}").read_text() for number in trials}
    rungs = [sorted(number for number, trial in trials.items() if trial["rung"] == rung) for rung in range(3)]
    assert [len(numbers) for numbers in rungs] == [9, 3, 1]
    first, second, [last] = rungs
    assert {found[number] for number in first} == {"nothing"}
    assert {number: found[number] for number in second} == {
        number: f"{trials[number]['origin']} of budget 1" for number in second
    }
    [middle] = [number for number in second if trials[number]["origin"] == trials[last]["origin"]]
    assert found[last] == f"{middle} of budget 3"


def test_without_a_terminal_the_output_is_plain_lines(desk: Desk) -> None:
    """The table at the end, where the store lies, and a command that carries on and can be copied."""
    desk.study()
    command = desk.launch("my_study.py", "--trials", "8", "--workers", "cpu=1").wait()
    assert command.code == 0, desk.said()
    assert "\x1b" not in command.out + command.err
    assert "store: sqlite:///shadho.db" in command.out
    assert "8 complete, 0 failed" in command.out
    [line] = [line for line in command.out.splitlines() if line.startswith("more trials of it: ")]
    _, *words = line.removeprefix("more trials of it: ").split()
    assert words[-2:] == ["--trials", "16"]
    again = desk.told(*words)
    assert again.code == 0, again.err
    assert "16 complete, 0 failed" in again.out
    assert desk.states() == {"COMPLETE": 16}


def test_a_terminal_shows_progress_the_best_and_every_class_and_ctrl_c_ends_with_the_result(desk: Desk) -> None:
    desk.study(seconds=0.4)
    terminal = desk.launch_in_terminal("my_study", "--trials", "1000", "--study", "watched", "--demo")
    terminal.says("best loss")
    for text in ("gpu_large", "gpu_small", "cpu", "busy", "waiting", "/1000", "runs on", "a minute"):
        terminal.says(text)

    def progress() -> set[str]:
        return set(re.findall(r"(\d+)/1000", terminal.read()))

    until(lambda: len(progress()) >= 3, 30, terminal.read)
    terminal.press(b"\x03")
    terminal.says("Ctrl-C again stops at once")
    assert terminal.wait(30) == 0, terminal.screen
    assert re.search(r"watched: \d+ complete, 0 failed", terminal.screen)
    assert "more trials of it" in terminal.screen
    assert "Traceback" not in terminal.screen
    assert "\x1b[?25h" in terminal.screen, "the cursor is shown again"
    desk.nothing_left()


def test_a_failing_trial_is_recorded_with_its_traceback_and_the_others_go_on(desk: Desk) -> None:
    body = """
    if context.trial % 4 == 1:
        raise ArithmeticError("the numbers ran away")
    if context.trial % 4 == 2:
        return float("nan")
    """.strip()
    desk.study(body=body)
    command = desk.launch("my_study", "--trials", "12", "--json", "--workers", "cpu=2").wait()
    assert command.code == 0, desk.said()
    report = command.json()
    check_schema(report)
    assert report["trials"] == {"total": 12, "complete": 6, "failed": 6, "pruned": 0, "cancelled": 0}
    errors = {trial["number"]: trial["error"] for trial in desk.trials() if trial["state"] == "FAILED"}
    assert set(errors) == {1, 5, 9, 2, 6, 10}
    assert "Traceback (most recent call last)" in errors[1]
    assert "my_study.py" in errors[1]
    assert errors[1].rstrip().endswith("ArithmeticError: the numbers ran away")
    assert "nan" in errors[2]


def test_where_no_trial_succeeds_the_exit_code_is_1(desk: Desk) -> None:
    desk.study(body="raise ValueError('not this one either')")
    command = desk.told("run", "my_study", "--trials", "4", "--json", "--workers", "cpu=1")
    assert command.code == 1, command.err
    assert "no successful trial" in command.err.splitlines()[-1]
    assert "Traceback" not in command.err
    check_schema(command.json())
    assert command.json()["best"] is None
    assert command.json()["trials"]["failed"] == 4
    assert all("not this one either" in trial["error"] for trial in desk.trials())


def test_ctrl_c_once_finishes_what_runs_and_keeps_what_waits(desk: Desk) -> None:
    """Trials that run are finished and counted, the result is printed, nothing is left; --resume finishes the rest."""
    desk.study(seconds=0.6)
    command = desk.launch("my_study", "--trials", "12", "--seed", "3", "--json", "--workers", "cpu=3")
    desk.await_runs(4)
    command.interrupt()
    command.wait(30)
    assert command.code == 0, desk.said()
    desk.nothing_left()
    report = command.json()
    began, ended = desk.runs("began"), desk.runs("ended")
    assert sorted(began) == sorted(ended), "what ran was finished"
    assert report["trials"]["complete"] == len(ended) < 12
    assert "Traceback" not in command.err
    states = desk.states()
    assert set(states) <= {"COMPLETE", "WAITING"}
    assert states["COMPLETE"] == len(ended)
    again = desk.launch("my_study", "--resume", "--trials", "12", "--json", "--workers", "cpu=2").wait()
    assert again.code == 0, desk.said()
    assert desk.states() == {"COMPLETE": 12}
    assert tried(desk) == reference(desk, 12, 3)
    assert Counter(number for number, *_ in desk.runs("ended")) == Counter(range(12)), "each was run once"


@pytest.mark.parametrize("how", ["Ctrl-C twice", "SIGTERM"])
def test_stopping_at_once_leaves_nothing_and_loses_no_trial(desk: Desk, how: str) -> None:
    desk.study(seconds=0.05, body="context.trial < 3 or time.sleep(60)")
    command = desk.launch("my_study", "--trials", "6", "--seed", "4", "--json", "--workers", "cpu=3")
    desk.await_runs(6)
    began = time.monotonic()
    if how == "SIGTERM":
        command.send(signal.SIGTERM)
    else:
        command.interrupt()
        command.says("Ctrl-C again stops at once")
        command.interrupt()
    command.wait(20)
    print(f"{how}: ended after {time.monotonic() - began:.1f} s, all gone {desk.nothing_left():.1f} s later")
    assert command.code == (143 if how == "SIGTERM" else 130), desk.said()
    assert command.json()["trials"]["complete"] == 3, "the result so far is printed"
    assert command.json()["state"] == "stopped"
    assert desk.told("studies", "--json").json()["studies"][0]["state"] == "stopped"
    assert "stopped: 3 trials left" in desk.told("show", "my_study").out
    assert "Traceback" not in command.err
    if how == "SIGTERM":
        return
    # The trials that ran are not judged: they run again when the study is resumed.
    desk.study(seconds=0.05)
    again = desk.launch("my_study", "--resume", "--trials", "6", "--json", "--workers", "cpu=2").wait()
    assert again.code == 0, desk.said()
    assert again.json()["trials"] == {"total": 6, "complete": 6, "failed": 0, "pruned": 0, "cancelled": 0}
    assert again.json()["state"] == "ended"
    assert tried(desk) == reference(desk, 6, 4)


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_its_trial_is_run_again(desk: Desk) -> None:
    """The lease of its running trial ends after 30 s at most; then the trial is sent as a new attempt."""
    desk.study(seconds=0.05, body="context.attempt == 1 and context.trial == 4 and time.sleep(3600)")
    command = desk.launch("my_study", "--trials", "6", "--seed", "6", "--json", "--workers", "cpu=1")
    until(lambda: any(run[0] == 4 for run in desk.runs()), 30, desk.said)
    until(lambda: Counter(trial["state"] for trial in desk.trials())["RUNNING"] == 1, 10, desk.said)
    [worker] = desk.pids("--class", "cpu")
    os.kill(worker, signal.SIGKILL)
    until(lambda: [pid for pid in desk.pids("--class", "cpu") if pid != worker], 20, desk.said)
    command.wait(90)
    assert command.code == 0, desk.said()
    assert command.json()["trials"] == {"total": 6, "complete": 6, "failed": 0, "pruned": 0, "cancelled": 0}
    assert [attempt for number, attempt, *_ in desk.runs() if number == 4] == [1, 2]
    [trial] = [trial for trial in desk.trials() if trial["number"] == 4]
    assert (trial["attempt"], trial["lost"]) == (2, 1)
    assert tried(desk) == reference(desk, 6, 6)
    desk.nothing_left()


def test_a_dead_supervisor_ends_the_study_with_one_line_and_resume_goes_on(desk: Desk) -> None:
    desk.study(seconds=0.3)
    command = desk.launch("my_study", "--trials", "1000", "--workers", "cpu=2")
    desk.await_runs(2)
    [supervisor] = desk.pids("shadho_celery.embedded.supervisor")
    os.kill(supervisor, signal.SIGKILL)
    command.wait(30)
    assert command.code == 2, desk.said()
    assert "Traceback" not in command.err
    assert "resume the study" in command.err.splitlines()[-1]
    until(lambda: not desk.processes(), 20, lambda: f"{desk.processes()}")
    count = desk.states()["COMPLETE"] + 6
    again = desk.launch("my_study", "--resume", "--trials", str(count), "--workers", "cpu=2").wait()
    assert again.code == 0, desk.said()
    assert desk.states()["COMPLETE"] == count
    desk.nothing_left()


def test_a_state_folder_that_another_one_uses_is_refused_with_its_process_and_long_logs_in_it_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_orphans: None
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".shadho/embedded/s"
    with closing(Embedded(Path(".shadho/embedded/s"), {"cpu": 1}, [], 1)) as first:
        pid = (folder / "lock").read_text()
        with monkeypatch.context() as patched:
            patched.setattr(embedded, "LOCK_SECONDS", 0.2)
            with pytest.raises(ServiceError, match=rf"\.shadho/embedded/s is in use .*process {pid}\); wait"):
                Embedded(Path(".shadho/embedded/s"), {"cpu": 1}, [], 1)
        until(lambda: len([*folder.glob("*.log")]) == 3, 30, str)
        for log in folder.glob("*.log"):
            with log.open("ab") as file:
                file.write(b"-" * (MAX_LOG + 1))
        until(lambda: all(log.stat().st_size < MAX_LOG for log in folder.glob("*.log")), 30, str)
        assert {path.stat().st_size for path in folder.glob("*.log.1")} == {MAX_LOG}
        first.raise_if_dead()
    Embedded(Path(".shadho/embedded/s"), {"cpu": 1}, [], 1).close()


@pytest.mark.slow
def test_redis_files_that_are_cut_or_damaged_cost_no_finished_trial(desk: Desk) -> None:
    """As a crash of the machine may leave them; what is kept is for its owner's eyes."""
    desk.study()
    assert desk.launch("my_study", "--trials", "6", "--workers", "cpu=1").wait().code == 0, desk.said()
    folder = desk.states_folder()
    places = [desk.folder / "shadho.db", desk.folder / ".shadho", folder, *folder.rglob("*")]
    assert [place for place in places if place.stat().st_mode & 0o077] == []
    [file] = folder.glob("appendonlydir/*.incr.aof")
    file.write_bytes(file.read_bytes()[:-7])
    cut = desk.launch("my_study", "--resume", "--trials", "12", "--workers", "cpu=1").wait()
    assert cut.code == 0, desk.said()
    [file] = folder.glob("appendonlydir/*.incr.aof")
    file.write_bytes(b"not what Redis wrote" * 100 + file.read_bytes())
    damaged = desk.launch("my_study", "--resume", "--trials", "18", "--workers", "cpu=1").wait()
    assert damaged.code == 0, desk.said()
    assert "is renamed to" in (folder / "supervisor.log").read_text()
    assert desk.states()["COMPLETE"] == 18
    assert Counter(number for number, *_ in desk.runs("ended")).most_common(1)[0][1] == 1, "none was run again"
    desk.nothing_left()


def test_a_state_folder_that_cannot_be_written_is_one_line(desk: Desk) -> None:
    desk.study()
    place = desk.folder / ".shadho"
    place.symlink_to("/proc")
    words = ("run", "my_study", "--trials", "3", "--workers", "cpu=1")
    refused(desk.told(*words), "the state folder ")
    place.unlink()
    place.write_text("in the way")
    refused(desk.told(*words), "the state folder ")


def test_a_second_scheduler_on_a_study_is_refused_and_a_changed_space_names_the_label(desk: Desk) -> None:
    desk.study(seconds=0.4)
    first = desk.launch("my_study", "--trials", "1000", "--study", "mine", "--workers", "cpu=1")
    desk.await_runs(1)
    second = desk.told("run", "my_study", "--resume", "mine", "--trials", "10")
    refused(second, "this study is run by the scheduler on", str(first.pid))
    taken = desk.told("run", "my_study", "--study", "mine", "--trials", "10")
    refused(taken, "'mine'", "already", "resume it (in a program ", "or choose another name")
    assert first.code is None
    first.interrupt()
    first.wait(20)
    assert first.code == 0, desk.said()
    path = desk.folder / "my_study.py"
    path.write_text(path.read_text().replace('hp.uniform("x2", 0, 1)', 'hp.uniform("x2", 0, 2)'))
    changed = desk.told("run", "my_study", "--resume", "mine", "--trials", "10")
    refused(changed, "x2", "another space")
    assert "n (was" not in changed.err


def refused(command: Answer, *texts: str) -> None:
    """It ended with exit code 2 and one line that has all of `texts`."""
    assert command.code == 2, command.err
    assert command.out == ""
    [line] = command.messages
    assert line.startswith("Error: "), line
    for text in texts:
        assert text in line, line


GOOD = "from hyperopt import hp\nSPACE = hp.uniform('width', 0, 1)\ndef objective(params): return params\n"

FILES = {
    "no_space": "def objective(params): return 0.0",
    "bad_key": GOOD + "STUDY = {'trails': 3}",
    "bad_value": GOOD + "STUDY = {'trials': 'ten'}",
    "bad_space": GOOD.replace("0, 1", "3, 1"),
    "two_nodes": GOOD + "SPACE = [hp.uniform('width', 0, 1), hp.uniform('width', 0, 2)]",
    "broken": "def objective(params:",
    "raises": "1 / 0",
}


#: what is typed, and what the answer must name
MISTAKES = {
    "nowhere": ["no module nowhere", "PYTHONPATH"],
    "no_space": ["SPACE"],
    "bad_key": ['STUDY["trails"]', "trials"],
    "bad_value": ["STUDY of bad_value: trials: 'ten' is not a whole number"],
    "bad_space": ["bad_space.py, line 2", "width"],
    "two_nodes": ["'width'"],
    "broken": ["broken.py", "line 1"],
    "raises": ["ZeroDivisionError", "raises.py, line 1"],
    "good --store nonsense": ["nonsense", "sqlite:///"],
    "good --store mysql://somebody:secret@host/name": ["mysql"],
    "good --store sqlite:////nowhere/at/all.db": ["/nowhere/at/all.db", "(store)"],
    "good --workers cpu": ["'cpu'", "CLASS=SLOTS"],
    "good --resume never_begun": ["'never_begun'", "leave out resume"],
    "good --study ../up": ["../up"],
    "good --url-file nowhere.urls": ["nowhere.urls"],
}


def test_what_a_user_gets_wrong_is_told_in_one_line(desk: Desk) -> None:
    """Exit code 2, nothing on standard output, no traceback, nothing started and no password shown."""
    for name, text in FILES.items():
        desk.write(f"{name}.py", text)
    desk.study("good")
    for typed, texts in MISTAKES.items():
        told = desk.told("run", *typed.split())
        refused(told, *texts)
        assert "secret" not in told.err
    refused(desk.launch("raises").wait(), *MISTAKES["raises"])
    # The workers of a new study start while it is read.
    desk.nothing_left()
    until(lambda: not list(desk.folder.glob(".shadho/*")), 10, lambda: str([*desk.folder.glob(".shadho/*")]))
