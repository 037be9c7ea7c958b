"""A worker knows what its newest process has imported, until a file is edited."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shadho_celery.core.code import CodeVersion, digest_of
from shadho_celery.node.code import Codes


def version(folder: Path, text: str) -> CodeVersion:
    """Write the study with this text; return the version that a process would find."""
    (folder / "my_study.py").write_text(text)
    return CodeVersion(root=str(folder), files={"my_study.py": digest_of(text.encode())}).with_space({})


def test_trials_for_another_version_cannot_run_here(tmp_path: Path) -> None:
    codes, ours = Codes(), version(tmp_path, "a")
    assert codes.lacks("my_study", "0123456789ab") == "", "before the import it is not known"
    codes.follow([{}, {"my_study": ours}])
    assert codes.lacks("my_study", ours.digest) == ""
    assert ours.digest in codes.lacks("my_study", "0123456789ab")


def test_after_an_edit_nobody_knows_what_the_next_process_finds(tmp_path: Path) -> None:
    codes, old = Codes(), version(tmp_path, "a")
    slots = [{"my_study": old}, {"my_study": old}]
    codes.follow(slots)
    new = version(tmp_path, "b")
    codes.follow(slots)
    assert (codes.known, codes.lacks("my_study", new.digest)) == ({}, "")
    codes.follow([slots[0], {"my_study": new}])
    assert codes.known == {"my_study": new}
    codes.follow([slots[0], {"my_study": new}])


def test_an_import_that_fails_is_logged_once_and_serves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes, broken = Codes(), version(tmp_path, "a").with_problem("No module named 'torch'")
    with caplog.at_level(logging.WARNING):
        codes.follow([{"my_study": broken}, {"my_study": CodeVersion(**_facts(broken))}])
    assert [record.getMessage().count("No module named 'torch'") for record in caplog.records] == [1]
    assert codes.lacks("my_study", "0123456789ab") == "No module named 'torch'"


def _facts(code: CodeVersion) -> dict[str, object]:
    return {name: getattr(code, name) for name in code.__struct_fields__}
