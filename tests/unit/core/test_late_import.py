"""A module that hardly anybody uses is loaded at its first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shadho_celery.core.system import load_late


def said(code: str) -> str:
    """Run the code in a new interpreter, and return what it prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import shadho_celery.space.compile", "import hyperopt"])
def test_hyperopts_module_is_whole_whoever_imports_it_first(first: str) -> None:
    code = f"{first}\nimport hyperopt, shadho_celery.space.compile, inspect\nfrom hyperopt import atpe\n"
    assert said(f"{code}print(atpe.suggest.__module__, hyperopt.atpe.suggest is atpe.suggest)") == "hyperopt.atpe True"


@pytest.mark.parametrize(
    "program",
    [
        "import shadho_celery.space.compile, hyperopt",
        "import shadho_celery; from hyperopt import hp",
        "from shadho_celery import hp, minimize",
    ],
)
def test_without_its_use_a_process_does_not_load_what_only_it_needs(program: str) -> None:
    assert said(f"{program}; import sys; print('scipy.stats' in sys.modules)") == "False"


def test_a_program_that_uses_the_packages_names_loads_no_graphs() -> None:
    loaded = said("from shadho_celery import hp, minimize; import sys; print(*sys.modules)").split()
    assert not {"networkx", "scipy.special"} & set(loaded)


def test_a_search_in_memory_loads_nothing_that_only_databases_and_other_searches_need() -> None:
    """That holds until something reads the study by SQL, such as its report."""
    code = """
import sys
from shadho_celery import hp, minimize
space = {"x": hp.uniform("x", -1, 1), "y": hp.loguniform("y", -5, 0)}
study = minimize(lambda values: values["x"] ** 2 + values["y"], space, trials=15, seed=0, sampler="tpe")
assert study.best.values["y"] > 0 and len(study.trials) == 15 and study.counts == {"COMPLETE": 15}
unused = {"networkx", "scipy.stats", "scipy.optimize", "scipy.linalg", "sqlalchemy", "sqlite3", "rich", "celery"}
print(*unused & {*sys.modules})
print(sum(study.read_report().counts.values()), "sqlalchemy" in sys.modules)
"""
    assert said(code).split() == ["15", "True"]


def test_a_module_is_late_only_for_those_imported_with_its_placeholder() -> None:
    """Here networkx, which hyperopt needs for its own algorithms; others import it and its submodules as ever."""
    code = """
import sys
import shadho_celery.space.compile
print("networkx" in sys.modules)
import networkx.algorithms.dag
from hyperopt import fmin, hp, tpe
best = fmin(lambda x: x, hp.uniform("x", 0, 1), tpe.suggest, max_evals=25, show_progressbar=False, verbose=False)
print(best["x"] < 1, networkx is sys.modules["networkx"], networkx.__name__)
"""
    assert said(code).split("\n") == ["False", "True True networkx"]


def test_hyperopt_loads_its_late_module_itself() -> None:
    code = """
import shadho_celery.space.compile
from hyperopt import fmin, hp, rand
best = fmin(lambda x: x, hp.uniform("x", 0, 1), rand.suggest, max_evals=2, show_progressbar=False, verbose=False)
print(best["x"] < 1)
import networkx.classes
print(networkx.classes.DiGraph is networkx.DiGraph)
"""
    assert said(code).split() == ["True", "True"]


def test_it_is_loaded_at_the_first_name_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    load_late(["colorsys"])
    import colorsys

    assert not hasattr(colorsys, "__file__")
    assert colorsys.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0.0)
    assert sys.modules["colorsys"].rgb_to_hsv is colorsys.rgb_to_hsv
    with pytest.raises(AttributeError, match="no_such_name"):
        colorsys.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_a_module_that_is_loaded_stays_as_it_is() -> None:
    import json

    load_late(["json"])
    assert sys.modules["json"] is json


def test_functions_that_use_a_late_module_can_be_pickled() -> None:
    code = """
import pickle, shadho_celery, cloudpickle
from hyperopt import tpe
found = pickle.loads(cloudpickle.dumps(lambda: tpe.suggest))()
import hyperopt
print(found is hyperopt.tpe.suggest)
"""
    assert said(code) == "True"


def test_all_names_of_a_late_module_can_be_imported() -> None:
    assert said("import shadho_celery; from hyperopt.tpe import *; print(suggest.__module__)") == "hyperopt.tpe"
