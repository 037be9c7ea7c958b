"""A command is searched without a function: by a study in TOML, and by a command line alone, here and on a fleet."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from acceptance.commands import Desk, signed_fleet, until
from services.cases import cases

from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.objective.toml_study import resume_words

pytestmark = pytest.mark.timeout(180)

#: a script as people have them, and a module that it imports
TRAIN = """
import argparse, json
from helper import loss

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--opt")
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--layers", type=int, default=1)
parser.add_argument("--nesterov", action="store_true")
given = parser.parse_args()
print(json.dumps({"loss": loss(given.lr), "opt": given.opt, "nesterov": given.nesterov}))
"""
HELPER = "def loss(lr):\n    return abs(lr - 0.01)\n"
STUDY = """
command = ["python", "train.py", "{args}"]
trials = 6

[space]
lr = {log = [1e-4, 1e-1]}
nesterov = {choice = [true, false]}

[space.opt.choice.sgd]
momentum = {uniform = [0, 1]}

[space.opt.choice.adam]
"""
WORDS = ["python", "train.py", "--lr", "{lr:log:1e-4:1e-1}", "--opt={opt:choice:adam:sgd}"]
EMBEDDED = ("--workers", "cpu=2", "--seed", "0", "-q")


def files(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text(HELPER)
    (folder / "study.toml").write_text(STUDY)


@pytest.fixture(name="desk")
def _desk(desk: Desk) -> Desk:
    files(desk.folder)
    return desk


def hint(out: str) -> list[str]:
    """Return the words of the command with which a run says that it goes on."""
    return shlex.split(re.findall("more trials of it: shadho-celery (.*)", out)[0])


@pytest.mark.sample
def test_a_study_in_toml_runs_shows_its_command_and_goes_on_as_it_says(desk: Desk) -> None:
    run = desk.launch("study.toml", *EMBEDDED).wait()
    assert run.code == 0, desk.said()
    assert desk.states() == {"COMPLETE": 6}
    for trial in desk.trials():
        metrics = json.loads(trial["metrics"])
        choices = trial["params"]
        assert metrics["opt"] == ("sgd", "adam")[choices["opt"]]
        assert metrics["nesterov"] is (choices["nesterov"] == 0)
        assert trial["loss"] == pytest.approx(abs(choices["lr"] - 0.01))
    name = desk.trials()[0]["name"]
    assert name.startswith("study-")
    shown = "python train.py '{args}'"
    for words in (("studies",), ("show", name), ("trial", name, "0")):
        assert shown in desk.told(*words).out, words
    assert desk.told("show", name, "--json").json()["command"] == shown
    desk.told("report", name, "-o", "report.html")
    assert "The command: python train.py" in (desk.folder / "report.html").read_text()
    resumed = desk.start(sys.executable, "-m", "shadho_celery", *hint(run.out), "-q").wait()
    assert resumed.code == 0, desk.said()
    assert desk.states() == {"COMPLETE": 12}
    told = desk.told("resume", name)
    assert (told.code, told.messages) == (
        2,
        [f"Error: study '{name}' runs a command, which is taken from your own file: shadho-celery run study.toml "
         f"--resume {name}"],
    )  # fmt: skip


@pytest.mark.sample
def test_a_command_without_a_file_is_a_study_that_only_the_same_command_continues(desk: Desk) -> None:
    run = desk.launch("--trials", "4", *EMBEDDED, "--", *WORDS).wait()
    assert run.code == 0, desk.said()
    name = desk.trials()[0]["name"]
    assert name.startswith("train-")
    again = desk.launch("--trials", "6", "-q", "--workers", "cpu=2", "--resume", name, "--", *WORDS).wait()
    assert again.code == 0, desk.said()
    words = ["run", "--resume", name, "--workers", "cpu=2", "--trials", "12", "--", *WORDS]
    assert hint(again.out) == words
    words[words.index("12")] = "8"
    assert desk.start(sys.executable, "-m", "shadho_celery", *words).wait().code == 0, desk.said()
    assert hint(desk.told("show", name).out) == ["run", "--resume", name, "--trials", "16", "--", *WORDS]
    assert desk.states() == {"COMPLETE": 8}
    others = [[*WORDS, "--layers=2"], [word.replace("1e-1", "1") for word in WORDS]]
    for words in others:
        told = desk.told("run", "--resume", name, "--trials", "9", "--workers", "cpu=2", "--", *words)
        [line] = told.messages
        assert line.startswith(f"Error: study '{name}' was begun with another command, --loss or domains: ")
    assert "a command is given again: run --resume NAME -- COMMAND" in desk.told("run", "--resume", name).err
    assert f": shadho-celery run --resume {name} -- {shlex.join(WORDS)}" in desk.told("resume", name).err
    assert desk.states() == {"COMPLETE": 8}


@cases(
    "words, says",
    [
        (["study.toml", "--", *WORDS], "a command after -- is a study of its own; leave out 'study.toml', or the"),
        (["study.toml", "--loss", "val"], "--loss is for a command after --; in a study file, set loss beside"),
        (["--"], "after -- follows a command with a domain in at least one placeholder"),
        (["--", "python", "--lr", "{lr}"], "'{lr}' has no domain; after -- follows a command with a domain in"),
        (["--", "python", "{lr:lgo:1:2}"], "there is no domain 'lgo'; did you mean log? choose one of uniform, log,"),
        (["--", "python", "{lr:log:0:1}"], "lr.log.0: 0 is not allowed; it must be above 0; a logarithm needs two"),
        (["--", "no_such_program", "{x:int:1:2}"], "there is no program 'no_such_program' that can be run; install it"),
        (["--", "train.py", "{x:int:1:2}"], "there is no program 'train.py' that can be run; install it, or"),
        (["--", "./train.py", "{x:int:1:2}"], "there is no program './train.py' that can be run; install it, or for a"),
        (["--", "python", "{x:int:2:1}"], "command.x.int: 2 is not below 1; give the lower end first"),
        (["--", "python", "{x:int:1:2}", "{y}"], "{y} in the command is no label; {{ stands for a brace"),
        (["--", "python", "{seed:int:1:2}"], "label 'seed' has the name of a placeholder of commands"),
        (["studdy.toml"], "there is no file studdy.toml here; did you mean study.toml?"),
        (["bad.toml"], "bad.toml: space.lr.lg: there is no such key; did you mean log?"),
        (["both"], 'both has both objective and STUDY["command"]; leave out one of them'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_command_is_one_line_before_anything_starts(
    desk: Desk, words: list[str], says: str
) -> None:
    desk.write("bad.toml", "command = ['python', '{lr}']\n[space]\nlr = {lg = [1, 2]}\n")
    desk.write("both.py", "SPACE = {}\nSTUDY = {'command': ['x']}\ndef objective(params): return 0\n")
    told = desk.told("run", *words)
    [line] = told.messages
    assert (told.code, line.startswith("Error: "), says in line) == (2, True, True), line
    assert not (desk.folder / "shadho.db").exists()


def test_the_name_of_the_loss_belongs_to_a_command_without_a_file(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    told = desk.told("run", "--loss", "val_loss", "--", "python", "{x:int:2:1}")
    assert told.messages[-1].endswith("command.x.int: 2 is not below 1; give the lower end first")
    [path] = desk.folder.glob(".shadho/commands/*/python.toml")
    assert 'loss = "val_loss"' in path.read_text()
    again = ["--loss", "val_loss", "--", "python", "{x:int:2:1}"]
    name = path.relative_to(desk.folder).as_posix()
    # At the end of a test, what still runs in its folder is killed.
    with monkeypatch.context() as context:
        context.chdir(desk.folder)
        assert resume_words(name, "mine", "-q") == ["shadho-celery", "run", "--resume", "mine", "-q", *again]
        path.unlink()
        assert resume_words(name, "mine") == ["shadho-celery", "run", name, "--resume", "mine"]


def test_a_file_that_is_edited_during_a_run_is_another_version_at_once(desk: Desk) -> None:
    """A command's process reads its files again, unlike the one that has imported a function."""
    run = desk.launch("study.toml", "--trials", "10000", *EMBEDDED)
    until(lambda: len([*desk.folder.glob(".shadho/checkpoints/*/logs/*.log")]) > 6, 60, desk.said)
    other = desk.write("other.py", HELPER.replace("0.01", "99"))
    other.rename(desk.folder / "helper.py")
    run.says("helper.py was edited")
    run.interrupt()
    run.wait()
    losses = [trial["loss"] for trial in desk.trials() if trial["loss"] is not None]
    # Each of the two slots may have started a trial just before.
    assert sum(loss > 90 for loss in losses) <= 2, losses


def test_a_fleet_runs_commands_of_files_on_its_disks(desk: Desk, redis_url: str) -> None:
    urls = {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
    desk.environment |= urls
    told = desk.told("run", "--", *WORDS)
    assert told.code == 2
    assert "the workers of a fleet take a command only from a study file on their machine" in told.err
    by_celery = "celery -A shadho_celery worker -c 1 -Q a -I study.toml"
    by_us = "shadho-celery worker --slots 1 --import study.toml --class"
    for name, command in (("one", by_celery), ("two", f"{by_us} b"), ("three", f"{by_us} c")):
        (folder := desk.folder / name).mkdir()
        files(folder)
        (folder / "helper.py").write_text(HELPER.replace("0.01", "0.02") if name == "three" else HELPER)
        desk.start("bash", "-c", f"cd {folder}; exec {command}")
    registry = Registry(connect(redis_url), Worker)
    until(lambda: len([each for each in registry.living().values() if each.codes]) == 3, 60, desk.said)
    run = desk.launch("study.toml", "--trials", "8", "-q").wait()
    assert run.code == 0, desk.said()
    assert {trial["compute_class"] for trial in desk.trials()} == {"a", "b"}
    assert re.search(r"gets no trials: its code has version .*three/helper.py differs", run.err), run.err


def test_a_command_is_shipped_to_workers_that_accept_signed_code(desk: Desk, redis_url: str) -> None:
    desk.environment |= signed_fleet(desk, redis_url)
    folder = desk.folder / "worker"
    folder.mkdir()
    desk.start("bash", "-c", f"cd {folder}; exec shadho-celery worker --class a --slots 1 --accept-code")
    # A program of the folder is shipped, too.
    desk.write("go", '#!/bin/sh\nexec python "$@"\n').chmod(0o700)
    until(lambda: "is ready" in desk.said(), 60, desk.said)
    run = desk.launch("--trials", "3", "-q", "--code", "ship", "--", "./go", *WORDS[1:]).wait()
    assert run.code == 0, desk.said()
    assert desk.states() == {"COMPLETE": 3}
