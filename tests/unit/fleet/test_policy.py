"""Which users the policy of a fleet knows, and which policies are ignored."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from msgspec.structs import replace
from services.cases import cases

from shadho_celery.core.checks import encoded
from shadho_celery.core.records import Pause
from shadho_celery.core.system import ManualClock
from shadho_celery.core.users import ADMINS_FILE, USER, USER_KEY_FILE
from shadho_celery.errors import UsageError
from shadho_celery.fleet import policy
from shadho_celery.fleet.control import Request
from shadho_celery.fleet.policy import KEY, Guard, Signed, UserKey, study_text
from shadho_celery.fleet.signing import CONTROL_KEY_FILE

pytest.importorskip("cryptography")

ROOT, ANNA, BERT = (UserKey(bytes([number]) * 32) for number in (1, 2, 3))

TEXT = f"""number = 2
[users.root]
key = "{ROOT.public}"
admin = true
[users.anna]
key = "{ANNA.public}"
weight = 2
slots = 8
"""


class FakeRedis:
    """Has one key."""

    def __init__(self) -> None:
        self.text = ""
        self.is_down = False

    def exists(self, key: str) -> int:
        return int(bool(self.text))

    def getrange(self, key: str, start: int, end: int) -> str:
        if self.is_down:
            raise redis.ConnectionError("down")
        return self.text


class Table:
    """A guard, and the Redis and the clock that it sees."""

    def __init__(self) -> None:
        self.redis, self.clock = FakeRedis(), ManualClock()
        self.guard = Guard(cast(Any, self.redis), {ROOT.public}, self.clock)

    def put(self, text: str, signer: UserKey = ROOT) -> None:
        signed = Signed(text=text, key=signer.public, proof=signer.sign(f"{KEY} {text}"))
        self.redis.text = encoded(signed).decode()
        self.clock.sleep(policy.READ_SECONDS)

    def request(self, by: str, key: UserKey | None) -> Request:
        request = Request(to="k", fence=1, id="0" * 32, expires=0, by=by, deed=Pause())
        return request if key is None else replace(request, proof=key.sign(policy._signed(request, "")))


@pytest.fixture
def lab() -> Table:
    made = Table()
    made.put(TEXT)
    return made


def test_the_owner_of_a_study_its_runner_and_admins_may_act_on_it(lab: Table) -> None:
    for owners in (("anna", "root"), ("", "anna"), ("root@lab7", "anna")):
        assert lab.guard.refusal(lab.request("anna", ANNA), *owners) is None
    assert "only its owner root or" in str(lab.guard.refusal(lab.request("anna", ANNA), "", "root"))
    assert lab.guard.refusal(lab.request("anna", ANNA), "anna") is None
    assert lab.guard.refusal(lab.request("root", ROOT), "anna") is None
    assert lab.guard.refusal(lab.request("root", ROOT)) is None
    assert lab.guard.refusal(lab.request("anna", ANNA)) == "only an admin may do this, not anna"
    assert "only its owner root or an admin" in str(lab.guard.refusal(lab.request("anna", ANNA), "root"))


@cases(
    "by, key, reason",
    [
        ("bert", BERT, "bert is not a user"),
        # Two users who have one name on two hosts.
        ("anna", BERT, "not signed with the key of user anna"),
        ("anna", None, "not signed with the key of user anna"),
        ("", ANNA, "nobody is not a user"),
    ],
)
def test_a_name_without_the_key_of_the_policy_is_refused(by: str, key: UserKey | None, reason: str, lab: Table) -> None:
    assert reason in str(lab.guard.refusal(lab.request(by, key), by))
    proof = "" if key is None else key.sign(study_text("k", by))
    assert reason in str(lab.guard.unwelcome("k", by, proof))


def test_a_changed_request_is_refused(lab: Table) -> None:
    signed = lab.request("anna", ANNA)
    assert lab.guard.refusal(replace(signed, to="another"), "anna") is not None
    assert lab.guard.refusal(replace(signed, expires=1), "anna") is not None


def test_the_proof_of_a_study_is_for_this_study_alone(lab: Table) -> None:
    proof = ANNA.sign(study_text("k", "anna"))
    assert lab.guard.unwelcome("k", "anna", proof) is None
    assert lab.guard.unwelcome("another", "anna", proof) is not None


def test_a_removed_user_is_refused_after_the_next_reading(lab: Table) -> None:
    proof = ANNA.sign(study_text("k", "anna"))
    assert lab.guard.unwelcome("k", "anna", proof) is None
    lab.put(TEXT.replace("number = 2", "number = 3").replace("anna", "another"))
    assert "anna is not a user" in str(lab.guard.unwelcome("k", "anna", proof))


@pytest.mark.parametrize(
    ("text", "signer", "reason"),
    [
        (TEXT.replace("number = 2", "number = 1"), ROOT, "has number 1, not one above 2"),
        (TEXT.replace("weight = 2", "weight = 3"), ROOT, "has number 2, not one above 2"),
        (TEXT.replace("number = 2", "number = 3"), ANNA, "not signed by an admin"),
        ("number = 3", ROOT, "users"),
        ("number = 3\n[users.anna]\nkey = 'short'", ROOT, "users.anna.key: 'short' is not allowed"),
        ("number = 3\n[users.anna]\nadmin = true", ROOT, "users.anna.key: it is missing; 64"),
        (TEXT.replace("number = 2", "number = 3").replace("slots = 8", "slots = -1"), ROOT, "slots"),
        (TEXT.replace("number = 2", "number = 3").replace("weight = 2", "weight = 0"), ROOT, "weight"),
        ("number = ", ROOT, "is not TOML"),
    ],
)
def test_a_broken_unsigned_or_older_policy_is_ignored(text: str, signer: UserKey, reason: str, lab: Table) -> None:
    before = lab.guard.policy
    assert before is not None
    lab.put(text, signer)
    assert lab.guard.policy is before
    assert reason in lab.guard.warning
    assert lab.guard.warning.endswith("it is ignored, and number 2 stays in force")
    lab.put(TEXT.replace("number = 2", "number = 4"))
    assert lab.guard.policy is not None
    assert (lab.guard.policy.number, lab.guard.warning) == (4, "")


def test_the_policy_stays_in_force_if_redis_loses_it_or_does_not_answer(lab: Table) -> None:
    before = lab.guard.policy
    lab.redis.text = ""
    lab.clock.sleep(60)
    assert lab.guard.policy is before is not None
    lab.redis.is_down = True
    lab.clock.sleep(60)
    assert lab.guard.policy is before


def test_a_user_is_told_of_a_limit_for_which_his_trials_may_wait(lab: Table) -> None:
    assert lab.guard.notices("anna") == ["the fleet's policy gives all studies of anna together at most 8 slots"]
    assert lab.guard.notices("root") == lab.guard.notices("bert") == []
    lab.put("number = ")
    assert [each[:21] for each in lab.guard.notices("root")] == ["the policy in Redis i"]


def test_without_a_policy_a_fleet_with_admins_obeys_nobody() -> None:
    table = Table()
    assert table.guard.refusal(table.request("root", ROOT)) == table.guard.trouble == policy.NO_POLICY
    table.redis.text = "{}"
    table.clock.sleep(10)
    assert "no policy yet" in str(table.guard.refusal(table.request("root", ROOT)))
    assert table.guard.warning == "the policy in Redis is broken; it is ignored, and none stays in force"


def test_without_a_file_of_admins_there_is_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMINS_FILE, raising=False)
    assert Guard.configured(cast(Any, FakeRedis())) is None


def test_a_process_without_the_file_of_admins_takes_no_part_in_a_fleet_with_a_policy(
    lab: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers would decline its trials one by one, or it would run the trials of anybody."""
    monkeypatch.delenv(ADMINS_FILE, raising=False)
    with pytest.raises(UsageError, match=f"has a policy; name the file .* in {ADMINS_FILE}"):
        Guard.configured(cast(Any, lab.redis))
    monkeypatch.setenv(CONTROL_KEY_FILE, "embedded")
    assert Guard.configured(cast(Any, lab.redis)) is None


@cases(
    "name, owner, reason",
    [
        ("anna", "anna", ""),
        ("root", "anna", ""),
        # Nobody else can have this study: it was begun before there was a policy, or its user is removed.
        ("anna", "anna@lab7", ""),
        ("anna", None, ""),
        ("anna", "root", "only its owner root or an admin may do this, not anna"),
        ("anna", "", "only an admin may do this, not anna"),
    ],
)
def test_a_user_resumes_no_study_of_another_user(
    name: str, owner: str | None, reason: str, lab: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user.key").write_text({"anna": "02", "root": "01"}[name] * 32)
    (tmp_path / "user.key").chmod(0o600)
    monkeypatch.setenv(USER_KEY_FILE, str(tmp_path / "user.key"))
    monkeypatch.setenv(USER, name)
    with pytest.raises(UsageError, match=f"^{reason}$") if reason else nullcontext():
        lab.guard.refuse_self(owner)


def test_a_request_is_signed_although_the_key_file_has_vanished(
    lab: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "user.key"
    path.write_text("02" * 32)
    path.chmod(0o600)
    monkeypatch.setenv(USER_KEY_FILE, str(path))
    proof = policy.proof_of(lab.request("anna", None))
    path.unlink()
    assert policy.proof_of(lab.request("anna", None)) == proof != ""
    path.touch(0o600)
    path.write_text("03" * 32)
    assert policy.proof_of(lab.request("anna", None)) == BERT.sign(policy._signed(lab.request("anna", None), ""))


@pytest.mark.parametrize("text", ["", "# none\n", "5f1d root", "g" * 64])
def test_a_file_of_admins_without_keys_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "admins").write_text(text)
    with pytest.raises(UsageError, match="must have public keys"):
        policy.read_admins(tmp_path / "admins")


def test_the_key_of_a_user_is_a_secret_of_64_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "user.key"
    monkeypatch.setenv(USER_KEY_FILE, str(path))
    path.write_text("02" * 32 + "\n")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        UserKey.configured()
    path.chmod(0o600)
    found = UserKey.configured()
    assert found is not None
    assert found.public == ANNA.public
    path.write_text("02")
    with pytest.raises(UsageError, match="make one: shadho-celery fleet key"):
        UserKey.configured()
