"""The example of a checkpoint in the document works, and a context shows its members."""

from __future__ import annotations

import re
from pathlib import Path

from services.documents import text_of

from shadho_celery.objective.context import CONTEXT_NAMES, LocalContext

TEXT = text_of("objective")


def test_the_example_of_a_checkpoint_writes_its_file(tmp_path: Path) -> None:
    [example] = re.findall(r"`(\(context\.checkpoint_dir[^`]*)`", TEXT)
    context = LocalContext(checkpoints=tmp_path / "new")
    eval(example, {"context": context, "text": "{}"})
    assert (context.checkpoint_dir / "model.json").read_text() == "{}"
    assert isinstance(context.checkpoint_dir, Path)


def test_dir_of_a_context_shows_what_an_objective_may_use() -> None:
    context = LocalContext(study="mine")
    assert dir(context) == sorted(CONTEXT_NAMES)
    assert all(hasattr(context, name) for name in dir(context))
    assert context.study == "mine"
