"""A store with trials that cannot be read is refused in one line, and goes on without these rows."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from shadho_celery.core.trial import Outcome, Result, TrialState
from shadho_celery.errors import StoreError, StudyLocked
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState

NOW = 1_700_000_000.0
TRIALS = 14


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


def resumed(store: SqlStore) -> StudyState:
    return open_study(store, {}, module="m", name="s", resume=True)


def refusal(url: str) -> str:
    with closing(SqlStore(url)) as store, pytest.raises(StoreError) as caught:
        list(resumed(store))
    message = str(caught.value)
    assert "\n" not in message
    return message


#: what makes a trial's row unreadable: changes that any database allows, and those that SQLite allows
UNREADABLE = [
    "params = '[1, 2]'",
    'params = \'{"x": "high"}\'',
    "budget = -1.0",
    "rung = 99999",
    "state = 'DONE'",
    "loss = NULL",
]
OF_SQLITE = [
    "params = '{\"x\": '",
    "params = CAST(X'7BFFFE' AS TEXT)",
    "state = CAST(X'FFFE' AS TEXT)",
    "loss = 'low'",
    "number = 'two'",
    "attempt = X'00'",
]


def test_a_trial_that_cannot_be_read_is_named_with_the_remedy_and_without_it_the_study_goes_on(url: str) -> None:
    is_file = url.startswith("sqlite")
    damages = UNREADABLE + OF_SQLITE * is_file
    for number, damage in enumerate(damages):
        change(url, f"UPDATE trials SET {damage} WHERE number = {number}")
        message = refusal(url)
        which = "number 'two'" if "'two'" in damage else f"number {number}"
        for words in ("its table trials", which, f"delete the row with {'sqlite3' if is_file else 'psql'}"):
            assert words in message, damage
        change(url, f"DELETE FROM trials WHERE {which.replace(' ', ' = ')}")
    with closing(SqlStore(url)) as store:
        study = resumed(store)
        assert [trial.number for trial in study] == [*range(len(damages), TRIALS)]
        assert study.add("all", {"x": 1.0}, seed=9).number == TRIALS
        study.close()


def test_the_number_of_a_last_trial_whose_row_was_deleted_is_not_given_again(url: str) -> None:
    change(url, f"DELETE FROM trials WHERE number = {TRIALS - 1}")
    with closing(SqlStore(url)) as store:
        study = resumed(store)
        assert study.add("all", {"x": 1.0}, seed=9).number == TRIALS
        study.close()


def test_a_refused_study_is_left_unlocked(url: str) -> None:
    change(url, "UPDATE trials SET budget = -1.0 WHERE number = 2")
    refusal(url)
    with closing(SqlStore(url)) as store:
        assert store.lock(store.find("s").key, "elsewhere 1 1", NOW)


def test_a_trial_that_continues_a_missing_one_is_named(url: str) -> None:
    change(url, "UPDATE trials SET origin = 2, rung = 1 WHERE number = 4")
    change(url, "DELETE FROM trials WHERE number = 2")
    assert "number 4): it continues trial 2, which is missing" in refusal(url)


@pytest.mark.parametrize(
    ("url", "table"), [("sqlite", "trials"), ("sqlite", "studies"), ("postgresql", "reports")], indirect=["url"]
)
def test_a_dropped_table_is_named_and_none_is_made_in_its_place(url: str, table: str) -> None:
    change(url, f"DROP TABLE {table} {'CASCADE' if url.startswith('postgresql') else ''}")
    for _ in range(2):
        with pytest.raises(StoreError, match=f"lost its table {table}; restore it"):
            SqlStore(url)


def test_a_store_of_an_unknown_version_is_refused_with_its_version(url: str) -> None:
    for version in (1, 3):
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
    with (
        closing(SqlStore(url)) as store,
        pytest.raises(StoreError, match=r"table studies .* \(name 's'\)"),
    ):
        store.find("s")
