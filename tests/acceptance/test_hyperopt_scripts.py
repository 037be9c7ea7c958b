"""Scripts written for hyperopt run with one import changed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import services

SCRIPTS = sorted((Path(__file__).parent / "hyperopt_scripts").glob("*.py"))

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_written_for_hyperopt_runs_with_one_import_changed(script: Path, tmp_path: Path) -> None:
    text, changed = re.subn(
        r"^from hyperopt import", "from shadho_celery import", script.read_text(), flags=re.MULTILINE
    )
    assert changed == 1
    (tmp_path / script.name).write_text(text)
    command = [sys.executable, script.name]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100 * services.PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "best" in done.stdout or "type" in done.stdout


def test_there_are_three_of_them() -> None:
    assert len(SCRIPTS) >= 3
