"""Which errors of a database are temporary."""

from __future__ import annotations

import sqlite3

import pytest
import sqlalchemy as sa

from shadho_celery.store.engine import is_outage, remedy


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("database is locked", True),
        ("database table is locked", True),
        ("locking protocol", True),
        ("database disk image is malformed", False),
    ],
)
def test_sqlite_passes_on_while_other_processes_use_the_file(said: str, passes: bool) -> None:
    error = sa.exc.OperationalError("SELECT 1", {}, sqlite3.OperationalError(said))
    assert is_outage(error) is passes
    assert "URL" not in remedy(said)
