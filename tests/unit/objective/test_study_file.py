"""A study file is a module with SPACE and objective; anything else is refused with cause and remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from services.cases import cases

from shadho_celery.core.settings import OF_COMMANDS, SETTINGS, StudySettings
from shadho_celery.errors import NestedStart, UsageError
from shadho_celery.objective.study_file import (
    WITHIN,
    check_modules,
    cores_per_trial,
    is_program,
    literal_settings,
    load,
    module_name,
    preloaded,
    refuse_libraries,
    refuse_nested,
    within,
)

GOOD = "SPACE = {'x': 1}\ndef objective(params): return 0.0\n"


#: keys and values that are rare
ODD = """
import enum, fractions, numbers, numpy
class Key(str, enum.Enum):
    TRIALS = 'trials'
class Bad:
    def __float__(self): raise RuntimeError('no')
numbers.Real.register(Bad)
DEEP = {}
for _ in range(3000): DEEP = {'all': DEEP}
STUDY = {}
STUDY['cost'] = STUDY
SELF = STUDY
"""


def forget() -> None:
    """Drop the modules of these names, which differ from test to test."""
    for name in [name for name in sys.modules if name.partition(".")[0] in {"a_study_of_mine", "a_folder_of_mine"}]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Write a module into the working directory, which is on no path yet; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])

    def write(text: str, name: str = "a_study_of_mine") -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    forget()
    yield write
    forget()


def refusal(module: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(module)
    message = str(caught.value)
    assert "\n" not in message
    return message


@cases(
    "text, says",
    [
        (
            "from hyperopt import hp\nSPACE = hp.unifrom('x', 0, 1)\n",
            "SPACE = hp.unifrom('x', 0, 1)); did you mean uniform?",
        ),
        ("SPCE = {}\ndef objective(values): return 0.0\n", "it lacks SPACE; did you mean SPCE? see"),
        ("import sklaern_\n", "line 1: import sklaern_); install what it needs"),
        ("SPACE = 1\n", "lacks objective"),
        ("def objective(params): return 0\n", "lacks SPACE"),
        ("", "lacks SPACE and objective"),
        (
            "import argparse, sys\nsys.exit(argparse.ArgumentParser())\n",
            "run a script as it is: shadho-celery run -- python a_study_of_mine.py --lr {lr:log:1e-4:1e-1}",
        ),
    ],
)
def test_what_a_study_file_lacks_or_misspells_is_named_with_its_line_and_a_similar_name(
    write: Callable[..., str], text: str, says: str
) -> None:
    forget()
    assert says in refusal(write(text))


def test_a_module_in_the_working_directory_is_found(write: Callable[..., str]) -> None:
    file = load(write(GOOD + "STUDY = {'trials': 7, 'cores': 2}\n"))
    assert (file.module, file.space, file.stated) == ("a_study_of_mine", {"x": 1}, {"trials": 7, "cores": 2})
    assert file.objective({}) == 0.0
    forget()
    assert load(write(GOOD)).stated == {}


def test_every_setting_can_be_stated(write: Callable[..., str]) -> None:
    stated = {
        "trials": 7,
        "seconds": 60,
        "target": -0.5,
        "early_stop": 30,
        "max_cost": 12.5,
        "objectives": {"error": "minimize", "accuracy": "maximize"},
        "sampler": "tpe",
        "policy": "fifo",
        "place_by": "money",
        "deadline": "4h",
        "shares": "promise",
        "pool": 8,
        "cost": {"all": 3.0},
        "classes": ["gpu", "cpu"],
        "cores": 2,
        "slots": 1,
        "gpus": "replicas",
        "gang_wait_seconds": 5,
        "pruner": "median",
        "fidelity": {"least": 1, "most": 9, "how": "asha"},
        "keep": {"best": 3},
        "speculate": False,
        "weight": 2,
        "at_once": 4,
        "repeats": 2,
        "trial_timeout": 9.5,
        "max_failures": 5,
        "preload": ["numpy"],
        "fresh": True,
        "track": "tensorboard:runs",
    }
    of_commands = {"command", *OF_COMMANDS}
    # `direction` is short for objectives, and `where` is a function.
    assert {*stated} == {*StudySettings.__struct_fields__} - {"direction", "where", *of_commands}
    file = load(write(GOOD + f"STUDY = {stated!r}\n"))
    assert file.stated == {**stated, "classes": ("gpu", "cpu"), "preload": ("numpy",)}


def test_a_wrong_key_of_keep_is_named(write: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match=r"^STUDY of \w+: keep: not allowed as a key: 'bset'; .*\{\"best\": 3\}"):
        load(write(GOOD + "STUDY = {'keep': {'bset': 3}}\n"))


def test_a_direction_is_short_for_an_objective(write: Callable[..., str]) -> None:
    file = load(write(GOOD + "STUDY = {'trials': 3, 'direction': 'maximize'}\n"))
    assert file.stated == {"trials": 3, "objectives": {"loss": "maximize"}}
    assert load(write(GOOD + "STUDY = {'direction': 'minimize'}\n", "one_that_minimizes")).stated == {
        "objectives": None
    }
    both = "STUDY = {'direction': 'maximize', 'objectives': {'error': 'minimize'}}\n"
    assert "direction (--maximize) is short for objectives" in refusal(write(GOOD + both, "one_with_both"))


@pytest.mark.parametrize("name", ["a,b", "a b", "-a", "a=1", "", "a\nb", "\ud800", "x" * 61])
def test_a_class_whose_name_is_not_plain_is_refused(write: Callable[..., str], name: str) -> None:
    message = refusal(write(GOOD + f"STUDY = {{'classes': ['cpu', {name!a}]}}\n"))
    assert ": classes: " in message
    assert "up to 60 letters" in message


@pytest.mark.parametrize("key", ["seconds", "target", "gang_wait_seconds", "weight", "trial_timeout"])
def test_a_number_may_be_one_of_numpys_floats(write: Callable[..., str], key: str) -> None:
    """numpy's functions return them; they are Python's floats, too."""
    file = load(write(GOOD + f"import numpy\nSTUDY = {{{key!r}: numpy.sqrt(2.25)}}\n"))
    assert file.stated == {key: 1.5}


@pytest.mark.parametrize("key", ["numpy.str_('trials')", "Key.TRIALS"])
def test_a_key_may_be_a_text_of_numpys_or_of_an_enum(write: Callable[..., str], key: str) -> None:
    file = load(write(GOOD + ODD + f"STUDY = {{{key}: 2}}\n"))
    assert file.stated == {"trials": 2}


@pytest.mark.parametrize("study", ["SELF", "{'cost': DEEP}", "{'fidelity': DEEP}", "{'fidelity': {'\\ud800': 1}}"])
def test_a_table_within_itself_or_too_deep_is_left_to_what_reads_it(write: Callable[..., str], study: str) -> None:
    assert len(repr(load(write(GOOD + ODD + f"STUDY = {study}\n")).stated)) < 200


def test_a_module_in_a_folder_is_found_by_dots_and_by_path(write: Callable[..., str]) -> None:
    write(GOOD, "a_folder_of_mine.study")
    assert load("a_folder_of_mine.study").module == "a_folder_of_mine.study"
    assert load("a_folder_of_mine/study.py").module == "a_folder_of_mine.study"
    assert load("./a_folder_of_mine/study.py").module == "a_folder_of_mine.study"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("tasks.svm", "tasks.svm"),
        ("tasks/svm.py", "tasks.svm"),
        ("./my_study.py", "my_study"),
        ("tasks/../tasks/svm.py", "tasks.svm"),
    ],
)
def test_a_path_names_its_module(given: str, name: str) -> None:
    assert module_name(given) == name
    assert module_name(str(Path("tasks/svm.py").absolute())) == "tasks.svm"


@pytest.mark.parametrize("name", ["my-study.py", "my-study", "2nd.py", "tasks/my study.py", "a;b"])
def test_a_name_that_no_import_can_have_is_refused(name: str) -> None:
    assert "letters, digits and underscores" in refusal(name)


def test_a_file_outside_of_the_folder_is_refused_with_the_place_to_go_to() -> None:
    assert "go to ../mine and give model.py" in refusal("../mine/model.py")


@pytest.mark.parametrize(("name", "place"), [("redis", "redis.py"), ("queue", "queue.py"), ("numpy.mine", "numpy")])
def test_a_study_that_has_the_name_of_a_library_is_refused_naming_both(
    name: str, place: str, write: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / f"{name.replace('.', '/')}.py").write_text("SPACE = objective = None\n")
    message = refusal(name)
    assert f"{tmp_path / place} has the name of " in message
    assert f" {name.partition('.')[0]}" in message
    assert f"rename it, such as to my_{place}" in message


def test_a_study_may_be_installed_as_well_as_lie_here(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write(GOOD)
    site = tmp_path / "site-packages"
    (site / "mine").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    monkeypatch.syspath_prepend(site)
    text = (tmp_path / f"{module}.py").read_text()
    for folder in (site, tmp_path):
        (folder / f"{module}.py").write_text(text)
        (folder / "mine/__init__.py").write_text("")
        (folder / "mine/study.py").write_text(text + f"# {folder}\n")
    refuse_libraries([module, "mine.study"])
    (site / f"{module}.py").write_text("another = 1\n")
    with pytest.raises(UsageError, match=f"has the name of the library {module} "):
        refuse_libraries([module])


def test_an_objective_that_takes_no_values_is_refused(write: Callable[..., str]) -> None:
    name = write("SPACE = 1\ndef objective(): return 0.0\n", "takes_none")
    assert "takes no argument, but it gets the values" in refusal(name)
    for place, taken in enumerate(("*args", "values", "values, context", "values, *, more=1", "**values")):
        name = write(f"SPACE = 1\ndef objective({taken}): return 0.0\n", f"takes_{place}")
        if taken == "**values":
            assert "takes (**values), but it is called with the values of a trial as its one argument" in refusal(name)
        else:
            assert load(name).module == name
    for place, text in enumerate(("async def objective(values): return 0.0", "def objective(values): yield 0.0")):
        assert "a coroutine or a generator" in refusal(write(f"SPACE = 1\n{text}\n", f"suspended_{place}"))


def test_a_module_of_a_similar_name_is_suggested(write: Callable[..., str]) -> None:
    write("SPACE = 1\n", "digits_study")
    assert "there is no module digit_study here; did you mean digits_study?" in refusal("digit_study")
    assert "did you mean" not in refusal("elsewhere")


@pytest.mark.parametrize("text", ["raise RuntimeError", "import no_such_library", "raise SystemExit"])
def test_a_worker_gets_a_module_whose_package_fails_at_its_import(write: Callable[..., str], text: str) -> None:
    """The worker reports the failure, and tries again after an edit; it is no missing module."""
    write(text, "a_folder_of_mine.__init__")
    check_modules([write(GOOD, "a_folder_of_mine.study"), "a_folder_of_mine/study.py"])
    assert "a_folder_of_mine" not in sys.modules
    for name in ("a_folder_of_mine.studdy", "a_folder_of_mine.study.part", "a_folder_of_mine..study"):
        with pytest.raises(UsageError, match="there is no module"):
            check_modules([name])


@pytest.mark.parametrize("name", ["no_such_study", "tasks.no_such_study", "no.such.study", "no_such_study.py", "", "."])
def test_a_module_that_is_not_there_is_refused(name: str) -> None:
    assert "there is no module" in refusal(name)


@pytest.mark.parametrize("key", ["7", "None", "('trials',)", "'\\ud800'", "'trails'"])
def test_an_unknown_key_is_named_with_the_known_ones(write: Callable[..., str], key: str) -> None:
    message = refusal(write(GOOD + f"STUDY = {{{key}: 7}}\n"))
    shown = key.replace("'", '"') if key.startswith("'") else key
    assert f"STUDY[{shown}] is not a setting" in message
    assert all(name in message for name in StudySettings.__struct_fields__)


@pytest.mark.parametrize("cost", ["{'all': 3.0}", "{}", "lambda params: params['x']", "len"])
def test_a_cost_is_a_mapping_or_a_function(write: Callable[..., str], cost: str) -> None:
    file = load(write(GOOD + f"STUDY = {{'cost': {cost}, 'shares': 'promise', 'policy': 'cost'}}\n"))
    assert file.stated["shares"] == "promise"
    assert callable(file.stated["cost"]) or isinstance(file.stated["cost"], dict)


@pytest.mark.parametrize(
    "setting",
    [
        *("'cost': 3", "'cost': 'much'", "'cost': [1.0]"),
        *("'shares': 1", "'shares': ''", "'sampler': ''", "'policy': None"),
        *("'trials': 0", "'trials': 1.5", "'trials': True", "'trials': '7'", "'cores': 0", "'cores': [2]"),
        *("'seconds': '1'", "'seconds': float('nan')", "'target': float('inf')", "'target': 10**400"),
        *("'classes': {'a', 'b'}", "'classes': frozenset('a')"),
        *("'weight': fractions.Fraction(10**400)", "'weight': 10**5000", "'trials': DEEP", "'weight': Bad()"),
        *("'weight': 1e305", "'trial_timeout': 1.1e9", "'gang_wait_seconds': 1e305"),
        *("'classes': 'cpu'", "'classes': 3", "'classes': ['']", "'classes': ['cpu', 1]"),
        *("'slots': 0", "'slots': True", "'slots': ''", "'slots': 1.5", "'slots': None"),
        *("'gpus': 0", "'gpus': -1", "'gpus': True", "'gpus': ''", "'gpus': 1.5", "'gpus': 2, 'slots': 2"),
        *("'gang_wait_seconds': 0", "'weight': 0", "'weight': -1", "'trial_timeout': 0", "'trial_timeout': True"),
        *("'fidelity': 3", "'fidelity': [1, 9]", "'fidelity': {1: 9}", "'speculate': 1", "'speculate': 'yes'"),
    ],
)
def test_a_setting_of_the_wrong_form_is_refused_saying_what_it_should_be(
    write: Callable[..., str], setting: str
) -> None:
    message = refusal(write(GOOD + ODD + f"STUDY = {{{setting}}}\n"))
    name = setting.split("'")[1]
    assert f": {name}: " in message
    assert SETTINGS[name].meaning in message


def test_settings_that_are_no_dict_are_refused(write: Callable[..., str]) -> None:
    assert "STUDY" in refusal(write(GOOD + "STUDY = [('trials', 7)]\n"))


# Cores, without an import


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("STUDY = {'trials': 3, 'cores': 4}", 4),
        ("STUDY: dict[str, object] = {'cores': 3}", 3),
        ("STUDY = OTHER = {'cores': 5}", 5),
        ("STUDY = {'trials': 3}", 1),
        ("STUDY = {'cores': 'all'}", 1),
        ("STUDY = {'cores': 0}", 1),
        ("STUDY = {'cores': -2}", 1),
        ("STUDY = {**DEFAULTS, 'cores': 2}", 2),
        ("STUDY = dict(cores=4)", 1),
        ("if True:\n    STUDY = {'cores': 4}", 1),
        ("STUDY: dict[str, object]", 1),
        ("this is no Python", 1),
        ("", 1),
    ],
)
def test_the_cores_of_a_trial_are_read_where_they_are_written_plainly(
    write: Callable[..., str], text: str, cores: int
) -> None:
    assert cores_per_trial([write("raise RuntimeError('imported')\n" + text)]) == cores
    assert "a_study_of_mine" not in sys.modules


def test_the_greediest_of_a_workers_modules_decides(write: Callable[..., str]) -> None:
    write("STUDY = {'cores': 2}", "a_folder_of_mine.one")
    write("STUDY = {'cores': 6}", "a_folder_of_mine.two")
    write("STUDY = {}", "a_folder_of_mine.three")
    names = [f"a_folder_of_mine.{name}" for name in ("one", "two", "three")]
    assert cores_per_trial([*names, "no_such_study", "json"]) == 6
    assert cores_per_trial([]) == 1


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("STUDY = {'preload': ['numpy', 'scipy.stats']}", ["numpy", "scipy.stats"]),
        ("STUDY = {'preload': ('json', 'numpy', 'numpy')}", ["json", "numpy"]),
        ("STUDY = {'preload': ['no_such_library', 'a_study_of_mine', '../x', 'numpy; os', 3]}", []),
        ("STUDY = {'preload': 'numpy'}", []),
        ("STUDY = {'preload': [name for name in 'ab']}", []),
        ("", []),
    ],
)
def test_libraries_to_preload_are_read_where_they_are_written_plainly(
    write: Callable[..., str], text: str, names: list[str]
) -> None:
    assert preloaded([write("raise RuntimeError('imported')\n" + text)]) == names


@pytest.mark.parametrize("name", ["no_such_library", "a_study_of_mine"])
def test_what_is_not_an_installed_library_cannot_be_preloaded(write: Callable[..., str], name: str) -> None:
    module = write(
        f"SPACE = {{}}\nSTUDY = {{'preload': ['numpy', {name!r}]}}\ndef objective(params):\n    return 0.0\n"
    )
    with pytest.raises(UsageError, match=rf"STUDY of a_study_of_mine: preload: .{name}. is not an installed library"):
        load(module)


def test_a_study_on_workers_that_an_import_starts_is_refused_naming_the_guard(write: Callable[..., str]) -> None:
    """Also by a process that the import starts; the program may start one before and after."""
    start = "from shadho_celery.objective.study_file import refuse_nested\n"
    refuse_nested()
    name = write(GOOD + start + "refuse_nested()\n")
    with pytest.raises(NestedStart, match=r'^a study .* the import of a_study_of_mine.* if __name__ == "__main__":$'):
        load(name)
    child = "import subprocess, sys\nSTARTED = subprocess.run([sys.executable, '-c', {!r}], capture_output=True)\n"
    forget()
    load(write(GOOD + child.format(start + "refuse_nested()")))
    assert b"NestedStart" in sys.modules[name].STARTED.stderr
    refuse_nested()
    assert WITHIN not in os.environ


def test_a_study_that_its_own_import_starts_is_refused_whoever_imports_it(write: Callable[..., str]) -> None:
    """Here no study is loaded: a program imports the module that starts it."""
    own = (
        "from shadho_celery.objective.study_file import is_program, refuse_nested\nIS_PROGRAM = is_program(__name__)\n"
    )
    name = write(GOOD + own + "try: refuse_nested(__name__)\nexcept Exception as error: REFUSED = error\n")
    load(name)
    forget()
    found = __import__(name)
    assert isinstance(found.REFUSED, NestedStart)
    assert found.IS_PROGRAM
    refuse_nested(name)
    assert not is_program(name)


def test_a_study_on_workers_within_a_trial_is_refused() -> None:
    with within("a trial"), pytest.raises(NestedStart, match=r"within a trial.*use no workers"):
        refuse_nested("another")


def test_settings_that_are_literals_are_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "1 / 0\nSTUDY = {'cores': 2, 'classes': ['a', 'b'], 'slots': 1 + 1, 'trials': number, **more}\n"
    (tmp_path / "never_imported.py").write_text(text)
    assert literal_settings("never_imported") == {"cores": 2, "classes": ["a", "b"]}
    assert literal_settings("nowhere_at_all") is None
