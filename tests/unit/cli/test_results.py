"""The commands about recorded studies show what was recorded, and refuse what they cannot do in one line."""

from __future__ import annotations

import calendar
import csv
import io
import json
import os
import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner
from hyperopt import hp
from services.documents import text_of
from services.golden import check
from services.played import record_played

import shadho_celery
from shadho_celery.charts import machines, study
from shadho_celery.cli.group import commands
from shadho_celery.cli.results import _why_here
from shadho_celery.core import columns
from shadho_celery.core.records import Placed
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Outcome, Result, TrialState
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState

SPACE = hp.choice(
    "model",
    [
        {"name": "net", "rate": 10 ** hp.uniform("exponent", -4, -3)},
        {"name": "forest", "depth": hp.choice("depth", [2, 4, 8])},
    ],
)
TRIALS = 12
#: how its trials have ended
ENDED = {"total": 12, "complete": 9, "failed": 3, "pruned": 0, "cancelled": 0}
#: a trial from elsewhere
POINT = ({"model": 0, "exponent": -3.5}, 1.0)


def objective(values: dict[str, Any], context: Any) -> dict[str, Any]:
    context.report(1, 2.0)
    if context.trial % 4 == 3:
        raise ValueError(f"trial {context.trial} cannot be")
    return {"loss": values.get("rate", 0.5) + context.trial / 100, "accuracy": 0.5, "study": context.study}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two studies of alike names."""
    folder = tmp_path_factory.mktemp("recorded")
    for name in ("svm-1a2b", "svm-1c3d"):
        shadho_celery.minimize(
            objective, SPACE, trials=TRIALS, seed=0, store=f"sqlite:///{folder}/shadho.db", study=name
        )
    record_played(folder / "played.db")
    return folder


#: a note that would control a terminal, and imitate a line of the output
FORGED = "late \x1b[31m\nloss: 0.0"


def test_notes_are_shown_with_the_study_and_with_the_trial(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADHO_USER", "anna")
    assert answer("note", "svm-1a2b", "new data") == "noted\n"
    assert found("note", "svm-1a", FORGED, "--trial", "3") == {"is_done": True, "text": "noted"}
    lines = [line for line in answer("show", "svm-1a2b").splitlines() if "anna" in line]
    assert [re.sub(r" at .*?: ", " at T: ", line) for line in lines] == [
        "note by anna at T: new data",
        "note on trial 3 by anna at T: late \\x1b[31m loss: 0.0",
    ]
    assert lines[1] in answer("trial", "svm-1a2b", "3").splitlines()
    assert "anna" not in answer("trial", "svm-1a2b", "4")
    note = {"trial": 3, "text": FORGED, "by": "anna"}
    [of_trial], exported = (
        found("trial", "svm-1a2b", "3")["notes"],
        json.loads(answer("export", "svm-1a2b", "--format", "json")),
    )
    assert {**of_trial, "at": 0} == {**note, "at": 0}
    assert exported["notes"][1] == of_trial
    assert found("show", "svm-1a2b")["actions"][1]["arguments"] == {"text": FORGED, "trial": 3}
    assert "has no trial 99" in refused("note", "svm-1a2b", "--trial", "99", "none")
    assert "note.text" in refused("note", "svm-1a2b", "")


#: commands whose output is a golden text, with the width of the terminal
TEXTS = {
    "studies": (200, [["studies"]]),
    "show": (80, [["show", "played"]]),
    "trials": (80, [["trials", "played"], ["trials", "played", "--failed"], ["trials", "rungs"]]),
    "trials_narrow": (50, [["trials", "played", "--failed"], ["show", "played"]]),
    "trial": (200, [["trial", "played", "0"], ["trial", "played", "0", "--json"], ["trial", "played", "3"]]),
    "promoted": (200, [["trial", "rungs", number] for number in ("1", "2", "5", "8", "11")]),
    "best": (200, [["best", "played"], ["best", "played", "--json"]]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_command_shows_of_a_study_is_its_golden_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width, commands = TEXTS[name]
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    text = "\n".join(answer(*words, "--store", "sqlite:///played.db") for words in commands)
    check(f"command_{name}", re.sub(r"checkpoints/[0-9a-f]{16}", "checkpoints/KEY", text))


@pytest.fixture(autouse=True)
def here(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test, with a copy of the store."""
    for file in recorded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def answer(*words: str) -> str:
    result = CliRunner().invoke(commands, words)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def found(*words: str) -> dict[str, Any]:
    """Return the one JSON object, in one line, that a command prints."""
    [line] = answer(*words, "--json").splitlines()
    answered = json.loads(line)
    assert isinstance(answered, dict)
    return answered


def refused(*words: str, code: int = 2) -> str:
    result = CliRunner().invoke(commands, words)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    return lines[0]


@pytest.fixture
def running(here: Path) -> Iterator[StudyState]:
    """A study that this process runs."""
    with closing(SqlStore()) as store:
        study = open_study(store, compile_space(SPACE).describe(), name="runs", seed=1)
        study.add("model=net", {"model": 0, "exponent": -3.5}, seed=1)
        study.commit()
        yield study
        study.close()


def test_studies_are_listed_with_their_trials_and_their_best(running: StudyState) -> None:
    shown = answer("studies")
    for text in ("svm-1a2b", "svm-1c3d", "ended", "runs", "running on", str(TRIALS)):
        assert text in shown
    listed = {each["study"]: each for each in found("studies")["studies"]}
    assert listed["svm-1a2b"]["trials"] == ENDED
    assert listed["runs"]["open"] == {"waiting": 1, "queued": 0, "running": 0}
    assert (listed["svm-1a2b"]["state"], listed["runs"]["state"]) == ("ended", "running")
    assert listed["svm-1a2b"]["best_loss"] == found("best", "svm-1a")["loss"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("shadho-celery stu", ["studies"]),
        ("shadho-celery show svm", ["svm-1c3d", "svm-1a2b"]),
        ("shadho-celery show svm-1a", ["svm-1a2b"]),
        ("shadho-celery trials svm --sort l", ["loss"]),
    ],
)
def test_the_tab_key_completes_commands_studies_and_options(typed: str, offered: list[str]) -> None:
    environment = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    environment["_SHADHO_CELERY_COMPLETE"] = "bash_complete"
    result = CliRunner(env=environment).invoke(commands, prog_name="shadho-celery")
    assert [line.partition(",")[2] for line in result.stdout.splitlines()] == offered


def test_a_store_that_is_not_there_is_one_line(here: Path) -> None:
    assert "nowhere.db" in refused("studies", "--store", "sqlite:///nowhere.db")
    assert not (here / "nowhere.db").exists()


@pytest.mark.parametrize("command", ["show", "trials", "best", "export", "report", "rm"])
def test_a_name_may_be_shortened_while_it_is_unique(command: str) -> None:
    line = refused(command, "svm-1")
    assert "svm-1a2b, svm-1c3d" in line
    line = refused(command, "other")
    assert "'other'" in line
    assert "shadho-celery studies" in line


def test_a_study_is_shown_while_it_runs_without_its_lock(running: StudyState) -> None:
    assert "running on " in answer("show", "runs").splitlines()[-1]
    assert found("show", "runs")["running_on"]
    study = running.add("model=net", {"model": 0, "exponent": -3.1}, seed=1)
    assert running.commit(), study


def test_without_a_success_there_is_no_best(running: StudyState) -> None:
    assert "study runs has no successful trial" in refused("best", "runs", code=1)


def numbers(*words: str) -> list[int]:
    return [trial["number"] for trial in found("trials", "svm-1a", *words)["trials"]]


def test_trials_are_filtered_and_sorted() -> None:
    everything = found("trials", "svm-1a")["trials"]
    assert numbers() == list(range(TRIALS))
    assert numbers("--failed") == numbers("--state", "failed") == [3, 7, 11]
    assert numbers("--state", "failed", "--state", "complete") == list(range(TRIALS))
    assert numbers("--state", "running") == []
    assert answer("trials", "svm-1a", "--state", "running") == "study svm-1a2b: no such trial\n"
    nets = [trial["number"] for trial in everything if trial["subspace"] == "model=net"]
    assert nets
    assert numbers("--subspace", "model=net") == nets
    assert numbers("--class", "nowhere") == []
    assert numbers("--class", everything[0]["compute_class"]) == list(range(TRIALS))
    losses = [trial["loss"] for trial in found("trials", "svm-1a", "--sort", "loss")["trials"]]
    assert losses[:9] == sorted(losses[:9])
    assert losses[9:] == [None] * 3
    seconds = [trial["seconds"] for trial in found("trials", "svm-1a", "--sort", "seconds")["trials"]]
    assert seconds == sorted(seconds, reverse=True)
    assert numbers("--sort", "loss", "--limit", "2") == numbers("--sort", "loss")[:2]
    shown = answer("trials", "svm-1a", "--limit", "2")
    assert "12 trials, of which 2 are shown: see --limit" in shown


def test_nearly_the_name_of_a_study_or_command_is_answered_with_the_name() -> None:
    assert "did you mean svm-1a2b" in refused("best", "svm-1a3b")
    assert "did you mean trials?" in refused("trails", "svm")
    assert "its trials go from 0 to 11" in refused("trial", "svm-1a", "99")


def test_half_a_surrogate_pair_can_be_exported(here: Path) -> None:
    with shadho_celery.Study(hp.uniform("x", 0, 1), store="sqlite:///odd.db", study="odd") as study:
        study.tell(study.ask(), {"loss": 1.0, "text": "\ud800é", "list": ["\udfff"]})
    for kind in ("csv", "parquet", "json"):
        words = ["export", "odd", "-o", f"odd.{kind}", "--store", "sqlite:///odd.db"]
        assert CliRunner().invoke(commands, words).exit_code == 0
    assert "é" in (here / "odd.csv").read_text(encoding="utf-8")


def test_a_trial_says_what_was_predicted_and_why_it_went_to_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "free_slots", lambda *_: {"big": 0, "cpu": 1})
    monkeypatch.setattr(study, "StudyData", MagicMock())
    placed = {"big": Placed(0.3, 0.2, 1.0), "cpu": Placed(0.5, 0.0, 1.0)}
    each = {"placed": placed, "compute_class": "cpu", "number": 51, "attempt": 1}
    assert [*_why_here(MagicMock(), each)] == [
        "  predicted when it was placed: big 300 ms, queue 200 ms; cpu 500 ms",
        "  it went to cpu because no slot was free on big",
    ]
    assert [*_why_here(MagicMock(), each | {"compute_class": "big"})][-1] == (
        "  it went to big because no class was expected to be faster"
    )
    unknown = {"big": Placed(0.3, 0.0, None), "cpu": Placed(None, 0.0, None)}
    assert "other class was live" not in "".join(_why_here(MagicMock(), each | {"placed": unknown}))
    assert [*_why_here(MagicMock(), each | {"placed": unknown, "compute_class": "big"})][-1] == (
        "  it went to big because no class was expected to be faster"
    )
    first, second, _ = _why_here(MagicMock(), each | {"placed": placed | {"cpu": Placed(0.5, 0.0, 0.5)}})
    assert first.endswith("cpu 500 ms, shadow price 0.5")
    assert "not money" in second


def test_json_holds_every_trial(here: Path) -> None:
    told = json.loads(answer("export", "svm-1a", "--format", "json"))
    assert told["trials"] == found("trials", "svm-1a")["trials"]
    result = CliRunner().invoke(commands, ["export", "svm-1a", "-o", "t.json"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads((here / "t.json").read_text()) == told
    assert json.loads(answer("export", "svm-1a", "-o", "-", "--format", "json")) == told


def test_a_report_replaces_an_earlier_file_only_when_it_can_be_written(here: Path) -> None:
    (here / "r.html").write_text("earlier")
    result = CliRunner().invoke(commands, ["report", "svm-1a", "-o", "r.html"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.endswith(" written to r.html\n")
    shown = CliRunner().invoke(commands, ["report", "svm-1a", "-o", "-"])
    assert (shown.exit_code, shown.stderr.count("written")) == (0, 0)
    assert shown.stdout.startswith("<!DOCTYPE html>")
    assert not (here / "-").exists()
    assert "What was searched" in (here / "r.html").read_text()
    refused = CliRunner().invoke(commands, ["report", "svm-1a", "-o", "none/r.html"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "Error: none/r.html cannot be written: No such file or directory; give -o another FILE\n"
    assert not [*here.glob(".r.html*")]


def test_usage_is_shown_by_month_and_owner(here: Path) -> None:
    """A trial of two studies runs for two hours of 2025 and one of 2026; without an owner it is the study's owner's."""
    hour, january = 3600, calendar.timegm((2026, 1, 1, 0, 0, 0))
    with closing(sqlite3.connect(here / "shadho.db")) as connection, connection:
        connection.execute("UPDATE studies SET owner = 'bert', created_at = ?", [january - 3 * hour])
        connection.execute("DELETE FROM attempts WHERE number > 0")
        spans = [january - 2 * hour, january + hour]
        connection.execute("UPDATE attempts SET owner = 'anna', price = 2.0, started_at = ?, ended_at = ?", spans)
        connection.execute(
            "UPDATE attempts SET owner = NULL, price = NULL WHERE study = (SELECT min(key) FROM studies)"
        )
    rows = [("2025-12", "anna", 2.0, 4.0), ("2025-12", "bert", 2.0, 0.0)]
    rows += [("2026-01", "anna", 1.0, 2.0), ("2026-01", "bert", 1.0, 0.0)]
    assert [tuple(each.values()) for each in found("studies", "--usage")["usage"]] == rows
    shown = answer("studies", "--usage", "--user", "anna")
    assert re.findall(r"[\d.-]+\d", shown) == ["2025-12", "2.00", "4.00", "2026-01", "1.00", "2.00"]


def test_one_schema_of_a_study_and_of_a_trial_is_in_the_json_of_every_command() -> None:
    """Whatever a command adds stands beside it: a name, a list, reports."""
    shown, listed = found("show", "svm-1a"), found("trials", "svm-1a")["trials"]
    exported = json.loads(answer("export", "svm-1a", "--format", "json"))
    one, best = found("trial", "svm-1a", "0"), found("best", "svm-1a")
    facts = {*columns.names(), "values"}
    assert {*listed[0]} == facts == {*shown["best"]} == {*exported["trials"][0]}
    assert {*one} == {*facts, "study", "folder", "reports", "history", "notes"}
    assert {*best} == {*facts, "study", "folder", "repeated"}
    for told in (exported, *found("studies")["studies"]):
        assert {*told} - {*shown} <= {"best_loss"}
    assert {name: exported[name] for name in ("study", "module", "seed", "space")} == {
        name: shown[name] for name in ("study", "module", "seed", "space")
    }
    of_trial = text_of("json").partition("## Of a trial")[2]
    assert {"values", "folder", "reports", "history"} <= {*re.findall(r"`(\w+)`", of_trial)}


def test_tables_have_a_column_for_each_label_and_metric(here: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = list(csv.DictReader(io.StringIO(answer("export", "svm-1a"))))
    assert [int(row["number"]) for row in rows] == list(range(TRIALS))
    assert {"exponent", "depth", "accuracy", "loss", "state"} <= rows[0].keys()
    assert {row["depth"] for row in rows} <= {"", "2", "4", "8", "2.0", "4.0", "8.0"}
    pytest.importorskip("pyarrow")
    assert CliRunner().invoke(commands, ["export", "svm-1a", "-o", "t.parquet"]).exit_code == 0
    frame = pandas.read_parquet(here / "t.parquet")
    assert list(frame["number"]) == list(range(TRIALS))


def test_a_table_without_pandas_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert 'pip install -e ".[export]"' in refused("export", "svm-1a", "-o", "trials.parquet")
    assert answer("export", "svm-1a").startswith("number,state,loss")


@pytest.mark.parametrize("place", ["/proc/trials.json", "missing/trials.json", "shadho.db/trials.json"])
def test_a_file_that_cannot_be_written_is_one_line(place: str) -> None:
    line = refused("export", "svm-1a", "-o", place)
    assert place in line
    assert "-o" in line


def test_an_export_that_fails_leaves_the_earlier_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "trials.parquet").write_text("earlier")
    monkeypatch.setitem(sys.modules, "pandas", None)
    refused("export", "svm-1a", "-o", "trials.parquet")
    assert (here / "trials.parquet").read_text() == "earlier"
    assert sorted(path.name for path in here.iterdir() if ".db" not in path.name) == ["trials.parquet"]


def test_a_study_is_deleted_with_its_folders_once_that_is_confirmed(here: Path) -> None:
    key = next(record.key for record in SqlStore(read_only=True).records() if record.name == "svm-1a2b")
    folder = here / ".shadho" / "checkpoints" / key
    folder.mkdir(parents=True)
    said_no = CliRunner().invoke(commands, ["rm", "svm-1a"], input="n\n")
    assert said_no.exit_code == 1
    assert "nothing was deleted" in said_no.stderr
    assert folder.exists()
    nobody = CliRunner().invoke(commands, ["rm", "svm-1a"], input="")
    assert nobody.exit_code == 2
    assert "--yes" in nobody.stderr
    shown = answer("rm", "svm-1a2b", "--yes")
    assert f"deleted: study svm-1a2b with {TRIALS} trials" in shown
    assert not folder.exists()
    assert [each["study"] for each in found("studies")["studies"]] == ["svm-1c3d"]
    assert numbers_of("svm") == list(range(TRIALS)), "the other study is whole"


def test_a_study_is_deleted_although_its_fleet_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADHO_REDIS_URL", "redis://127.0.0.1:1")
    done = CliRunner().invoke(commands, ["rm", "svm-1a2b", "--yes"])
    assert done.exit_code == 0
    assert "deleted: study svm-1a2b" in done.stdout
    assert "Warning: the study's running and waiting trials on the fleet continue" in done.stderr
    assert "redis://127.0.0.1:1 cannot be used" in done.stderr


def numbers_of(name: str) -> list[int]:
    return [trial["number"] for trial in found("trials", name)["trials"]]


def test_a_study_that_runs_is_not_deleted(running: StudyState) -> None:
    assert "stop it first" in refused("rm", "runs", "--yes")
    assert "runs" in [each["study"] for each in found("studies")["studies"]]


def test_without_a_fleet_the_status_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CELERY_BROKER_URL", "")
    monkeypatch.setenv("SHADHO_REDIS_URL", "")
    shown = answer("status")
    assert "no fleet" in shown
    assert "--broker" in shown
    assert found("status") == {"fleet": None, "embedded": []}


def test_an_export_to_a_device_is_written_to_it_and_does_not_take_its_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = CliRunner().invoke(commands, ["export", "svm-1a", "-o", str(pipe), "--format", "json"])
        assert result.exit_code == 0, result.output
        assert pipe.is_fifo()
        assert json.loads(os.read(reading, 1 << 20))["study"] == "svm-1a2b"
    finally:
        os.close(reading)


def test_codes_that_a_terminal_obeys_reach_a_file_and_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    label = "a\nbest loss: 0"
    with shadho_celery.Study({label: hp.uniform(label, 0, 1)}, store="sqlite:///odd.db", study="odd") as study:
        study.tell(study.ask(), {"loss": 1.0, "text": "\x1b]0;title\x07"})
    words = ["export", "odd", "--store", "sqlite:///odd.db"]
    assert "\x1b" in CliRunner().invoke(commands, words).stdout
    assert "\n  'a\\nbest loss: 0': 0." in CliRunner().invoke(commands, ["best", *words[1:]]).stdout
    theirs, ours = os.openpty()
    with os.fdopen(theirs, "rb", buffering=0) as terminal, os.fdopen(ours, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        commands(words, standalone_mode=False)
        stdout.flush()
        shown = terminal.read(1 << 16)
    assert b"\x1b" not in shown
    assert b"\\x1b]0;title\\x07" in shown


def test_an_ending_that_names_no_form_is_refused() -> None:
    assert "there is no format for names that end with .xlsx" in refused("export", "svm-1a", "-o", "trials.xlsx")
    assert not Path("trials.xlsx").exists()


def test_yes_deletes_only_what_is_named_in_full(here: Path) -> None:
    assert "--yes needs the full name: svm-1a2b" in refused("rm", "svm-1a", "--yes")
    assert "12 trials" in answer("trials", "svm-1a")


def test_a_study_is_shown_with_the_param_that_matters_most() -> None:
    space = {"x": hp.uniform("x", 0, 1), "y": hp.uniform("y", 0, 1)}
    shadho_celery.minimize(
        lambda values: values["x"], space, trials=60, seed=0, sampler="random", store="sqlite:///shadho.db", study="two"
    )
    shown = answer("show", "two")
    assert "\nx matters most" in shown
    assert "One more" not in shown, "it has run in this process"


def test_a_warm_start_is_shown_with_its_study() -> None:
    shadho_celery.minimize(
        lambda values: 0.0, SPACE, trials=1, seed=0, store="sqlite:///shadho.db", study="new", warm_start=[POINT]
    )
    assert "warm start: learned from 1 trial of earlier studies" in answer("show", "new")
    assert "warm start" not in answer("show", "svm-1a2b")
    assert (found("show", "new")["warm_start"], found("show", "svm-1a2b")["warm_start"]) == (1, 0)


def test_the_help_of_best_says_what_a_front_is() -> None:
    assert "the feasible ones that no other one dominates" in " ".join(answer("best", "--help").split())


# Names


def record(name: str, module: str, at: float) -> None:
    space = compile_space(SPACE)
    clock = ManualClock(at)
    with closing(SqlStore("sqlite:///shadho.db")) as store:
        study = open_study(store, space.describe(), module=module, name=name, seed=1, clock=clock)
        attempt = study.send(study.add("model=net", {"model": 0, "exponent": -3.5}, seed=1), "cpu")
        outcome = Outcome(state=TrialState.COMPLETE, loss=at)
        study.tell(Result(number=0, attempt=attempt.attempt, outcome=outcome, host="h", at=at))
        study.close()


@pytest.fixture
def of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with studies of three modules, the latest one of each neither first nor last by name."""
    folder = tmp_path / "of_modules"
    folder.mkdir()
    monkeypatch.chdir(folder)
    studies = [("svm-41bc", "tasks.svm"), ("svm-3f2a", "tasks.svm"), ("wide", "tasks.svm"), ("svm-77aa", "tasks.svm")]
    studies += [("svm_large-9d00", "tasks.svm_large"), ("mlp-1111", "a.mlp"), ("mlp-2222", "b.mlp")]
    for place, (name, module) in enumerate(studies):
        record(name, module, 100.0 + place)


READ = (["best"], ["show"], ["trials"], ["export"], ["trial", "0"], ["logs", "0"])


@pytest.mark.slow
@pytest.mark.parametrize("command", READ, ids=lambda command: command[0])
@pytest.mark.parametrize("given", ["svm", "tasks.svm"])
def test_a_command_that_reads_takes_a_modules_latest_study_and_names_it(
    of_modules: None, command: list[str], given: str
) -> None:
    done = CliRunner().invoke(commands, [command[0], given, *command[1:]])
    assert "study svm-77aa, the latest of 4 of module tasks.svm" in done.stderr
    assert "matches" not in done.stderr
    as_json = CliRunner().invoke(commands, ["best", given, "--json"])
    assert json.loads(as_json.stdout)["study"] == "svm-77aa"


def test_the_latest_study_of_a_module_is_found_by_the_beginning_of_its_name_and_whatever_it_was_called(
    of_modules: None,
) -> None:
    record("deep", "tasks.lone", 300.0)
    assert json.loads(CliRunner().invoke(commands, ["best", "lone", "--json"]).stdout)["study"] == "deep"
    record("lone-0001", "tasks.lone", 301.0)
    record("lone-0002", "tasks.lone", 302.0)
    assert json.loads(CliRunner().invoke(commands, ["best", "lo", "--json"]).stdout)["study"] == "lone-0002"


@pytest.mark.parametrize(
    ("given", "cause"), [("svm-", "matches 3"), ("mlp", "matches 2"), ("s", "matches 4"), ("wise", "wide")]
)
def test_a_name_that_fits_several_studies_or_modules_is_refused_with_what_it_fits(
    of_modules: None, given: str, cause: str
) -> None:
    done = CliRunner().invoke(commands, ["best", given])
    assert done.exit_code == 2
    assert cause in done.stderr


def test_rm_needs_an_exact_or_a_unique_name_and_python_takes_a_module(of_modules: None) -> None:
    done = CliRunner().invoke(commands, ["rm", "svm", "--yes"])
    assert (done.exit_code, "matches 4 studies" in done.stderr) == (2, True)
    assert CliRunner().invoke(commands, ["rm", "tasks.svm", "--yes"]).exit_code == 2
    assert CliRunner().invoke(commands, ["rm", "mlp-1111", "--yes"]).exit_code == 0
    for name in ("svm", "tasks.svm"):
        assert shadho_celery.load_study("sqlite:///shadho.db", name).name == "svm-77aa"


CODES = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj"


@pytest.fixture
def strange(here: Path) -> Path:
    """Texts of strangers wherever a store has texts."""
    with closing(sqlite3.connect("shadho.db")) as store, store:
        for table, columns in (
            ("trials", "subspace host compute_class error warning log outgrown code"),
            ("studies", "module"),
        ):
            for column in columns.split():
                store.execute(f"UPDATE {table} SET {column} = ?", [f"{CODES}[red]{column}"])
        metrics = json.dumps({CODES: [CODES, {CODES: CODES}]})
        store.execute("UPDATE trials SET metrics = ?, code = NULL", [metrics])
        given = json.dumps({"values": {CODES: [CODES, {"!text": CODES}]}, "shown": {"C": CODES}})
        store.execute("UPDATE trials SET given = ?", [given])
        store.execute("UPDATE studies SET module = ?, in_force = ?", ["mod\x9bule", json.dumps({"sampler": CODES})])
        store.execute("UPDATE studies SET space = ?", [json.dumps({CODES: CODES})])
    return here


@pytest.mark.parametrize(
    "words",
    [
        ["studies"],
        ["studies", "--json"],
        ["show", "svm-1a2b"],
        ["show", "svm-1a2b", "--json"],
        ["trials", "svm-1a2b"],
        ["trials", "svm-1a2b", "--failed"],
        ["trials", "svm-1a2b", "--json"],
        ["trial", "svm-1a2b", "3"],
        ["trial", "svm-1a2b", "3", "--json"],
        ["trial", "svm-1a2b", "2"],
        ["best", "svm-1a2b"],
        ["best", "svm-1a2b", "--json"],
        ["logs", "svm-1a2b", "3"],
        ["best", f"svm{CODES}"],
        ["trials", "svm-1a2b", "--sort", CODES],
        [CODES],
    ],
)
@pytest.mark.filterwarnings("default")
def test_nothing_that_a_terminal_obeys_reaches_it(strange: Path, words: list[str]) -> None:
    """Control codes in errors, warnings, hosts, labels, metrics and log lines are shown as text, as are brackets."""
    result = CliRunner().invoke(commands, words, terminal_width=120)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert all(line.isprintable() for line in result.output.split("\n"))


@pytest.mark.parametrize(
    "words", [["show", "svm-1a2b"], ["trial", "svm-1a2b", "3"], ["export", "svm-1a2b"], ["report", "svm-1a2b"]]
)
@pytest.mark.parametrize(
    "given",
    [
        '{"values": ' + "[" * 10**5 + "]" * 10**5 + "}",
        '{"values": {"!dict": [' + ",".join(f"[{place * (2**61 - 1)},0]" for place in range(1, 40000)) + "]}}",
        json.dumps({"values": "x" * 10**6, "shown": {"C": "x" * 10**6}}),
    ],
)
@pytest.mark.timeout(60)
def test_a_recorded_space_and_recorded_values_cannot_hold_a_reader_up(here: Path, words: list[str], given: str) -> None:
    """The space has expressions that would not end, and a text of a megabyte that all trials refer to."""
    nodes = [{"kind": "literal", "value": 0}, {"kind": "sequence", "items": [0]}, {"kind": "literal", "value": 10**9}]
    nodes += [{"kind": "call", "name": "mul", "args": [1, 2], "kwargs": []}]
    nodes += [{"kind": "sequence", "items": [place] * 100} for place in range(3, 60)]
    law = {"law": "randint", "parameters": {}, "conditions": [[]], "options": ["x" * 10**6] * 3}
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("UPDATE studies SET tree = ?", [json.dumps({"nodes": nodes, "labels": {"kernel": law}})])
        store.execute("UPDATE trials SET given = ?", [given])
    result = CliRunner().invoke(commands, words)
    assert result.exit_code == 0
    assert len(result.output) < 10**6 or words[0] == "trial"


@pytest.mark.parametrize("words", [["show"], ["trials"], ["trials", "--json"], ["trial", "2"], ["export"]])
def test_a_row_that_cannot_be_read_ends_a_command_with_one_line(strange: Path, words: list[str]) -> None:
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("UPDATE trials SET loss = ? WHERE number = 2", [CODES])
    result = CliRunner().invoke(commands, [words[0], "svm-1a2b", *words[1:]])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: the store sqlite:///shadho.db has a row in its table trials that cannot be read")
    assert "number 2" in line
    assert line.isprintable()
