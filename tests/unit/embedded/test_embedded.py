"""The path of embedded workers: they import what their scheduler imports."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

import pytest

from shadho_celery.embedded.embedded import python_path


def test_workers_search_each_folder_that_this_python_does_not_search_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name, and in their order; a library's own folder only if PYTHONPATH names it."""
    installed = site.getsitepackages()[0]
    module, added = tmp_path / "opt" / "lib" / "site-packages", tmp_path / "dist-packages"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(module), ""]))
    library = [sysconfig.get_path("stdlib"), installed]
    monkeypatch.setattr(sys, "path", ["", str(module), *library, str(added), "relative", str(module)])
    here = Path.cwd()
    assert python_path().split(os.pathsep) == [str(here), str(module), str(added), str(here / "relative")]
    monkeypatch.setenv("PYTHONPATH", installed)
    assert installed in python_path().split(os.pathsep)
