"""Requests to a scheduler are carried out at most once, and answered; whatever is not meant for it is refused."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import services
from click.testing import CliRunner
from hyperopt import hp
from msgspec.structs import replace
from services.cases import cases
from services.controlled import SIGNER, control
from services.repeating import repeated

from shadho_celery import load_study
from shadho_celery.cli.again import enqueued
from shadho_celery.cli.group import commands
from shadho_celery.core.checks import encoded
from shadho_celery.core.records import Answer, Cancel, OfStudy, Stop
from shadho_celery.core.users import USER, USER_KEY_FILE
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.channel import SchedulerChannel
from shadho_celery.fleet.control import (
    CONTROL,
    KEPT_SECONDS,
    MAX_REQUEST,
    MAX_REQUESTS,
    VALID_SECONDS,
    Client,
    Inbox,
    Request,
)
from shadho_celery.fleet.policy import KEY, Signed, UserKey
from shadho_celery.fleet.registry import Registry, StudyWants, Worker
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.session import control as module
from shadho_celery.session.control import Control
from shadho_celery.session.opening import Opening
from shadho_celery.session.opening import Request as OpeningRequest
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study

# A fixture, which pytest finds by its name here.
__all__ = ["control"]

STUDY = "0123456789abcdef"
DONE = Answer(is_done=True, text="done")


class Scheduler:
    """The end of a scheduler with a fence of 7."""

    def __init__(self, client: Any, signer: Signer = SIGNER) -> None:
        self.inbox = Inbox(client, STUDY, 7, signer)
        self.channel = SchedulerChannel(client, STUDY, UNSIGNED, 7, self.inbox)

    def read(self) -> list[Request]:
        """Return the requests that are to be carried out."""
        assert self.channel.drain(0) == []
        found, self.inbox.arrived = self.inbox.arrived, []
        return [request for request, refusal in found if refusal is None]


def sent(client: Any, signer: Signer = SIGNER, **changes: Any) -> tuple[Client[OfStudy, Answer], Request]:
    """Send a request with these facts."""
    asker = Client(client, signer, CONTROL)
    request = replace(asker.request(STUDY, "me@here", Stop(), 7), **changes)
    assert asker.send(request) is not None
    return asker, request


def later(client: Any, seconds: float) -> int:
    """Return the moment of the server's clock in so many seconds."""
    return int(1000 * (client.time()[0] + seconds))


@pytest.mark.parametrize("signer", [SIGNER, UNSIGNED])
def test_a_request_is_read_once_and_answered(client: Any, signer: Signer) -> None:
    scheduler = Scheduler(client, signer)
    asker, request = sent(client, signer, deed=Cancel(3))
    assert scheduler.read() == [request]
    assert scheduler.read() == []
    assert asker.wait(request, 0.0) is None
    scheduler.inbox.answer(request, DONE)
    answer = f"shadho:{STUDY}:answer:{request.id}"
    assert 0 < client.ttl(answer) <= KEPT_SECONDS
    assert asker.wait(request) == DONE
    assert not client.exists(answer), "it is removed when it is read"
    assert client.xlen(scheduler.inbox.key) == 0


def test_a_request_that_arrives_again_gets_the_first_answer_also_once_it_has_expired(client: Any) -> None:
    scheduler = Scheduler(client)
    expires = later(client, 2.0)
    asker, request = sent(client, expires=expires)
    asker.send(request)
    assert scheduler.read() == [request]
    asker.send(request)
    assert scheduler.read() == []
    scheduler.inbox.answer(request, DONE)
    for _ in range(2):
        client.delete(f"shadho:{STUDY}:answer:{request.id}")
        asker.send(request)
        assert scheduler.read() == []
        assert asker.wait(request) == DONE
        services.wait_until(lambda: later(client, 0.0) > expires)


@cases(
    "seconds, fence, reason",
    [
        (-1.0, 7, "has expired"),
        (KEPT_SECONDS + 5, 7, "valid for more than 30 s"),
        (VALID_SECONDS, 6, "an earlier scheduler"),
    ],
)
def test_what_is_late_or_for_an_earlier_scheduler_is_refused(
    client: Any, seconds: float, fence: int, reason: str
) -> None:
    scheduler = Scheduler(client)
    asker, request = sent(client, expires=later(client, seconds), fence=fence)
    assert scheduler.read() == []
    answer = asker.wait(request)
    assert answer is not None
    assert (answer.is_done, reason in answer.text) == (False, True)
    assert scheduler.channel.forged == 0


def test_what_is_forged_is_counted_and_not_answered(client: Any) -> None:
    scheduler = Scheduler(client)
    good = Client(client, SIGNER, CONTROL).request(STUDY, "me", Stop(), 7)
    texts = [
        "",
        "no record",
        "{}",
        UNSIGNED.seal("", good),
        Signer(b"another key of the fleet").seal(scheduler.inbox.key, good),
        # Signed for another study, or for another key of Redis.
        SIGNER.seal("shadho:another:inbox", good),
        SIGNER.seal(scheduler.inbox.key, replace(good, to="another")),
        SIGNER.seal(scheduler.inbox.key, {"deed": {"action": "delete"}}),
        SIGNER.seal(scheduler.inbox.key, replace(good, by="x" * MAX_REQUEST)),
        json.dumps([]),
    ]
    for text in texts:
        client.xadd(scheduler.inbox.key, {"r": text})
    client.xadd(scheduler.inbox.key, {"another": "field"})
    assert scheduler.read() == []
    assert scheduler.channel.forged == len(texts) + 1
    assert [*client.scan_iter(f"shadho:{STUDY}:answer:*")] == []
    assert client.xlen(scheduler.inbox.key) == 0


def test_an_answer_that_is_forged_is_not_believed(client: Any) -> None:
    asker, request = sent(client)
    key = f"shadho:{STUDY}:answer:{request.id}"
    for text in (UNSIGNED.seal("", DONE), SIGNER.seal("another key", DONE), "no record"):
        client.set(key, text)
        assert asker.wait(request, 0.0) is None


def test_an_inbox_is_bounded_and_so_is_a_request(client: Any) -> None:
    for _ in range(MAX_REQUESTS):
        asker, request = sent(client)
    assert asker.send(request) is None
    with pytest.raises(ValueError, match="and may have 1000000"):
        asker.send(replace(request, by="x" * MAX_REQUEST))
    assert len(Scheduler(client).read()) == MAX_REQUESTS
    assert asker.send(request) is not None


def test_an_inbox_of_a_wrong_type_is_removed(client: Any) -> None:
    scheduler = Scheduler(client)
    client.set(scheduler.inbox.key, "no stream")
    scheduler.channel.repair()
    _, request = sent(client)
    assert scheduler.read() == [request]


# The whole way: from a name to an answer


@contextmanager
def running(client: Any) -> Iterator[None]:
    """A study that is announced, whose scheduler carries out what it is asked."""
    scheduler = Scheduler(client)
    announced(client, "svm-3f2a")

    def turn() -> None:
        for request in scheduler.read():
            scheduler.inbox.answer(request, Answer(is_done=True, text=f"{request.deed} by {request.by}"))

    with repeated(turn):
        yield


def announced(client: Any, name: str, control: str | None = SIGNER.fingerprint) -> None:
    """A study that is announced, but does not read requests."""
    key = STUDY if name.startswith("svm-3") else uuid.uuid4().hex[:16]
    Registry(client, StudyWants, SIGNER).announce(key, StudyWants(name=name, fence=7, control=control))


def test_a_running_study_is_found_by_its_name_or_a_unique_beginning(client: Any, control: Control) -> None:
    announced(client, "svm-other")
    with running(client):
        for name in ("svm-3f2a", "svm-3", STUDY):
            named = "" if name == "svm-3f2a" else "study svm-3f2a: "
            assert control.cancel(name, 3).text.startswith(f"{named}Cancel(number=3) by ")
        with pytest.raises(UsageError, match="2 running studies are called 'svm': svm-3f2a, svm-other"):
            control.stop("svm")
        for name in ("gp", ""):
            with pytest.raises(UsageError, match=r"no running study is called .*: svm-3f2a, svm-other"):
                control.stop(name)


def test_the_name_of_a_study_that_has_ended_does_not_mean_another_one_that_runs(
    redis_url: str, client: Any, control: Control, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path}/studies.db"
    with closing(SqlStore(store)) as opened:
        study = open_study(opened, compile_space({"x": hp.uniform("x", 0, 1)}).describe(), name="svm-3", seed=1)
        study.unlock()
    with running(client):
        assert control.stop("svm-3").is_done, "a store without it"
        with pytest.raises(UsageError, match="study svm-3 does not run"):
            Control(redis=redis_url, store=store).stop("svm-3")


def test_a_study_that_does_not_run_is_changed_only_by_its_owner_and_admins(
    redis_url: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a note, and with params that its next run begins with."""
    pytest.importorskip("cryptography")
    keys = {name: UserKey(bytes([number]) * 32) for number, name in enumerate(("root", "anna", "bert"))}
    users = [f"[users.{name}]\nkey = '{key.public}'\n" for name, key in keys.items()]
    text = "admin = true\n".join(["number = 1\n" + users[0], "".join(users[1:])])
    signed = Signed(text=text, key=keys["root"].public, proof=keys["root"].sign(f"{KEY} {text}"))
    client.set(KEY, encoded(signed).decode())
    store = f"sqlite:///{tmp_path}/studies.db"
    (tmp_path / "annas.py").write_text(
        "from hyperopt import hp\nSPACE = {'x': hp.uniform('x', 0, 1)}\ndef objective(p):\n    return p['x']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(urls.REDIS, redis_url)

    def act_as(name: str) -> None:
        path = tmp_path / f"{name}.key"
        path.write_text(f"{[*keys].index(name):02}" * 32)
        path.chmod(0o600)
        monkeypatch.setenv(USER_KEY_FILE, str(path))
        monkeypatch.setenv(USER, name)

    act_as("anna")
    space = {"x": hp.uniform("x", 0, 1)}
    with closing(Opening(OpeningRequest(space=space, module="annas", store=store, name="mine")).open()):
        pass
    study = load_study(store, "mine")
    act_as("bert")
    refusal = "only its owner anna or an admin may do this, not bert"
    with pytest.raises(UsageError, match=refusal):
        Control(store=store).note("mine", "no")
    with pytest.raises(UsageError, match=refusal):
        enqueued(study, store, [{"x": 0.5}])
    assert refusal in CliRunner().invoke(commands, ["rm", "mine", "--yes", "--store", store]).stderr
    assert (study.notes(), study.count()) == ([], 0)
    for number, name in enumerate(("anna", "root"), start=1):
        act_as(name)
        assert Control(store=store).note("mine", "yes").is_done
        assert enqueued(study, store, [{"x": 0.5}]).is_done
        assert ([each["by"] for each in study.notes()][-1], study.count()) == (name, number)


@cases("key, reason", [(None, "has no signing key"), ("12345678", "another signing key")])
def test_a_study_without_our_key_refuses(client: Any, control: Control, key: str | None, reason: str) -> None:
    announced(client, "svm-3f2a", key)
    answer = control.stop("svm")
    assert (answer.is_done, reason in answer.text) == (False, True)
    assert not client.exists(f"shadho:{STUDY}:inbox")


def test_a_study_and_a_worker_of_a_fleet_with_another_key_are_said_to_have_it(client: Any, control: Control) -> None:
    other = Signer(b"another key of a fleet")
    Registry(client, StudyWants, other).announce(STUDY, StudyWants(name="svm-3f2a", fence=7, control=other.fingerprint))
    reason = "announcements with another signing key than this command's: 1; give the fleet's --signing-key-file"
    with pytest.raises(UsageError, match=reason):
        control.stop("svm")
    worker = Worker(key=other.fingerprint, compute_class="cpu", slots=1)
    Registry(client, Worker, other).announce("cpu@node7.1.abcd", worker)
    with pytest.raises(UsageError, match=reason):
        control.drain("cpu@node7")


def test_without_an_answer_the_request_is_taken_back(
    client: Any, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VALID_SECONDS", 0.1)
    monkeypatch.setattr(module, "STUDY_SECONDS", 0.1)
    announced(client, "svm-3f2a")
    with pytest.raises(ServiceError, match="so nothing was changed"):
        control.stop("svm")
    assert Scheduler(client).read() == []


def test_a_study_that_reads_but_does_not_answer_is_said_to(
    client: Any, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VALID_SECONDS", "GRACE_SECONDS", "STUDY_SECONDS"):
        monkeypatch.setattr(module, name, 0.1)
    monkeypatch.setattr(Client, "take_back", lambda *_: False)
    announced(client, "svm-3f2a")
    with pytest.raises(ServiceError, match="has read the request but has not answered"):
        control.stop("svm")


def test_a_study_that_ends_meanwhile_is_said_to(client: Any, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUDY_SECONDS", 0.01)
    monkeypatch.setattr(Client, "wait", lambda *_: Registry(client, StudyWants, SIGNER).withdraw(STUDY))
    announced(client, "svm-3f2a")
    with pytest.raises(ServiceError, match="ended before its scheduler answered"):
        control.stop("svm")


def test_points_and_settings_are_checked_before_they_are_sent(client: Any, control: Control) -> None:
    announced(client, "svm-3f2a")
    for points in ([], [1] * 1001):
        with pytest.raises(UsageError, match=f"there are {len(points)} points"):
            control.enqueue("svm", points)
    with pytest.raises(UsageError, match="too long"):
        control.enqueue("svm", [{"x": "y" * MAX_REQUEST}])
    wrong: dict[str, dict[str, Any]] = {
        "no setting is given": {},
        "trials": {"trials": "many"},
        "not a setting": {"nothing": 1},
    }
    for words, settings in wrong.items():
        with pytest.raises(UsageError, match=words):
            control.set("svm", **settings)
    assert not client.exists(f"shadho:{STUDY}:inbox")


def test_a_full_inbox_is_said_to_be(client: Any, control: Control) -> None:
    announced(client, "svm-3f2a")
    for _ in range(MAX_REQUESTS):
        sent(client)
    with pytest.raises(ServiceError, match="has not read 20 earlier requests"):
        control.stop("svm")
