"""The command line takes what makes sense, and refuses the rest in one line with exit code 2."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import services
from click.testing import CliRunner, Result
from msgspec.structs import replace
from services.cases import cases

from shadho_celery.cli.group import commands
from shadho_celery.cli.run import RunOptions
from shadho_celery.core import hardware
from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.core.settings import StudySettings
from shadho_celery.errors import UsageError
from shadho_celery.fleet.urls import BROKER, REDIS
from shadho_celery.launch import main
from shadho_celery.session import session as session_module
from shadho_celery.session.opening import Request, settle
from shadho_celery.session.session import Session
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits

Captured = Callable[..., RunOptions]

#: beginning of the first line, which comes before the heavy imports
READING = "shadho_celery: reading "

STUDY = """
from hyperopt import hp
SPACE = {"x": hp.uniform("x", 0, 1)}
def objective(params): return params["x"]
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in (BROKER, REDIS):
        # Set first, so that what the command itself sets is taken back.
        monkeypatch.setenv(name, "")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """Run the command with these words; the options that it would have run the study with."""
    seen: list[RunOptions] = []

    def run(options: RunOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("shadho_celery.cli.run.run_study", run)

    def options_of(*words: str) -> RunOptions:
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
        return seen[-1]

    return options_of


def in_force(
    options: RunOptions,
    stated: Mapping[str, object],
    earlier: Mapping[str, object] | None = None,
    before: Mapping[str, object] | None = None,
) -> StudySettings:
    """The settings that a run with these options goes by."""
    return settle(Request(space=None, module="m", stated=stated, given=options.given), earlier or {}, before or {})


def refused(*words: str) -> str:
    """Return the single line that a refused command prints besides its usage."""
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage:", "Try ", READING))]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.fixture
def study_file(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A study file of this test's own."""
    name = f"study_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(STUDY)
    return name


def test_what_is_not_given_is_left_to_the_study_file(options: Captured) -> None:
    given = options("tasks.svm")
    assert given.study == "tasks.svm"
    assert given.given == {}
    assert (given.seed, given.name) == (None, None)
    assert (given.resume, given.as_json, given.fleet, given.workers) == (False, False, False, {})
    assert given.store == "sqlite:///shadho.db"


def test_every_option_arrives(options: Captured) -> None:
    words = "--trials 3 --seconds 4.5 --target -1e-3 --seed 0 --sampler random --policy fifo --shares promise --json"
    words += " --trial-timeout 1.5 --no-speculation"
    given = options("tasks.svm", *words.split(), "--weight", "2.5", "--study", "größe", "--store", "sqlite:///x.db")
    assert given.given == {
        "trials": 3,
        "seconds": 4.5,
        "target": -1e-3,
        "sampler": "random",
        "policy": "fifo",
        "shares": "promise",
        "speculate": False,
        "weight": 2.5,
        "trial_timeout": 1.5,
    }
    assert (given.seed, given.as_json) == (0, True)
    assert (given.name, given.store) == ("größe", "sqlite:///x.db")


def test_the_option_comes_before_the_study_file_and_both_before_the_default(options: Captured) -> None:
    settings = {"policy": "paper", "shares": "promise", "cost": {"all": 3.0}}
    plain, given = options("tasks.svm"), options("tasks.svm", "--policy", "fifo", "--shares", "uniform")

    def chosen(options: RunOptions, settings: dict[str, Any]) -> tuple[Any, ...]:
        over = in_force(options, settings)
        return over.policy, over.shares, over.cost

    default = StudySettings()
    assert chosen(plain, {}) == (default.policy, default.shares_in_force, default.cost) == ("cost", "promise", None)
    assert chosen(plain, settings) == ("paper", "promise", {"all": 3.0})
    assert chosen(given, settings) == ("fifo", "uniform", {"all": 3.0})


def test_what_an_earlier_run_was_given_comes_between_the_option_and_the_study_file(options: Captured) -> None:
    assert in_force(options("tasks.svm", "--no-speculation"), {"speculate": True}).speculate is False
    assert in_force(options("tasks.svm"), {"speculate": False}).speculate is False
    assert in_force(options("tasks.svm"), {}).speculate is True
    settings = {"policy": "paper", "shares": "promise", "trials": 5, "weight": 2}
    earlier = {"policy": "fifo", "trials": 7, "trial_timeout": 9.0}
    found = in_force(options("tasks.svm", "--trials", "8"), settings, earlier)
    assert found.trials == 8
    assert (found.policy, found.trial_timeout) == ("fifo", 9.0)
    assert (found.shares, found.weight) == ("promise", 2)
    assert (found.sampler, found.seconds) == ("auto", None)


def test_a_setting_of_an_earlier_run_that_no_message_can_carry_is_refused(options: Captured) -> None:
    with pytest.raises(UsageError, match=r"^trial_timeout: 1e\+305 is not allowed; it must be at most 1e\+09"):
        in_force(options("tasks.svm"), {}, {"trial_timeout": 1e305})


@pytest.mark.parametrize(
    ("words", "resume", "name"),
    [
        ([], False, None),
        (["--resume"], True, None),
        (["--resume", "s"], True, "s"),
        (["--resume", "--trials", "5"], True, None),
        (["--resume", "--study", "s"], True, "s"),
    ],
)
def test_resume_takes_a_name_or_none(options: Captured, words: list[str], resume: bool, name: str | None) -> None:
    given = options("tasks.svm", *words)
    assert (given.resume, given.name) == (resume, name)


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        (["cpu=4"], {"cpu": 4}),
        (["gpu_large=1,cpu=2"], {"gpu_large": 1, "cpu": 2}),
        (["gpu_large=1", "cpu=2"], {"gpu_large": 1, "cpu": 2}),
        ([" cpu=1 , gpu=2 ,"], {"cpu": 1, "gpu": 2}),
        (["größte=3"], {"größte": 3}),
    ],
)
def test_workers_are_classes_with_slots(options: Captured, words: list[str], workers: dict[str, int]) -> None:
    assert options("tasks.svm", *(part for word in words for part in ("--workers", word))).workers == workers


#: words that are refused, and a part of the line that says why; FILE stands for a study file
REFUSED: list[tuple[str, str]] = [
    ("", "Missing argument 'STUDY_FILE'"),
    ("--resume FILE", "as the name of a study; write run"),
    ("FILE another_study", "another_study"),
    ("FILE --no-such-option", "--no-such-option"),
    ("FILE --trials 0", "trials"),
    ("FILE --seed -1", "--seed"),
    ("FILE --seed 99999999999999999999", "seed"),
    ("FILE --sampler oracle", "random"),
    ("FILE --policy best", "paper"),
    ("FILE --shares fair", "promise"),
    ("FILE --weight 0", "weight"),
    ("FILE --weight inf", "weight"),
    ("FILE --trial-timeout 1e305", "trial_timeout"),
    ("FILE --trial-timeout nan", "trial_timeout"),
    ("FILE --target nan", "target: nan is not a finite number"),
    ("FILE --seconds soon", "seconds: "),
    ("FILE --seconds 0", "seconds"),
    ("FILE --store mysql://me@host/db", "sqlite:///"),
    ("FILE --store sqlite://host/x", "sqlite:///FILE"),
    ("FILE --store sqlite://me@/x", "sqlite:///FILE"),
    ("FILE --store sqlite:////no/such/folder/s.db", "(store)"),
    ("FILE --resume", "no study"),
    ("FILE --resume s", "'s'"),
    ("FILE --study a/b", "a/b"),
    ("FILE --workers cpu=1 --demo", "either"),
    *((f"FILE --workers {word}", "cpu=4") for word in ("cpu", "cpu=", "=4", "cpu=0", "cpu=-1", "cpu=two", "cpu=1.5")),
    *((f"FILE --workers {word}", "cpu=4") for word in ("cpu=1,gpu", "cpu=²", f"cpu={'9' * 5000}")),
    # Last, because they name a broker in the environment.
    ("FILE --broker amqp://host --workers cpu=1", "celery -A"),
    ("FILE --broker amqp://host --demo", "embedded mode"),
]


@cases("words, about", REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line_that_says_why(words: str, about: str, study_file: str) -> None:
    line = refused(*words.replace("FILE", study_file, 1).split())
    assert about in line
    assert len(line) < 300


def test_options_in_one_letter_and_the_store_of_the_environment(
    options: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options("tasks.svm", "-n", "7", "-q")
    assert (given.given, given.silent) == ({"trials": 7}, True)
    monkeypatch.setenv("SHADHO_STORE", "sqlite:///mine.db")
    assert options("tasks.svm").store == "sqlite:///mine.db"
    assert options("tasks.svm", "--store", "sqlite:///other.db").store == "sqlite:///other.db"
    monkeypatch.setenv("SHADHO_STORE", "")
    assert options("tasks.svm").store == "sqlite:///shadho.db"


def test_a_broker_of_the_environment_is_told_from_one_of_an_option_and_local_overrides_it(
    options: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*words: str) -> tuple[bool, str]:
        given = options("tasks.svm", *words)
        return given.fleet, given.broker_from

    monkeypatch.setenv(BROKER, "amqp://another-application")
    assert found() == (True, BROKER)
    assert found("--local")[0] is False
    monkeypatch.setenv("SHADHO_BROKER_URL", "amqp://ours")
    assert found() == (True, "SHADHO_BROKER_URL")
    assert os.environ[BROKER] == "amqp://ours"
    assert found("--broker", "amqp://host") == (True, "")
    assert "leave out --broker" in refused("tasks.svm", "--local", "--broker", "amqp://host")


@pytest.mark.parametrize("words", [["--trials", "9"], []])
def test_a_study_is_resumed_by_its_name_alone(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    seen: list[RunOptions] = []
    monkeypatch.setattr("shadho_celery.cli.run.run_study", lambda options: seen.append(options) or 0)
    with closing(SqlStore("sqlite:///shadho.db")) as store:
        open_study(store, {"x": ""}, module="tasks.svm", name="first").close()
        open_study(store, {"x": ""}, module="", name="of-a-program").close()
    result = CliRunner().invoke(commands, ["resume", "fir", *words])
    assert result.exit_code == 0, result.output
    assert (seen[0].study, seen[0].name, seen[0].resume) == ("tasks.svm", "first", True)
    assert seen[0].given == ({"trials": 9} if words else {})
    result = CliRunner().invoke(commands, ["resume", "of-a-program"])
    assert result.exit_code == 2
    assert "has no study file, because a program ran it; continue it there with minimize(" in result.stderr
    result = CliRunner().invoke(commands, ["again", "of-a-program", "3"])
    assert result.exit_code == 2
    assert "call the objective with the params that shadho-celery trial of-a-program 3 shows" in result.stderr
    assert CliRunner().invoke(commands, ["resume", "missing"]).exit_code == 2
    assert len(seen) == 1


@pytest.mark.parametrize("module", ["antigravity", "/tmp/other/file.py", "a/b.py", "--repair", "os.path", "a..b"])
def test_a_module_on_record_that_is_no_study_file_is_not_imported(module: str) -> None:
    """The store may be a stranger's."""
    with closing(SqlStore("sqlite:///shadho.db")) as store:
        open_study(store, {"x": ""}, module=module, name="first").close()
    result = CliRunner().invoke(commands, ["resume", "first"])
    assert (result.exit_code, "give the file: run FILE --resume first" in result.stderr) == (2, True)


@pytest.mark.parametrize("name", ["no_such_study", "no_such_study.py", "tasks.no_such_study", ""])
def test_a_study_file_that_is_not_there_is_one_line(name: str, tmp_path: Path) -> None:
    assert "there is no module" in refused(name)
    assert not list(tmp_path.glob("*.db*"))


class Opened(Exception):
    """The search would begin now."""


def settled(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[StudySettings, Limits]:
    """Return the settings and limits of a run with these arguments, which ends before it starts workers."""
    seen: list[tuple[StudySettings, Limits]] = []

    def embed(session: Session) -> None:
        seen.append((session.plan.settings, session.plan.limits))
        raise Opened

    monkeypatch.setattr(Session, "_embed", embed)
    assert isinstance(CliRunner().invoke(main, words).exception, Opened)
    return seen[0]


def test_a_resumed_study_goes_on_with_what_its_earlier_runs_were_given(
    study_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--trials 12 --target 0.25 --sampler tpe --policy fifo --shares promise --weight 2 --trial-timeout 7"
    first = settled(monkeypatch, study_file, *words.split())
    settings, _ = first
    assert (settings.trials, settings.sampler, settings.trial_timeout) == (12, "tpe", 7.0)
    assert settled(monkeypatch, study_file, "--resume") == first
    second = settled(monkeypatch, study_file, "--resume", "--trials", "30", "--policy", "paper")
    assert second == (replace(settings, trials=30, policy="paper"), Limits(trials=30, target=0.25, failures=10))
    assert settled(monkeypatch, study_file, "--resume") == second


def test_a_loss_to_maximise_is_one_for_the_resumed_study_too(study_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, limits = settled(monkeypatch, study_file, "--maximize", "--target", "2")
    assert first.objectives == {"loss": "maximize"}
    assert (limits.target, settled(monkeypatch, study_file, "--resume")) == (-2.0, (first, limits))
    assert settled(monkeypatch, study_file, "--resume", "--maximize") == (first, limits)


def test_a_loss_that_was_minimised_is_not_maximised_later(study_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch, study_file)
    assert "started with other objectives" in refused(study_file, "--resume", "--maximize")


@pytest.mark.parametrize(
    ("stated", "found"),
    [("'direction': 'maximize'", "maximize"), ("'direction': 'minimize'", "maximize"), ("'trials': 2", "maximize")],
)
def test_the_option_maximize_comes_before_the_direction_of_the_study_file(
    study_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str, found: str
) -> None:
    (tmp_path / f"{study_file}.py").write_text(f"{STUDY}STUDY = {{{stated}}}\n")
    assert settled(monkeypatch, study_file, "--maximize")[0].objectives == {"loss": found}


def test_a_study_with_named_losses_is_not_maximised_by_an_option(study_file: str, tmp_path: Path) -> None:
    (tmp_path / f"{study_file}.py").write_text(f"{STUDY}STUDY = {{'objectives': {{'error': 'minimize'}}}}\n")
    assert "direction (--maximize) is short for objectives" in refused(study_file, "--maximize")


def test_the_study_file_of_today_holds_where_no_run_was_given_anything(
    study_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, limits = settled(monkeypatch, study_file, "--policy", "fifo")
    assert (limits, first.weight) == (Limits(trials=100, failures=10), 1.0)
    (tmp_path / f"{study_file}.py").write_text(
        STUDY + "STUDY = {'weight': 3, 'policy': 'paper', 'trial_timeout': 60}\n"
    )
    del sys.modules[study_file]
    importlib.invalidate_caches()
    second, _ = settled(monkeypatch, study_file, "--resume")
    assert (second.policy, second.weight, second.trial_timeout) == ("fifo", 3, 60)


def resumed_after(monkeypatch: pytest.MonkeyPatch, study_file: str, in_force: str) -> tuple[str, str, str]:
    """Sampler, policy and shares of a resumed study whose store has this of what was in force."""
    settled(monkeypatch, study_file)
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("UPDATE studies SET in_force = ?", (in_force,))
    settings, _ = settled(monkeypatch, study_file, "--resume")
    with closing(sqlite3.connect("shadho.db")) as store:
        [(kept,)] = store.execute("SELECT in_force FROM studies")
    assert json.loads(kept) == settings.in_force(), "what is in force now is kept"
    return settings.sampler, settings.policy, settings.shares


@pytest.mark.parametrize(
    ("in_force", "goes_on_with"),
    [
        ('{"sampler": "tpe", "policy": "fifo", "shares": "promise"}', ("tpe", "fifo", "promise")),
        ('{"policy": "fifo"}', ("auto", "fifo", "promise")),
    ],
    ids=["other defaults", "some were not kept then"],
)
def test_a_study_begun_under_other_defaults_goes_on_with_them(
    study_file: str, monkeypatch: pytest.MonkeyPatch, in_force: str, goes_on_with: tuple[str, str, str]
) -> None:
    assert resumed_after(monkeypatch, study_file, in_force) == goes_on_with


def test_what_was_in_force_gives_way_to_the_study_file_and_both_to_what_was_given(options: Captured) -> None:
    before = {"sampler": "tpe", "policy": "fifo", "shares": "promise"}
    found = in_force(options("tasks.svm", "--sampler", "random"), {"policy": "paper", "sampler": "tpe"}, {}, before)
    assert (found.sampler, found.policy, found.shares) == ("random", "paper", "promise")


def test_what_was_in_force_and_is_unknown_here_is_refused(study_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(monkeypatch, study_file)
    with closing(sqlite3.connect("shadho.db")) as store, store:
        store.execute("""UPDATE studies SET in_force = '{"sampler": "oracle"}'""")
    assert "'oracle'" in refused(study_file, "--resume")
    assert settled(monkeypatch, study_file, "--resume", "--sampler", "tpe")[0].sampler == "tpe"


def test_a_limit_below_the_trials_that_have_ended_is_refused_and_not_kept(
    study_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = settled(monkeypatch, study_file, "--trials", "12")
    # As if trials had ended.
    monkeypatch.setattr(SqlStore, "tally", lambda *_: {"COMPLETE": 5, "FAILED": 1, "CANCELLED": 9, "RUNNING": 2})
    said = refused(study_file, "--resume", "--trials", "5")
    assert "trials: 5 is too few, because 6 trials of study" in said
    assert "give a number above 6" in said
    assert settled(monkeypatch, study_file, "--resume")[0] == settings
    assert settled(monkeypatch, study_file, "--resume", "--trials", "6")[0].trials == 6


def test_a_resumption_that_is_refused_changes_nothing_of_what_is_kept(
    study_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = settled(monkeypatch, study_file, "--trials", "12")
    refused(study_file, "--resume", "--trials", "5", "--sampler", "oracle")
    refused(study_file, "--resume", "--trials", "5", "--seed", "99999")
    assert settled(monkeypatch, study_file, "--resume") == first


def test_a_space_that_cannot_be_searched_is_one_line(study_file: str, tmp_path: Path) -> None:
    (tmp_path / f"{study_file}.py").write_text(STUDY.replace("0, 1", "1, 0"))
    assert "'x'" in refused(study_file)


@pytest.mark.parametrize(
    ("setting", "about"),
    [
        ("{'policy': 'best'}", "cost, paper, fifo"),
        ("{'policy': 'best'}", "there is no policy 'best'"),
        ("{'sampler': 'best'}", "there is no sampler 'best'"),
        ("{'seconds': -1}", "more than -1.0 seconds; change seconds"),
        ("{'shares': 'fair'}", "uniform, promise"),
        ("{'cost': 3.0}", "cost: "),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_line(study_file: str, tmp_path: Path, setting: str, about: str) -> None:
    (tmp_path / f"{study_file}.py").write_text(STUDY + f"STUDY = {setting}\n")
    assert about in refused(study_file)
    assert not list(tmp_path.glob("*.db*"))


def workers_by(monkeypatch: pytest.MonkeyPatch, machine: Machine, *words: str) -> Mapping[str, int]:
    """The slots by class of the embedded workers that a run of the command starts on `machine`."""
    seen: list[Mapping[str, int]] = []

    def embedded(folder: Path, workers: Mapping[str, int], *_: object, **__: object) -> None:
        seen.append(workers)
        raise Opened

    monkeypatch.setattr(session_module, "Embedded", embedded)
    monkeypatch.setattr(hardware, "detect", lambda: machine)
    assert isinstance(CliRunner().invoke(main, words).exception, Opened)
    return seen[0]


@pytest.mark.parametrize(
    ("machine", "stated", "words", "workers"),
    [
        (Machine(cores=4), {}, [], {"cpu": 4}),
        (Machine(cores=0), {}, [], {"cpu": 1}),
        (Machine(cores=4), {"cores": 2}, [], {"cpu": 2}),
        (Machine(cores=4), {"classes": ["big", "cpu"]}, [], {"big": 1, "cpu": 1}),
        (Machine(cores=4), {}, ["--demo"], {"gpu_large": 1, "gpu_small": 1, "cpu": 1}),
        (Machine(cores=4), {"classes": ["big"]}, ["--demo"], {"gpu_large": 1, "gpu_small": 1, "cpu": 1}),
        (Machine(cores=4, cards=(Gpu(name="A100", memory=2**40),)), {}, [], {"gpu_large": 1, "cpu": 3}),
        (Machine(cores=4, cards=(Gpu(name="T4"),)), {}, ["--demo"], {"gpu_large": 1, "gpu_small": 1, "cpu": 1}),
        (Machine(cores=4), {}, ["--workers", "b=2"], {"b": 2}),
    ],
)
def test_without_options_a_machine_works_as_what_it_is_and_classes_are_played_on_demand(
    study_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    stated: Mapping[str, object],
    words: list[str],
    workers: Mapping[str, int],
) -> None:
    (tmp_path / f"{study_file}.py").write_text(f"{STUDY}STUDY = {stated}\n")
    assert workers_by(monkeypatch, machine, study_file, *words) == workers


def test_a_users_warning_reads_as_a_message(study_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warning = "import warnings\nwarnings.simplefilter('default')\nwarnings.warn('the disk\\nis slow')\n"
    (tmp_path / f"{study_file}.py").write_text(warning + STUDY)
    monkeypatch.setattr(Session, "__enter__", lambda session: sys.exit(3))
    result = CliRunner().invoke(main, [study_file])
    assert result.exit_code == 3
    assert result.stderr.splitlines()[1:] == ["Warning: the disk is slow"]


def test_ctrl_c_while_a_study_is_read_ends_without_a_traceback(study_file: str, tmp_path: Path) -> None:
    (tmp_path / f"{study_file}.py").write_text("raise KeyboardInterrupt")
    result = CliRunner().invoke(main, [study_file])
    assert result.exit_code == 130
    assert result.stderr.splitlines()[1:] == ["stopped"]


def test_a_url_makes_it_a_fleet_and_a_password_in_it_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("shadho_celery.cli.run.run_study", lambda options: seen.append(options.fleet) or 0)

    def warning_of(*words: str) -> str:
        result: Result = CliRunner().invoke(main, ("tasks.svm", *words))
        assert result.exit_code == 0
        return result.stderr

    assert warning_of("--broker", "amqp://host") == f"{READING}tasks.svm ...\n"
    warning = warning_of("--redis", "redis://:secret@host/0")
    assert "Warning" in warning
    assert "secret" not in warning
    assert seen == [True, True]


def test_a_redis_that_is_down_is_one_line_without_its_password_and_leaves_no_study(study_file: str) -> None:
    url = f"redis://:secret@127.0.0.1:{services.free_port()}/0"
    message = refused_with_warning(study_file, "--redis", url)
    assert "secret" not in message
    assert url.rpartition("@")[2] in message
    assert "SHADHO_REDIS_URL" in message
    kept = SqlStore("sqlite:///shadho.db")
    with pytest.raises(Exception, match="no study"):
        kept.latest(study_file)
    kept.close()


def refused_with_warning(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2, result.output
    warning, reading, line = result.stderr.splitlines()
    assert warning.startswith("Warning")
    assert reading.startswith(READING)
    return line


def test_help_says_what_ends_a_study_of_maximised_and_of_several_losses() -> None:
    words = " ".join(CliRunner().invoke(main, ["--help"], terminal_width=120).output.split())
    assert "of at most this, or of at least this if it is maximised; for one loss." in words
    assert "without a better feasible loss; with several losses, without a change of the front." in words


def test_help_shows_every_option_and_commands_that_work(options: Captured) -> None:
    result = CliRunner().invoke(main, ["--help"], terminal_width=120)
    assert result.exit_code == 0
    for parameter in main.params:
        assert any(name in result.output for name in (*parameter.opts, "STUDY_FILE"))
    joined = result.output.replace("\\\n", " ")
    examples = [line for line in joined.splitlines() if "shadho-celery run" in line and "tasks" in line]
    assert len(examples) >= 4
    for example in examples:
        words = example.partition("#")[0].partition("shadho-celery run")[2].split()
        options(*words)
    assert "CELERY_BROKER_URL=" in result.output


def test_a_study_in_which_nothing_succeeded_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadho_celery.cli.run.run_study", lambda options: 1)
    assert CliRunner().invoke(main, ["tasks.svm"]).exit_code == 1


# Known points


@pytest.mark.parametrize("text", ['{"x": 0.5}\n\n{"x": 1}\n', '[{"x": 0.5}, {"x": 1}]'])
def test_known_points_are_json_lines_or_one_list(options: Captured, text: str) -> None:
    Path("points").write_text(text)
    assert options("my_study", "--enqueue", "points").points == [{"x": 0.5}, {"x": 1}]
    assert options("my_study").points == []


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("form", ['{{"x": "a{0}b"}}\n{{"x": 1}}\n', '[{{"x": "a{0}b"}}, {{"x": 1}}]'])
@pytest.mark.parametrize("within", ["\u2028", "\u2029", "\u0085", "\ufeff"])
def test_a_byte_order_mark_and_line_ends_within_a_text_are_json(
    options: Captured, mark: str, form: str, within: str
) -> None:
    Path("points").write_text(mark + form.format(within), encoding="utf-8")
    assert options("my_study", "--enqueue", "points").points == [{"x": f"a{within}b"}, {"x": 1}]


@pytest.mark.parametrize(
    ("content", "about"),
    [
        (b'{"x": 0.5}\nx = 1\n', "line 2 of points is not JSON"),
        (b"[{", "points is not JSON"),
        (b'{"x": 0.5, "x": 1}', "'x' occurs twice in one object"),
        (b"\xff\xfe\x00", "the points in points cannot be read: it is not text in UTF-8"),
        (None, "the points in points cannot be read"),
    ],
)
def test_a_file_that_has_no_points_is_refused_in_one_line(content: bytes | None, about: str) -> None:
    if content is not None:
        Path("points").write_bytes(content)
    result = CliRunner().invoke(main, ["my_study", "--enqueue", "points"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert about in result.output


def test_a_point_that_is_no_part_of_the_space_is_refused_before_anything_runs() -> None:
    Path("my_study.py").write_text(STUDY)
    Path("points").write_text('{"x": 0.5}\n{"y": 0.5}\n')
    sys.path.insert(0, str(Path.cwd()))
    result = CliRunner().invoke(main, ["my_study", "--trials", "1", "--workers", "cpu=1", "--enqueue", "points"])
    assert result.exit_code == 2
    assert "point 1: there is no label 'y'; known are x" in result.output
    assert not Path("shadho.db").exists()
