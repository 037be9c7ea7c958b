"""Schedulers that begin at the same moment find, or make, one and the same store."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shadho_celery.errors import StudyNotFound
from shadho_celery.store.sql import SqlStore

#: begin at once; the tables are made within milliseconds, so that few would seldom meet
MANY = 12


def begin_at_once(url: str) -> list[Exception]:
    ready = threading.Barrier(MANY)
    errors: list[Exception] = []

    def begin() -> None:
        ready.wait()
        try:
            store = SqlStore(url)
            try:
                with pytest.raises(StudyNotFound):
                    store.find("nothing yet")
            finally:
                store.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=begin) for _ in range(MANY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/new.db"


def test_many_may_begin_in_an_empty_database_at_once(url: str) -> None:
    assert begin_at_once(url) == []
    assert begin_at_once(url) == [], "and in one that has its tables"
