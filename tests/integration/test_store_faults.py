"""A store that fails says so in one line, keeps what it had, and the study goes on once it is fixed."""

from __future__ import annotations

import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import services
import sqlalchemy as sa
from acceptance.commands import Command, Desk, desk, until
from services.proxy import Proxy

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Outcome, Report, Result, Started, Trial, TrialState
from shadho_celery.errors import LockLost, StoreError, StoreOutage, StudyExists
from shadho_celery.store import engine
from shadho_celery.store.base import StudyRecord, Turn, holder_name
from shadho_celery.store.sql import LOCK_SECONDS, SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import LONGEST_PAUSE

NOW = 1_700_000_000.0

KEY = "k1"


@contextmanager
def opened(url: str) -> Iterator[tuple[SqlStore, int]]:
    """A store with a study, and the fence of this process's lock on it."""
    with closing(SqlStore(url)) as store:
        with suppress(StudyExists):
            store.create(StudyRecord(key=KEY, name="s", module="m", seed=0, space={}, created_at=NOW))
        fence = store.lock(KEY, holder_name(), NOW)
        yield store, fence
        with suppress(StoreError):  # what a scheduler that has failed cannot do either
            store.unlock(KEY, fence)


def trial(number: int, text: str = "") -> Trial:
    """A trial whose row holds `text`."""
    return Trial(number=number, subspace="all", params={"x": 0.5}, host=text)


def numbers(url: str) -> list[int]:
    with closing(SqlStore(url)) as store:
        return [each.number for each in store.trials(KEY)]


@contextmanager
def refusal(*words: str, outage: bool | None = None) -> Iterator[None]:
    """Inside, the store fails with one line that has all of `words`; a running study waits for an `outage`."""
    with pytest.raises(StoreError) as caught:
        yield
    assert outage is None or isinstance(caught.value, StoreOutage) == outage, caught.value
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shadho.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


# SQLite


def test_a_full_disk_costs_the_turn_that_it_had_no_room_for_and_nothing_else(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = engine._set_up_sqlite

    def small(connection: Any, record: Any) -> None:
        set_up(connection, record)
        connection.execute("PRAGMA max_page_count = 40")

    monkeypatch.setattr(engine, "_set_up_sqlite", small)
    with opened(url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(0, "x" * 4000)]))
        with refusal("full", "make room"):
            store.write(KEY, fence, NOW, Turn(new=[trial(number, "x" * 4000) for number in range(1, 60)]))
    assert numbers(url) == [0]
    monkeypatch.setattr(engine, "_set_up_sqlite", set_up)
    with opened(url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(number, "x" * 4000) for number in range(1, 60)]))
    assert numbers(url) == list(range(60))


def test_a_store_that_is_opened_read_only_is_one_line(url: str, path: Path) -> None:
    with opened(url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(0)]))
    with refusal("readonly", "writable"), opened(f"sqlite:///file:{path}?mode=ro&uri=true"):
        pass
    assert numbers(url) == [0]
    assert {each.name for each in path.parent.iterdir()} <= {path.name, f"{path.name}-wal", f"{path.name}-shm"}


def test_a_store_that_is_locked_for_long_is_an_outage_and_can_be_used_later(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LOCKED_SECONDS", 0.2)
    with opened(url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(0)]))
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            with refusal("locked", "another program", outage=True):
                store.write(KEY, fence, NOW, Turn(new=[trial(1)]))
        store.write(KEY, fence, NOW, Turn(new=[trial(1)]))
    assert numbers(url) == [0, 1]


@pytest.mark.parametrize(("content", "words"), [(None, "moved or deleted"), ("another file", "replaced")])
def test_a_store_that_was_moved_or_replaced_is_noticed_and_used_again_once_it_is_put_back(
    url: str, path: Path, content: str | None, words: str
) -> None:
    with opened(url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(0), trial(1)]))
        path.rename(path.with_name("moved.db"))
        if content is not None:
            path.write_text(content)
        with refusal(words, "put it back", "resume the study"):
            store.write(KEY, fence, NOW, Turn(new=[trial(2)]))
    assert (path.read_text() if path.exists() else None) == content
    path.with_name("moved.db").replace(path)
    assert numbers(url) == [0, 1]


def test_a_damaged_file_is_one_line(url: str, path: Path) -> None:
    with opened(url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(0, "x" * 4000) for _ in range(1)]))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with refusal("shadho.db"), opened(url):
        pass


# PostgreSQL


def cut(url: str) -> None:
    """Have the server close all connections to the database but the one that asks for it."""
    server = sa.create_engine(url, poolclass=sa.NullPool)
    text = "select pg_terminate_backend(pid) from pg_stat_activity where datname = :name and pid <> pg_backend_pid()"
    with server.connect() as connection:
        connection.execute(sa.text(text), {"name": server.url.database})


def once(call: Callable[[], None]) -> Callable[[], None]:
    """`call` the first time, nothing after that."""
    left = [call]
    return lambda: left.pop()() if left else None


def test_a_connection_that_is_cut_between_two_turns_or_in_the_middle_of_one_costs_nothing(postgres_url: str) -> None:
    with opened(postgres_url) as (store, fence):
        cut(postgres_url)
        store.write(KEY, fence, NOW, Turn(new=[trial(0)]))
        cut_once = once(lambda: cut(postgres_url))

        @sa.event.listens_for(store._engine, "before_cursor_execute")
        def _(_: Any, __: Any, statement: str, *___: Any) -> None:
            if statement.startswith("INSERT INTO trials"):
                cut_once()

        store.write(KEY, fence, NOW, Turn(new=[trial(1)], changed=[trial(0, "changed")]))
        assert [each.host for each in store.trials(KEY)] == ["changed", ""]


def test_a_turn_whose_commit_was_not_confirmed_is_told_again_and_counts_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(postgres_url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(0)]))
        commit = store._engine.dialect.do_commit

        def lose(connection: Any) -> None:
            commit(connection)
            monkeypatch.setattr(store._engine.dialect, "do_commit", commit)
            cut(postgres_url)
            connection.cursor().execute("select 1")

        monkeypatch.setattr(store._engine.dialect, "do_commit", lose)
        outcome = Outcome(state=TrialState.FAILED, error="it failed")
        ended = trial(0).evolve(state=outcome.state, outcome=outcome, finished_at=NOW)
        report = Report(number=0, attempt=1, step=1, loss=0.5, at=NOW)
        store.write(KEY, fence, NOW, Turn(new=[trial(1)], changed=[ended], reported=[report]))
        assert list(store.trials(KEY)) == [ended, trial(1)]
        assert store.reports(KEY) == [report]


def test_a_turn_that_is_told_again_is_still_refused_to_an_old_fence(postgres_url: str) -> None:
    with opened(postgres_url) as (store, fence):

        @once
        def replaced() -> None:
            cut(postgres_url)
            with closing(SqlStore(postgres_url)) as other:
                other.unlock(KEY, fence)
                other.lock(KEY, "elsewhere 1 1", NOW)

        @sa.event.listens_for(store._engine, "before_cursor_execute")
        def _(_: Any, __: Any, statement: str, *___: Any) -> None:
            if statement.startswith("INSERT INTO trials"):
                replaced()

        with pytest.raises(LockLost):
            store.write(KEY, fence, NOW, Turn(new=[trial(1)]))
    assert numbers(postgres_url) == []


#: one code of each kind of error that passes: two transactions have met, the server is short of something, another
#: session has a lock, a statement or transaction was ended, a standby answers, the user's rights are loaded anew
PASSING = ["40001", "40P01", "53000", "53100", "53200", "53300", "55P03", "57014", "57P01", "57P03"]
PASSING += ["25006", "25P03", "42501", "08006"]


def test_an_error_of_the_server_that_passes_is_an_outage_and_the_turn_is_written_later(postgres_url: str) -> None:
    """Its lock is renewed meanwhile: what cannot be written may be so for long. Other errors are no outage."""
    with opened(postgres_url) as (store, fence), store._engine.connect() as owner:

        def run(*statements: str) -> None:
            for statement in statements:
                owner.execute(sa.text(statement))
            owner.commit()

        def write_denied(code: str, number: int, *, outage: bool) -> None:
            body = f"begin raise exception 'denied' using errcode = '{code}'; end"
            run(
                f"create or replace function deny() returns trigger language plpgsql as $$ {body} $$",
                "create trigger deny before insert on trials for each row execute function deny()",
            )
            with refusal("denied", outage=outage):
                store.write(KEY, fence, NOW + number, Turn(new=[trial(number)]))
            run("drop trigger deny on trials")

        for number, code in enumerate(PASSING):
            write_denied(code, number, outage=True)
            expires = owner.execute(sa.text("select lock_expires from studies")).scalar_one()
            owner.commit()
            assert code.startswith(("08", "57P")) or expires == NOW + number + LOCK_SECONDS
            store.write(KEY, fence, NOW + number, Turn(new=[trial(number)]))
        for code in ("22003", "42P01", "XX000"):
            write_denied(code, len(PASSING), outage=False)
    assert numbers(postgres_url) == list(range(len(PASSING)))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bounds of calls to PostgreSQL are short."""
    for name in ("DATABASE_CONNECT_SECONDS", "STATEMENT_SECONDS", "READ_SECONDS", "LOCK_WAIT_SECONDS"):
        monkeypatch.setattr(engine, name, 0.4 if name == "LOCK_WAIT_SECONDS" else 0.6)
    monkeypatch.setattr(engine, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(engine, "IDLE_SECONDS", 1.0)
    monkeypatch.setitem(engine.POSTGRESQL, "connect_timeout", 2)


def written(store: SqlStore, fence: int, number: int) -> bool:
    """Write a trial; whether the server did it."""
    with suppress(StoreOutage):
        store.write(KEY, fence, NOW, Turn(new=[trial(number)]))
        return True
    return False


def test_a_server_that_stands_still_is_an_outage_wherever_it_stops(postgres_url: str, short: None) -> None:
    """At a statement, at the commit, and between two turns. Later a new connection serves.

    The server ends the transaction of a client that it does not hear: it would keep the study's row for itself.
    """
    parsed = sa.make_url(postgres_url)
    with Proxy(parsed.port or 5432) as proxy:
        url = parsed.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        with opened(url) as (store, fence):

            @sa.event.listens_for(store._engine, "before_cursor_execute")
            def _(_: Any, __: Any, statement: str, *___: Any) -> None:
                if statement.startswith(stops_at[-1]):
                    proxy.blackhole()

            @sa.event.listens_for(store._engine, "commit")
            def _(_: Any) -> None:
                if stops_at[-1] == "COMMIT":
                    proxy.blackhole()

            stops_at = ["nowhere"]
            for number, place in enumerate(("INSERT INTO trials", "COMMIT", "between")):
                stops_at.append(place)
                if place == "between":
                    proxy.blackhole()
                words = "timeout" if place == "between" else "has not answered"
                with refusal(words, outage=True):
                    store.write(KEY, fence, NOW, Turn(new=[trial(number)]))
                stops_at.append("nowhere")
                proxy.heal(half_open=True)
                until(partial(written, store, fence, number), 20, lambda: "the row stays locked")
            # This store is open. To open another one may take longer than the short bounds allow.
            assert [each.number for each in store.trials(KEY)] == [0, 1, 2]


def test_a_locked_table_is_an_outage_for_a_study_and_one_line_for_a_reader(postgres_url: str, short: None) -> None:
    with opened(postgres_url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(0)]))
        other = sa.create_engine(postgres_url, poolclass=sa.NullPool)
        with other.connect() as session:
            session.execute(sa.text("LOCK TABLE trials"))
            with refusal("lock timeout", "another session", outage=True):
                store.write(KEY, fence, NOW + 7, Turn(changed=[trial(0, "changed")]))
            found = session.execute(sa.text("select lock_expires from studies")).scalar_one()
            assert found == NOW + 7 + LOCK_SECONDS, "it is still ours"
            with refusal("lock timeout"), closing(SqlStore(postgres_url, read_only=True)) as reader:
                list(reader.trials(KEY))
        store.write(KEY, fence, NOW, Turn(changed=[trial(0, "changed")]))
        assert [each.host for each in store.trials(KEY)] == ["changed"]


def test_a_statement_that_takes_too_long_is_an_outage(postgres_url: str, short: None) -> None:
    with opened(postgres_url) as (store, fence):
        store.write(KEY, fence, NOW, Turn(new=[trial(0)]))
        with store._begin() as connection:
            body = "begin perform pg_sleep(60); return new; end"
            connection.exec_driver_sql(f"create function slow() returns trigger language plpgsql as $$ {body} $$")
            connection.exec_driver_sql(
                "create trigger slow before update on trials for each row execute function slow()"
            )
        with refusal("statement timeout", outage=True):
            store.write(KEY, fence, NOW, Turn(changed=[trial(0)]))


@pytest.fixture(scope="module")
def private_postgres() -> Iterator[services.PostgresServer]:
    with services.private(services.PostgresServer) as server:
        yield server


@pytest.fixture
def private_url(private_postgres: services.PostgresServer) -> Iterator[str]:
    """URL of an empty database of a server that may be killed and started again."""
    with services.postgres_database(private_postgres.url) as url:
        yield url
        if private_postgres.process is None:
            private_postgres.start()


def test_a_study_waits_for_its_server_with_growing_pauses_and_writes_each_turn_once(
    private_postgres: services.PostgresServer,
    private_url: str,
) -> None:
    clock = ManualClock(NOW)
    with closing(SqlStore(private_url)) as store:
        study = open_study(store, {}, name="s", seed=0, clock=clock)
        sent = study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
        assert study.commit()
        private_postgres.kill()
        study.tell(Started(number=0, attempt=1, host="h", at=NOW))
        study.send(study.add("all", {"x": 0.25}, seed=2), "cpu")
        pauses = []
        for _ in range(7):
            clock.sleep(pauses[-1] if pauses else 0.0)
            assert not study.commit()
            assert "server runs" in str(study.trouble)
            pauses.append(study._retry_at - clock.now())
        assert pauses == sorted(pauses)
        assert pauses[0] < pauses[-1] == LONGEST_PAUSE
        private_postgres.start()
        # Too early to try again.
        assert not study.commit()
        clock.sleep(LONGEST_PAUSE)
        assert study.commit()
        assert study.trouble is None
        outcome = Outcome(state=TrialState.COMPLETE, loss=0.5)
        study.tell(Result(number=0, attempt=sent.attempt, outcome=outcome, at=NOW))
        study.close()
        assert [(each.number, each.state) for each in store.trials(study.record.key)] == [
            (0, "COMPLETE"),
            (1, "QUEUED"),
        ]


def test_a_study_that_was_taken_over_during_an_outage_stops(
    private_postgres: services.PostgresServer, private_url: str
) -> None:
    clock = ManualClock(NOW)
    with closing(SqlStore(private_url)) as store:
        study = open_study(store, {}, name="s", seed=0, clock=clock)
        private_postgres.kill()
        study.add("all", {"x": 0.5}, seed=1)
        assert not study.commit()
        private_postgres.start()
        with closing(SqlStore(private_url)) as other:
            other.unlock(study.record.key, 1)
            other.lock(study.record.key, "elsewhere 1 1", NOW)
        clock.sleep(LONGEST_PAUSE)
        with pytest.raises(LockLost):
            study.commit()
        assert list(store.trials(study.record.key)) == []


# The command

#: The launch command on a store that has so many pages, and is locked for no longer than a second.
LAUNCH = """
import os
from shadho_celery.launch import main
from shadho_celery.store import engine

set_up = engine._set_up_sqlite

def small(connection, record):
    set_up(connection, record)
    connection.execute("PRAGMA max_page_count = " + os.environ.get("PAGES", "100000"))

engine._set_up_sqlite, engine.LOCKED_SECONDS = small, 1.0
main()
"""


@pytest.fixture(name="desk")
def _desk(no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        made.write("launch.py", LAUNCH)
        yield made


def launch(desk: Desk, *words: str, **environment: str) -> Command:
    return desk.start(sys.executable, "launch.py", "my_study", "--workers", "cpu=1", *words, **environment)


def ended_with_one_line(command: Command, *words: str) -> None:
    command.wait(60)
    assert command.code == 2, command.err
    assert command.out == ""
    assert "Traceback" not in command.err
    lines = [line for line in command.err.splitlines() if line.startswith("Error: ")]
    assert lines == command.err.splitlines()[-1:]
    for word in words:
        assert word in lines[0], lines


def resumed(desk: Desk, finished: set[int], trials: int) -> None:
    """The study is resumed to its end, in which every trial is counted once and none of `finished` is run again."""
    before = desk.runs("began")
    again = launch(desk, "--resume", "--trials", str(trials), "--json").wait(60)
    assert again.code == 0, desk.said()
    assert again.json()["trials"]["complete"] == again.json()["trials"]["total"] == trials
    assert desk.states()["COMPLETE"] == trials
    assert finished.isdisjoint(number for number, *_ in desk.runs("began")[len(before) :])


def finished(desk: Desk) -> set[int]:
    return {trial["number"] for trial in desk.trials() if trial["state"] == "COMPLETE"}


def test_a_study_whose_disk_is_full_ends_with_one_line_and_is_resumed(desk: Desk) -> None:
    desk.study(seconds=0.02)
    study = desk.folder / "my_study.py"
    study.write_text(
        study.read_text().replace('return params["x"]', 'return {"loss": params["x"], "text": "x" * 9000}')
    )
    ended_with_one_line(launch(desk, "--trials", "60", "--json", PAGES="60"), "full", "make room")
    before = finished(desk)
    assert before
    # Those that were under way are counted, too.
    resumed(desk, before, len(desk.trials()) + 5)


def test_a_study_whose_store_is_locked_for_long_waits_for_it(desk: Desk) -> None:
    desk.study(seconds=0.1)
    command = launch(desk, "--trials", "30", "--json")
    desk.await_runs(3, "ended")
    with closing(sqlite3.connect(desk.folder / "shadho.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        command.says("trying again")
    command.wait(60)
    assert command.code == 0, desk.said()
    assert command.json()["trials"]["complete"] == 30


def on_postgres(desk: Desk, url: str, *words: str) -> Command:
    command = [sys.executable, "-m", "shadho_celery.launch", "my_study", "--workers", "cpu=2", "--json"]
    return desk.start(*command, "--store", url, *words)


def stored(url: str) -> list[tuple[int, str]]:
    """Number and state of the trials on a server."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT number, state FROM trials ORDER BY number"))
        return [(number, state) for number, state in rows]


def test_a_server_that_restarts_during_a_study_costs_some_seconds_and_no_trial(
    desk: Desk, private_postgres: services.PostgresServer, private_url: str
) -> None:
    desk.study(seconds=0.05)
    command = on_postgres(desk, private_url, "--trials", "60")
    for finished_runs in (5, 20):
        desk.await_runs(finished_runs, "ended")
        private_postgres.restart()
    command.wait(90)
    assert command.code == 0, desk.said()
    assert "trying again" in command.err
    assert command.json()["trials"]["total"] == 60
    assert stored(private_url) == [(number, "COMPLETE") for number in range(60)]
    # Published after it was recorded, and once.
    assert sorted(number for number, *_ in desk.runs("began")) == list(range(60))


def test_a_signal_ends_the_wait_for_a_server_and_the_study_is_resumed(
    desk: Desk, private_postgres: services.PostgresServer, private_url: str
) -> None:
    desk.study(seconds=0.05)
    for sign, words in ((signal.SIGINT, []), (signal.SIGTERM, ["--resume"])):
        command = on_postgres(desk, private_url, "--trials", "1000", *words)
        desk.await_runs(len(desk.runs("ended")) + 5, "ended")
        private_postgres.kill()
        command.says("trying again")
        command.send(sign)
        ended_with_one_line(command, "server runs")
        private_postgres.start()
    trials = [state for _, state in stored(private_url)].count("COMPLETE") + 10
    again = on_postgres(desk, private_url, "--resume", "--trials", str(trials)).wait(60)
    assert again.code == 0, desk.said()
    assert again.json()["trials"]["complete"] == trials
    assert [number for number, _ in stored(private_url)] == list(range(len(stored(private_url))))
