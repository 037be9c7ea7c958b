"""A study in TOML, and the same study made of a command with domains in its placeholders."""

from __future__ import annotations

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services import golden
from services.documents import text_of

from shadho_celery.core.names import FORMS
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective import study_file, toml_study
from shadho_celery.objective.command import Command
from shadho_celery.objective.sources import contents
from shadho_celery.objective.study_file import cores_per_trial, literal_settings, load, module_name, read_sources
from shadho_celery.objective.toml_study import write_command
from shadho_celery.space.compile import compile_space
from shadho_celery.space.forms import form_of

STUDY = """
command = ["python", "train.py", "{args}"]
arg = "{label}={value}"
loss = {pattern = 'loss (\\S+)'}
cores = 2
fidelity = {least = 1, most = 9}

[space]
lr = {log = [1e-4, 1e-1]}
drop = {uniform = [0, 0.5], step = 0.1}
width = {int = [16, 64], step = 16}
trees = {logint = [1, 1000]}
"model.act" = {choice = ["relu", 1, 0.5, true]}

[space.opt.choice.sgd]
momentum = {uniform = [0, 1]}
nesterov = {choice = {yes = {c = {uniform = [0, 1]}}, no = {}}}

[space.opt.choice.adam]
[space.opt.choice.rms]
momentum = {uniform = [0, 1]}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_study_in_toml_is_a_study(folder: Path) -> None:
    (folder / "exp").mkdir()
    (folder / "exp" / "study.toml").write_text(STUDY)
    (folder / "train.py").write_text("import lib\n")
    (folder / "lib.py").touch()
    file = load("./exp/study.toml")
    command = file.objective
    assert isinstance(command, Command)
    assert file.module == "exp/study.toml"
    assert command.folder == folder, "the study's name is a path in it"
    assert command.loss == re.compile(r"loss (\S+)")
    assert file.stated["fidelity"] == {"least": 1, "most": 9}
    assert {*file.code.files} == {"exp/study.toml", "train.py", "lib.py"}
    assert contents(file.code)["train.py"] == b"import lib\n", "all of them can be shipped"
    assert literal_settings(file.module)["cores"] == cores_per_trial([file.module]) == 2  # type: ignore[index]
    space = compile_space(file.space)
    assert space.conditions["c"] == ((("opt", 0), ("nesterov", 0)),)
    assert {len(space.conditions[label]) for label in ("momentum", "opt")} == {1, 2}, "a label may be in two options"
    for params in space.sample(np.random.default_rng(0), 200):
        values = space.evaluate(params)
        assert 1e-4 <= values["lr"] <= 1e-1
        assert values["width"] in (16, 32, 48, 64)
        assert type(values["width"]) is type(values["trees"]) is int
        assert 1 <= values["trees"] <= 1000
        assert round(values["drop"] * 10) == pytest.approx(values["drop"] * 10)
        assert values["model.act"] in ["relu", 1, 0.5, True]
        assert values["opt"] == "adam" or values["opt"]["opt"] in {"sgd", "rms"}
        flat = command.values(space)(params).by_label
        assert flat["opt"] == (values["opt"] if values["opt"] == "adam" else values["opt"]["opt"])


def test_the_version_of_a_study_depends_on_its_file_and_those_that_it_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "study.toml"
    path.write_text(STUDY)
    (folder / "train.py").touch()
    before = load("study.toml").code.files
    (folder / "train.py").write_text("changed")
    now = load("study.toml").code.files
    assert {name for name in now if now[name] != before[name]} == {"train.py"}
    path.write_text("broken")
    assert {*read_sources("study.toml").files} == {"study.toml"}
    assert literal_settings("study.toml") == {}
    path.unlink()
    assert literal_settings("study.toml") is None
    assert read_sources("study.toml").files == {"study.toml": ""}
    monkeypatch.setattr(study_file, "file_of", lambda name: path)
    assert read_sources("study.toml").files == {"study.toml": ""}, "it was removed after it had been found"


def test_a_python_study_may_have_a_command_in_place_of_an_objective(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    space = "from hyperopt import hp\nSPACE = {'x': hp.uniform('x', 0, 1)}\n"
    (folder / "train.sh").touch()
    words = ["sh", "train.sh", "{x}"]
    (folder / "commanding.py").write_text(f"{space}STUDY = {{'command': {words}, 'outputs': ['a']}}\n")
    file = load("commanding.py")
    assert file.objective == Command(words=("sh", "train.sh", "{x}"), outputs=("a",), folder=folder)
    assert {*file.code.files} == {"commanding.py", "train.sh"}
    (folder / "doubled.py").write_text(f"{space}STUDY = {{'command': ['x']}}\ndef objective(params): pass\n")
    with pytest.raises(UsageError, match=r'doubled has both objective and STUDY\["command"\]; leave out one of them'):
        load("doubled")
    (folder / "lossy.py").write_text(f"{space}STUDY = {{'loss': 'x'}}\ndef objective(params): pass\n")
    with pytest.raises(UsageError, match="loss is for a command; set command, or leave it out"):
        load("lossy")


#: tables below [space] that are not valid
SPACES = """
lr = {unifrm = [0, 1]}
lr = {uniform = [0]}
lr = {uniform = [0, 1, 2]}
lr = {uniform = [1, 0]}
lr = {uniform = ["a", 1]}
lr = {uniform = [nan, 1]}
lr = {uniform = [0, 1], step = -1}
lr = {uniform = [0, 1], log = [1, 2]}
lr = {log = [0, 1]}
lr = {int = [1, 2.5]}
lr = {int = [1, 5], step = 0.5}
lr = 3
lr = {}
lr = {step = 1}
lr = {choice = []}
lr = {choice = "ab"}
lr = {choice = [1, [2]]}
lr = {choice = [1979-05-27]}
lr = {choice = [1, inf]}
lr = {choice = [1, 2], step = 1}
lr = {choice = {a = 3}}
lr = {choice = {a = {b = {unifor = [0, 1]}}}}
lr = {choice = {a = {lr = {uniform = [0, 1]}}}}
lr = {choice = {a = {b = {uniform = [0, 1]}}, c = {b = {uniform = [0, 2]}}}}
optimizer.lr = {log = [1, 2]}
""".strip().splitlines()

#: whole files that are not valid
FILES = [
    "",
    "command = ['x']",
    "command = ['x']\nspace = 3",
    "command = ['x']\n[space]",
    "[space]\nx = {int = [1, 2]}",
    "comand = ['x']\n[space]\nx = {int = [1, 2]}",
    "command = 'x'\n[space]\nx = {int = [1, 2]}",
    "command = []\n[space]\nx = {int = [1, 2]}",
    "command = ['x', 3]\n[space]\nx = {int = [1, 2]}",
    "command = ['x']\ntrials = 0\n[space]\nx = {int = [1, 2]}",
    "command = ['x']\nloss = 3\n[space]\nx = {int = [1, 2]}",
    "command = ['x']\nloss = {patern = 'x'}\n[space]\nx = {int = [1, 2]}",
    "command = ['x']\nloss = {pattern = 'x'}\n[space]\nx = {int = [1, 2]}",
    "command = ['x']\ninputs = ['no.csv']\n[space]\nx = {int = [1, 2]}",
    "command = ['x']\n[sapce]\nx = {int = [1, 2]}",
    "command = ['{x:int:1:2}']\n[space]\nx = {int = [1, 3]}",
    "command = ['{x:int:1:2}', 3]",
    "command = ['x'\n",
    f"a{'.b' * 40} = 1",
]

#: commands that are not valid, each separated by spaces
COMMANDS = [
    "",
    "x",
    "x {{a:int:1:2}",
    "x {lr}",
    "x {lr:lg:1:2}",
    "x {lr:log:1}",
    "x {lr:log:a:b}",
    "x {lr:log:1:inf}",
    "x {lr:log:1:2:3:4}",
    "x {lr:log:1:2} {lr:log:1:3}",
    "x {lr:log:1:2",
]


def told(make: Any, *given: Any) -> str:
    with pytest.raises(ShadhoError) as refused:
        make(*given)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_what_is_wrong_is_named_by_its_path_with_a_guess(folder: Path) -> None:
    texts = [("command = ['x']\n[space]\n" + line, line) for line in SPACES] + [(text, text) for text in FILES]
    lines = []
    for text, shown in texts:
        (folder / "study.toml").write_text(text)
        lines.append(f"{shown[:100]!r}\n    {told(lambda: compile_space(load('study.toml').space))}")
    lines += [f"{words}\n    {told(lambda words: load(write_command(words.split())), words)}" for words in COMMANDS]
    golden.check("commands_refused", "\n".join(lines).replace(str(folder), "FOLDER"))


def test_deep_and_large_files_are_refused(folder: Path) -> None:
    path = folder / "study.toml"
    nested = "{uniform = [0, 1]}"
    for level in range(300):
        nested = f"{{choice = {{a = {{l{level} = {nested}}}}}}}"
    path.write_text(f"command = ['x']\n[space]\nx = {nested}\n")
    assert "is not TOML: maximum recursion depth" in told(load, "study.toml")
    path.write_text(f"command = ['x']\n[space]\nx = {{choice = [{'1, ' * 1001}]}}\n")
    assert "its length must be at most 1000" in told(load, "study.toml")
    path.write_text("#" * 1_000_001)
    assert "more than 1,000,000 bytes" in told(load, "study.toml")
    path.write_text("a = " + "[" * 5000)
    assert "is not TOML" in told(load, "study.toml")


def test_a_study_whose_name_no_message_could_have_is_refused(folder: Path) -> None:
    (folder / "my study.toml").write_text(STUDY)
    assert "rename it" in told(load, "my study.toml")
    (folder / "study.toml").touch()
    assert told(load, "studi.toml").startswith("there is no file studi.toml here; did you mean study.toml?")
    assert "is outside this folder" in told(load, "../study.toml")
    assert module_name("exp/../study.toml") == "study.toml"
    assert study_file.form_of("study.toml") is not None
    assert {*FORMS} >= {".toml"}


def test_a_command_with_domains_is_the_same_study_as_the_toml_that_is_written_for_it(folder: Path) -> None:
    words = [
        "python", "train.py", "--lr={lr:log:1e-4:1e-1}", "--again", "{lr}", "{n:int:16:64:16}",
        "{m:uniform:-1:0.5:0.25}",
        "{opt:choice:adam:0.10:2:0.5:true:inf:a\"b\\:ü\x7f}", "{{x:y}", '{"a": 1}', "",
    ]  # fmt: skip
    name = write_command(words, "val_loss")
    assert re.fullmatch(r"\.shadho/commands/[0-9a-f]{12}/train\.toml", name)
    written = (folder / name).read_text()
    file = load(name)
    assert file.objective == Command(
        words=("python", "train.py", "--lr={lr}", "--again", "{lr}", "{n}", "{m}", "{opt}", "{{x:y}", '{"a": 1}', ""),
        loss="val_loss",
        folder=folder,
    )
    (folder / "study.toml").write_text(
        'command = ["x"]\n[space]\nlr = {log = [1e-4, 1e-1]}\nn = {int = [16, 64], step = 16}\n'
        "m = {uniform = [-1, 0.5], step = 0.25}\n"
        "opt = {choice = ['adam', '0.10', 2, 0.5, true, 'inf', 'a\"b\\', \"ü\\u007f\"]}\n"
    )
    assert compile_space(file.space).describe() == compile_space(load("study.toml").space).describe()
    assert write_command(words, "val_loss") == name, "the same command has the same file"
    assert (folder / name).read_text() == written
    assert write_command(words) != name
    names = {"bash -x ./run.sh {x:int:1:2}": "run", "./go {x:int:1:2}": "go", "python -m a.b {x:int:1:2}": "a-b"}
    for command, stem in names.items():
        assert Path(write_command(command.split())).stem == stem


def test_digits_that_are_too_many_for_a_number_are_a_text() -> None:
    assert form_of(f"choice:{'9' * 400}") == {"choice": ["9" * 400]}


def test_the_documented_commands_of_other_environments_are_studies(folder: Path) -> None:
    text = text_of("scripts").replace("\\\n", "")
    for command in (found := re.findall(r"^shadho-celery run -- (.*\{.*)", text, re.MULTILINE)):
        objective = load(write_command(shlex.split(command))).objective
        assert isinstance(objective, Command)
        assert ("--lr", "{lr}") in [*pairwise(objective.words)]
    assert {command.split()[0] for command in found} >= {"conda", "uv", "apptainer", "docker"}


def test_a_word_that_is_not_text_is_refused_before_a_file_is_written(folder: Path) -> None:
    assert "has a word that is not text in UTF-8" in told(write_command, ["x", "\udcff{lr:log:1:2}"])
    assert not (folder / ".shadho").exists()


def test_the_oldest_files_of_commands_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toml_study, "MOST_COMMANDS", 2)
    names = [write_command(["x", f"{{x:int:0:{high}}}"]) for high in (1, 2, 3)]
    assert [(folder / name).exists() for name in names] == [False, True, True]
    shutil.rmtree(folder / ".shadho")
    (folder / ".shadho").touch()
    assert "cannot be written: " in told(write_command, ["x", "{x:int:0:1}"])
