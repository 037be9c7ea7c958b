"""Rows that a stranger has written end in an error."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shadho_celery.errors import StoreError
from shadho_celery.store import sql
from shadho_celery.store.rows import LONGEST
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study


@pytest.mark.parametrize("kind", ["machines", "actions"])
def test_a_key_that_is_too_long_is_named_in_place_of_the_same_page_without_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "PAGE", 2)
    with closing(SqlStore(f"sqlite:///{tmp_path}/s.db")) as store:
        study = open_study(store, {}, module="m", name="s", seed=0)
        rows = {
            "machines": ("host, gpus, cores, memory, versions", "'[]', 1, 1, '{}'"),
            "actions": ("id, action, arguments, by, is_done, answer, at", "'stop', '{}', 'me', 1, '', 1.0"),
        }
        names, values = rows[kind]
        with closing(sqlite3.connect(tmp_path / "s.db")) as raw, raw:
            for key in ("a", "b", "z" * (LONGEST + 1)):
                raw.execute(f"INSERT INTO {kind} (study, {names}) VALUES (?, ?, {values})", [study.record.key, key])
        with pytest.raises(StoreError, match=f"a row in its table {kind} that cannot be read"):
            getattr(store, kind)(study.record.key)
