"""A worker knows which code and which folder of checkpoints it has."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shadho_celery.core.code import CodeVersion, digest_of
from shadho_celery.core.files import STORAGE_TOKEN
from shadho_celery.node import code
from shadho_celery.node.code import CodeGate, storage_id


def version(folder: Path, text: str) -> CodeVersion:
    """Write the study with this text; return the version that a process would find."""
    (folder / "my_study.py").write_text(text)
    return CodeVersion(root=str(folder), files={"my_study.py": digest_of(text.encode())}).with_space({})


def gate(folder: Path) -> CodeGate:
    return CodeGate(["my_study"], folder, None)


def trials_of(digest: str) -> Any:
    return SimpleNamespace(study="0123456789abcdef", module="my_study", code=digest, is_shipped=False)


def test_trials_for_another_version_cannot_run_here(tmp_path: Path) -> None:
    codes, ours = gate(tmp_path), version(tmp_path, "a")
    assert codes.lacks(trials_of("0123456789ab")) == "", "before the import it is not known"
    codes.follow([{}, {"my_study": ours}])
    assert codes.lacks(trials_of(ours.digest)) == ""
    assert ours.digest in codes.lacks(trials_of("0123456789ab"))


def test_after_an_edit_nobody_knows_what_the_next_process_finds(tmp_path: Path) -> None:
    codes, old = gate(tmp_path), version(tmp_path, "a")
    slots = [{"my_study": old}, {"my_study": old}]
    codes.follow(slots)
    new = version(tmp_path, "b")
    codes.follow(slots)
    assert (codes.known, codes.lacks(trials_of(new.digest))) == ({}, "")
    codes.follow([slots[0], {"my_study": new}])
    assert codes.known == {"my_study": new}
    codes.follow([slots[0], {"my_study": new}])


def test_an_import_that_fails_is_logged_once_and_serves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes, broken = gate(tmp_path), version(tmp_path, "a").with_problem("No module named 'torch'")
    with caplog.at_level(logging.WARNING):
        codes.follow([{"my_study": broken}, {"my_study": CodeVersion(**_facts(broken))}])
    assert [record.getMessage().count("No module named 'torch'") for record in caplog.records] == [1]
    assert codes.lacks(trials_of("0123456789ab")) == "No module named 'torch'"


def _facts(code: CodeVersion) -> dict[str, object]:
    return {name: getattr(code, name) for name in code.__struct_fields__}


#: waits for a file, so that both begin at once, several times
RACER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from shadho_celery.node.code import storage_id
for folder in map(Path, sys.argv[1:]):
    print("ready", flush=True)
    while not folder.with_suffix(".go").exists():
        pass
    print(storage_id(folder), flush=True)
"""


def test_the_id_of_a_folder_stays_and_another_folder_has_another(tmp_path: Path) -> None:
    here, there = tmp_path / "a" / ".shadho", tmp_path / "b" / ".shadho"
    first = storage_id(here)
    assert first
    assert storage_id(here) == first != storage_id(there)
    assert [path.name for path in here.iterdir()] == [STORAGE_TOKEN]


def test_a_folder_has_the_same_id_by_another_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    assert storage_id(tmp_path / "link") == storage_id(tmp_path / "real") != ""


def test_processes_that_begin_at_once_agree(tmp_path: Path) -> None:
    folders = [tmp_path / str(attempt) for attempt in range(3)]
    words = [sys.executable, "-c", RACER, *map(str, folders)]
    racers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for folder in folders:
        assert [str(racer.stdout and racer.stdout.readline()) for racer in racers] == ["ready\n"] * 2
        folder.with_suffix(".go").touch()
        said = {str(racer.stdout and racer.stdout.readline()).strip() for racer in racers}
        assert said == {storage_id(folder)}
    for racer in racers:
        assert racer.communicate(timeout=30)[0] == ""


def test_of_two_that_find_no_token_the_second_takes_that_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = storage_id(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert storage_id(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [STORAGE_TOKEN]


def test_a_copy_of_the_folder_is_another_storage(tmp_path: Path) -> None:
    """Its token came with it from another disk."""
    first = storage_id(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert "" != storage_id(tmp_path / "b") != first


def test_a_folder_that_cannot_be_made_or_written_is_of_no_known_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert storage_id(tmp_path / "file" / "checkpoints") == ""

    def refuse(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(code.os, "link", refuse)
    assert storage_id(tmp_path / "new") == ""
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("content", ["", "x" * 32, "0" * 31, "0" * 33, "0" * 32 + "\n"])
def test_what_is_no_token_is_of_no_known_storage(tmp_path: Path, content: str) -> None:
    (tmp_path / STORAGE_TOKEN).write_text(content)
    assert storage_id(tmp_path) == ""


def test_a_pipe_or_folder_in_place_of_the_token_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / STORAGE_TOKEN)
    assert storage_id(tmp_path) == ""
    (tmp_path / "other" / STORAGE_TOKEN).mkdir(parents=True)
    assert storage_id(tmp_path / "other") == ""
