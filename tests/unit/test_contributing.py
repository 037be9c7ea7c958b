"""The lists of edits in CONTRIBUTING.md are complete, and the checks before a commit are those of CI."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import yaml

from shadho_celery.charts import registry
from shadho_celery.charts.chart import Chart
from shadho_celery.cli import control
from shadho_celery.core import names, records
from shadho_celery.dashboard.answers import buttons
from shadho_celery.fidelity import pruners
from shadho_celery.samplers import find_sampler
from shadho_celery.samplers.random import RandomSampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^### An? (\w+)\n(.*?)(?=^##|\Z)", GUIDE, re.MULTILINE | re.DOTALL))
#: example -> how code that knows it writes it
WRITTEN = {
    "cma": '"cma"',
    "patience": r'"patience"|\bPatience\b',
    "max_failures": r"\bmax_failures\b",
    "pause": r'"pause"|\bPause\b(?! \w)',
    "curves": r'\bdef curves\b|"curves"',
}


def edits(section: str) -> list[str]:
    """Return the files that a list of edits begins its lines with."""
    return re.findall(r"^\d\. [^`\n]*`([\w/.]+\.\w+)`", SECTIONS[section], re.MULTILINE)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_file_that_is_named_exists(section: str) -> None:
    named = re.findall(r"`((?:shadho_celery|tests)/[\w/.]+)`", SECTIONS[section])
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_module_of_the_table_of_places_exists() -> None:
    table = GUIDE.partition("| thing | module |")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w/.]+)`", table)
    assert len(named) > 10
    assert [path for path in named if not (ROOT / "shadho_celery" / path).is_file()] == []


@pytest.mark.parametrize("section", ["sampler", "pruner", "setting", "action", "chart"])
def test_a_list_of_edits_names_every_module_that_knows_its_example(section: str) -> None:
    """Besides the module of its own there are two edits at most. Those that only some need are named below the list."""
    [example] = re.findall(r"Example: `(\w+)`", SECTIONS[section])
    knows = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "static/*.js")
        for path in (ROOT / "shadho_celery").rglob(pattern)
        if re.search(WRITTEN[example], path.read_text())
    }
    # Arguments of Python's functions are compared with the settings by a test of theirs. Optuna's names are its own.
    knows -= {path for path in knows if path.startswith(("shadho_celery/program/", "shadho_celery/optuna/"))}
    named = {path for path in re.findall(r"`([\w/.]+\.(?:py|js))`", SECTIONS[section]) if not path.startswith("tests/")}
    assert knows <= named
    assert len(edits(section)) <= 3
    for path in edits(section):
        assert re.search(rf"{example}|{WRITTEN[example]}", (ROOT / path).read_text()) or path.endswith(f"/{example}.py")


def test_a_fact_of_a_trial_is_named_where_it_is_declared_where_it_is_set_and_in_the_table() -> None:
    assert len(edits("fact")) == 3
    for path in edits("fact"):
        assert re.search(r"\bgpu_memory\b", (ROOT / path).read_text())
    made = [path for room in ("store", "study", "results") for path in (ROOT / "shadho_celery" / room).glob("*.py")]
    assert [path.name for path in made if re.search(r"\bgpu_memory\b", path.read_text())] == []


def test_a_sampler_is_found_by_its_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.SAMPLERS, "mine", "samplers.random:RandomSampler")  # type: ignore[arg-type]
    [subspace] = split(compile_space({"x": 1}), max_subspaces=1)
    assert isinstance(find_sampler("mine")(subspace, (0,)), RandomSampler)


class Mine(pruners._Settings, frozen=True, kw_only=True):  # type: ignore[misc]
    """Stop a trial after so many steps."""

    in_short = "steps"

    steps: int = 3

    def make(self) -> Any:
        return self

    def tell(self, trial: int, step: int, loss: float) -> bool:
        return step > self.steps

    def end(self, trial: int, *, complete: bool) -> None: ...


def test_a_pruner_is_found_by_its_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.PRUNERS, "mine", "fidelity.pruners:Mine")  # type: ignore[arg-type]
    monkeypatch.setattr(pruners, "Mine", Mine, raising=False)
    assert pruners.read_pruner("mine:2") == pruners.read_pruner({"how": "mine", "steps": 2}) == Mine(steps=2)
    assert pruners.read_pruner("mine") == Mine()


class Hurry(records.Deed, frozen=True):  # type: ignore[misc]
    """Do something."""

    line = "Let a running study do something."
    examples = ("hurry svm-3f2a",)
    question = "Let {study} do something?"


def test_an_action_is_a_command_and_a_button_by_its_class_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(records.ACTIONS, "hurry", Hurry)  # type: ignore[arg-type]
    found = control.command(Hurry)
    assert (found.name, found.help) == ("hurry", "Do something.")
    assert [each.name for each in found.params if isinstance(each, click.Argument)] == ["name"]
    assert "shadho-celery hurry svm-3f2a" in str(found.epilog)
    [button] = [each for each in buttons("study", study="mine") if each["text"] == "hurry"]
    assert (button["request"], button["question"]) == ({"action": "hurry"}, "Let mine do something?")


def test_a_chart_is_found_by_its_decorator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CHARTS", {})

    @registry.StudyChart(section="Failures", place=9)
    def mine(study: object) -> Chart:
        return Chart(title="My own", axes=(), empty="Nothing is drawn.")

    [chart] = registry.CHARTS.values()
    assert (chart.name, chart.draw(SimpleNamespace(study=None)).title) == ("mine", "My own")


def test_the_checks_before_a_commit_are_those_of_ci() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    script = (ROOT / ".ci" / "run").read_text()
    checks = re.findall(r"^(\w.*?)(?: -m \"\" -n 6)? \|\| status=1", script, re.MULTILINE)
    assert [hook["entry"] for hook in hooks] == checks
