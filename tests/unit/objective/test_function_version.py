"""Two objectives that compute another loss have two versions, and where they stand in their file does not matter."""

from __future__ import annotations

import functools
import subprocess
import sys
from types import FunctionType
from typing import Any

import pytest

from shadho_celery.objective.sources import function_version

BASE = """
EPOCHS = 12
SCALE = (1.0, 2.0)
NAMES = None

class Model:
    def train(self, x):
        return x + 1

def helper(x, power=2):
    return x ** power

def objective(x):
    '''Return a loss.'''
    model = Model()
    if x in {"a", "b", "c"}:
        return 0.0
    return sum(helper(model.train(x)) * SCALE[0] for _ in range(EPOCHS))
"""


def objective_of(text: str) -> FunctionType:
    names: dict[str, Any] = {"__name__": "a_script"}
    exec(compile(text, "a_script.py", "exec"), names)
    found = names["objective"]
    assert isinstance(found, FunctionType)
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("EPOCHS = 12", "EPOCHS = 20"),
        ("range(EPOCHS)", "range(20)"),
        ("(1.0, 2.0)", "(1.5, 2.0)"),
        ("x ** power", "x * power"),
        ("power=2", "power=3"),
        ("x + 1", "x - 1"),
        ("0.0", "0.5"),
    ],
)
def test_an_edit_that_changes_what_is_computed_is_another_version(old: str, new: str) -> None:
    """Constants, helpers, their defaults and classes of the objective's module belong to it."""
    assert function_version(objective_of(BASE)) != function_version(objective_of(BASE.replace(old, new)))


def test_comments_places_docstrings_and_what_is_not_used_are_no_part_of_a_version() -> None:
    edited = "# a comment\n\n" + BASE.replace("NAMES = None", "NAMES = 5\nTRIALS = 40").replace(
        "power=2):", "power=2): #"
    )
    assert function_version(objective_of(BASE)) == function_version(objective_of(edited))


def test_what_a_function_is_bound_to_is_part_of_its_version() -> None:
    def scaled(factor: float) -> Any:
        return lambda x: factor * x

    class Called:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, x: float) -> float:
            return self.factor * x

        def method(self, x: float) -> float:
            return self.factor * x

    def power(x: float, n: int) -> float:
        return float(x**n)

    made = (scaled, Called, lambda n: functools.partial(power, n=n), lambda n: Called(n).method)
    for make in made:
        assert function_version(make(1)) == function_version(make(1)) != function_version(make(2))
    assert function_version(abs) == "", "it is not known"


def test_what_an_objective_gathers_is_no_part_of_its_version() -> None:
    """A study that goes on in the same program has the same code, however often it was called."""
    seen: list[float] = []
    calls = 0

    def objective(x: float) -> float:
        nonlocal calls
        calls += 1
        seen.append(x)
        return later(x)

    class Counted:
        calls = 0

        def __call__(self, x: float) -> float:
            self.calls += 1
            return x

    counted = Counted()
    before = function_version(counted)
    unbound = function_version(objective)

    def later(x: float) -> float:
        return x

    first = function_version(objective)
    objective(1.0)
    counted(1.0)
    assert unbound != first, "a function that it calls belongs to it"
    assert (function_version(objective), function_version(counted)) == (first, before)


def test_a_version_is_the_same_in_every_process() -> None:
    code = f"exec({BASE!r})\nfrom shadho_celery.objective.sources import function_version as v\n"
    code += "print(v(objective))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
