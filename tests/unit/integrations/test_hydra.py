"""Hydra's sweeper: overrides as a space, the command of a job, its result, and what is refused before anything runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from services.cases import cases
from services.extras import needed

from shadho_celery.core.files import SWEEPS
from shadho_celery.errors import UsageError
from shadho_celery.objective.script import PARAMS, RESULT
from shadho_celery.objective.study_file import load
from shadho_celery.objective.toml_study import write_study
from shadho_celery.space.compile import compile_space

hydra = needed("shadho_celery.integrations.hydra")
OverridesParser, OmegaConf = hydra.OverridesParser, hydra.OmegaConf
JobReturn, JobStatus = (getattr(needed("hydra.core.utils"), name) for name in ("JobReturn", "JobStatus"))

#: what is written on a command line, and the domain that it is
DOMAINS: list[tuple[str, dict[str, Any]]] = [
    ("x=interval(0,1)", {"uniform": [0.0, 1.0]}),
    ("x=interval(-1,2.5)", {"uniform": [-1.0, 2.5]}),
    ("x=tag(log, interval(1e-4,1e-1))", {"log": [1e-4, 1e-1]}),
    ("x=int(interval(1,8))", {"int": [1, 8]}),
    ("x=int(tag(log, interval(1,64)))", {"logint": [1, 64]}),
    ("x=tag(log, int(interval(1,64)))", {"logint": [1, 64]}),
    ("x=adam,sgd", {"choice": ["adam", "sgd"]}),
    ("x=choice(adam, sgd)", {"choice": ["adam", "sgd"]}),
    ("x=shuffle(sort(2,1,3))", {"choice": [1, 2, 3]}),
    ("x=1,0.5,true,null", {"choice": [1, 0.5, True, "null"]}),
    ("x=float(1,2)", {"choice": [1.0, 2.0]}),
    ("x='a b',\"c,d\"", {"choice": ["'a b'", '"c,d"']}),
    ("x=[1,2],[3]", {"choice": ["[1,2]", "[3]"]}),
    ("x={a:1},{a:2}", {"choice": ["{a:1}", "{a:2}"]}),
    ("x=range(1,5)", {"int": [1, 4], "step": 1}),
    ("x=range(5)", {"int": [0, 4], "step": 1}),
    ("x=range(16,65,16)", {"int": [16, 64], "step": 16}),
    ("x=range(4,0,-2)", {"int": [2, 4], "step": 2}),
    ("x=range(1,9,3)", {"choice": [1, 4, 7]}),
    ("x=range(3,4)", {"choice": [3]}),
    ("x=range(0,1,0.25)", {"uniform": [0, 0.75], "step": 0.25}),
    ("x=range(0.5,2)", {"choice": [0.5, 1.5]}),
    ("x=float(range(1,4))", {"uniform": [1.0, 3.0], "step": 1.0}),
]


def parsed(*lines: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = hydra.space_of(OverridesParser.create().parse_overrides([*lines]))
    return found


@cases("line, form", DOMAINS)
def test_an_override_with_several_values_is_a_domain(line: str, form: dict[str, Any]) -> None:
    found = parsed(line)["x"]
    if "shuffle" in line:
        found["choice"].sort()
    assert found == form
    assert [*map(type, form.values())] == [*map(type, found.values())]


@cases("line", [line for line, _ in DOMAINS])
def test_each_of_these_domains_is_searched(line: str) -> None:
    """The file that a sweep writes is read by the workers as the same space."""
    form = parsed(line)["x"]
    study = load(write_study("a test", {"command": ["python", "{args}"], "space": {"x": form}}, "app.py", SWEEPS))
    space = compile_space(study.space)
    values = {space.evaluate(each)["x"] for each in space.sample(np.random.default_rng(0), 20)}
    if "choice" in form:
        assert values <= {*form["choice"]}
    else:
        low, high = next(iter(form.values()))
        assert all(low <= each <= high for each in values)
        assert {type(each) for each in values} == {int if {"int", "logint"} & form.keys() else float}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_keys_keep_their_groups_packages_and_prefixes() -> None:
    lines = ("db@src=x,y", "+opt.lr=interval(0,1)", "++deep.er=1,2", "fixed=3", "~gone")
    assert [*parsed(*lines)] == ["db@src", "+opt.lr", "++deep.er"]


def test_a_key_that_is_a_placeholder_of_commands_gets_an_equivalent_name() -> None:
    assert [*parsed("seed=1,2", "+trial=1,2")] == ["++seed", "+trial"]


@cases(
    "line, message",
    [
        ("x=1", "no override has several values; give some, such as opt=adam,sgd"),
        ("x=tag(lgo, interval(1,2))", "x=tag(lgo, interval(1,2)): lgo is no tag here; the one tag is log"),
        ("x=tag(log, choice(1,2))", "log is no tag here"),
        ("x=tag(log, range(1,5))", "log is no tag here"),
        ("x=range(5,1)", "x=range(5,1) has no values; give some, such as a,b or range(START, STOP)"),
        ("x=range(1,5,0)", "x=range(1,5,0) has no values"),
        ("x=range(0,1,0.0)", "x=range(0,1,0.0) has no values"),
        ("x=shuffle(range(5,1))", "x=shuffle(range(5,1)) has no values"),
    ],
)
def test_what_is_no_domain_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parsed(line)
    assert message in str(error.value)


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Begin a sweep with these overrides and keys of hydra.sweeper; its error."""

    def begin(*arguments: str, **given: Any) -> str:
        sweeper = made(monkeypatch, *arguments, **given)
        with pytest.raises(SystemExit) as ended:
            sweeper.sweep([*arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    return begin


def made(monkeypatch: pytest.MonkeyPatch, *arguments: str, of_hydra: tuple[str, ...] = (), **given: Any) -> Any:
    """Return a sweeper as Hydra makes it for ``python -X dev app.py -m --config-name tiny ...``."""
    words = ["app.py", "-m", "--config-name", "tiny", *arguments, *of_hydra]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", *words])
    sweeper = hydra.ShadhoSweeper(params={}, **given)
    overrides = {"task": [*arguments], "hydra": [*of_hydra, "hydra.mode=MULTIRUN"]}
    config = OmegaConf.create({"hydra": {"overrides": overrides, "sweep": {"dir": "multirun"}}})
    sweeper.setup(hydra_context=SimpleNamespace(config_loader=None), task_function=None, config=config)
    monkeypatch.setattr(sweeper, "validate_batch_is_legal", lambda batch: None)
    return sweeper


@cases(
    "given, message",
    [
        ({"trails": 3}, "Error: there is no key of hydra.sweeper 'trails'; did you mean trials? "),
        ({"resum": True}, "did you mean resume? "),
        ({"command": ["x"]}, "Error: there is no key of hydra.sweeper 'command'"),
        ({"fidelity": {"most": 9}}, "Error: there is no key of hydra.sweeper 'fidelity'"),
        ({"trials": "many"}, "Error: trials: 'many' is not a whole number"),
        ({"keep": {"worst": 1}}, "keep: "),
        ({"resume": True}, "there is no study of .shadho/sweeps/"),
        ({"resume": "yes"}, "resume: "),
        ({"store": "nowhere"}, "nowhere"),
        ({"workers": {"cpu": 0}}, "workers: cpu is 0; give a whole number from 1"),
        ({"sampler": "tpr"}, "did you mean tpe?"),
        ({"direction": "up"}, "direction: "),
        ({"study": "a/b"}, "study: "),
    ],
)
def test_a_wrong_setting_is_one_line(sweep: Callable[..., str], given: dict[str, Any], message: str) -> None:
    error = sweep("x=interval(0,1)", **given)
    assert message in error
    assert error.count("\n") == 1


def test_ends_in_the_wrong_order_are_one_line(sweep: Callable[..., str]) -> None:
    assert sweep("x=interval(1,0)") == "Error: hydra.sweeper: space.x.uniform: 1 is not below 0; " + (
        "give the lower end first\n"
    )


@cases("state, codes", [("ended", [1]), ("stopped", [])])
def test_a_sweep_without_a_loss_fails_unless_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, state: str, codes: list[int]
) -> None:
    found: list[Any] = []
    sweeper = made(monkeypatch, "x=1,2")
    monkeypatch.setattr(sweeper, "_search", lambda _: SimpleNamespace(name="app-1", state=state, best_or_none=None))
    try:
        sweeper.sweep(["x=1,2"])
    except SystemExit as ended:
        found.append(ended.code)
    assert found == codes
    assert not Path("multirun").exists()


def test_a_pattern_that_matches_no_option_is_refused() -> None:
    loader = SimpleNamespace(get_group_options=lambda group, results_filter: ["adam", "sgd"])
    found = OverridesParser.create(config_loader=loader).parse_overrides(["opt=glob(s*)", "opt=glob(z*)"])
    assert hydra.space_of(found[:1]) == {"opt": {"choice": ["sgd"]}}
    with pytest.raises(UsageError, match=r"^opt=glob\(z\*\) has no values; "):
        hydra.space_of(found[1:])


def test_hydra_is_asked_for_each_option_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an option that the app lacks is an error of the sweep, and not of the jobs that get it."""
    asked: list[Any] = []
    given = ("a=1", "opt=adam,sgd,rms", "name=x,y", "lr=interval(0,1)")
    sweeper = made(monkeypatch, *given)
    monkeypatch.setattr(sweeper, "validate_batch_is_legal", asked.extend)
    monkeypatch.setattr("shadho_celery.program.on_workers.search_on_workers", lambda *_, **__: None)
    sweeper._search([*given])
    assert asked == [
        ["a=1", "opt=adam", "name=x", "lr=0.0"],
        ["a=1", "opt=sgd", "name=y", "lr=1.0"],
        ["a=1", "opt=rms", "name=x", "lr=0.0"],
    ]


def test_the_command_of_a_job_is_that_of_the_sweep_without_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ("hydra/sweeper=shadho", "hydra.sweeper.trials=3", "hydra.sweep.dir=out", "hydra/launcher=basic")
    theirs = ("hydra.job.name=mine", "+hydra.job.env_set.A=1")
    given = ("lr=interval(0,1)", "fixed={a:1}", "name=${now}")
    sweeper = made(monkeypatch, *given, of_hydra=(*ours, *theirs))
    assert sweeper._command([*given], given[1:]) == [
        *("env", "HYDRA_FULL_ERROR=1", "python", "-X", "dev", "app.py", "--config-name", "tiny"),
        *theirs,
        *("fixed={{a:1}", "name=${{now}"),
        *("hydra.mode=RUN", "hydra.job.num={trial}", "hydra.run.dir=${{oc.env:SHADHO_CHECKPOINT_DIR}"),
        "++hydra.callbacks.shadho._target_=shadho_celery.integrations.hydra.JobCallback",
        "{args}",
    ]


def test_settings_without_an_option_are_in_the_study_and_the_others_override_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a sweep with another limit continues the same study."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "shadho_celery.program.on_workers.search_on_workers", lambda *given, **others: asked.append((given, others))
    )
    monkeypatch.setenv("SHADHO_STORE", "sqlite:///there.db")
    for trials in (3, 9):
        keys = {"trials": trials, "keep": {"best": 1}, "study": "mine", "seed": 0, "workers": 2, "loss": None}
        made(monkeypatch, "x=1,2", **keys)._search(["x=1,2"])
    (first, others), (second, _) = asked
    assert (first[0], others["workers"]) == (second[0], 2)
    assert [first[2], second[2]] == [{"trials": 3}, {"trials": 9}]
    opened = {"store": "sqlite:///there.db", "name": "mine", "seed": 0, "points": (), "ship": True}
    assert first[3] == opened
    study = load(first[0])
    assert study.stated["keep"] == {"best": 1}
    assert "trials" not in study.stated


def test_an_override_replaces_the_one_of_params(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeper = made(monkeypatch, "lr=0.1", "opt=adam,sgd")
    sweeper._params = {"lr": "interval(0,1)", "layers": "range(1,4)", "name": None, "on": True}
    monkeypatch.setattr("shadho_celery.program.on_workers.search_on_workers", lambda module, *_, **__: module)
    study = load(sweeper._search(["lr=0.1", "opt=adam,sgd"]))
    assert {*compile_space(study.space).domains} == {"layers", "opt"}
    assert {"lr=0.1", "name=null", "on=True"} <= {*study.stated["command"]}


@cases(
    "returned, written",
    [
        (0.5, 0.5),
        (1, 1.0),
        (np.float32(0.5), 0.5),
        ({"loss": np.float32(0.5), "model": object}, {"loss": 0.5}),
        ({"losses": {"a": 1}}, {"losses": {"a": 1}}),
        ({"loss": 0.5, "each": np.zeros(2)}, {"loss": 0.5, "each": [0.0, 0.0]}),
        (OmegaConf.create({"loss": 0.5}), {"loss": 0.5}),
        (np.array(0.5), 0.5),
        ({"accuracy": 1}, None),
        (None, None),
        ("text", None),
        ([1.0, 2.0], None),
    ],
)
def test_what_a_job_returns_is_its_result_unless_it_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: Any, written: Any
) -> None:
    monkeypatch.setenv(PARAMS, str(tmp_path / "hyperparameters.json"))
    (result := tmp_path / RESULT).unlink(missing_ok=True)
    hydra.JobCallback().on_job_end({}, JobReturn(_return_value=returned, status=JobStatus.COMPLETED))
    assert (json.loads(result.read_text()) if result.exists() else None) == written


def test_a_failed_job_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARAMS, str(tmp_path / "hyperparameters.json"))
    hydra.JobCallback().on_job_end({}, JobReturn(_return_value=ValueError("3"), status=JobStatus.FAILED))
    assert not (tmp_path / RESULT).exists()


def test_results_have_the_form_of_other_sweepers(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = SimpleNamespace(values={"+opt.lr": 0.1, "name": "'a b'"}, losses={"loss": 0.5, "time": 2.0})
    facts = {"name": "app-1", "state": "ended", "best": trial, "best_or_none": trial, "best_loss": 0.5}
    one = {"best_params": trial.values, "best_value": 0.5}
    several = {"solutions": [{"params": trial.values, "values": [0.5, 2.0]}]}
    for front, results in (([], one), ([trial], several)):
        sweeper = made(monkeypatch, "x=1,2")
        monkeypatch.setattr(sweeper, "_search", lambda _, front=front: SimpleNamespace(**facts, front=front))
        sweeper.sweep(["x=1,2"])
        written = OmegaConf.load(Path("multirun", "optimization_results.yaml"))
        assert written == {"name": "shadho", "study": "app-1", **results}
