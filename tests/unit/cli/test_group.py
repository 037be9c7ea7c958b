"""The console command starts fast, and has every command with its help."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from services.cases import cases

from shadho_celery.cli.group import COMMANDS, commands

#: what takes long to import, and no help needs
HEAVY = "celery kombu hyperopt numpy scipy sqlalchemy redis rich pandas torch"


def answer(*words: str) -> str:
    result = CliRunner().invoke(commands, words, terminal_width=120)
    assert result.exit_code == 0, result.output
    return result.output


def test_help_names_every_command_and_how_to_switch_completion_on() -> None:
    shown = answer("--help")
    for name, (_, _, text) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", shown, re.MULTILINE), shown
    assert "_SHADHO_CELERY_COMPLETE=bash_source shadho-celery" in shown
    assert "Examples:" in shown


def test_the_version_is_the_packages() -> None:
    assert re.search(r"\d+\.\d+", answer("--version"))


def test_an_unknown_command_is_refused_with_code_2() -> None:
    result = CliRunner().invoke(commands, ["shwo"])
    assert result.exit_code == 2
    assert "shwo" in result.stderr


def test_the_hint_at_an_option_of_another_tool_names_one_that_the_command_has() -> None:
    said = {name: CliRunner().invoke(commands, [name, "s", "--n-trials", "3"]) for name in ("run", "best")}
    assert {each.exit_code for each in said.values()} == {2}
    assert "No such option --n-trials; here it is --trials" in said["run"].stderr
    assert "--trials" not in said["best"].stderr.replace("--n-trials", "")
    said = {name: CliRunner().invoke(commands, [name, "s", "--trails", "3"]) for name in ("run", "best")}
    assert "No such option --trails; did you mean --trials?" in said["run"].stderr
    assert "--trials" not in said["best"].stderr


@cases("name", COMMANDS)
def test_the_help_of_a_command_has_examples_that_its_options_allow(name: str) -> None:
    shown = answer(name, "--help")
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    examples = re.findall(rf"^ +(?:\S+=\S+ )*(?:shadho-celery {name}|python -m \S+)(.*)$", shown, re.MULTILINE)
    assert examples, shown
    for example in examples:
        words = shlex.split(example.partition("  #")[0].partition(">")[0].replace("\\", ""))
        # Only understood, not run.
        if "--example" not in words:
            command.make_context(name, words)


def test_an_option_in_one_letter_means_the_same_in_every_command() -> None:
    meanings = {"-n": {"--trials", "--limit"}, "-f": {"--follow"}, "-y": {"--yes"}, "-o": {"--output"}}
    meanings |= {"-q": {"--quiet"}, "-v": {"--verbose"}, "-h": {"--help"}}
    found: dict[str, set[str]] = {}
    for name in COMMANDS:
        command = commands.get_command(click.Context(commands), name)
        assert command is not None
        for option in command.get_params(click.Context(command, parent=click.Context(commands))):
            letters = {each for each in option.opts if len(each) == 2 and each != "--"}
            whole = next((each for each in option.opts if each.startswith("--")), "")
            for letter in letters:
                found.setdefault(letter, set()).add(whole)
            # What has a letter in one command has it in all.
            assert letters or whole not in {each for named in meanings.values() for each in named} - {"--help"}, name
    assert {letter: named for letter, named in found.items() if letter != "-h"} == {
        letter: named for letter, named in meanings.items() if letter != "-h"
    }


@pytest.mark.slow
@cases("words", ["--help", *(f"{name} --help" for name in COMMANDS)])
def test_help_imports_nothing_heavy(words: str) -> None:
    code = (
        f"import atexit, sys; sys.argv = ['shadho-celery', *'{words}'.split()]\n"
        f"atexit.register(lambda: print('heavy:', *(set('{HEAVY}'.split()) & sys.modules.keys())))\n"
        "from shadho_celery.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["heavy:"]


def test_the_module_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "shadho_celery", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: shadho-celery [OPTIONS] COMMAND")


@pytest.mark.parametrize("module", ["shadho_celery", "shadho_celery.launch"])
def test_ctrl_c_during_the_imports_ends_without_a_traceback(module: str, tmp_path: Path) -> None:
    """Here a module that everything needs interrupts its own import."""
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); "
            f"runpy.run_module({module!r}, run_name='__main__')",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")
