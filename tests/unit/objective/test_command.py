"""A command's template is filled with the values of a trial; what no trial can fill is refused with a remedy."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery.errors import UsageError
from shadho_celery.objective.command import Command, command_of, files_of
from shadho_celery.objective.context import LocalContext
from shadho_celery.objective.study_file import checked
from shadho_celery.space.compile import compile_space
from shadho_celery.space.space import Space

#: a label that all trials have, and one of each kind of value
SPACE = {
    "lr": hp.loguniform("lr", -9, -2),
    "width": 2 ** hp.quniform("width", 3, 6, 1),
    "layers": hp.uniformint("layers", 1, 4),
    "bn": hp.choice("bn", [True, False, None]),
    "opt": hp.choice("opt", [{"name": "sgd", "m": hp.uniform("m", 0, 1)}, {"name": "adam"}, ("rms", 0.9), 7, 0.5]),
    "shape": hp.choice("shape", [(1, 2), {"a": [3]}]),
}


@pytest.fixture(scope="module")
def space() -> Space:
    return compile_space(SPACE)


def command(*words: str, folder: Path = Path(), **more: Any) -> Command:
    return command_of({"command": words, **more}, folder)


#: values of a trial, one of each kind
VALUES = {"lr": 0.001, "n": 3, "opt": "a b; rm *", "on": True, "off": False, "none": None}


@cases(
    "words, arg, arguments",
    [
        (["x", "{args}"], None, ["x", "--lr=0.001", "--n=3", "--opt=a b; rm *", "--on"]),
        (
            ["x", "{args}", "-v"],
            "{label}={value}",
            ["x", "lr=0.001", "n=3", "opt=a b; rm *", "on=true", "off=false", "none=null", "-v"],
        ),
        (["{args}"], "-{label} {value}", ["-lr", "0.001", "-n", "3", "-opt", "a b; rm *", "-on"]),
        (
            ["{args}"],
            "--set={label}:{value}",
            [
                "--set=lr:0.001",
                "--set=n:3",
                "--set=opt:a b; rm *",
                "--set=on:true",
                "--set=off:false",
                "--set=none:null",
            ],
        ),
        (["x", "--lr={lr}{n}", "", "{opt}"], None, ["x", "--lr=0.0013", "", "a b; rm *"]),
        (["x", "{on}", "{off}", "{none}"], None, ["x", "true", "false", "null"]),
        (
            ["x", '{{"a": {{"lr": {lr}}}', "}", "{{lr}", "{{{lr}}"],
            None,
            ["x", '{"a": {"lr": 0.001}}', "}", "{lr}", "{0.001}"],
        ),
        (["x", "{seed}", "{trial}", "{budget}"], None, ["x", "5", "7", "27"]),
    ],
)
def test_words_are_filled_one_by_one(words: list[str], arg: str | None, arguments: list[str]) -> None:
    context = LocalContext(seed=5, trial=7, budget=27)
    assert command(*words, arg=arg).arguments(VALUES, context) == arguments


def test_the_folder_of_checkpoints_is_absolute_and_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("x", "{checkpoint_dir}").arguments({}, LocalContext(checkpoints="c")) == ["x", str(tmp_path / "c")]
    assert (tmp_path / "c").is_dir()


def test_values_are_flat_and_as_the_objective_gets_them(space: Space) -> None:
    values = command("x").values(space)
    options: dict[Any, Any] = {}
    for params in space.sample(np.random.default_rng(0), 100):
        flat, nested = values(params)
        assert nested == space.evaluate(params)
        assert list(flat) == list(params)
        assert flat["lr"] == nested["lr"]
        assert flat["width"] == nested["width"]
        assert flat["layers"] == nested["layers"]
        assert type(flat["layers"]) is int
        assert flat["bn"] is nested["bn"]
        options[params["opt"]] = flat["opt"]
    assert options == {0: "sgd", 1: "adam", 2: "rms", 3: 7, 4: 0.5}


@cases(
    "words, says",
    [
        (["x", "{l}"], "{l} in the command is no label; did you mean lr? {{ stands for a brace"),
        (["x", "{sed}"], "did you mean seed?"),
        (["x", "{}"], "{} in the command is no label"),
        (["x", "{lr"], "'{lr' in the command has an open brace; {{ stands for a brace"),
        (["x", "--a={args}"], "'--a={args}' in the command: {args} must be a word of its own"),
        (["x", "{m}"], "{m} in the command has no value in some trials; use {args}"),
        (["x", "{shape}"], "label 'shape' has an option that is no text or number"),
        (["x", "{args}"], "label 'shape' has an option that is no text or number"),
        (["x", "{budget}"], "{budget} is in the command, but trials have no budgets; set fidelity"),
    ],
)
def test_what_some_trials_cannot_fill_is_refused(space: Space, words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        command(*words).check(space, has_budgets=False)
    assert says in str(refused.value)
    command("x", "{lr}", "{opt}", "{budget}", "{{no}").check(space, has_budgets=True)


def test_no_label_has_the_name_of_a_placeholder() -> None:
    with pytest.raises(UsageError, match="label 'seed' has the name of a placeholder"):
        command("x").check(compile_space({"seed": hp.uniform("seed", 0, 1)}), has_budgets=True)


@cases(
    "stated, says",
    [
        ({"command": ["x", "\0"]}, "command: ['x', '\\x00'] is not allowed; a program and its arguments"),
        ({"command": ["x"], "arg": "--{label}"}, "arg: '--{label}' is not allowed; form of the arguments"),
        ({"command": ["x"], "arg": "{label}={value}={value}"}, "arg: '{label}={value}={value}' is not allowed"),
        ({"command": ["x"], "loss": {"pattern": "("}}, "loss.pattern: missing ), unterminated"),
        ({"command": ["x"], "loss": {"pattern": "loss"}}, "loss.pattern has 0 groups; give it one"),
        (
            {"command": ["x"], "inputs": ["../a"]},
            "inputs: ['../a'] is not allowed; files that the command reads, a list",
        ),
        ({"command": ["x"], "inputs": ["a", "b/..", "c"]}, "of paths or globs below its folder"),
        ({"command": ["x"], "inputs": ["a**"]}, "inputs: ['a**'] is not allowed"),
        ({"command": ["x"], "outputs": ["/a"]}, "outputs: ['/a'] is not allowed"),
        ({"command": ["x"], "outputs": ["."]}, "outputs: ['.'] is not allowed"),
        ({"command": ["x"], "outputs": [""]}, "outputs: [''] is not allowed"),
    ],
)
def test_a_command_that_is_not_valid_is_refused(stated: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        command_of(checked("STUDY", stated), Path())
    assert says in str(refused.value)


@pytest.mark.parametrize("path", ["a", "./a.csv", "data/**/*.csv", "**/[ab]?.txt", ".env", "...", "a b/", "..a/b.."])
def test_paths_and_globs_below_the_folder_are_accepted(path: str) -> None:
    assert command_of(checked("STUDY", {"command": ["x"], "outputs": [path]}), Path()).outputs == (path,)


def test_a_program_that_cannot_run_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "python").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for program in ("pyton", "train.sh", "./train.sh", "./bin"):
        with pytest.raises(UsageError) as refused:
            command(program, folder=tmp_path).check_program()
        assert str(refused.value) == (
            f"there is no program {program!r} that can be run; install it, or for a file in {tmp_path} write ./NAME, "
            "and run chmod +x NAME"
        )
    for program in ("python", "bin/python", "{program}"):
        command(program, folder=tmp_path).check_program()


@cases(
    "words, is_refused",
    [
        (["python", "trian.py", "{args}"], True),
        (["sh", "data/go.sh"], True),
        (["python", "train.py"], False),
        (["python", "{x}.py"], False),
        (["python", "-m", "trian.py"], False),
        (["sh", "-c", "trian.py"], False),
        (["python", "trian"], False),
        (["ls", "trian.py"], False),
    ],
)
def test_a_script_that_is_missing_is_refused_with_a_similar_name(
    tmp_path: Path, words: list[str], is_refused: bool
) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError) if is_refused else nullcontext() as refused:
        command(*words, folder=tmp_path).check_program()
    if words[1] == "trian.py" and refused is not None:
        says = f"there is no file 'trian.py' in {tmp_path}; did you mean train.py? correct it"
        assert str(refused.value) == says


def test_the_files_of_a_command_are_those_that_it_names_what_they_import_and_its_inputs(tmp_path: Path) -> None:
    for name in (
        "train.py",
        "lib.py",
        "other.py",
        "tool/__init__.py",
        "tool/go.py",
        "tool/__main__.py",
        "conf.yaml",
        "a.csv",
        "b.csv",
        "c.bin",
        "v1.2.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "train.py").write_text("import lib\n")

    def files(*words: str, **more: Any) -> set[str]:
        return {*files_of(command(*words, folder=tmp_path, **more))}

    assert files("python", "train.py", "{args}") == {"train.py", "lib.py"}
    assert files("python", "-m", "tool.go") == {"tool/__init__.py", "tool/go.py"}
    assert files("python", "-m", "tool") == {"tool/__init__.py", "tool/__main__.py"}
    assert files("python", "./train.py", "--config=conf.yaml", "/etc/hosts", "../x") == {
        "train.py",
        "lib.py",
        "conf.yaml",
    }
    assert files("cat", "c.bin", inputs=["*.csv"]) == {"a.csv", "b.csv", "c.bin"}
    assert files("python", "-c", "x" * 5000, "v1.2.py") == {"v1.2.py"}, "words that are no paths, or no modules"
    before = files_of(command("cat", "c.bin", folder=tmp_path))
    (tmp_path / "c.bin").write_text("other")
    assert files_of(command("cat", "c.bin", folder=tmp_path)) != before


def test_inputs_that_are_missing_too_large_or_outside_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").touch()
    (tmp_path / "leaves").symlink_to("/etc/hosts")
    with (tmp_path / "large").open("wb") as file:
        os.truncate(file.fileno(), 2**31)

    def refusal(*inputs: str) -> str:
        with pytest.raises(UsageError) as refused:
            files_of(command("x", folder=tmp_path, inputs=inputs))
        return str(refused.value)

    assert refusal("larg").startswith(f"inputs: 'larg' is no file in {tmp_path}; name files")
    assert "name files, such as data/*.csv" in refusal("data")
    assert "is a link that leads out of the study's folder" in refusal("leaves")
    assert "more than 1,000 files or 67,108,864 bytes" in refusal("large")
    assert [*files_of(command("x", folder=tmp_path, inputs=["data/*"]))] == ["data/a.csv"]
    (tmp_path / ".shadho" / "checkpoints").mkdir(parents=True)
    (tmp_path / ".shadho" / "checkpoints" / "b.csv").touch()
    assert [*files_of(command("x", folder=tmp_path, inputs=["**/*.csv"]))] == ["data/a.csv"], "none of a trial"
