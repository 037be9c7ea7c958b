"""Every store keeps which attempts, workers and machines a study had, and says what of it is new."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec.structs import replace

from shadho_celery.core.hardware import Gpu
from shadho_celery.core.records import AttemptRecord, Leaving, MachineRecord, Placed, Present
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Lost, Outcome, Result, Retry, Started, TrialState
from shadho_celery.errors import StoreError
from shadho_celery.program.recorded import load_study
from shadho_celery.results.trial import Records
from shadho_celery.store import sql
from shadho_celery.store.base import StudyRecord, Turn, holder_name
from shadho_celery.store.memory import MemoryStore
from shadho_celery.store.sql import LOCK_SECONDS, SqlStore
from shadho_celery.study import recorder
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState

S = TrialState
NOW = 1_700_000_000.0
MACHINE = MachineRecord(
    host="node1",
    gpus=(Gpu(name="Größte GPU", memory=2**34),),
    cores=8,
    memory=2**35,
    versions={"shadho_celery": "1", "python": "3.11.2"},
)
PLACED = {"gpu": Placed(12.5, 0.0, 1.25), "cpu": Placed(None, 3.0, None)}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no record of a queued attempt be held back."""
    monkeypatch.setattr(recorder, "QUEUED_SECONDS", 0.0)


@pytest.fixture(params=["file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db" if request.param == "file" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["memory", "file", "postgresql"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StudyState]:
    clock = ManualClock(NOW)
    if request.param == "memory":
        record = StudyRecord(key="k", name="s", module="", seed=0, space={}, created_at=NOW)
        yield StudyState(MemoryStore(), record, 1, clock=clock)
        return
    url = f"sqlite:///{tmp_path}/s.db" if request.param == "file" else request.getfixturevalue("postgres_url")
    with closing(SqlStore(url)) as store:
        yield open_study(store, {}, module="m", name="s", clock=clock)


def records(study: StudyState) -> Records:
    return Records(study.store, study.record.key)  # type: ignore[arg-type]


def result(number: int, attempt: int, state: TrialState = S.COMPLETE, **facts: Any) -> Result:
    outcome = Outcome(state=state, loss=0.5 if state is S.COMPLETE else None, seconds=2.0)
    return Result(number=number, attempt=attempt, outcome=outcome, at=NOW + 9, **facts)


def started(number: int, attempt: int = 1) -> Started:
    return Started(number=number, attempt=attempt, host="node1", at=NOW + 7, worker="cpu@node1.1", slot=2)


def row(study: StudyState, place: int) -> dict[str, Any]:
    return {name: values[place] for name, values in records(study).attempts().items()}


def test_an_attempt_is_recorded_when_it_is_placed_claimed_and_ended(study: StudyState) -> None:
    attempt = study.send(study.add("all", {"x": 0.5}, seed=1), "gpu")
    study.recorder.note_placement(attempt, PLACED)
    study.commit()
    queued = {"number": 0, "attempt": 1, "compute_class": "gpu", "queued_at": NOW, "copy": False, "placed": PLACED}
    # A study in memory is made without a user.
    queued["owner"] = None if isinstance(study.store, MemoryStore) else "tester"
    nothing = dict.fromkeys(("host", "worker", "slot", "started_at", "ended_at", "end", "price"))
    assert row(study, 0) == {**queued, **nothing}
    study.tell(started(0))
    study.commit()
    claimed = {"host": "node1", "worker": "cpu@node1.1", "slot": 2, "started_at": NOW + 7}
    assert row(study, 0) == {**queued, **nothing, **claimed}
    study.tell(result(0, 1, worker="cpu@node1.1"))
    study.commit()
    assert row(study, 0) == {**queued, **nothing, **claimed, "ended_at": NOW + 9, "end": "complete"}


def test_a_queued_attempt_is_written_once_it_has_waited_and_at_the_end_of_a_run(
    study: StudyState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "QUEUED_SECONDS", 1.0)
    study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
    study.commit()
    assert records(study).attempts()["number"] == []
    study.clock.sleep(2.0)
    study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
    study.commit()
    assert records(study).attempts()["number"] == [0]
    study.close()
    assert records(study).attempts()["number"] == [0, 1]


def test_every_end_has_its_word(study: StudyState) -> None:
    def sent(first: Any = None) -> int:
        number = study.send(study.add("all", {"x": 0.5}, seed=1), "cpu").number
        study.tell(started(number))
        return number

    study.tell(result(sent(), 1, S.FAILED))
    study.tell(replace(result(sent(), 1, S.FAILED), retry=Retry(reason="broken", failed_on="w")))
    study.tell(replace(result(sent(), 1, S.FAILED), retry=Retry(reason="full", outgrown="cpu")))
    study.tell(Lost(number=sent(), attempt=1, reason="silent"))
    study.tell(Lost(number=sent(), attempt=1, reason="stopped", claimed=False))
    unclaimed = study.send(study.add("all", {"x": 0.5}, seed=1), "cpu").number
    study.tell(Lost(number=unclaimed, attempt=1, reason="taken back", claimed=False))
    study.tell(result(sent(), 1, S.CANCELLED))
    copied = sent()
    study.send(study.trial(copied), "gpu")
    study.tell(result(copied, 2))
    study.commit()
    ends = ["failed", "retried", "outgrown", "lost", "returned", "unclaimed", "cancelled", "superseded", "complete"]
    found = records(study).attempts()
    assert found["end"] == ends
    assert found["copy"] == [False] * 8 + [True]
    assert found["attempt"] == [1] * 8 + [2]


def test_a_result_that_arrives_after_its_attempt_was_thought_lost_corrects_the_record(study: StudyState) -> None:
    number = study.send(study.add("all", {"x": 0.5}, seed=1), "cpu").number
    study.tell(started(number))
    study.tell(Lost(number=number, attempt=1, reason="silent"))
    study.commit()
    assert row(study, 0)["end"] == "lost"
    study.tell(result(number, 1))
    study.commit()
    found = row(study, 0)
    assert (found["end"], found["ended_at"], found["started_at"]) == ("complete", NOW + 9, NOW + 7)


def test_the_backlog_of_a_class_is_the_predicted_time_of_its_queued_attempts(study: StudyState) -> None:
    for seconds in (2.0, 3.0, None):
        attempt = study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
        study.recorder.note_placement(attempt, {"cpu": Placed(seconds, study.recorder.backlog("cpu"), None)})
    assert study.recorder.backlog("cpu") == 5.0
    study.tell(started(0))
    assert study.recorder.backlog("cpu") == 3.0
    study.tell(Lost(number=1, attempt=1, reason="taken back", claimed=False))
    assert study.recorder.backlog("cpu") == 0.0
    study.commit()
    assert [found["cpu"].backlog for found in records(study).attempts()["placed"]] == [0.0, 2.0, 5.0]


def test_sessions_and_machines_are_recorded_as_workers_come_and_go(study: StudyState) -> None:
    def present(name: str) -> Present:
        return Present("cpu", 4, MACHINE)

    study.recorder.see({"a", "b"}, NOW, present)
    study.commit()
    study.commit()
    study.recorder.see({"b"}, NOW + 5, present, lambda name: Leaving.QUARANTINED)
    study.recorder.see({"a", "b"}, NOW + 6, present)
    study.close()
    found = records(study).sessions()
    assert found["worker"] == ["a", "b", "a"]
    assert found["since"] == [NOW, NOW, NOW + 6]
    assert found["until"] == [NOW + 5, NOW, NOW + 6], "closed by the clock, which stands still here"
    assert found["reason"] == ["quarantined", "study ended", "study ended"]
    assert (found["compute_class"], found["host"], found["slots"]) == (["cpu"] * 3, ["node1"] * 3, [4] * 3)
    machines = records(study).machines()
    assert machines == {
        "host": ["node1"],
        "gpus": [[{"name": "Größte GPU", "memory": 2**34}]],
        "cores": [8],
        "memory": [2**35],
        "versions": [{"shadho_celery": "1", "python": "3.11.2"}],
    }


def test_an_attempt_costs_the_price_of_its_slots_for_its_time(study: StudyState) -> None:
    prices = {"dear": 7.2, "cheap": 0.0, "unknown": None}
    study.recorder.see({*prices}, NOW, lambda name: Present(name, 4, MACHINE, prices[name]))
    for number, worker in enumerate((*prices, "gone", "dear")):
        study.send(study.add("all", {"x": 0.5}, seed=1, slots=2), worker)
        study.tell(Started(number=number, attempt=1, host="node1", at=NOW + 10, worker=worker, slot=number))
    assert study.recorder.spending(NOW + 20) == pytest.approx(2 * 2 * 7.2 * 10 / 3600), "two trials of two slots run"
    study.tell(replace(result(0, 1, worker="dear"), at=NOW + 110))
    study.tell(replace(result(1, 1, worker="cheap"), at=NOW + 110))
    study.tell(Lost(number=4, attempt=1, reason="silent", claimed=True))
    study.commit()
    found = records(study)
    assert found.attempts()["price"] == [14.4, 0.0, None, None, 14.4]
    assert found.sessions()["price"] == [prices[name] for name in sorted(prices)]
    assert study.recorder.spent == pytest.approx({"dear": 0.4, "cheap": 0.0}), (
        "the clock stands before the lost one's start"
    )
    if isinstance(study.store, SqlStore):
        key = study.record.key
        assert study.store.spent(key) == pytest.approx({"dear": 0.4, "cheap": 0.0})
        assert study.store.spent(key, until=NOW + 100) == {}
        study.send(study.add("all", {"x": 0.5}, seed=1, slots=2), "dear")
        # The worker has left since it has claimed the attempt.
        study.recorder.see({"cheap"}, NOW + 110, lambda name: Present(name, 4, MACHINE, prices[name]))
        study.tell(Started(number=5, attempt=1, host="node1", at=NOW + 100, worker="dear", slot=5))
        study.close()
        with_past = open_study(study.store, {}, module="m", name="s", resume=True, clock=ManualClock(NOW + 200))
        assert with_past.recorder.spending(NOW + 200) == pytest.approx(0.8), "one of the earlier run still runs"
        with_past.tell(replace(result(5, 1, worker="dear"), at=NOW + 300))
        assert with_past.recorder.spending(NOW + 400) == pytest.approx(1.2)
        with_past.close()
        assert study.store.spent(key) == pytest.approx({"dear": 1.2, "cheap": 0.0})


def test_attempts_that_a_slot_has_claimed_at_once_and_runs_in_turn_cost_its_time_once(study: StudyState) -> None:
    """So do attempts that it gives back unrun, and its next claim."""
    study.recorder.see({"w"}, NOW, lambda name: Present("gpu", 1, MACHINE, 3600.0))
    for number in range(4):
        study.send(study.add("all", {"x": 0.5}, seed=1), "gpu")
        study.tell(Started(number=number, attempt=1, host="node1", at=NOW - 30, worker="w", slot=0))
    assert study.recorder.spending(NOW) == pytest.approx(30.0)
    study.tell(replace(result(0, 1, worker="w"), at=NOW - 20))
    study.tell(replace(result(1, 1, worker="w"), at=NOW - 10))
    study.tell(Lost(number=2, attempt=1, reason="given back", claimed=False))
    assert study.recorder.spending(NOW + 5) == pytest.approx(35.0), "the last one runs"
    study.tell(replace(result(3, 1, worker="w"), at=NOW + 10))
    study.send(study.add("all", {"x": 0.5}, seed=1), "gpu")
    study.tell(Started(number=4, attempt=1, host="node1", at=NOW + 20, worker="w", slot=0))
    assert study.recorder.spending(NOW + 25) == pytest.approx(45.0)
    study.commit()
    assert study.recorder.spent == pytest.approx({"gpu": 40.0})
    if isinstance(study.store, SqlStore):
        assert study.store.spent(study.record.key) == pytest.approx({"gpu": 40.0})


def test_a_class_that_joins_later_leaves_earlier_predictions_as_they_were(study: StudyState) -> None:
    for names in (["b"], ["c", "a"], ["a"]):
        attempt = study.send(study.add("all", {"x": 0.5}, seed=1), "b")
        study.recorder.note_placement(attempt, {name: Placed(float(ord(name)), 0.0, None) for name in names})
        study.commit()
    assert [[*found] for found in records(study).attempts()["placed"]] == [["b"], ["c", "a"], ["a"]]
    assert [found["a"].seconds for found in records(study).attempts()["placed"][1:]] == [97.0, 97.0]


# What databases add


def begun(store: SqlStore) -> StudyState:
    return open_study(store, {}, module="m", name="s", clock=ManualClock(NOW))


def changed(reader: SqlStore, key: str, since: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the numbers of the trials, and of trial and attempt, that were written after a change number."""
    trials = [number for block in reader.rows_of_trials(key, ["number"], since) for (number,) in block]
    attempts = [tuple(row) for block in reader.rows_of_attempts(key, ["number", "attempt"], since) for row in block]
    return sorted(trials), sorted(attempts)


def test_a_reader_learns_which_rows_are_new_since_a_change(url: str) -> None:
    with closing(SqlStore(url)) as store, closing(SqlStore(url, read_only=True)) as reader:
        study = begun(store)
        key = study.record.key
        assert (reader.change(key), changed(reader, key)) == (0, ([], []))
        for _ in range(3):
            study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
        study.commit()
        second = reader.change(key)
        assert changed(reader, key) == ([0, 1, 2], [(0, 1), (1, 1), (2, 1)])
        study.commit()
        assert (reader.change(key), changed(reader, key, second)) == (second, ([], [])), "nothing was written"
        running = reader.versions(NOW)
        assert running[key][0] == second
        assert running[key][2], "it may be running"
        study.tell(Lost(number=1, attempt=1, reason="silent", claimed=False))
        study.send(study.trial(1), "cpu")
        study.commit()
        third = reader.change(key)
        assert third > second
        assert changed(reader, key, second) == ([1], [(1, 1), (1, 2)])
        assert changed(reader, key)[0] == [0, 1, 2], "0 is the beginning"
        study.close()
        ended = reader.versions(NOW)
        assert ended[key] == (third, None, False)
        again = open_study(store, {}, module="m", name="s", resume=True)
        again.tell(result(0, 1))
        again.commit()
        assert reader.change(key) > third, "a later run counts on"
        assert changed(reader, key, third)[0] == [0]


def test_unchecked_rows_are_read_in_pages_as_the_driver_has_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "LONG_PAGE", 4)
    with closing(SqlStore(url)) as store:
        study = begun(store)
        for number in range(9):
            study.send(study.add("all", {"x": number}, seed=1), "cpu")
        study.commit()
        blocks = [*store.rows_of_trials(study.record.key, ["number", "loss", "state", "params"])]
        assert [len(block) for block in blocks] == [4, 4, 1]
        rows = [row for block in blocks for row in block]
        assert [row[0] for row in rows] == [*range(9)]
        texts = [str(text, "utf-8") if isinstance(text, bytes) else text for text in rows[8]]
        assert texts == [8, None, "QUEUED", '{"x": 8}']
        names = ["number", "attempt", "compute_class", "placed"]
        attempts = [row for block in store.rows_of_attempts(study.record.key, names) for row in block]
        assert [row[:2] for row in attempts] == [(number, 1) for number in range(9)]


@pytest.mark.slow
def test_the_changes_since_a_number_are_found_by_an_index(tmp_path: Path) -> None:
    with closing(SqlStore(f"sqlite:///{tmp_path}/s.db")), closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        for table, columns in (("trials", "number"), ("attempts", "number, attempt")):
            query = f"SELECT {columns}, host FROM {table} WHERE study = 'k' AND change > 5"
            plan = " ".join(str(step) for step in connection.execute(f"EXPLAIN QUERY PLAN {query}"))
            assert f"{table}_by_change" in plan


def test_sessions_that_a_killed_scheduler_left_open_end_with_its_last_write(url: str) -> None:
    with closing(SqlStore(url)) as store:
        study = begun(store)
        study.recorder.see({"a"}, NOW, lambda name: Present("cpu", 1, MACHINE))
        study.commit()
        later = NOW + 10 * LOCK_SECONDS
        with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
            connection.execute(sa.text("UPDATE studies SET holder = 'elsewhere 4711 123'"))
        store.lock(study.record.key, holder_name(), later)
        [session] = store.sessions(study.record.key)
    assert (session.until, session.reason) == (NOW, Leaving.ENDED)


def test_a_deleted_study_leaves_no_rows_behind(url: str) -> None:
    with closing(SqlStore(url)) as store:
        study = begun(store)
        study.recorder.see({"a"}, NOW, lambda name: Present("cpu", 1, MACHINE))
        study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
        study.close()
        store.delete(study.record.key, store.lock(study.record.key, holder_name(), NOW))
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            for table in ("attempts", "sessions", "machines"):
                assert connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar() == 0


DAMAGE = {
    "attempts": "UPDATE attempts SET ended_at = 1e300 WHERE number = 1",
    "sessions": "UPDATE sessions SET reason = 'eaten' WHERE worker = 'b'",
    "machines": "UPDATE machines SET gpus = '{\"name\": 1}' WHERE host = 'node1'",
}
OF_SQLITE = {
    "a text for bytes": "UPDATE attempts SET placed = 'abc' WHERE number = 1",
    "a text for a number": "UPDATE attempts SET slot = 'two' WHERE number = 1",
    "bytes for a text": "UPDATE attempts SET host = X'00FF' WHERE number = 1",
    "bytes for a name": "UPDATE sessions SET host = X'00FF' WHERE worker = 'b'",
    "no JSON": "UPDATE machines SET versions = '{' WHERE host = 'node1'",
    "an unknown end": "UPDATE attempts SET \"end\" = 'eaten' WHERE number = 1",
}


@pytest.mark.parametrize(
    ("kind", "statement"),
    [*(("both", each) for each in DAMAGE.values()), *(("file", each) for each in OF_SQLITE.values())],
    ids=[*DAMAGE, *OF_SQLITE],
)
def test_a_damaged_row_is_named_in_one_line_until_it_is_deleted(url: str, kind: str, statement: str) -> None:
    if kind == "file" and not url.startswith("sqlite"):
        pytest.skip("PostgreSQL does not store such values")
    with closing(SqlStore(url)) as store:
        study = begun(store)
        study.recorder.see({"a", "b"}, NOW, lambda name: Present("cpu", 1, replace(MACHINE, host=f"node{name == 'b'}")))
        for _ in range(3):
            study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
        study.close()
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE machines SET host = 'node1' WHERE host = 'nodeTrue'"))
        connection.exec_driver_sql(statement.replace("%", "%%"))
    records, table = load_study(url, "s").records, statement.split()[1]
    which = {"attempts": "number 1, attempt 1", "sessions": "worker 'b'", "machines": "host 'node1'"}[table]
    with pytest.raises(StoreError) as caught:
        getattr(records, table)()
    assert "\n" not in str(caught.value)
    for words in (f"table {table} that cannot be read", which, "or delete the row with"):
        assert words in str(caught.value)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DELETE FROM {table} WHERE {statement.split(' WHERE ')[1]}")
    columns = [records.attempts(), records.sessions(), records.machines()]
    assert sum(len(each["host"]) for each in columns) == 3 + 2 + 2 - 1
    with closing(SqlStore(url)) as store:
        study = open_study(store, {}, module="m", name="s", resume=True)
        assert len(study) == 3
        study.close()


def test_bytes_that_no_version_writes_as_a_prediction_are_no_prediction(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    with closing(SqlStore(url)) as store:
        study = begun(store)
        study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
        study.close()
        with closing(sqlite3.connect(tmp_path / "s.db")) as connection, connection:
            connection.execute("UPDATE attempts SET placed = X'0102'")
        assert load_study(url, "s").records.attempts()["placed"] == [{}]


def test_an_attempt_takes_at_most_250_bytes_and_12_for_each_class(tmp_path: Path) -> None:
    path, classes, count = tmp_path / "s.db", [f"class{place}" for place in range(5)], 1000
    worker = "gpu_large@node-0123.cluster.local.123456.ab12"

    def size() -> int:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            [pages], [free], [page] = (
                connection.execute(f"PRAGMA {name}").fetchone()
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * page)

    with closing(SqlStore(f"sqlite:///{path}")) as store:
        study = begun(store)
        key, fence, before = study.record.key, study.fence, size()
        for start in range(0, count, 4):
            places = range(start, start + 4)
            placed = b"\1" * (12 * len(classes))
            each = [
                AttemptRecord(
                    number=1_000_000 + n,
                    attempt=1,
                    compute_class="gpu_large",
                    queued_at=NOW + n / 7,
                    copy=False,
                    placed=placed,
                )
                for n in places
            ]
            store.write(key, fence, NOW, Turn(attempted=each))
            claimed = {"host": "node-0123.cluster.local", "worker": worker, "slot": 3}
            each = [AttemptRecord(number=1_000_000 + n, attempt=1, started_at=NOW + n / 7, **claimed) for n in places]
            store.write(key, fence, NOW, Turn(attempted=each))
            each = [
                AttemptRecord(number=1_000_000 + n, attempt=1, ended_at=NOW + n / 3, end="complete") for n in places
            ]  # type: ignore[arg-type]
            store.write(key, fence, NOW, Turn(attempted=each))
        taken = (size() - before) / count
        print(taken - 12 * len(classes))
    assert taken <= 250 + 12 * len(classes)
