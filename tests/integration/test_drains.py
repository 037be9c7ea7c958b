"""Workers are drained and undrained over a real Redis, and workers that end and start stay drained."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from acceptance.commands import until
from click.testing import CliRunner
from integration.fleets import fleet
from services.cases import cases
from services.controlled import BYTES, SIGNER, control
from services.repeating import repeated

from shadho_celery.cli.group import commands
from shadho_celery.core.system import ManualClock
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.drains import KEY, Drain, Drains, DrainWatch
from shadho_celery.fleet.redis import server_time
from shadho_celery.fleet.registry import Registry, StudyWants, Worker, obeyed_drains
from shadho_celery.fleet.signing import KEY_FILE, READ_SECONDS, UNSIGNED, Signer
from shadho_celery.node.heartbeat import ANNOUNCE_EVERY, DRAIN_EVERY, Heartbeat
from shadho_celery.node.leases import Leases
from shadho_celery.session import control as module
from shadho_celery.session.control import Control

# A fixture, which pytest finds by its name here.
__all__ = ["control"]


@contextmanager
def serving(
    client: Any, name: str, key: Signer | None = SIGNER, signer: Signer = SIGNER
) -> Iterator[tuple[Heartbeat, MagicMock]]:
    """A worker that beats, with its consumer of messages. `key` signs the drains that it obeys."""
    clock, consumer = ManualClock(), MagicMock()
    worker = Worker(key=signer.fingerprint, control=None if key is None else key.fingerprint, slots=2)
    leases = Leases(MagicMock(), MagicMock())
    heartbeat = Heartbeat(client, name, worker, leases, clock, signer=signer, control=key)
    heartbeat.check()
    heartbeat.announce(consumer)

    def beat() -> None:
        clock.sleep(DRAIN_EVERY)
        heartbeat.beat(has_free_slot=False)

    try:
        with repeated(beat):
            yield heartbeat, consumer
    finally:
        heartbeat.withdraw()


def test_a_worker_that_is_asked_to_end_takes_nothing_more_and_its_neighbours_go_on(client: Any) -> None:
    """Without its signature the request is refused, and the list of drained workers does not have it."""
    asked: list[str] = []
    with serving(client, "cpu@h.1.aaaa") as (heartbeat, consumer), serving(client, "cpu@h.2.bbbb") as (_, other):
        heartbeat.on_end = asked.append
        Drains(client, UNSIGNED).put("cpu@h.1.aaaa", "mallory", alone=True, ends=True)
        Drains(client, SIGNER).put("cpu@h.2.bbbb", "me@here", alone=True, ends=True)
        client.hset(KEY, "cpu@h.1.aaaa", client.hget(KEY, "cpu@h.2.bbbb"))
        until(lambda: announced(client, "cpu@h.2.bbbb").drained, 10)
        assert not asked
        Drains(client, SIGNER).put("cpu@h.1.aaaa", "me@here", alone=True, ends=True)
        until(lambda: announced(client, "cpu@h.1.aaaa").drained, 10)
        assert asked == ["me@here"]
        consumer.pause.assert_called_once_with("drain")
        assert Drains(client, SIGNER).all() == {}
        other.pause.assert_called_once_with("drain")
        Drains(client, SIGNER).forget(["cpu@h.1.aaaa", "cpu@h.2.bbbb"])
        assert client.hlen(KEY) == 0


@pytest.mark.timeout(120)
def test_a_drained_worker_finishes_its_trial_and_the_others_run_the_rest(
    amqp_url: str, redis_url: str, client: Any, control: Control, unique: Callable[[str], str], tmp_path: Path
) -> None:
    """On RabbitMQ, with a worker of another class, and after a restart of the drained one."""
    key = str(tmp_path / "shadho.key")
    name, other = unique("cpu"), unique("gpu")
    with fleet(tmp_path / "fleet", amqp_url, redis_url, name, **{KEY_FILE: key}) as made:
        desk = made.desk
        desk.study(seconds=4.0)
        [drained] = made.workers(1)
        launched = made.launch("my_study", 3)
        desk.await_runs(1)
        place = next(iter(Registry(client, Worker, SIGNER).living()))
        answer = control.drain(place)
        assert answer.is_done
        begun = len(desk.runs())
        assert "1 running trial finishes first" in answer.text
        until(lambda: len(desk.runs("ended")) == begun, 20, desk.said)
        status = desk.told("status", **{KEY_FILE: key})
        assert "drained" in status.out
        assert "is drained, by " in status.out
        desk.worker(other, "-c", "1", "--without-gossip", "--without-mingle")
        desk.await_runs(begun + 1)
        drained.send(15)
        assert drained.wait(30).code == 0
        made.workers(1)
        made.ended_well(launched, "my_study", 3, 60)
        classes = [class_name for _, _, class_name, _ in desk.runs()]
        assert classes == begun * [name] + (3 - begun) * [other]
        assert "Traceback" not in desk.said()


def announced(client: Any, name: str) -> Worker:
    return Registry(client, Worker, SIGNER).living()[name]


def test_a_drained_worker_takes_nothing_until_it_is_undrained_also_after_a_restart(
    client: Any, control: Control
) -> None:
    with serving(client, "cpu@h.1.aaaa") as (_, consumer):
        answer = control.drain("cpu@h.1.aaaa")
        assert (answer.is_done, answer.text) == (True, "drained cpu@h: it takes no more trials")
        consumer.pause.assert_called_once_with("drain")
        worker = announced(client, "cpu@h.1.aaaa")
        assert (worker.drained, worker.draining, worker.quarantined) == (True, True, True)
        assert control.drain("cpu@h").text.startswith("cpu@h was already drained by ")
    with serving(client, "cpu@h.2.bbbb") as (heartbeat, consumer):
        consumer.pause.assert_called_once_with("drain")
        assert announced(client, "cpu@h.2.bbbb").drained
        assert control.undrain("cpu@h").text == "undrained cpu@h: it takes trials again"
        consumer.resume.assert_called_once_with("drain")
        assert not heartbeat.is_drained
        assert control.undrain("cpu@h").text == "cpu@h was not drained"


def test_a_scheduler_finds_each_drain_once_also_one_from_before_its_start(client: Any, control: Control) -> None:
    with serving(client, "cpu@h.1.aaaa"), serving(client, "gpu@h.2.bbbb"), serving(client, "cpu@i.3.cccc"):
        before = server_time(client)
        control.drain("cpu@h")
        watch = DrainWatch(Drains(client, SIGNER))
        living = Registry(client, Worker, SIGNER).living
        found = watch.news(obeyed_drains(living()))
        assert [(place, drain.is_drained) for place, drain in found.items()] == [("cpu@h", True)]
        assert before <= found["cpu@h"].at <= server_time(client), "not the whole second before what was asked earlier"
        assert watch.news(obeyed_drains(living())) == {}
        control.undrain("cpu@h")
        control.drain("gpu@h")
        found = watch.news(obeyed_drains(living()))
        assert {place: drain.is_drained for place, drain in found.items()} == {"cpu@h": False, "gpu@h": True}
        control.drain("cpu@i")
        client.hdel(KEY, "cpu@i")
        assert watch.news(obeyed_drains(living())) == {}, "Redis has lost who did it"


def test_status_names_a_drained_worker_also_when_redis_has_lost_the_record(
    client: Any, control: Control, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (urls.BROKER, urls.REDIS):
        monkeypatch.setenv(name, redis_url)
    with serving(client, "cpu@h.1.aaaa"), serving(client, "gpu@h.2.bbbb") as (ending, _):
        control.drain("gpu@h")
        control.undrain("gpu@h")
        control.drain("cpu@h")
        Drains(client, SIGNER).put("gpu@h.2.bbbb", "me@here", alone=True, ends=True)
        until(lambda: ending.is_drained and announced(client, "gpu@h.2.bbbb").drained, 10)
        said = CliRunner().invoke(commands, ["status"]).output
        assert re.findall("(.*) is drained, by .*; shadho-celery undrain cpu@h lets it", said) == ["cpu@h"]
        client.hdel(KEY, "cpu@h")
        said = CliRunner().invoke(commands, ["status"]).output
        assert re.findall("(.*) is drained, but Redis has lost its record; shadho-celery undrain cpu@h", said) == [
            "cpu@h"
        ]
        assert control.undrain("cpu@h").is_done
        assert "is drained" not in CliRunner().invoke(commands, ["status"]).output


def test_only_what_is_meant_and_live_is_drained(client: Any, control: Control) -> None:
    with pytest.raises(UsageError, match="no live worker is 'cpu@h'; none is live"):
        control.drain("cpu@h")
    with serving(client, "cpu@h.1.aaaa"), serving(client, "cpu@h.2.bbbb"), serving(client, "gpu@h.3.cccc"):
        with pytest.raises(UsageError, match=r"there are cpu@h, gpu@h; see shadho-celery status"):
            control.drain("cpu@i")
        assert control.drain("cpu@h").is_done
        assert [announced(client, f"cpu@h.{name}").drained for name in ("1.aaaa", "2.bbbb")] == [True, True]
        assert not announced(client, "gpu@h.3.cccc").drained
    assert control.undrain("cpu@h").text == "undrained cpu@h, where no worker is live"


def test_of_several_workers_of_a_place_one_is_drained_by_its_name(client: Any, control: Control) -> None:
    one, other = "cpu@10.0.0.7.1.aaaa", "cpu@10.0.0.7.2.bbbb"
    watch, living = DrainWatch(Drains(client, SIGNER)), Registry(client, Worker, SIGNER).living

    def drained() -> list[bool]:
        return [announced(client, name).drained for name in (one, other)]

    with serving(client, one), serving(client, other):
        assert control.drain(one).text == f"drained {one}: it takes no more trials"
        assert control.drain(one).text.startswith(f"{one} was already drained by ")
        assert drained() == [True, False]
        assert {place: drain.is_drained for place, drain in watch.news(obeyed_drains(living())).items()} == {one: True}
        assert control.undrain(one).text == f"undrained {one}: it takes trials again"
        assert control.undrain(one).text == f"{one} was not drained"
        assert (drained(), control.undrain("cpu@10.0.0.7").text) == ([False, False], "cpu@10.0.0.7 was not drained")
        control.drain(one)
        control.drain("cpu@10.0.0.7")
        refused = control.undrain(one)
        assert (refused.is_done, refused.text) == (False, "all workers of cpu@10.0.0.7 are drained; undrain it")
        assert (control.undrain("cpu@10.0.0.7").is_done, drained()) == (True, [False, False])
        control.drain(one)
    with serving(client, "cpu@10.0.0.7.3.cccc"), serving(client, other):
        control.drain(other)
        assert Drains(client, SIGNER).all().keys() == {other}, "the record of a worker that has gone is removed"


@cases("key, signer", [(None, SIGNER), (Signer(b"another key of a fleet"), SIGNER)])
def test_a_worker_without_our_key_refuses(client: Any, control: Control, key: Signer | None, signer: Signer) -> None:
    with serving(client, "cpu@h.1.aaaa", key, signer):
        answer = control.drain("cpu@h")
        assert not answer.is_done
        reason = "it has no signing key" if key is None else "obeys requests with another signing key"
        assert reason in answer.text
        assert not client.exists(KEY)


def test_without_a_key_workers_that_allow_it_obey(client: Any, redis_url: str) -> None:
    with serving(client, "cpu@h.1.aaaa", UNSIGNED, UNSIGNED) as (heartbeat, _):
        assert Control(redis=redis_url).drain("cpu@h").is_done
        assert heartbeat.is_drained


def test_forged_drains_and_those_of_another_place_are_ignored(client: Any, control: Control) -> None:
    drains, drain = Drains(client, SIGNER), Drain(by="me", at=1.0, sequence=1)
    signed, unsigned = SIGNER.seal(f"{KEY}:gpu@h", drain), UNSIGNED.seal("", drain)
    for text in ("", "{}", "no record", unsigned, signed, "x" * 10_000):
        client.hset(KEY, "cpu@h", text)
        assert drains.latest("cpu@h") is None
        assert drains.all() == {}
    client.delete(KEY)
    client.set(KEY, "of another type")
    assert (drains.latest("cpu@h"), drains.all()) == (None, {})


def read_again(heartbeat: Heartbeat) -> None:
    """Wait until a worker has read its drain from Redis since now."""
    since = heartbeat._drain_read_at
    until(lambda: heartbeat._drain_read_at > since + 2 * DRAIN_EVERY, 10)


def test_an_old_drain_that_is_put_back_is_refused(
    client: Any, control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    """Who can write to Redis has no key, but may have kept what others have signed."""
    with serving(client, "cpu@h.1.aaaa") as (heartbeat, _):
        control.drain("cpu@h")
        old_drain = client.hget(KEY, "cpu@h")
        control.undrain("cpu@h")
        old_undrain = client.hget(KEY, "cpu@h")
        client.hset(KEY, "cpu@h", old_drain)
        until(lambda: "was put back into Redis; it is refused" in caplog.text, 10)
        assert not heartbeat.is_drained
        drains, obeyed = Drains(client, SIGNER), announced(client, "cpu@h.1.aaaa").drain_sequence
        assert {*drains.all()} == {"cpu@h"}
        assert drains.all({"cpu@h": obeyed}) == {}, "status does not show it"
        assert control.drain("cpu@h").text == "drained cpu@h: it takes no more trials"
        for put_back in (old_undrain, None):
            client.hdel(KEY, "cpu@h") if put_back is None else client.hset(KEY, "cpu@h", put_back)
            read_again(heartbeat)
            assert heartbeat.is_drained, "it takes a later undrain with a signature"


def test_a_clock_that_is_set_back_does_not_make_an_undrain_old(client: Any, control: Control) -> None:
    with serving(client, "cpu@h.1.aaaa") as (heartbeat, _):
        future = Drain(by="me", at=1.0, sequence=10**14)
        client.hset(KEY, "cpu@h", SIGNER.seal(f"{KEY}:cpu@h", future))
        until(lambda: heartbeat.is_drained, 10)
        until(lambda: announced(client, "cpu@h.1.aaaa").drain_sequence == 10**14, 10)
        assert control.undrain("cpu@h").is_done
        assert not heartbeat.is_drained
        client.delete(KEY)
        assert control.drain("cpu@h").is_done
        assert heartbeat.is_drained


def test_the_running_trials_of_a_drained_worker_are_told(client: Any, control: Control) -> None:
    drained = Worker(control=SIGNER.fingerprint, busy=2, slots=2, drained=True)
    Registry(client, Worker, SIGNER).announce("cpu@h.1.aaaa", drained)
    assert control.drain("cpu@h").text.endswith("it takes no more trials; 2 running trials finish first")


def test_a_worker_that_does_not_beat_is_said_to_be_late(
    client: Any, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    Registry(client, Worker, SIGNER).announce("cpu@h.1.aaaa", Worker(control=SIGNER.fingerprint))
    with pytest.raises(ServiceError, match=r"worker cpu@h\.1\.aaaa has not confirmed it"):
        control.drain("cpu@h")
    assert Drains(client, SIGNER).latest("cpu@h") is not None


def test_a_drain_outlasts_a_rotation_of_the_keys(client: Any, tmp_path: Path) -> None:
    """Schedulers sign the record again, and none that a stranger has written."""
    file, clock, old, new = tmp_path / "shadho.key", ManualClock(), b"a key of sixteen bytes", b"another key of a fleet"
    file.write_bytes(old)
    file.chmod(0o600)
    ours = Drains(client, Signer.of_file(file, clock))
    ours.put("cpu@h", "me@here")
    Drains(client, Signer(b"the key of a stranger")).put("gpu@h", "mallory")
    before = client.hgetall(KEY)
    ours.follow_keys()
    assert client.hgetall(KEY) == before
    file.write_bytes(new + b"\n" + old)
    clock.sleep(READ_SECONDS)
    ours.follow_keys()
    assert Drains(client, Signer(new)).all().keys() == {"cpu@h"}
    assert client.hget(KEY, "gpu@h") == before["gpu@h"]


def test_a_worker_that_was_off_during_a_rotation_takes_messages_once_its_file_has_the_key(
    client: Any, tmp_path: Path
) -> None:
    file, clock, consumer = tmp_path / "shadho.key", ManualClock(), MagicMock()
    file.write_bytes(b"the key before the rotation")
    file.chmod(0o600)
    signer = Signer.of_file(file, clock)
    Registry(client, StudyWants, SIGNER).announce("k1", StudyWants(name="one"))
    heartbeat = Heartbeat(client, "cpu@h.1.aaaa", Worker(), Leases(MagicMock(), MagicMock()), clock, signer=signer)
    heartbeat.check()
    heartbeat.announce(consumer)
    consumer.pause.assert_called_once_with("key")
    file.write_bytes(BYTES)
    clock.sleep(ANNOUNCE_EVERY)
    heartbeat.beat(has_free_slot=False)
    consumer.resume.assert_called_once_with("key")
    Registry(client, StudyWants, UNSIGNED).announce("k2", StudyWants(name="of a stranger"))
    clock.sleep(ANNOUNCE_EVERY)
    heartbeat.beat(has_free_slot=False)
    consumer.pause.assert_called_once_with("key")
    heartbeat.withdraw()
