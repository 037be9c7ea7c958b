"""A broker that is away is waited for; one that refuses for good says so before a worker starts."""

from __future__ import annotations

from collections.abc import Callable

import kombu
import pytest
import redis
import services

from shadho_celery.core.checks import mask
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.broker import check_access, depths, machine_queue, queue


@pytest.mark.parametrize("scheme", ["amqp", "redis"])
def test_a_broker_that_does_not_answer_is_no_reason_to_end_but_named_with_its_remedy(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{scheme}://me:secret@127.0.0.1:{services.free_port()}"
    monkeypatch.setenv("CELERY_BROKER_URL", url)
    said = check_access(kombu.Connection(url, connect_timeout=1), ["cpu"], url)
    assert said is not None
    assert said.startswith(f"the broker at {mask(url)} cannot be used (")
    assert "start it, or check CELERY_BROKER_URL; this worker tries again" in said
    assert "secret" not in said
    assert "\n" not in said


@pytest.mark.parametrize("fixture", ["redis_url", "amqp_url"])
def test_a_queue_that_may_be_served_keeps_its_messages_in_their_order(
    fixture: str, request: pytest.FixtureRequest, unique: Callable[[str], str]
) -> None:
    url, name = request.getfixturevalue(fixture), unique("cpu")
    with kombu.Connection(url) as connection:
        waiting = connection.SimpleQueue(queue(name)(connection.default_channel))
        for number in range(3):
            waiting.put({"number": number})
        assert check_access(kombu.Connection(url), [name, machine_queue(name, "here")]) is None
        assert [waiting.get(timeout=5).payload["number"] for _ in range(3)] == [0, 1, 2]
        waiting.close()
        queue(name)(connection.default_channel).delete()


@pytest.mark.parametrize("fixture", ["redis_url", "amqp_url"])
def test_the_depth_of_a_queue_is_told_without_making_one(
    fixture: str, request: pytest.FixtureRequest, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, name, absent = request.getfixturevalue(fixture), unique("cpu"), unique("absent")
    monkeypatch.setenv("CELERY_BROKER_URL", url)
    # RabbitMQ counts what it has taken in; without confirmations the messages may still be on their way there.
    with kombu.Connection(url, transport_options={"confirm_publish": True}) as connection:
        waiting = connection.SimpleQueue(queue(name)(connection.default_channel))
        for number in range(3):
            waiting.put({"number": number})
        nothing = 0 if fixture == "redis_url" else None
        assert depths([absent, name]) == depths([absent, name]) == {absent: nothing, name: 3}
        waiting.close()
        queue(name)(connection.default_channel).delete()
    monkeypatch.setenv("CELERY_BROKER_URL", f"{url.partition(':')[0]}://me:secret@127.0.0.1:{services.free_port()}")
    with pytest.raises(ServiceError, match="the broker at") as caught:
        depths([name])
    assert "secret" not in str(caught.value)


def test_a_wrong_password_and_missing_rights_are_final_on_redis_too(private_redis: services.RedisServer) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">right-one", "~shadho:*", "&*", "+@all")
    for password in ("wrong-one", "right-one"):
        url = private_redis.url.replace("//", f"//worker:{password}@")
        with pytest.raises(ServiceError, match="CELERY_BROKER_URL") as caught:
            check_access(kombu.Connection(url), ["cpu"])
        assert password not in str(caught.value)
        assert "\n" not in str(caught.value)
