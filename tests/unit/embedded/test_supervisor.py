"""A log of the embedded fleet never takes more than twice its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadho_celery.embedded import supervisor
from shadho_celery.embedded.embedded import open_log


def test_a_long_log_is_cut_while_a_process_appends_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MAX_LOG", 100)
    log, before = tmp_path / "worker-cpu.log", tmp_path / "worker-cpu.log.1"
    with open_log(log) as output:
        for round_ in b"ab":
            output.write(bytes([round_]) * 100)
            output.flush()
            assert not supervisor.cut(log)
            output.write(b"the last line\n")
            output.flush()
            assert supervisor.cut(log)
            assert log.read_bytes() == b""
            assert before.read_bytes() == bytes([round_]) * 86 + b"the last line\n"
        output.write(b"the next line\n")
    assert log.read_bytes() == b"the next line\n"
    assert before.stat().st_mode & 0o777 == 0o600
