"""The start of an embedded study: servers and workers start while the study file is imported."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from acceptance.commands import Desk, until

pytestmark = pytest.mark.timeout(180)

SUPERVISOR = "shadho_celery.embedded.supervisor"

#: the first lines of a study file that needs some time: it is imported once its servers run
WAITS = """
import time
from pathlib import Path

for _ in range(600):
    if [*Path(".shadho/embedded").glob("*/worker-*.log")]:
        break
    time.sleep(0.1)
else:
    raise SystemExit("no worker was started")
"""

#: A module that Python imports at its start: the scheduler waits for a file before it reads the study.
CUSTOM = """
import sys, time
from importlib.abc import MetaPathFinder
from pathlib import Path

class Wait(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        while name == "shadho_celery.cli.run" and not Path("go").exists():
            time.sleep(0.02)

sys.meta_path.insert(0, Wait())
"""


def all_gone(desk: Desk) -> None:
    desk.nothing_left()
    until(lambda: not (desk.folder / ".shadho").exists(), 10, lambda: str([*desk.folder.rglob(".shadho/**/*")]))


def test_workers_start_while_the_study_is_imported_and_get_the_variables_that_it_sets(desk: Desk) -> None:
    desk.study()
    path = desk.folder / "my_study.py"
    path.write_text(f'{WAITS}import os\nos.environ["SHADHO_HOST"] = "somewhere"\n{path.read_text()}')
    command = desk.launch("my_study", "--trials", "4", "--json").wait()
    assert command.code == 0, desk.said()
    assert command.json()["trials"]["complete"] == 4
    assert {trial["host"] for trial in desk.trials()} == {"somewhere"}
    study = desk.states_folder().name
    desk.nothing_left()
    assert desk.states_folder().name == study, "the state folder stays"
    again = desk.launch("my_study", "--resume", "--trials", "6", "--json").wait()
    assert again.json()["trials"]["complete"] == 6


@pytest.mark.parametrize("how", ["fails", "is killed", "is interrupted"])
def test_a_study_that_does_not_begin_leaves_nothing(desk: Desk, how: str) -> None:
    last = "1 / 0" if how == "fails" else "Path('waits').touch(); time.sleep(600)"
    desk.write("my_study.py", f"{WAITS}\ntime.sleep(2)\n{last}\n")
    command = desk.launch("my_study", "--trials", "4")
    if how != "fails":
        until((desk.folder / "waits").exists, 60, desk.said)
        assert desk.pids(SUPERVISOR)
        command.send(signal.SIGKILL if how == "is killed" else signal.SIGINT)
    code = command.wait().code
    assert code == {"fails": 2, "is killed": -9, "is interrupted": 130}[how], desk.said()
    if how == "fails":
        [line] = command.messages
        assert "ZeroDivisionError" in line
    all_gone(desk)


def test_a_new_study_that_is_refused_leaves_the_files_of_others_alone(desk: Desk) -> None:
    desk.study()
    assert desk.launch("my_study", "--trials", "2", "--study", "mine").wait().code == 0, desk.said()
    desk.nothing_left()
    files = sorted(desk.folder.rglob(".shadho/**/*"))
    assert files
    taken = desk.launch("my_study", "--trials", "2", "--study", "mine").wait()
    assert taken.code == 2
    assert "already" in taken.err
    desk.nothing_left()
    assert sorted(desk.folder.rglob(".shadho/**/*")) == files


@pytest.mark.parametrize(
    ("settings", "slots"), [({"classes": ["a", "b"]}, {"a": 1, "b": 1}), ({"cores": 1000}, {"cpu": 1})]
)
def test_a_study_gets_the_workers_that_it_needs(desk: Desk, settings: dict[str, object], slots: dict[str, int]) -> None:
    """Its settings cannot be read from its text, so that others were started for it."""
    # The workers start one after another.
    desk.study(seconds=1.0, settings=settings)
    path = desk.folder / "my_study.py"
    path.write_text(path.read_text().replace("STUDY = {", "STUDY = dict() | {"))
    command = desk.launch("my_study", "--trials", "4", "--json").wait()
    assert command.code == 0, desk.said()
    assert {name: each["slots"] for name, each in command.json()["classes"].items()} == slots
    assert [path.name for path in desk.states_folder().glob("worker-*.log")] == [f"worker-{name}.log" for name in slots]
    desk.nothing_left()


def test_a_study_that_an_editor_saves_after_its_workers_have_read_it_runs_as_it_was_saved(desk: Desk) -> None:
    desk.write("sitecustomize.py", CUSTOM)
    desk.study(body="note('old', 0, 1, 'cpu', 0)")
    path = desk.folder / "my_study.py"
    text = path.read_text()
    path.write_text(f"{text}\nopen('read', 'w').close()\n")
    paths = os.pathsep.join([str(desk.folder), desk.environment["PYTHONPATH"]])
    command = desk.launch("my_study", "--trials", "4", "--json", "--workers", "cpu=2", PYTHONPATH=paths)
    until((desk.folder / "read").exists, 60, desk.said)
    path.write_text(text.replace("'old'", "'new'"))
    Path(desk.folder / "go").touch()
    assert command.wait().code == 0, desk.said()
    assert command.json()["trials"]["complete"] == 4
    assert len(command.json()["codes"]) == 1
    assert (len(desk.runs("new")), len(desk.runs("old"))) == (4, 0)
    assert "was edited" not in command.err


@pytest.mark.parametrize("way", ["command", "program"])
def test_a_library_that_cannot_be_preloaded_is_said_once_at_the_end_of_a_study_of_one_short_trial(
    desk: Desk, way: str
) -> None:
    """The state folder of a program's study in memory is removed with it, unless no trial succeeded."""
    libraries = desk.folder / "lib" / "site-packages"
    libraries.mkdir(parents=True)
    (libraries / "broken_library.py").write_text("raise RuntimeError('it needs a display')\n")
    desk.study(seconds=0.0, settings={"preload": ["broken_library"]})
    desk.write("program.py", 'import shadho_celery\nshadho_celery.minimize("my_study", trials=1, workers={"cpu": 1})\n')
    paths = os.pathsep.join([desk.environment["PYTHONPATH"], str(libraries)])
    start = desk.launch if way == "command" else partial(desk.start, sys.executable)
    words = ["my_study", "--trials", "1", "--workers", "cpu=1"] if way == "command" else ["program.py"]
    command = start(*words, PYTHONPATH=paths).wait()
    assert command.code == 0, desk.said()
    assert (command.out + command.err).count("its import failed: RuntimeError: it needs a display") == 1, desk.said()
    desk.nothing_left()
    assert (desk.folder / ".shadho/embedded").exists() == (way == "command")
