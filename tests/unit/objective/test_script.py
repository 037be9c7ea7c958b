"""Scripts get params, reports, stop flag and checkpoints from the files of their trial, and work alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shadho_celery as sh


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARAMS", "REPORTS", "STOP", "CHECKPOINT_DIR"):
        # Set first, so that the test's own value is removed at its end.
        monkeypatch.setenv(f"SHADHO_{name}", "")
        monkeypatch.delenv(f"SHADHO_{name}")


def test_in_a_trial_they_use_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PARAMS", "REPORTS", "STOP", "CHECKPOINT_DIR"):
        monkeypatch.setenv(f"SHADHO_{name}", str(tmp_path / name))
    (tmp_path / "PARAMS").write_text('{"x": [1]}')
    assert sh.params() == {"x": [1]}
    sh.report(1, 0.5)
    sh.report(step=2, loss=float("nan"))
    lines = (tmp_path / "REPORTS").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1, "loss": 0.5}
    assert len(lines) == 2
    assert not sh.should_stop()
    (tmp_path / "STOP").touch()
    assert sh.should_stop()
    assert sh.checkpoint_dir() == tmp_path / "CHECKPOINT_DIR"


def test_alone_they_have_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert sh.params() == {}
    assert not sh.should_stop()
    sh.report(3, 0.25)
    assert json.loads(capsys.readouterr().out) == {"step": 3, "loss": 0.25}
    folder = sh.checkpoint_dir()
    assert folder.is_dir()
    assert sh.checkpoint_dir() == folder
    folder.rmdir()


def test_they_import_nothing_heavy() -> None:
    code = "import sys, shadho_celery as sh; sh.params(); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "msgspec", "hyperopt", "celery", "click"} & {*found}
