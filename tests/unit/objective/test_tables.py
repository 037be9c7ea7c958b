"""The tables beside the code name every attribute of a context and every key of STUDY, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from services.documents import text_of

from shadho_celery.core.settings import StudySettings
from shadho_celery.objective.context import CONTEXT_NAMES, LocalContext

TEXT = text_of("objective")


def names_in(heading: str) -> list[str]:
    """Return the names in the first column of the table with this heading."""
    _, _, after = TEXT.partition(f"| {heading} | meaning |\n| --- | --- |\n")
    rows = after.partition("\n\n")[0].splitlines()
    return [name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])]


def test_every_attribute_of_a_context_is_explained_once() -> None:
    assert sorted(names_in("`context.`")) == sorted(CONTEXT_NAMES)


def test_the_example_of_a_checkpoint_writes_its_file(tmp_path: Path) -> None:
    [example] = re.findall(r"`(\(context\.checkpoint_dir[^`]*)`", TEXT)
    context = LocalContext(checkpoints=tmp_path / "new")
    eval(example, {"context": context, "text": "{}"})
    assert (context.checkpoint_dir / "model.json").read_text() == "{}"
    assert isinstance(context.checkpoint_dir, Path)
    assert "| `checkpoint_dir` | `pathlib.Path` of " in TEXT


def test_every_key_of_a_study_is_explained_once() -> None:
    assert sorted(names_in("key")) == sorted(StudySettings.__struct_fields__)


def test_dir_of_a_context_shows_what_is_documented() -> None:
    context = LocalContext(study="mine")
    assert dir(context) == sorted(names_in("`context.`"))
    assert all(hasattr(context, name) for name in dir(context))
    assert context.study == "mine"
