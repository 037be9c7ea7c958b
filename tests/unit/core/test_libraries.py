"""A file of the user's that has the name of a library is found, and nothing that is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shadho_celery.core import libraries


@pytest.mark.parametrize(("name", "library"), [("queue", "Python's own module queue"), ("numpy", f"({np.__file__})")])
def test_a_module_of_python_and_an_installed_one_are_libraries(name: str, library: str) -> None:
    assert library in str(libraries.library_named(name))


@pytest.mark.parametrize("name", ["my_study", "test", "tasks"])
def test_other_names_are_free(name: str) -> None:
    assert libraries.library_named(name) is None


def test_what_is_installed_hides_nothing() -> None:
    assert all(libraries.is_installed(str(module.__file__)) for module in (json, np, pytest))
    assert libraries.failed_import(ImportError()) is None


def test_the_file_that_hides_a_library_is_named_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("queue")
    module.__file__ = str(tmp_path / "queue.py")
    monkeypatch.setitem(sys.modules, "queue", module)
    told = f"{tmp_path / 'queue.py'} has the name of Python's own module queue"
    assert str(libraries.failed_import(ImportError())).startswith(told)
    assert libraries.failed_import(ValueError()) is None


def test_a_module_whose_import_fails_is_found_by_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turtledemo_of_ours.py").write_text("import queue_of_ours\n")
    (tmp_path / "queue_of_ours.py").write_text("from json import nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "library_named", lambda name: "ours" if name == "queue_of_ours" else None)
    with pytest.raises(ImportError) as failed:
        __import__("turtledemo_of_ours")
    assert libraries.is_import(failed.value)
    assert str(tmp_path / "queue_of_ours.py") in str(libraries.failed_import(failed.value))


def test_an_error_of_code_that_was_imported_long_ago_is_of_no_import() -> None:
    with pytest.raises(AttributeError) as failed:
        np.array([1]).nothing  # noqa: B018
    assert not libraries.is_import(failed.value)
