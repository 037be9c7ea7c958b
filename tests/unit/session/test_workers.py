"""Workers that are started before their study is read."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import hyperopt  # noqa: F401 -- it is imported
import pytest

from shadho_celery.session import workers
from shadho_celery.session.workers import start_early


def test_ctrl_c_waits_until_the_supervisor_can_end_what_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has its plan, it would leave the link to its socket."""
    made: list[dict[str, int]] = []

    def embedded(_: Path, workers: dict[str, int], *__: object, **___: object) -> None:
        signal.raise_signal(signal.SIGINT)
        made.append(workers)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "studied_early.py").touch()
    monkeypatch.setattr(workers, "Embedded", embedded)
    assert start_early("studied_early", {}, {"cpu": 1}) is None, "hyperopt is imported, so it would gain nothing"
    monkeypatch.delitem(sys.modules, "hyperopt")
    assert start_early("no_such_study", {}, {"cpu": 1}) is None
    assert made == []
    with pytest.raises(KeyboardInterrupt):
        start_early("studied_early", {}, {"cpu": 1})
    assert made == [{"cpu": 1}]
