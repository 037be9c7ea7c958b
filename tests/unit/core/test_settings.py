"""Each setting is described once, and every surface names it in its own way."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shadho_celery import Study, launch, minimize, simulate
from shadho_celery.core import names
from shadho_celery.core.settings import IN_FORCE, KEPT, SETTINGS, Setting, StudySettings, as_options
from shadho_celery.errors import StoreError, UsageError
from shadho_celery.objective import study_file

TABLES = (names.SAMPLERS, names.POLICIES, names.SHARES, names.FIDELITIES, names.PRUNERS)

ALL = pytest.mark.parametrize("setting", [pytest.param(each, id=name) for name, each in SETTINGS.items()])
#: commands that have options of settings, with the argument that they need
COMMANDS = {"run": (launch.main, "my_study"), "simulate": (simulate.main, "cluster.py")}
WITH_OPTION = pytest.mark.parametrize(
    ("command", "setting"),
    [
        pytest.param(command, SETTINGS[each.name], id=f"{command}-{each.name}")
        for command, (main, _) in COMMANDS.items()
        for each in main.params
        if each.name in SETTINGS
    ],
)
ARGUMENTS = {*inspect.signature(minimize).parameters, *inspect.signature(Study).parameters} & {*SETTINGS}
WITH_ARGUMENT = pytest.mark.parametrize(
    "setting", [pytest.param(SETTINGS[each], id=each) for each in sorted(ARGUMENTS)]
)
#: a value that no setting can have
WRONG: Any = b"\x00"

SOURCE = "SPACE = {'x': 1}\ndef objective(params): return 0.0\n"


@pytest.mark.parametrize("table", TABLES)
def test_each_name_of_a_setting_stands_for_a_class_that_there_is(table: dict[str, str]) -> None:
    assert all(isinstance(names.named(place), type) for place in table.values())


def test_the_names_are_known_without_the_modules_that_they_stand_for() -> None:
    code = "import sys, shadho_celery.cli.shared_options; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    modules = {f"shadho_celery.{place.partition(':')[0]}" for table in TABLES for place in table.values()}
    assert "shadho_celery.core.names" in loaded
    assert not modules & {*loaded}


def test_each_setting_that_is_kept_as_it_was_in_force_is_kept() -> None:
    assert {*IN_FORCE} <= {*KEPT}
    assert StudySettings(sampler="tpe").in_force()["sampler"] == "tpe"


def test_the_docstring_of_minimize_describes_the_settings_that_are_its_arguments() -> None:
    assert {*inspect.signature(Study.run).parameters} & {*SETTINGS} < ARGUMENTS
    for name in {*inspect.signature(minimize).parameters} & {*SETTINGS}:
        assert f"`{name}`: {SETTINGS[name].meaning}"[:60] in str(minimize.__doc__)


# What does not fit is named as its surface calls it


def test_run_has_an_option_for_each_setting_that_has_one() -> None:
    assert {each.name for each in launch.main.params} & {*SETTINGS} == {*KEPT}


def refused_by_command(command: str, *words: str) -> str:
    main, argument = COMMANDS[command]
    result = CliRunner().invoke(main, [argument, *words])
    assert result.exit_code == 2
    return result.stderr.splitlines()[-1]


def refused_in_file(folder: Path, monkeypatch: pytest.MonkeyPatch, stated: str, number: int = 0) -> str:
    name = f"a_study_{folder.name}_{number}".replace("-", "_")
    (folder / f"{name}.py").write_text(f"{SOURCE}STUDY = {{{stated}}}\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with pytest.raises(UsageError) as refused:
        study_file.load(name)
    return str(refused.value)


@WITH_OPTION
def test_an_option_given_twice_misspelt_or_of_another_type_is_named(command: str, setting: Setting) -> None:
    def refused(*words: str) -> str:
        return refused_by_command(command, *words)

    flag = setting.flag
    is_repeated = any(each.name == setting.name and each.multiple for each in COMMANDS[command][0].params)
    if isinstance(setting.default, bool) or setting.value:
        if not setting.value:
            assert f"{flag} is given twice" in refused(flag, f"--no-{flag[2:]}")
        assert f"Option '{flag}' does not take a value" in refused(f"{flag}=x")
    else:
        assert is_repeated or f"{flag} is given twice" in refused(flag, "1", flag, "1")
        if setting.choices or setting.kinds & {int, float}:
            assert "nothing" in refused(flag, "nothing")
    misspelt = refused(f"{flag}x")
    assert f"No such option {flag}x; did you mean {flag}?" in misspelt


@ALL
def test_a_key_of_a_study_file_given_twice_misspelt_or_of_another_type_is_named(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f'STUDY["{setting.name}"]'
    said = refused_in_file(tmp_path, monkeypatch, f"'{setting.name}': 1, 'cores': 1, '{setting.name}': 2", 1)
    assert f"{key} is given twice" in said
    said = refused_in_file(tmp_path, monkeypatch, f"'{setting.name}s_': 1", 2)
    assert f'STUDY["{setting.name}s_"] is not a setting; did you mean {setting.name}?' in said
    said = refused_in_file(tmp_path, monkeypatch, f"'{setting.name}': b'wrong'", 3)
    assert re.fullmatch(rf"STUDY of a_study_\w+_3: {setting.name}: .*", said)


@WITH_ARGUMENT
def test_an_argument_of_another_type_is_named(setting: Setting) -> None:
    with pytest.raises(UsageError) as refused:
        minimize(lambda params: 0.0, {"x": 1}, **{"trials": 1, setting.name: WRONG})
    assert str(refused.value).startswith((f"{setting.name}: ", f"{setting.name} needs workers"))
    with pytest.raises(UsageError, match=f"no argument {setting.name}_x; did you mean {setting.name}"):
        minimize(lambda params: 0.0, {"x": 1}, **{f"{setting.name}_x": 1})


@pytest.mark.parametrize(
    ("argument", "wrong", "says"),
    [
        ("store", "mysql://me@host/db", "'mysql' stores are not supported"),
        ("store", "nothing", "'nothing' is not a database URL"),
        ("study", "a/b", "'a/b' cannot name a study"),
        ("seed", 2**63, f"{2**63} is not allowed"),
    ],
)
def test_what_says_where_a_study_is_kept_is_named(
    argument: str, wrong: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"kept_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    result = CliRunner().invoke(launch.main, [name, f"--{argument}", str(wrong)])
    assert result.exit_code == 2
    assert f"{argument}: {says}" in result.stderr.splitlines()[-1]
    with pytest.raises(UsageError if argument != "store" else StoreError) as refused:
        minimize(lambda params: 0.0, {"x": 1}, trials=1, **{argument: wrong})
    assert f"{argument}: {says}" in str(refused.value)
    if argument != "seed":
        with pytest.raises(UsageError, match=f"^{argument}: 3 is not allowed"):
            minimize(lambda params: 0.0, {"x": 1}, trials=1, **{argument: 3})


def test_what_rungs_was_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused_in_file(tmp_path, monkeypatch, "'rungs': {'least': 1, 'most': 9}")
    assert 'STUDY["rungs"] is not a setting; here it is fidelity; known are ' in said


def test_settings_of_a_study_become_the_options_of_a_command() -> None:
    given = {"trials": 9, "direction": "maximize", "speculate": False, "sampler": "tpe", "fidelity": {"most": 9}}
    assert as_options(given) == ["--trials", "9", "--maximize", "--sampler", "tpe", "--no-speculation"]
    assert as_options({"speculate": True, "sampler": "auto", "trials": None, "direction": "minimize"}) == []
