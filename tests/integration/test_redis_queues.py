"""With Redis as the broker a worker outlives items that are no messages."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import pytest

from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, TrialState
from shadho_celery.fleet import broker
from shadho_celery.fleet.broker import Connection, Publisher, queue

#: items of a list that are no messages, in the ways that they can be none
JUNK: list[bytes] = [
    b"junk",
    b"",
    b"\xff\xfe",
    b"5",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"body": "", "properties": {"delivery_tag": "a"}}',
    b'{"body": "", "properties": {"delivery_tag": [], "delivery_info": {"exchange": "", "routing_key": "q"}}}',
    b'{"body": 5, "properties": {"delivery_tag": "a", "body_encoding": "base64", "delivery_info": {}}}',
    b'{"body": "!", "properties": {"delivery_tag": "a", "body_encoding": "base64", "delivery_info": {}}}',
    b'{"headers": [1], "properties": {"delivery_tag": "a", "delivery_info": {"exchange": "", "routing_key": "q"}}}',
]


def payload(number: int, study: str = "k1", attempt: int = 1, **changes: Any) -> Payload:
    one = Attempt(number=number, attempt=attempt, params={"x": 0.5}, subspace="", seed=0, state=TrialState.QUEUED)
    return Payload(**{"study": study, "module": "my_study", "attempts": [one], **changes})


def consumed(url: str, name: str, seconds: float = 0.5, **options: Any) -> list[Any]:
    """The tasks of all messages that a consumer gets."""
    found: list[Any] = []

    def keep(message: Any) -> None:
        found.append(message.headers["task"])
        message.ack()

    with (
        Connection(url, transport_options=options) as connection,
        connection.Consumer(queue(name), on_message=keep, accept=["json"]),
        suppress(socket.timeout),
    ):
        while True:
            connection.drain_events(timeout=seconds)
    return found


def test_items_that_are_no_messages_are_passed_over_and_said(
    client: Any, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.lpush("q", *JUNK)
    Publisher(redis_url).publish([("q", payload(0))])
    assert consumed(redis_url, "q") == ["shadho.trial"]
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == len(JUNK)
    for line in said:
        assert "not a message" in line
        assert "\n" not in line
        assert len(line) < 300
    assert not client.exists("unacked", "q")


def test_a_long_item_is_passed_over_unread(
    client: Any, redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "MAX_ITEM", 10_000)
    client.lpush("q", b"[" * 10_001)
    Publisher(redis_url).publish([("q", payload(0))])
    assert consumed(redis_url, "q") == ["shadho.trial"]
    assert "it has more than 10,000 bytes" in caplog.text
