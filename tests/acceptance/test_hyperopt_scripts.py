"""Scripts written for hyperopt run with one import changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from acceptance.commands import Desk

SCRIPTS = sorted((Path(__file__).parent / "hyperopt_scripts").glob("*.py"))

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_written_for_hyperopt_runs_with_one_import_changed(script: Path, desk: Desk) -> None:
    text, changed = re.subn(
        r"^from hyperopt import", "from shadho_celery import", script.read_text(), flags=re.MULTILINE
    )
    assert changed == 1
    desk.write(script.name, text)
    done = desk.ran(script.name)
    assert done.code == 0, done.err
    assert "best" in done.out or "type" in done.out


def test_there_are_three_of_them() -> None:
    assert len(SCRIPTS) >= 3
