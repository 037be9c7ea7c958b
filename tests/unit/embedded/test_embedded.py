"""The path of embedded workers, which import what their scheduler imports; and why servers did not start."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

import pytest

from shadho_celery.embedded.embedded import _last_words, python_path


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


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["# WARNING Memory overcommit must be enabled!", "* Ready to accept connections"], ""),
        (
            ["# Can't open the append-only file: Disk full", "# WARNING: The TCP backlog"],
            ": Can't open the append-only",
        ),
        ([], ""),
    ],
)
def test_redis_advice_is_no_reason_why_it_did_not_start(lines: list[str], words: str, tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    log.write_text("".join(f"12:C 01 Jan 2026 00:00:00.000 {line}\n" for line in lines))
    assert _last_words(log).startswith(words)
    assert bool(_last_words(log)) == bool(words)
