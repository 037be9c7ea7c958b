"""A cluster file is understood, or refused in one line that names the file and the cause."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from services.cases import cases

from shadho_celery.errors import UsageError
from shadho_celery.simulate import EXAMPLE, main
from shadho_celery.simulation.executor import LARGEST, LEASE_SECONDS, MOST_WORKERS, Change, Fleet, SimulatedClass
from shadho_celery.simulation.simulation import BOUNDS, DRAWN, Cluster, Machine, load, read_fleet, simulate

#: the least that a file must say
LEAST = """
from hyperopt import hp
SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"seconds": 100}
CLUSTER = {"classes": {"cpu": {"workers": 2}}}
def seconds(params, machine):
    return 10
"""

#: each file has a name of its own, as Python imports a module once
_numbers = count()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def written(text: str) -> str:
    path = Path(f"cluster_{next(_numbers)}.py")
    path.write_text(text, encoding="utf-8")
    return str(path)


def understood(text: str) -> Cluster:
    return load(written(text))


def refusal(text: str, *words: str) -> str:
    """What the command says of this file, with CLUSTER for its name: one line, and exit code 2."""
    file = written(text)
    result = CliRunner().invoke(main, [file, *words])
    assert isinstance(result.exception, SystemExit), result.output
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert len(line) < 600
    return line.removeprefix("Error: ").replace(file.removesuffix(".py"), "FILE")


def fleet_with(**facts: Any) -> dict[str, Any]:
    return {"classes": {"cpu": {"workers": 2}}, **facts}


def class_with(**facts: Any) -> dict[str, Any]:
    return {"classes": {"cpu": {"workers": 2, **facts}}}


# What is understood


def test_the_least_file_leaves_the_rest_to_the_defaults() -> None:
    cluster = understood(LEAST)
    assert cluster.fleet == Fleet(classes={"cpu": SimulatedClass(workers=2)})
    assert cluster.fleet.lease_seconds == LEASE_SECONDS
    assert cluster.settings == {"seconds": 100}
    assert [cluster.ask(name, {"x": 0.5}) for name in ("loss", "memory_gib", "failure_rate")] == [0.0, 0.0, 0.0]
    found = simulate(cluster)
    assert (found.complete, found.seconds, found.best) == ({"all": 20}, 100.0, 0.0)


def test_the_example_explains_every_name_and_key_and_all_of_it_is_understood() -> None:
    names = {field.name for field in fields(Cluster)} - {"space", "fleet", "settings", "name"}
    assert names == {*BOUNDS, *DRAWN}
    assert all(f"\ndef {name}(" in EXAMPLE for name in names)
    keys = {*Fleet.__struct_fields__, *SimulatedClass.__struct_fields__, "at", "class"}
    assert all(f'"{key}": ' in EXAMPLE for key in keys)
    cluster = understood(re.sub(r'# ("\w+": )', r"\1", EXAMPLE))
    assert cluster.settings["trials"] == 1000
    assert [each.workers for each in cluster.fleet.classes.values()] == [4, 8, 20]
    assert cluster.fleet.changes[1] == Change(at=5400, compute_class="cpu", workers=15)
    flat = {"family": "flat", "x": 0.5, "width": 0.5}
    assert cluster.ask("seconds", flat, Machine(compute_class="cpu", slots=1)) == 220.0


def test_classes_and_prices_may_stand_in_a_toml_file() -> None:
    Path("classes.toml").write_text("[classes.gpu]\nworkers = 1\nprice = 2.5\n[classes.cpu]\nworkers = 3\n")
    fleet = read_fleet({"classes": "classes.toml"})
    assert {name: (each.workers, each.price) for name, each in fleet.classes.items()} == {
        "gpu": (1, 2.5),
        "cpu": (3, None),
    }
    with pytest.raises(UsageError, match=r"the class spec none\.toml cannot be read"):
        read_fleet({"classes": "none.toml"})


def test_a_class_may_have_no_workers_where_another_has_some_or_some_come_later() -> None:
    assert [*read_fleet({"classes": {"cpu": {"workers": 2}, "gpu": {"workers": 0}}}).classes] == ["cpu", "gpu"]
    later = [{"at": 5, "class": "cpu", "workers": 3}]
    assert read_fleet({"classes": {"cpu": {"workers": 0}}, "changes": later}).changes[0].workers == 3


def test_the_number_of_slots_of_a_trial_is_a_setting_and_seconds_see_it() -> None:
    text = LEAST.replace('"seconds": 100', '"seconds": 100, "gpus": [1, 2]').replace(
        "return 10", "return 8 / machine.slots"
    )
    found = simulate(understood(text.replace('"workers": 2', '"workers": 2, "slots": 2')))
    assert {(trial.slots, trial.outcome.seconds) for trial in found.study.trials} == {(1, 8.0), (2, 4.0)}


# What is refused


@cases(
    ("text", "message"),
    [
        (LEAST.replace("CLUSTER", "CLUSTERS"), "FILE is not a cluster file: it lacks CLUSTER; did you mean CLUSTERS? "),
        (LEAST.replace("def seconds", "def duration"), "FILE is not a cluster file: it lacks seconds; "),
        ("import no_such_library\n" + LEAST, "FILE cannot be imported: No module named 'no_such_library'"),
        (LEAST + "\n1 / 0\n", "FILE cannot be imported: ZeroDivisionError"),
        (LEAST + "\nloss = 4\n", "loss of FILE is not a function; "),
        (LEAST + "\nCLUSTER = 4\n", "CLUSTER of FILE: it is not a dict; "),
        (LEAST + "\nSTUDY['second'] = 4\n", 'FILE: STUDY["second"] is not a setting; did you mean seconds? '),
        (LEAST + "\nSTUDY['pruner'] = 'median'\n", 'STUDY["pruner"] of FILE is not simulated; leave it out'),
        (LEAST + "\nSTUDY = {}\n", "a simulation needs an end; give seconds or trials"),
        (LEAST + "\nSTUDY['gpus'] = 2\n", "a trial takes 2 slots, but the largest worker has 1; see gpus"),
        (LEAST.replace("return 10", "return params['y']"), "seconds of FILE failed for {'x': 0."),
        (LEAST.replace("return 10", "return params['y']"), ": KeyError: 'y' (FILE.py:7); fix it"),
        (LEAST.replace("(params, machine)", "(params)"), "positional argument"),
        (LEAST.replace("return 10", "return None"), "seconds of FILE failed for "),
        (LEAST.replace("return 10", "return 0"), "seconds of FILE gives 0 for "),
        (LEAST.replace("return 10", "return float('nan')"), "but must give 0.001 to 1e+15"),
        (LEAST + "\ndef failure_rate(params): return 1.5", "failure_rate of FILE gives 1.5 for "),
        (LEAST + "\ndef loss(params): return float('inf')", "loss of FILE gives inf for "),
        (LEAST + "\ndef size(generator, count): return 1.0", "size of FILE must give 131072 finite numbers from 0"),
        (LEAST + "\ndef straggler(generator, count): return [-1] * count", "straggler of FILE must give 131072 "),
        (LEAST + "\ndef size(generator): return 1.0", "size of FILE failed for "),
    ],
)
def test_a_file_that_is_not_valid_is_one_line_with_the_cause(text: str, message: str) -> None:
    assert message in refusal(text)


def test_a_file_that_is_not_there_is_one_line_and_so_is_one_of_toml() -> None:
    for name, message in {"missing.py": "there is no module missing here", "c.toml": "--example prints"}.items():
        result = CliRunner().invoke(main, [name])
        assert (result.exit_code, result.stdout) == (2, "")
        [line] = result.stderr.splitlines()
        assert message in line


@cases(
    ("described", "message"),
    [
        ({}, "classes: "),
        ({"classes": {}}, "classes: "),
        ({"classes": 4}, "classes: this is not a table but a number"),
        ({"classes": {"cpu": 4}}, "classes.cpu: this is not a table but a number"),
        ({"classes": {"cpu": {}}}, "classes.cpu.workers: it is missing"),
        ({"classes": {"a b": {"workers": 1}}}, "a b"),
        (class_with(worker=2), "classes.cpu.worker: there is no such key; did you mean workers? "),
        (fleet_with(change=[]), "change: there is no such key; did you mean changes? "),
        (class_with(workers=0), "classes: there are no workers"),
        (class_with(workers=1.5), "classes.cpu.workers: 1.5 is not a whole number"),
        (class_with(workers=MOST_WORKERS + 1), "classes.cpu.workers: "),
        (class_with(return_seconds=5), "classes.cpu.return_seconds: "),
        (class_with(return_seconds=5), "its workers stay; give preemption_seconds or for_seconds"),
        (class_with(for_seconds=5, notice=False), "its workers are not preempted; give preemption_seconds"),
        (fleet_with(checkpoints="machine", checkpoint_seconds=5), "only from a shared checkpoint"),
        (fleet_with(checkpoints="cloud"), "checkpoints: "),
        (fleet_with(changes={"at": 1}), 'changes: this is not a list but a table; write [{"at": 60'),
        (fleet_with(changes=[{"class": "cpu", "workers": 1}]), "changes.0.at: it is missing"),
        (fleet_with(changes=[{"at": 1, "class": "gpu", "workers": 1}]), "changes.0.class: there is no class 'gpu'; "),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_by_its_key(described: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_fleet(described)
    assert message in str(refused.value)
    assert str(refused.value).isprintable()


#: numbers of a description, and what may be added so that they are allowed
NUMBERS = {
    **{f"classes.cpu.{name}": class_with for name in ("workers", "slots", "memory_gib", "price", "startup_seconds")},
    **{f"classes.cpu.{name}": class_with for name in ("preemption_seconds", "for_seconds")},
    **dict.fromkeys(("seed", "lease_seconds", "handover_seconds", "steps"), fleet_with),
}


@cases("value", [-1, True, "4", [4], {"a": 4}, float("nan"), float("inf"), 1e300, 10**400, None, b"4"])
def test_what_is_no_number_or_out_of_its_bounds_is_refused_by_its_key(value: object) -> None:
    for key, described in NUMBERS.items():
        name = key.rpartition(".")[2]
        read_fleet(described(**{name: 1}))
        if value is None and name in {"price", "preemption_seconds", "for_seconds"}:
            continue
        with pytest.raises(UsageError, match=f"^{re.escape(key)}: ") as refused:
            read_fleet(described(**{name: value}))
        assert len(str(refused.value)) < 400


def test_a_change_may_be_as_great_as_a_machine_can_count() -> None:
    for workers, is_allowed in ((-MOST_WORKERS, True), (MOST_WORKERS + 1, False)):
        described = fleet_with(changes=[{"at": LARGEST, "class": "cpu", "workers": workers}])
        if is_allowed:
            assert read_fleet(described).changes[0].workers == workers
        else:
            with pytest.raises(UsageError, match=r"^changes\.0\.workers: "):
                read_fleet(described)
