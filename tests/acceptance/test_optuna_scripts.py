"""Programs written for Optuna run with its import changed, which needs no further line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from acceptance.commands import Desk

SCRIPTS = sorted((Path(__file__).parent / "optuna_scripts").glob("*.py"))

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_program_written_for_optuna_runs_with_its_import_changed(script: Path, desk: Desk) -> None:
    if "import lightgbm" in script.read_text():
        # An environment of an earlier time may lack it.
        pytest.importorskip("lightgbm")
    text = re.sub(r"^import optuna$", "import shadho_celery.optuna as optuna", script.read_text(), flags=re.MULTILINE)
    text, _ = re.subn(r"^from optuna\.", "from shadho_celery.optuna.", text, flags=re.MULTILINE)
    desk.write(script.name, text)
    done = desk.ran(script.name)
    assert done.code == 0, done.err
    assert "best" in done.out


def test_there_are_more_than_eight_of_them() -> None:
    assert len(SCRIPTS) > 8
