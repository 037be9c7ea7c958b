"""The documents, the commands in them, and how a test runs one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from acceptance.commands import ROOT, Desk
from services import documents

#: all of its commands are run, by tests/acceptance/test_operate.py
OPERATE = documents.DOCUMENTS["operate"]
DOCUMENTS = [path for path in documents.DOCUMENTS.values() if path != OPERATE]
#: the other pages of the site, whose commands and blocks of code are run by tests/acceptance/test_site.py
SITE = [path for path in sorted((ROOT / ".docs").rglob("*.md")) if path not in documents.DOCUMENTS.values()]
#: documents beside the code, which have a few lines and a link to the site
SHORT = [ROOT / "deploy" / "README.md", *sorted(ROOT.glob("shadho_celery/*/README.md")), ROOT / "tests" / "README.md"]
TEXTS = {
    path: path.read_text(encoding="utf-8")
    for path in [*DOCUMENTS, OPERATE, *SITE, *SHORT, *sorted((ROOT / ".readme").glob("*.md"))]
}


def blocks(path: Path, language: str) -> list[str]:
    """Return a document's blocks of code in a language."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", TEXTS[path], re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands(path: Path) -> list[str]:
    """Return a document's commands, each in one line."""
    return [line for text in blocks(path, "bash") for line in text.replace(" \\\n ", "").splitlines() if line.strip()]


COMMANDS = [line for path in DOCUMENTS for line in commands(path)]
PYTHON = blocks(ROOT / "README.md", "python")
TRAINING, RANKS = documents.DOCUMENTS["training"], documents.DOCUMENTS["ranks"]


def last_part(command: str) -> str:
    """Return a command without its install: that needs a network, and CI begins with it."""
    return command.rsplit(" && ", maxsplit=1)[-1]


def shell(desk: Desk, command: str, seconds: float = 120.0, **environment: str) -> str:
    """Run a command as typed; what it printed."""
    run = desk.start("bash", "-c", command, **environment).wait(seconds)
    assert run.code == 0, desk.said()
    return run.out


def in_tests(command: str, options: str) -> str:
    """Return a benchmark's command as it is run from another folder, with options that make it short."""
    return f"{command.replace('tests/', f'{ROOT}/tests/').replace('python', sys.executable, 1)} {options}"


#: runs a benchmark after statements that change its constants, also in the processes that it spawns
_SHORTENED = """
import importlib, sys

sys.path.insert(0, {folder!r})
script = importlib.import_module({name!r})
{changes}
if __name__ == "__main__":
    script.main()
"""


def shortened(desk: Desk, command: str, options: str, changes: str) -> str:
    """Return a benchmark's command as `in_tests`, after statements that change the constants of the module `script`."""
    path, given = re.fullmatch(r"python (\S+)\.py(.*)", command).groups()  # type: ignore[union-attr]
    folder, _, name = f"{ROOT}/{path}".rpartition("/")
    desk.write("shortened.py", _SHORTENED.format(folder=folder, name=name, changes=changes.strip()))
    return f"{sys.executable} shortened.py{given} {options}"


#: runs a task as ``python -m`` does, but forks its ranks, because each new process would import torch
_FORKED = """
import runpy, sys

sys.path.insert(0, {folder!r})
import torch._dynamo
from services.ranks import Forking
from shadho_celery.ranks import launch

launch.SPAWN = Forking()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def forked(desk: Desk, command: str, options: str) -> str:
    """Return the command ``python -m MODULE`` with `options`, and with ranks that are forked."""
    desk.write("forked.py", _FORKED.format(folder=f"{ROOT}/tests"))
    return f"{sys.executable} forked.py{command.removeprefix('python -m')} {options}"
