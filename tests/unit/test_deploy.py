"""What deploy/ says: read here as text; tests/integration/test_services.py gives it to real servers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from services.cases import cases

from shadho_celery.cli.group import commands
from shadho_celery.core.units import seconds_of
from shadho_celery.fleet.broker import machine_queue
from shadho_celery.node import stay
from shadho_celery.node.shutdown import END_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
DEFINITIONS: dict[str, Any] = json.loads((DEPLOY / "rabbitmq" / "definitions.json").read_text())


def settings(path: Path, separator: str | None) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.split(separator, 1) for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, value in pairs}


def test_rabbitmq_lets_a_trial_run_for_two_weeks() -> None:
    conf = settings(DEPLOY / "rabbitmq" / "rabbitmq.conf", "=")
    assert int(conf["consumer_timeout"]) == 14 * 24 * 3600 * 1000


def test_redis_keeps_what_it_accepted() -> None:
    conf = settings(DEPLOY / "redis" / "redis.conf", None)
    assert (conf["appendonly"], conf["maxmemory-policy"]) == ("yes", "noeviction")


CLASSES = [queue["name"] for queue in DEFINITIONS["queues"]]


def permits(user: str, deed: str, resource: str) -> bool:
    [permission] = [each for each in DEFINITIONS["permissions"] if each["user"] == user]
    return re.search(permission[deed], resource) is not None


def test_rabbitmq_has_a_user_for_each_role_and_none_can_log_in_or_administer_as_delivered() -> None:
    names = [user["name"] for user in DEFINITIONS["users"]]
    assert names == ["scheduler", *(f"worker-{name}" for name in CLASSES)]
    assert all((user["password_hash"], user["tags"]) == ("", []) for user in DEFINITIONS["users"])
    assert {each["vhost"] for each in DEFINITIONS["permissions"] + DEFINITIONS["queues"]} == {"shadho"}


def test_the_queues_are_declared_as_workers_and_schedulers_declare_them() -> None:
    assert CLASSES == ["gpu_large", "gpu_small", "cpu"]
    for queue in DEFINITIONS["queues"]:
        assert (queue["durable"], queue["auto_delete"], queue["arguments"]) == (True, False, {})


@pytest.mark.parametrize("name", CLASSES)
def test_a_worker_may_touch_its_own_queues_and_control_mailbox_and_nobody_elses(name: str) -> None:
    user = f"worker-{name}"
    for other in (*CLASSES, f"{name}x", f"x{name}", f"{name}-x"):
        for queue in (other, machine_queue(other, "node-7.example"), machine_queue(other, "2001:db8::1")):
            for deed in ("configure", "read"):
                assert permits(user, deed, queue) is (other == name)
            assert not permits(user, "write", queue)
        mailbox = f"{other}-17@node.example.celery.pidbox"
        for deed in ("configure", "write", "read"):
            assert permits(user, deed, mailbox) is (other in (name, f"{name}-x"))
    assert not permits(user, "write", "amq.default"), "it may publish to no class"
    assert not permits(user, "write", "celery.pidbox"), "it may command no other worker"


def test_the_scheduler_declares_and_publishes_and_reads_nothing() -> None:
    for name in CLASSES:
        for queue in (name, machine_queue(name, "node-7.example")):
            assert permits("scheduler", "configure", queue)
            assert not permits("scheduler", "read", queue)
        assert not permits("scheduler", "configure", f"{name}x")
    assert permits("scheduler", "write", "amq.default")
    assert not permits("scheduler", "configure", "celery.pidbox")


def test_redis_users_are_off_until_they_have_a_password_and_see_the_keys_of_studies_and_queues_only() -> None:
    lines = [line.split() for line in (DEPLOY / "redis" / "users.acl").read_text().splitlines()]
    users = {words[1]: words[2:] for words in lines}
    assert users.keys() == {"default", "scheduler", *(f"worker-{name}" for name in CLASSES)}
    for name in users.keys() - {"default"}:
        assert "off" in users[name]
        keys = {word.partition("~")[2] for word in users[name] if word.startswith(("~", "%"))}
        assert "allkeys" not in users[name]
        classes = CLASSES if name == "scheduler" else [name[7:]]
        own = {*classes, *(f"{each},*" for each in classes)} | (set() if name == "scheduler" else {f"{name[7:]}-*"})
        assert {key for key in keys if not key.startswith("shadho:")} == {"_kombu.binding*", "unacked*", *own}
        assert "-@dangerous" in users[name]
    for name in CLASSES:
        # Equal but for the class's name: the line of another class is a copy.
        assert users[f"worker-{name}"] == [word.replace("cpu", name) for word in users["worker-cpu"]]


UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
CODE = [*DEPLOY.parent.glob("shadho_celery/**/*.py"), DEPLOY.parent / "celeryconfig.py"]
VARIABLE = r"\b(?:SHADHO|CELERY)_[A-Z]+(?:_[A-Z]+)*\b"
VARIABLES = {name for path in CODE for name in re.findall(VARIABLE, path.read_text())}


def directive(unit: Path, name: str) -> str:
    """The value of a unit's only line of this name."""
    [value] = re.findall(f"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    return str(value).replace(" $OPTIONS", "")


@cases("path", FILES)
def test_every_variable_that_a_file_names_is_one_of_the_code(path: Path) -> None:
    assert {*re.findall(VARIABLE, path.read_text())} <= VARIABLES


@cases("unit", UNITS)
def test_the_command_of_a_unit_is_one_that_there_is(unit: Path) -> None:
    program, name, *words = shlex.split(directive(unit, "ExecStart").replace("%I", "gpu_large"))
    assert program == "/opt/shadho/bin/shadho-celery"
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    # Only understood, not run.
    command.make_context(name, words)


def test_the_unit_of_a_worker_leaves_its_trials_their_grace() -> None:
    [unit] = [each for each in UNITS if "worker" in each.name]
    variable, _, grace = directive(unit, "Environment").partition("=")
    assert variable == stay.GRACE
    assert float(directive(unit, "TimeoutStopSec")) >= seconds_of(grace) + END_SECONDS
    assert (directive(unit, "KillMode"), directive(unit, "KillSignal")) == ("mixed", "SIGTERM")


@cases("unit", UNITS)
def test_systemd_finds_nothing_wrong_with_a_unit_and_it_is_sandboxed(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    # The program of the unit need not be installed here.
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/shadho/bin/shadho-celery", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    # It also reads the units of this machine, which may have faults of their own.
    assert [line for line in (done.stdout + done.stderr).splitlines() if "shadho" in line] == []
    assert done.returncode == 0, done.stderr
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=40", "--no-pager", str(copy)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, [*done.stdout.splitlines()[-1:], done.stderr]


@cases("unit", [unit for unit in UNITS if "worker" not in unit.name])
def test_a_unit_can_write_to_its_folders_only_and_sees_the_holder_of_a_studys_lock(unit: Path) -> None:
    """A process of another user that `/proc` hides would look dead, and its study would be taken over."""
    assert (directive(unit, "ProtectSystem"), directive(unit, "ReadWritePaths")) == ("strict", "/srv/shadho")
    assert "ProtectProc" not in unit.read_text()
    assert "PrivateUsers" not in unit.read_text()


def test_a_study_goes_on_after_a_stop_and_a_reboot() -> None:
    [unit] = [each for each in UNITS if "study" in each.name]
    name, *words = shlex.split(directive(unit, "ExecStart"))[1:]
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    params = command.make_context(name, [word.replace("%I", "tasks.svm") for word in words]).params
    assert (params["name"], params["resume_if_exists"]) == ("tasks.svm", True)
    assert "EnvironmentFile=-/etc/shadho/study-%i.env" in unit.read_text()
