"""The names of the package are there when they are first used, and type checkers see the same ones."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import hyperopt
import pytest
from packaging.requirements import Requirement

import shadho_celery

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def test_every_name_is_there_and_hyperopts_are_hyperopts() -> None:
    found = {name: getattr(shadho_celery, name) for name in shadho_celery.__all__}
    assert None not in found.values()
    assert set(shadho_celery.__all__) <= set(dir(shadho_celery))
    for name in ("STATUS_FAIL", "STATUS_OK", "Trials", "anneal", "hp", "space_eval"):
        assert found[name] is getattr(hyperopt, name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(shadho_celery.__file__).read_text())
    [checked] = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    imports = [each for each in checked.body if isinstance(each, ast.ImportFrom)]
    seen = {alias.name for each in imports for alias in each.names}
    # Only Celery's command looks for the application.
    assert seen == set(shadho_celery._LAZY) - {"app"} == {*shadho_celery.__all__} - {"__version__"}


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'minimise'"):
        shadho_celery.minimise  # noqa: B018


def test_hp_alone_imports_no_scheduler() -> None:
    """A study file that takes `hp` from here costs a worker's process nothing beside hyperopt."""
    code = "import sys; from shadho_celery import hp; print('sqlalchemy' in sys.modules, 'hyperopt' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numpy", ["numpy.py"]),
        ("redis", ["-m", "shadho_celery.worker", "--import", "redis"]),
        ("redis", ["-m", "celery", "-A", "shadho_celery", "worker"]),
        ("click", ["-m", "shadho_celery", "run", "click"]),
    ],
)
def test_a_file_that_hides_a_library_is_named_in_one_line_however_it_is_met(
    name: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text("from shadho_celery import minimize\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(shadho_celery.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "serving class" not in line]
    assert f"{tmp_path / name}.py has the name of " in line
    assert f"rename it, such as to my_{name}.py" in line


def test_a_worker_for_a_module_that_does_not_exist_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "my_study.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(Path(shadho_celery.__file__).parents[1])}
    words = [sys.executable, "-m", "shadho_celery.worker", "--import", "my_study,,my_studdy"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "there is no module my_studdy here; did you mean my_study?" in line


def test_type_checkers_find_the_hints_of_the_package() -> None:
    assert Path(shadho_celery.__file__).with_name("py.typed").exists()


def test_the_packages_facts_agree_with_one_another() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least, most = (int(minor) for minor in re.findall(r"3\.(\d+)", project["requires-python"]))
    versions = [line for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert versions == [f"Programming Language :: Python :: 3.{minor}" for minor in range(least, most)]
    extras = project["optional-dependencies"]
    [everything], [integrations] = extras["all"], extras["integrations"]
    named, of_integrations = (set(re.findall(r"\w+", text)) - {"shadho_celery"} for text in (everything, integrations))
    assert named | of_integrations == {*extras} - {"all", "test", "integrations", "docs"}
    assert named & of_integrations == {"sklearn"}
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"< (3, {most})" in ci
    assert f"from 3.{least} to 3.{most - 1}" in ci
    assert f"Python 3.{least} to 3.{most - 1}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("minor", range(10, 15))
def test_the_tested_versions_have_one_of_each_package_that_is_needed(minor: int) -> None:
    """Renew them with .ci/renew_constraints."""
    here = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0", "sys_platform": "linux"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    texts += [each for extra in project["project"]["optional-dependencies"].values() for each in extra]
    needed = [each for each in map(Requirement, texts) if each.marker is None or each.marker.evaluate(here)]
    lines = [line for line in (ROOT / ".ci" / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert not [line for line in lines if re.search("[:/@]", line)], "a registry, or a path"
    pins = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate(here)]
    versions = {each.name.lower().replace("_", "-"): next(iter(each.specifier)).version for each in pins}
    assert len(versions) == len(pins)
    for each in needed:
        name = each.name.lower().replace("_", "-")
        assert name == "shadho-celery" or each.specifier.contains(versions[name]), each


def test_ci_installs_every_extra_but_torch_in_its_least_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"--extra (\w+)", (ROOT / ".ci" / "run").read_text())
    [everything] = extras["all"]
    assert sorted(named) == sorted(set(re.findall(r"\w+", everything)) - {"shadho_celery", "torch"})


def test_the_extra_optuna_has_what_its_plots_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [re.split("[<>=]", named)[0] for named in extras["optuna"]] == ["optuna", "plotly"]
