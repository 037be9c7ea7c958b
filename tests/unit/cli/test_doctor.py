"""Each check of `doctor` says what is wrong with its remedy, and the command's exit code is 1 then."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace as changed
from services.cases import cases
from services.golden import check

from shadho_celery.cli import doctor
from shadho_celery.cli.doctor import Check, Finding, Site, State, examine
from shadho_celery.cli.group import commands
from shadho_celery.core.checks import encoded
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.core.users import ADMINS_FILE, USER, USER_KEY_FILE
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.limits import BrokerFacts, RedisFacts
from shadho_celery.fleet.policy import KEY, Signed, UserKey
from shadho_celery.fleet.registry import StudyWants, Worker, keys_of
from shadho_celery.fleet.signing import Signer
from shadho_celery.fleet.state import FleetState

DAY = 86400.0
WORKER = Worker(protocol=PROTOCOL, compute_class="cpu", slots=2, imports=["m"], machine=Machine(host="a"), storage="s")
FLEET = FleetState(
    workers={"cpu@a.1.x": WORKER}, studies={}, refused=0, drained={}, depths={"cpu": {"cpu": 3}}, ages={}
)
RABBITMQ = BrokerFacts(product="RabbitMQ 3.12", seconds=0.01, accepts=True, consumer_timeout=14 * DAY)
REDIS = RedisFacts(policy="noeviction", used=2**20, most=0, appends=True, is_saved=True)


class _Server:
    """A Redis whose clock is so many seconds behind, with a policy or an empty text."""

    def __init__(self, behind: float = 0.0, policy: str = "") -> None:
        self.behind, self.policy = behind, policy

    def exists(self, key: str) -> int:
        return int(bool(self.policy))

    def getrange(self, key: str, start: int, end: int) -> str:
        return self.policy

    def time(self) -> tuple[int, int]:
        return divmod(round((time.time() - self.behind) * 1e6), 10**6)


def site(**facts: Any) -> Site:
    """A fleet where nothing is wrong, but for `facts`."""
    well = Site(
        store="sqlite:///shadho.db",
        longest=DAY,
        machine=Machine(host="here", cores=2),
        broker=RABBITMQ,
        redis=_Server(),
        redis_facts=REDIS,
        fleet=FLEET,
    )
    return replace(well, **facts)


def fleet(**facts: Any) -> FleetState:
    return replace(FLEET, **facts)


def workers(*others: Worker) -> FleetState:
    """The fleet with more workers."""
    found = {
        f"{each.compute_class}@{each.machine.host}.{place}.x": each for place, each in enumerate((WORKER, *others))
    }
    return fleet(workers=found, depths={each.compute_class: {each.compute_class: 0} for each in found.values()})


def gpu_worker(**facts: Any) -> Worker:
    machine = Machine(host="b", cards=(Gpu(name="A100", id="0", memory=2**35),))
    return changed(WORKER, **{"compute_class": "gpu_large", "machine": machine, **facts})


#: what is wrong, or not known, in a fleet
CASES: dict[str, dict[str, Any]] = {
    "alarm": {"broker": replace(RABBITMQ, accepts=False)},
    "no right": {"broker": replace(RABBITMQ, accepts=None)},
    "half an hour": {"broker": replace(RABBITMQ, consumer_timeout=1800.0)},
    "short trials": {"broker": replace(RABBITMQ, consumer_timeout=1800.0), "longest": 600.0},
    "untold": {"broker": replace(RABBITMQ, consumer_timeout=None)},
    "no timeout": {"broker": replace(RABBITMQ, consumer_timeout=math.inf)},
    "visibility": {"broker": BrokerFacts(product="Redis", seconds=0.1, visibility=3600.0)},
    "eviction": {"redis_facts": replace(REDIS, policy="allkeys-lru")},
    "memory": {"redis_facts": replace(REDIS, most=2**20)},
    "unsaved": {"redis_facts": replace(REDIS, is_saved=False)},
    "no file": {"redis_facts": replace(REDIS, appends=False)},
    "may not ask": {"redis_facts": ServiceError("its INFO cannot be read: no permission")},
    "own clock": {"redis": _Server(60.0)},
    "a worker's clock": {"fleet": workers(gpu_worker(clock_offset=-30))},
    "queue alone": {"fleet": fleet(workers={})},
    "study alone": {"fleet": fleet(workers={}, depths={}, studies={"k": StudyWants()})},
    "quarantine": {"fleet": workers(gpu_worker(quarantined=True))},
    "no queue": {"fleet": fleet(depths={"cpu": {"cpu": None}})},
    "protocol": {"fleet": workers(gpu_worker(protocol=9))},
    "refused": {"fleet": fleet(refused=2)},
    "their key": {"fleet": workers(gpu_worker(key="0a"))},
    "code": {
        "fleet": workers(
            *(gpu_worker(machine=Machine(host=host), codes={"m": CodeVersion(digest=host)}) for host in ("b", "c"))
        )
    },
    "storages": {"fleet": workers(gpu_worker(storage="t"))},
    "one card": {"fleet": workers(gpu_worker(), gpu_worker(compute_class="gpu_other"))},
    "one card, by its unique id": {
        "fleet": workers(
            *(
                gpu_worker(machine=Machine(host="b", cards=(Gpu(name="T4", id=number, uuid="GPU-a"),)))
                for number in ("0", "1")
            )
        )
    },
    "no card": {"fleet": workers(gpu_worker(machine=Machine(host="b")))},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CELERY_BROKER_URL", "SHADHO_BROKER_URL", "SHADHO_REDIS_URL", "SHADHO_SIGNING_KEY_FILE", ADMINS_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))


def found(check: Check, where: Site) -> Finding:
    return next(each for each in examine(where) if each.name == check.__name__.replace("_", " "))


def test_each_check_says_what_is_wrong_and_what_to_do() -> None:
    """The golden text has the lines of each case that a fleet where nothing is wrong has not."""
    well, lines = examine(site()), []
    for case, facts in CASES.items():
        for each in examine(site(**facts)):
            assert each.remedy or each.state is not State.WRONG
            is_shown = each.state is not State.OK or each.remedy or each.name == "consumer timeout"
            if each not in well and is_shown:
                lines.append(f"{case}: {each.state.value} {each.name}: {each.text}; {each.remedy}")
    check("doctor", "\n".join(lines).replace(f"protocol {PROTOCOL}", "protocol N"))


@cases(
    "study, worker, state, words",
    [
        ("on", "on", State.OK, "all know two: key O signs for 3, key N signs for 0"),
        ("on", "no", State.OK, "all know two: key O signs for 2, key N signs for 1"),
        ("on", "o", State.WRONG, "key N is unknown to cpu@b.1.x; add it to their key files"),
        ("no", "o", State.WRONG, "key N is unknown to cpu@b.1.x; add it to their key files"),
        ("n", "on", State.WRONG, "key O is unknown to study s; add it to their key files"),
        (
            "on",
            "oz",
            State.WRONG,
            "key N is unknown to cpu@b.1.x; key Z is unknown to this machine, study s; add",
        ),
        ("", "on", State.WRONG, "key O is unknown to study s; key N is unknown to study s; add"),
    ],
)
def test_a_rotation_of_the_keys_is_done_only_when_all_know_all(
    study: str, worker: str, state: State, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is left half done, begun twice or ended too early is wrong."""
    keys = {"o": b"the old key of a fleet", "n": b"the new key of a fleet", "z": b"a third key of a fleet"}
    file = tmp_path / "shadho.key"
    file.write_bytes(keys["o"] + b"\n" + keys["n"])
    file.chmod(0o600)
    monkeypatch.setenv("SHADHO_SIGNING_KEY_FILE", str(file))
    signers = [Signer(*(keys[each] for each in names)) for names in (study, worker)]
    of_study, of_worker = (keys_of(signer, None) for signer in signers)
    own = fleet(workers={"cpu@b.1.x": changed(WORKER, **of_worker)}, studies={"k": StudyWants(name="s", **of_study)})
    finding = found(doctor.keys, site(fleet=own))
    for letter, key in keys.items():
        words = words.replace(f"key {letter.upper()} ", f"key {Signer(key).fingerprint} ")
    assert (finding.state, words in f"{finding.text}; {finding.remedy}") == (state, True), finding


def test_where_nothing_is_wrong_every_check_says_so() -> None:
    findings = examine(site())
    assert [each for each in findings if each.state is not State.OK] == []
    # RabbitMQ has no visibility timeout, and the fleet has no policy.
    assert len(findings) == len(doctor.OF_FLEET) + len(doctor.OF_MACHINE) - 2


@cases(
    "by, user, state, words",
    [
        ("root", "anna", State.OK, "number 7, 2 users; it has the key of anna"),
        ("root", "", State.OK, "number 7, 2 users; no user's key is named in SHADHO_USER_KEY_FILE"),
        ("root", "bert", State.WRONG, "bert is not a user of this fleet's policy; see SHADHO_USER"),
        ("anna", "anna", State.WRONG, "the policy in Redis is not signed by an admin; an admin sets it: shadho-celery"),
        ("", "anna", State.WRONG, "this fleet has admins, but no policy yet; an admin sets it: shadho-celery fleet"),
        (None, "anna", State.WRONG, "has a policy; name the file with its admins' keys in SHADHO_ADMINS_FILE"),
    ],
)
def test_the_policy_of_a_fleet_with_admins_is_in_force_and_has_the_key_of_this_user(
    by: str | None, user: str, state: State, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    keys = {"root": UserKey(b"1" * 32), "anna": UserKey(b"2" * 32)}
    (tmp_path / "admins").write_text(keys["root"].public)
    (tmp_path / "key").write_text((b"2" * 32).hex())
    (tmp_path / "key").chmod(0o600)
    text = "number = 7\n" + "".join(f'[users.{name}]\nkey = "{key.public}"\n' for name, key in keys.items())
    signer = keys[by or "root"]
    policy = Signed(text=text, key=signer.public, proof=signer.sign(f"{KEY} {text}"))
    monkeypatch.setenv(ADMINS_FILE, "" if by is None else str(tmp_path / "admins"))
    monkeypatch.setenv(USER_KEY_FILE, str(tmp_path / "key") if user else "")
    monkeypatch.setenv(USER, user)
    where = site(redis=_Server(policy="" if by == "" else encoded(policy).decode()))
    finding = found(doctor.policy, where)
    assert (finding.state, words in f"{finding.text}; {finding.remedy}") == (state, True), finding


def test_what_depends_on_a_server_that_is_down_is_unknown_and_only_the_server_is_wrong() -> None:
    down = ServiceError("the broker at amqp://x cannot be used (refused); start it")
    findings = {each.name: each for each in examine(site(broker=down))}
    wrong = [each for each in findings.values() if each.state is State.WRONG]
    assert [(each.name, each.text, each.remedy) for each in wrong] == [
        ("broker", "the broker at amqp://x cannot be used (refused)", "start it")
    ]
    assert {name for name, each in findings.items() if each.state is State.UNKNOWN} == {
        *("broker alarms", "consumer timeout", "visibility timeout", "queues")
    }


@pytest.mark.parametrize("is_broker", [True, False])
def test_a_server_that_is_down_is_one_line_with_the_checks_that_need_it(
    monkeypatch: pytest.MonkeyPatch, *, is_broker: bool
) -> None:
    """Redis may be the broker too."""
    down = ServiceError("Redis at redis://x cannot be used (refused); start it")
    lost: dict[str, Any] = {"redis": down, "redis_facts": down, "fleet": down}
    lost |= {"broker": down} if is_broker else {}
    monkeypatch.setattr(doctor, "look", lambda store, longest: site(**lost))
    result = CliRunner().invoke(commands, ["doctor"])
    assert result.exit_code == 1
    [line] = [line for line in result.stdout.splitlines() if "redis://x" in line]
    said, _, others = line.partition("; not checked because of it: ")
    which = "broker" if is_broker else "redis"
    assert said == f"wrong   {which}: Redis at redis://x cannot be used (refused); start it"
    alone = {"broker alarms", "consumer timeout", "visibility timeout", "redis"} if is_broker else set()
    shared = {"redis memory", "redis persistence", "clocks", "workers", "queues", "protocol", "keys", "policy", "code"}
    assert {*others.split(", ")} == {*shared, *alone, "checkpoints"}
    checks = json.loads(CliRunner().invoke(commands, ["doctor", "--json"]).stdout)["checks"]
    assert {each["name"] for each in checks if each["needs"] == which} == {*others.split(", ")}


@pytest.mark.parametrize(
    ("broker", "redis", "is_one"),
    [
        ("redis://:secret@h:6379/0", "redis://h:6379/1", True),
        ("amqp://h:6379", "redis://h:6380/0", False),
        ("amqp://h", "redis://h:6379/0", False),
    ],
)
def test_broker_and_redis_may_be_one_server(
    monkeypatch: pytest.MonkeyPatch, broker: str, redis: str, *, is_one: bool
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", broker)
    monkeypatch.setenv("SHADHO_REDIS_URL", redis)
    assert doctor._is_one_server() == is_one


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The store cannot be written, and the disk is named; without a fleet only this machine is checked."""

    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    result = CliRunner().invoke(commands, ["doctor", "--json"])
    assert result.exit_code == 1, result.output
    answer = json.loads(result.stdout)
    wrong = {each["name"]: each for each in answer["checks"] if each["state"] == "wrong"}
    assert {*wrong} == {"store", "disks"}
    assert answer["wrong"] == 2
    assert wrong["store"]["text"].endswith("cannot be written: No space left on device")
    assert wrong["store"]["remedy"] == "make room on its disk"
    assert str(tmp_path) in wrong["disks"]["text"]
    assert not [*tmp_path.iterdir()]


def test_without_a_fleet_this_machine_is_checked() -> None:
    result = CliRunner().invoke(commands, ["doctor"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"nothing wrong was found ({len(doctor.OF_MACHINE)} checks)"


@cases(
    "facts, code, last",
    [
        (
            {"broker": replace(RABBITMQ, consumer_timeout=None)},
            0,
            "nothing wrong was found (18 checks); 1 of them could not be made",
        ),
        (
            {
                "redis_facts": ServiceError("its INFO cannot be read: no permission"),
                "broker": replace(RABBITMQ, accepts=None),
            },
            0,
            "nothing wrong was found (18 checks); 3 of them could not be made",
        ),
        (
            {"redis_facts": replace(REDIS, appends=False), "broker": replace(RABBITMQ, consumer_timeout=None)},
            1,
            "1 of 18 checks found something wrong; 1 of them could not be made",
        ),
    ],
)
def test_the_last_line_counts_the_checks_that_could_not_be_made_and_only_faults_are_an_error(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], code: int, last: str
) -> None:
    monkeypatch.setattr(doctor, "look", lambda store, longest: site(**facts))
    result = CliRunner().invoke(commands, ["doctor"])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (code, last)


@cases("url", ["nonsense", "sqlite://", "sqlite:////no/such/folder/shadho.db"])
def test_a_store_that_cannot_be_used_is_wrong(url: str) -> None:
    result = CliRunner().invoke(commands, ["doctor", "--store", url])
    assert result.exit_code == 1, result.output
    assert "wrong   store: " in result.stdout


def test_a_slow_store_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadho_celery.store.engine.commit_seconds", lambda _: 0.3)
    assert found(doctor.store, site()).state is State.WRONG


def test_too_few_open_files_are_wrong_with_the_command_that_raises_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    finding = found(doctor.open_files, site())
    assert finding.state is State.WRONG
    assert finding.remedy == "before it starts: ulimit -n 288"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert "LimitNOFILE" in found(doctor.open_files, site()).remedy


def test_gpus_that_the_driver_does_not_show_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a2b")
    assert found(doctor.gpus, site()).state is State.WRONG
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found(doctor.gpus, site()).state is State.OK


@cases("text", ["0s", "-1h", "soon", "4 hours", "1e9d", ""])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    result = CliRunner().invoke(commands, ["doctor", "--longest-trial", text])
    assert result.exit_code == 2
    assert "is not a duration; write it as 90s, 10m, 4h or 2d" in result.stderr


def test_what_the_system_refuses_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", refused)
    [found] = [each for each in examine(site()) if each.name == "disks"]
    assert (found.state, "Permission denied" in found.text) == (State.UNKNOWN, True)


def test_workers_on_this_machine_are_no_further_machine() -> None:
    fleet_here = workers(changed(WORKER, clock_offset=0))
    assert doctor.clocks(site(fleet=fleet_here, machine=Machine(host="a"))).text.startswith("1 machine, at most 0.0 s")
    assert doctor.clocks(site(fleet=fleet_here, machine=Machine(host="c"))).text.startswith("2 machines")
