"""A store with trials that are missing or cannot be read is refused in one line, and goes on after a repair."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import click
import pytest
import sqlalchemy as sa
from acceptance.commands import Command, Desk, desk

from shadho_celery.core.trial import Outcome, Result, TrialState
from shadho_celery.errors import StoreError, StudyLocked
from shadho_celery.launch import main
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState

NOW = 1_700_000_000.0
TRIALS = 6


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a store with a study of so many finished trials."""
    is_file = request.param == "sqlite"
    made = f"sqlite:///{tmp_path}/s.db" if is_file else str(request.getfixturevalue("postgres_url"))
    with closing(SqlStore(made)) as store:
        study = open_study(store, {}, module="m", name="s", seed=0)
        for number in range(TRIALS):
            sent = study.send(study.add("all", {"x": number / 7}, seed=number), "cpu")
            outcome = Outcome(state=TrialState.COMPLETE, loss=float(number), metrics={"m": number})
            study.tell(Result(number=sent.number, attempt=1, outcome=outcome, at=NOW + number))
        study.close()
    return made


def change(url: str, statement: str) -> None:
    """Do to a store what no scheduler does."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text(statement))


def resumed(store: SqlStore, said: list[str] | None = None) -> StudyState:
    return open_study(store, {}, module="m", name="s", resume=True, repaired=None if said is None else said.append)


def refusal(url: str) -> str:
    with closing(SqlStore(url)) as store, pytest.raises(StoreError) as caught:
        list(resumed(store))
    message = str(caught.value)
    assert "\n" not in message
    return message


MISSING = "DELETE FROM trials WHERE number = 2"
#: changes of trial 2 that any database allows, and those that SQLite allows
UNREADABLE = {
    "missing": MISSING,
    "params": "UPDATE trials SET params = '[1, 2]' WHERE number = 2",
    "param": 'UPDATE trials SET params = \'{"x": "high"}\' WHERE number = 2',
    "budget": "UPDATE trials SET budget = -1.0 WHERE number = 2",
    "rung": "UPDATE trials SET rung = 99999 WHERE number = 2",
    "state": "UPDATE trials SET state = 'DONE' WHERE number = 2",
    "loss": "UPDATE trials SET loss = NULL WHERE number = 2",
}
OF_SQLITE = {
    "half of the params": "UPDATE trials SET params = '{\"x\": ' WHERE number = 2",
    "bytes": "UPDATE trials SET params = CAST(X'7BFFFE' AS TEXT) WHERE number = 2",
    "bytes of a state": "UPDATE trials SET state = CAST(X'FFFE' AS TEXT) WHERE number = 2",
    "loss": "UPDATE trials SET loss = 'low' WHERE number = 2",
    "number": "UPDATE trials SET number = 'two' WHERE number = 2",
    "attempt": "UPDATE trials SET attempt = X'00' WHERE number = 2",
}


@pytest.mark.parametrize("statement", UNREADABLE.values())
def test_a_trial_that_is_missing_or_cannot_be_read_is_named_with_the_remedy(url: str, statement: str) -> None:
    change(url, statement)
    message = refusal(url)
    assert "trial 2 of study 's'" in message
    assert "--resume s --repair" in message


@pytest.mark.parametrize("statement", OF_SQLITE.values())
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_values_that_only_sqlite_would_keep_are_named_too(url: str, statement: str) -> None:
    change(url, statement)
    assert "trial 2 of study 's'" in refusal(url)


def test_a_refused_study_is_left_unlocked(url: str) -> None:
    change(url, MISSING)
    refusal(url)
    with closing(SqlStore(url)) as store:
        assert store.lock(store.find("s").key, "elsewhere 1 1", NOW)


STATEMENTS = [("sqlite", statement) for statement in (*UNREADABLE.values(), *OF_SQLITE.values())]
STATEMENTS += [("postgresql", statement) for statement in UNREADABLE.values()]


@pytest.mark.parametrize(("url", "statement"), STATEMENTS, indirect=["url"])
def test_a_repaired_study_goes_on_with_numbers_that_no_trial_has_had(url: str, statement: str) -> None:
    change(url, statement)
    said: list[str] = []
    with closing(SqlStore(url)) as store:
        study = resumed(store, said)
        assert "repaired" in said[0]
        assert [trial.number for trial in study] == [0, 1, 3, 4, 5]
        assert study.add("all", {"x": 1.0}, seed=9).number == TRIALS
        study.close()
        again = resumed(store)
        assert [trial.number for trial in again] == [0, 1, 3, 4, 5, 6]
        again.close()
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        moved = connection.execute(sa.text("SELECT number, problem, row FROM unreadable")).all()
    assert "2" in [number for number, *_ in moved]
    assert all(problem for _, problem, _ in moved)


def test_the_last_trials_number_is_not_given_again_after_its_repair(url: str) -> None:
    change(url, f"UPDATE trials SET state = 'DONE' WHERE number = {TRIALS - 1}")
    with closing(SqlStore(url)) as store:
        study = resumed(store, [])
        assert study.add("all", {"x": 1.0}, seed=9).number == TRIALS
        study.close()


def test_a_trial_that_carries_on_a_missing_one_is_moved_with_it(url: str) -> None:
    change(url, "UPDATE trials SET origin = 2, rung = 1 WHERE number = 4")
    change(url, MISSING)
    with closing(SqlStore(url)) as store:
        study = resumed(store, [])
        assert [trial.number for trial in study] == [0, 1, 3, 5]
        study.close()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_repair_leaves_a_copy_of_the_store_as_it_was(url: str, tmp_path: Path) -> None:
    change(url, MISSING)
    with closing(SqlStore(url)) as store:
        resumed(store, []).close()
    [copied] = [path for path in tmp_path.iterdir() if path.name.startswith("s.db.")]
    assert copied.stat().st_mode & 0o077 == 0
    with closing(sqlite3.connect(copied)) as before:
        assert [n for (n,) in before.execute("SELECT number FROM trials ORDER BY number")] == [0, 1, 3, 4, 5]
        assert before.execute("SELECT count(*) FROM unreadable").fetchone() == (0,)


def test_a_repair_changes_nothing_in_a_whole_store(url: str) -> None:
    said: list[str] = []
    with closing(SqlStore(url)) as store:
        before = list(store.trials(store.find("s").key))
        study = resumed(store, said)
        assert list(study) == before
        study.close()
    assert said == ["nothing to repair: every trial is there and can be read"]


@pytest.mark.parametrize("table", ["trials", "reports", "studies"])
def test_a_dropped_table_is_named_and_none_is_made_in_its_place(url: str, table: str) -> None:
    change(url, f"DROP TABLE {table} {'CASCADE' if url.startswith('postgresql') else ''}")
    for _ in range(2):
        with pytest.raises(StoreError, match=f"lost its table {table}; restore it"):
            SqlStore(url)


@pytest.mark.parametrize("version", [1, 3])
def test_a_store_of_an_unknown_version_is_refused_with_its_version(url: str, version: int) -> None:
    change(url, f"UPDATE schema_version SET version = {version}")
    with pytest.raises(StoreError, match=f"of version {version}, not 2; install"):
        SqlStore(url)


def test_a_store_with_studies_but_without_a_version_is_refused_as_an_earlier_one(url: str) -> None:
    change(url, "DROP TABLE schema_version")
    for read_only in (False, True):
        with pytest.raises(StoreError, match="an earlier version, or another program, has written it; give --store"):
            SqlStore(url, read_only=read_only)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("value", [-1, 2**63 - 1, "'x'"])
def test_a_fence_that_cannot_be_raised_is_named(url: str, value: object) -> None:
    change(url, f"UPDATE studies SET fence = {value}")
    with closing(SqlStore(url)) as store, pytest.raises(StoreError, match=r"fence in .* restore it from a copy"):
        store.lock(store.find("s").key, "elsewhere 1 1", NOW)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_holder_of_any_length_is_one_line(url: str) -> None:
    change(url, f"UPDATE studies SET holder = '{'x' * 10**6}', lock_expires = 1e10")
    with closing(SqlStore(url)) as store, pytest.raises(StudyLocked) as caught:
        store.lock(store.find("s").key, "elsewhere 1 1", NOW)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("column", ["space = '{'", "seed = -1", "created_at = 'x'"])
def test_a_study_whose_own_row_cannot_be_read_is_one_line(url: str, column: str) -> None:
    change(url, f"UPDATE studies SET {column}")
    with closing(SqlStore(url)) as store, pytest.raises(StoreError, match=r"the study named 's' .* cannot be read"):
        store.find("s")


def test_without_resume_there_is_nothing_to_repair() -> None:
    with pytest.raises(click.ClickException, match="--resume"):
        main(["tasks.svm", "--repair"], standalone_mode=False)


# The command


@pytest.fixture(name="desk")
def _desk(no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        yield made


def launch(desk: Desk, *words: str) -> Command:
    command = [sys.executable, "-m", "shadho_celery.launch", "my_study", "--workers", "cpu=1", *words, "--json"]
    return desk.start(*command).wait(60)


def test_a_launch_with_a_missing_trial_ends_at_once_and_with_repair_it_finishes(desk: Desk) -> None:
    desk.study(seconds=0.0)
    assert launch(desk, "--trials", "5", "--study", "s").code == 0
    change(f"sqlite:///{desk.folder}/shadho.db", MISSING)
    refused = launch(desk, "--resume", "s", "--trials", "9")
    assert refused.code == 2
    assert refused.err.splitlines()[-1].startswith("Error: trial 2 of study 's'")
    assert "Traceback" not in refused.err
    repaired = launch(desk, "--resume", "s", "--trials", "9", "--repair")
    assert repaired.code == 0, desk.said()
    assert "repaired: trials 2 are in its table unreadable" in repaired.err
    assert json.loads(repaired.out)["trials"]["complete"] == 9
    assert [trial["number"] for trial in desk.trials()] == [0, 1, 3, 4, 5, 6, 7, 8, 9]


def test_a_number_that_is_damaged_is_moved_away_and_the_numbers_up_to_it_are_not_missed(url: str) -> None:
    change(url, f"UPDATE trials SET number = {2**40 if 'postgresql' not in url else 2**30} WHERE number = 4")
    with closing(SqlStore(url)) as store:
        said: list[str] = []
        assert len(list(resumed(store, said).trials)) == TRIALS - 1
    damaged = 2**40 if "postgresql" not in url else 2**30
    assert said[0].startswith(f"repaired: trials 4, {damaged} are in its table unreadable now")
