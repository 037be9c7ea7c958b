"""Users of a fleet with a policy: who may do what, and what becomes of a study whose user is removed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from acceptance.commands import Desk, until
from acceptance.test_control import told
from integration.fleets import fleet

from shadho_celery.fleet.drains import Drains
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.signing import KEY_FILE, Signer

pytestmark = pytest.mark.timeout(120)

POLICY = """number = {number}
[users.root]
key = "{root}"
admin = true
[users.anna]
key = "{anna}"
"""


def key_of(desk: Desk, user: str) -> str:
    """Make a key of a user, and return its public part."""
    line = told(desk, "fleet", "key", f"{user}.key", SHADHO_USER=user)
    assert line.startswith(f'[users."{user}"]\nkey = "')
    return line.split('"')[3]


def as_user(desk: Desk, user: str) -> dict[str, str]:
    return {"SHADHO_USER": user, "SHADHO_USER_KEY_FILE": str(desk.folder / f"{user}.key")}


def run_is_refused(desk: Desk, because: str, **environment: str) -> None:
    answer = desk.told("run", "my_study", "--trials", "1000", "--study", "refused", **environment)
    assert (answer.code, because in answer.err.splitlines()[-1]) == (2, True), answer.err


def test_a_study_obeys_its_owner_and_admins_and_ends_when_its_user_is_removed(
    tmp_path: Path, amqp_url: str, redis_url: str, postgres_url: str, unique: Callable[[str], str]
) -> None:
    """Two users on one fleet of RabbitMQ, Redis and PostgreSQL with three workers."""
    secret = tmp_path / "shadho.key"
    secret.write_text("0123456789abcdef0123")
    secret.chmod(0o600)
    named = {KEY_FILE: str(secret), "SHADHO_STORE": postgres_url}
    with fleet(tmp_path / "fleet", amqp_url, redis_url, unique("cpu"), **named) as made:
        desk = made.desk
        desk.study(seconds=0.3)
        keys = {user: key_of(desk, user) for user in ("root", "anna", "bert")}
        assert r'[users."LAB\\bert"]' in told(desk, "fleet", "key", "bert.key", SHADHO_USER=r"LAB\bert")
        desk.write("admins", f"{keys['root']} root\n")
        desk.environment["SHADHO_ADMINS_FILE"] = str(desk.folder / "admins")
        root, anna, bert = (as_user(desk, user) for user in keys)
        bert_too = f'{POLICY}[users.bert]\nkey = "{{bert}}"\n'
        desk.write("policy.toml", bert_too.format(number=2, **keys))
        desk.write("with.toml", bert_too.format(number=4, **keys))
        desk.write("without.toml", POLICY.format(number=3, **keys))
        desk.write("older.toml", bert_too.format(number=1, **keys))
        run_is_refused(desk, "no policy yet", **anna)
        assert "is not one of the admins'" in told(desk, "fleet", "policy", "set", "policy.toml", code=2, **anna)
        without_file = root | {"SHADHO_ADMINS_FILE": ""}
        assert "SHADHO_ADMINS_FILE" in told(desk, "fleet", "policy", "set", "policy.toml", code=2, **without_file)
        assert told(desk, "fleet", "policy", "set", "policy.toml", **root).startswith("policy 2 is in force")
        assert "one above 2" in told(desk, "fleet", "policy", "set", "older.toml", code=2, **root)
        assert told(desk, "fleet", "policy", "show") == bert_too.format(number=2, **keys)
        made.workers(3)
        # The name alone is no proof.
        run_is_refused(desk, "is not signed with the key of user anna", **bert | {"SHADHO_USER": "anna"})
        hers, his = (
            desk.launch("my_study", "--trials", "1000", "--study", name, **user)
            for name, user in (("hers", anna), ("his", bert))
        )
        until(lambda: len(desk.runs()) > 3, 60, desk.said)
        assert "only its owner anna or an admin may do this, not bert" in told(desk, "stop", "hers", code=2, **bert)
        run_is_refused(desk, "this fleet has a policy; name the file", **anna | {"SHADHO_ADMINS_FILE": ""})
        assert told(desk, "pause", "hers", **anna).startswith("paused")
        [worker, *_] = [
            each for each in told(desk, "status", "--json").split('"') if each.startswith(made.compute_class + "@")
        ]
        assert "only an admin may do this, not anna" in told(desk, "drain", worker, code=2, **anna)
        # A drain from before the policy does not count, and an admin's replaces it.
        with connect(redis_url) as client:
            Drains(client, Signer(secret.read_bytes())).put(worker, "anna", alone=True)
        assert told(desk, "drain", worker, **root).startswith("drained")
        shown = told(desk, "status", "--user", "bert", "--json")
        assert '"owner": "bert"' in shown
        assert '"owner": "anna"' not in shown
        told(desk, "fleet", "policy", "set", "without.toml", **root)
        removed_at = time.monotonic()
        his.says("stopping: bert is not a user of this fleet's policy")
        assert his.wait(20).code == 0, desk.said()
        assert time.monotonic() - removed_at < 60.0
        run_is_refused(desk, "bert is not a user", **bert)
        assert told(desk, "stop", "hers", **root).startswith("stopping")
        assert hers.wait(30).code == 0, desk.said()
        # The owner steers a run that an admin has resumed.
        again = desk.launch("my_study", "--resume", "hers", **root)
        until(lambda: '"hers"' in told(desk, "status", "--user", "root", "--json"), 60, desk.said)
        assert told(desk, "stop", "hers", **anna).startswith("stopping")
        assert again.wait(30).code == 0, desk.said()
        found = told(desk, "studies")
        assert "anna" in found
        assert "bert" in told(desk, "studies", "--user", "bert")
        assert "anna" not in told(desk, "studies", "--user", "bert")
        his_own = "only its owner anna or an admin may do this, not bert"
        told(desk, "fleet", "policy", "set", "with.toml", **root)
        assert his_own in told(desk, "rm", "hers", "--yes", code=2, **bert)
        # Each action is recorded with the user who has requested it.
        shown = desk.told("show", "hers", "--json").json()
        by = [each["by"] for each in shown["actions"]]
        assert (shown["owner"], by) == ("anna", ["bert", "anna", "root", "root", "anna"])
