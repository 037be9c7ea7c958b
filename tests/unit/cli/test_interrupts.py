"""How a command's process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: a program whose modules open files in a folder, and that fails with a code
PROGRAM = """
import atexit, sys, threading
from shadho_celery.cli.interrupts import ending_quickly
from shadho_celery.core.system import without_collections

with ending_quickly():
    with without_collections():
        early = open("early.txt", "w")
    late = open("late.bin", "wb")
    early.write("of a library")
    late.write(b"of the study")
    atexit.register(print, "at exit")
    threading.Timer(0.1, print, ["of a thread"]).start()
    print("of the command")
    sys.exit({code})
"""


def test_what_a_command_has_written_is_complete_when_it_ends(tmp_path: Path) -> None:
    """Also in files that were opened before the objects of its imports were left out of collections."""
    for code, shown in (("3", 3), ("None", 0), ("'a reason'", 1)):
        words = [sys.executable, "-c", PROGRAM.format(code=code)]
        ended = subprocess.run(words, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (shown, "a reason\n" if shown == 1 else "")
        assert ended.stdout == "of the command\nof a thread\nat exit\n"
        assert (tmp_path / "early.txt").read_text() == "of a library"
        assert (tmp_path / "late.bin").read_text() == "of the study"
