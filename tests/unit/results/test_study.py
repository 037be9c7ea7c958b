"""A recorded study can be looked at, taken away and deleted, by a shortened name too."""

from __future__ import annotations

import fcntl
import importlib
import math
import os
import socket
import sqlite3
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp
from hyperopt.pyll import scope

import shadho_celery
from shadho_celery.core.files import EMBEDDED, LOCK
from shadho_celery.core.trial import TrialState
from shadho_celery.errors import StoreError, StudyLocked, StudyNotFound, UsageError
from shadho_celery.program.recorded import load_study
from shadho_celery.store.sql import SqlStore

STORE = "sqlite:///shadho.db"
S = TrialState

SPACE = hp.choice(
    "model",
    [
        {"name": "small", "n": scope.int(hp.quniform("n", 1, 9, 1))},
        {"name": "large", "opt": hp.choice("opt", ["adam", "sgd"]), "rate": hp.loguniform("rate", -5, 0)},
    ],
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def objective(values: dict[str, Any], context: Any) -> dict[str, Any]:
    context.report(1, 0.5)
    if values.get("opt") == "sgd" and values["rate"] > 0.5:
        raise ArithmeticError("too fast")
    return {"loss": float(values.get("n", values.get("rate"))), "got": values, "size": 3}


def searched(**options: Any) -> shadho_celery.Study:
    given = {"trials": 30, "seed": 0, "store": STORE, "study": "first", **options}
    return shadho_celery.minimize(objective, SPACE, **given)


def test_a_study_is_loaded_with_trials_whose_values_are_what_the_objective_got() -> None:
    made = searched()
    study = shadho_celery.load_study(STORE, "first")
    assert (study.name, study.key, study.module, study.seed) == ("first", made.key, "", 0)
    assert study.count() == len(study.trials) == 30
    for trial in study.trials:
        if trial.state is S.COMPLETE:
            assert trial.values == trial.metrics["got"]
            assert [(report.step, report.loss) for report in trial.reports] == [(1, 0.5)]
        else:
            assert "too fast" in str(trial.error)
        assert (trial.attempts, trial.lost, trial.compute_class) == (1, 0, "local")
    assert study.best is not None
    assert study.best.loss == min(trial.loss for trial in study.trials if trial.loss is not None)
    assert study.values_note is None
    assert study.running_on is None
    assert [trial.number for trial in study.trials[3:5]] == [3, 4]
    assert study.trials[-1].number == study.trial(29).number == 29
    with pytest.raises(UsageError, match="no trial 30"):
        study.trial(30)


def test_a_table_has_values_not_indices_and_a_column_for_each_label_and_metric() -> None:
    study = searched()
    frame = study.dataframe()
    got = dict(study.best.values)
    assert (study.best_params, study.best_loss) == ({"model": got.pop("name"), **got}, study.best.loss)
    assert list(frame["number"]) == [*range(30)]
    assert set(frame["model"]) == {"small", "large"}
    assert set(frame["opt"].dropna()) == {"adam", "sgd"}
    assert str(frame["n"].dtype) == "Int64", "whole numbers stay so where some trials have none"
    assert set(frame["size"].dropna()) == {3}
    assert [math.isnan(loss) for loss in frame["loss"]] == [trial.loss is None for trial in study.trials]
    frame.to_parquet("trials.parquet")
    assert Path("trials.parquet").stat().st_size > 0


def test_a_label_or_metric_whose_name_is_taken_gets_a_prefix() -> None:
    space = {"loss": hp.uniform("loss", 0, 1), "x": hp.uniform("x", 0, 1)}
    study = shadho_celery.minimize(lambda values: {"loss": 1.0, "x": "text"}, space, trials=2, seed=0)
    frame = study.dataframe()
    assert list(frame["loss"]) == [1.0, 1.0]
    assert list(frame["param.loss"]) == [trial.params["loss"] for trial in study.trials]
    assert list(frame["metric.x"]) == ["text", "text"]


def test_values_of_unlike_kinds_are_one_column_of_texts() -> None:
    space = hp.choice("o", [1, "a", None, (2, 3)])
    study = shadho_celery.minimize(lambda value: {"loss": 0.0, "m": [1]}, space, trials=20, seed=0, sampler="random")
    frame = study.dataframe()
    assert {*frame["o"]} == {"1", "a", "None", "(2, 3)"}
    assert set(frame["m"]) == {"[1]"}
    frame.to_parquet("trials.parquet")


def test_a_name_may_be_shortened_while_it_is_unique() -> None:
    for name in ("svm-3f2a", "svm-41bc", "mlp-9d00"):
        searched(study=name, trials=1)
    assert shadho_celery.load_study(STORE, "m").name == "mlp-9d00"
    assert shadho_celery.load_study(STORE, "svm-3").name == "svm-3f2a"
    with pytest.raises(StudyNotFound, match=r"matches 2 studies.*svm-3f2a, svm-41bc; write more"):
        shadho_celery.load_study(STORE, "svm")
    with pytest.raises(StudyNotFound, match="'SVM'"):
        shadho_celery.load_study(STORE, "SVM")
    searched(study="svm", trials=1)
    assert shadho_celery.load_study(STORE, "svm").name == "svm"


def test_a_name_that_was_not_given_is_short_and_unique() -> None:
    names = {searched(study=None, trials=1).name for _ in range(3)}
    assert len(names) == 3
    assert {(name.rpartition("-")[0], len(name)) for name in names} == {("study", 10)}


def test_studies_are_listed_the_latest_first() -> None:
    searched(trials=3)
    searched(study="second", trials=2)
    listed = shadho_celery.list_studies(STORE)
    assert [summary.name for summary in listed] == ["second", "first"]
    assert [sum(summary.counts.values()) for summary in listed] == [2, 3]
    assert listed[1].best_loss == shadho_celery.load_study(STORE, "first").best.loss  # type: ignore[union-attr]
    assert listed[0].running_on is None


def test_a_study_that_runs_is_read_and_not_deleted() -> None:
    with shadho_celery.Study(SPACE, store=STORE, study="mine") as study:
        asked = study.ask()
        loaded = shadho_celery.load_study(STORE, "mine")
        assert [trial.state for trial in loaded.trials] == [S.RUNNING]
        assert [attempt.attempt for attempt in loaded.trials[0].live] == [1]
        assert "process" in str(loaded.running_on)
        with pytest.raises(StudyLocked, match="'mine' is run by"):
            loaded.delete()
        study.tell(asked, 0.5)
        assert loaded.best is not None
        assert loaded.best.loss == 0.5


def test_a_deleted_study_leaves_nothing_and_others_alone(tmp_path: Path) -> None:
    searched(trials=2)
    other = searched(study="other", trials=2)
    study = shadho_celery.load_study(STORE, "first")
    for folder in (
        f".shadho/checkpoints/{study.key}/0",
        f".shadho/checkpoints/{other.key}",
        f".shadho/embedded/{study.key}",
    ):
        (tmp_path / folder).mkdir(parents=True)
    deleted = study.delete()
    assert (deleted.name, deleted.trials, deleted.hosts) == ("first", 2, [])
    assert sorted(deleted.folders) == [f".shadho/checkpoints/{study.key}", f".shadho/embedded/{study.key}"]
    assert list((tmp_path / ".shadho/embedded").iterdir()) == []
    assert [path.name for path in (tmp_path / ".shadho/checkpoints").iterdir()] == [other.key]
    assert [summary.name for summary in shadho_celery.list_studies(STORE)] == ["other"]
    with closing(sqlite3.connect("shadho.db")) as store:
        assert store.execute("SELECT count(*) FROM reports").fetchone() == (2,)
    with pytest.raises(StudyNotFound):
        study.delete()


@pytest.mark.slow
def test_of_two_studies_with_one_name_in_two_stores_each_has_its_own_folders(tmp_path: Path) -> None:
    searched(study="checkpoints", trials=1)
    other = searched(study="checkpoints", trials=1, store="sqlite:///other.db")
    folder = tmp_path / EMBEDDED / other.key
    folder.mkdir(parents=True)
    load_study(STORE, "checkpoints").delete()
    assert folder.is_dir()


def test_a_study_whose_workers_are_still_ending_is_deleted_once_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = searched(trials=1)
    folder = tmp_path / EMBEDDED / study.key
    folder.mkdir(parents=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with monkeypatch.context() as patched:
            patched.setattr("shadho_celery.results.study.LOCK_SECONDS", 0.1)
            with pytest.raises(StudyLocked, match="still ending; try again"):
                study.delete()
        unlock = threading.Timer(0.3, fcntl.flock, (file, fcntl.LOCK_UN))
        unlock.start()
        study.delete()
        unlock.join()
    assert not folder.exists()


def test_a_folder_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = searched(trials=1)
    (tmp_path / EMBEDDED / study.key).mkdir(parents=True)
    monkeypatch.setattr("shutil.rmtree", lambda folder, ignore_errors: None)
    deleted = study.delete()
    assert (deleted.folders, deleted.left) == ([], [f".shadho/embedded/{study.key}"])


def test_the_disks_of_other_machines_are_named() -> None:
    study = searched(trials=1)
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("UPDATE trials SET host = 'node-7'")
    deleted = study.delete()
    assert deleted.hosts == ["node-7"]
    here = searched(trials=1)
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("UPDATE trials SET host = ?", (socket.gethostname(),))
    assert here.delete().hosts == [socket.gethostname()], "workers here may have run in another folder"
    assert deleted.folder_there == f".shadho/checkpoints/{study.key}"


def test_reading_makes_no_store() -> None:
    with pytest.raises(StoreError, match=r"there is no store .*none.db"):
        shadho_celery.load_study("sqlite:///none.db", "first")
    assert not Path("none.db").exists()
    with pytest.raises(StoreError, match="in memory"):
        shadho_celery.list_studies("sqlite://")


def test_a_store_of_an_earlier_version_is_refused_in_one_line_without_a_change() -> None:
    """It has no values of its trials."""
    searched(trials=5)
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("PRAGMA journal_mode = DELETE")
        store.execute("ALTER TABLE trials DROP COLUMN given")
        store.execute("UPDATE schema_version SET version = 1")
    before = Path("shadho.db").read_bytes()
    for read in (partial(load_study, STORE, "fi"), partial(shadho_celery.list_studies, STORE)):
        with pytest.raises(StoreError, match="its tables are of version 1, not 2; install the shadho_celery that"):
            read()
    assert Path("shadho.db").read_bytes() == before
    with pytest.raises(StoreError, match="its tables are of version 1, not 2"):
        searched()


def test_options_that_are_no_json_come_from_the_studys_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if this program has imported it: a store may name any module. Otherwise they are texts, and that is said."""
    file = tmp_path / "functions.py"
    file.write_text(
        "from hyperopt import hp\nprint('imported')\nSPACE = {'f': hp.choice('f', [len, max])}\n"
        "def objective(values):\n    return 0.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    study = shadho_celery.minimize(lambda values: 0.0, {"f": hp.choice("f", [len, max])}, trials=1, seed=0, **KEPT)
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("UPDATE studies SET module = 'functions'")
    unknown = load_study(STORE, "first")
    assert repr(unknown.trials[0].values["f"]).startswith("builtins.")
    assert "import functions in the program first" in str(unknown.values_note)
    assert "functions" not in sys.modules
    try:
        importlib.import_module("functions")
        assert load_study(STORE, "first").trials[0].values == study.trials[0].values
        assert study.trials[0].values["f"] in (len, max)
    finally:
        sys.modules.pop("functions", None)
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("UPDATE studies SET module = 'gone'")
    gone = load_study(STORE, "first")
    assert repr(gone.trials[0].values["f"]).startswith("builtins.")
    assert "import gone in the program first" in str(gone.values_note)


def test_a_table_tells_the_option_none_from_an_inactive_label() -> None:
    space = {
        "depth": hp.choice("depth", [None, 8]),
        "kind": hp.choice("kind", [{"a": 1}, {"b": hp.uniform("b", 0, 1)}]),
    }
    points = [{"depth": 0, "kind": 0}, {"depth": 1, "kind": 1, "b": 0.5}]
    frame = shadho_celery.minimize(lambda values: 0.0, space, trials=2, enqueue=points).dataframe()
    assert [*frame["depth"]] == ["None", "8"]
    assert [*frame["kind"]] == ["{'a': 1}", "{'b': ...}"]
    assert [*frame["b"].isna()] == [True, False]


KEPT: dict[str, Any] = {"store": STORE, "study": "first"}


def spoil(column: str, value: object, table: str = "studies", where: str = "1 = 1") -> None:
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", [value])


@pytest.mark.parametrize("key", ["../../victim", "/victim", "..", ".", "", "a/b", "x" * 65, None, b"\xff"])
def test_a_key_that_is_none_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: object) -> None:
    """Keys are checked when they are read, like everything else of a store."""
    (tmp_path / "work" / ".shadho" / "checkpoints").mkdir(parents=True)
    (tmp_path / "victim").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    searched(trials=1)
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("PRAGMA writable_schema = ON")
        store.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
    spoil("key", str(tmp_path / "victim") if key == "/victim" else key)
    with pytest.raises(StoreError, match=r"table studies that cannot be read \(name 'first'\)"):
        load_study(STORE, "first").delete()
    assert (tmp_path / "victim").is_dir()


def test_a_folder_of_a_study_that_is_a_link_stays(tmp_path: Path) -> None:
    study = searched(trials=1)
    (tmp_path / "victim").mkdir()
    EMBEDDED.mkdir(parents=True)
    (EMBEDDED / study.key).symlink_to(tmp_path / "victim")
    deleted = study.delete()
    assert (deleted.folders, deleted.left) == ([], [f".shadho/embedded/{study.key}"])
    assert (tmp_path / "victim").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("params", "[1]"),
        ("params", '{"n": [1]}'),
        ("params", "[" * 100_000),
        ("params", b"\xff"),
        ("state", "UNKNOWN"),
        ("loss", "text"),
        ("metrics", '{"a": ' + "[" * 500 + "]" * 500 + "}"),
        ("finished_at", 1e300),
        ("asked_at", "yesterday"),
        ("attempt", -1),
        ("number", "text"),
        ("host", b"\xff\xfe"),
        ("code", b"\xff"),
        ("live", '[{"state": "NONE"}]'),
        ("live", "5"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_in_one_line(column: str, value: object) -> None:
    searched(trials=3)
    spoil(column, value, "trials", "number = 1")
    study = load_study(STORE, "first")
    assert all(isinstance(code, str) for code in SqlStore(STORE, read_only=True).tally(study.key, "code"))
    which = "number 'text'" if column == "number" else "number 1"
    with pytest.raises(StoreError, match=rf"table trials that cannot be read \(study '{study.key}', {which}\)") as said:
        list(study.trials)
    assert "\n" not in str(said.value)
    assert len(str(said.value)) < 1000


@pytest.mark.parametrize(
    ("column", "value"),
    [("space", "{"), ("settings", '{"trials": "x"}'), ("created_at", 1e300), ("name", b"\xff"), ("in_force", "[1]")],
)
def test_a_study_that_cannot_be_read_is_named_and_another_one_is_shown(column: str, value: object) -> None:
    searched(trials=1)
    searched(study="other", trials=1)
    spoil(column, value, where="name = 'other'")
    with pytest.raises(StoreError, match=r"store sqlite:///shadho.db has a row in its table studies .*; restore the"):
        shadho_celery.list_studies(STORE)
    assert load_study(STORE, "first").count() == 1


#: statements by which a file computes what is read from it, or does something at each write
ENDLESS = {
    "generated column": (
        "ALTER TABLE trials ADD COLUMN extra TEXT AS (hex(zeroblob(400000000)))",
        "generated column trials.extra",
    ),
    "virtual table": ("DROP TABLE reports; CREATE VIRTUAL TABLE reports USING fts5(study)", "virtual table reports"),
    "view": (
        "DROP TABLE reports; CREATE VIEW reports AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n FROM r) "
        "SELECT n AS study FROM r",
        "lost its table reports",
    ),
}


@pytest.mark.parametrize(("statements", "words"), ENDLESS.values(), ids=ENDLESS)
def test_a_file_that_computes_what_is_read_is_refused(statements: str, words: str) -> None:
    searched(trials=1)
    with closing(sqlite3.connect("shadho.db")) as store:
        store.executescript(statements)
    with pytest.raises(StoreError, match=words):
        load_study(STORE, "first")


def test_a_file_with_a_trigger_is_read_and_not_written() -> None:
    searched(trials=1)
    with closing(sqlite3.connect("shadho.db")) as store:
        store.execute("CREATE TRIGGER mine AFTER UPDATE ON studies BEGIN DELETE FROM trials; END")
    assert load_study(STORE, "first").count() == 1
    with pytest.raises(StoreError, match="it has the trigger mine"):
        searched(resume=True, study="first", trials=2)


@pytest.mark.parametrize("ending", ["-journal", "-wal"])
def test_a_pipe_beside_a_store_is_not_waited_for(ending: str) -> None:
    searched(trials=1)
    os.mkfifo(f"shadho.db{ending}")
    for use in (lambda: load_study(STORE, "first"), lambda: searched(resume=True)):
        with pytest.raises(StoreError, match=f"shadho.db{ending} is not a file"):
            use()
