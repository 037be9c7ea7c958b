"""A scheduler's inbox: what a request that arrives again is answered."""

from __future__ import annotations

from typing import Any

import pytest

from shadho_celery.core.actions import Answer, Stop
from shadho_celery.transport.control import KEPT_SECONDS, VALID_SECONDS, Inbox, Request
from shadho_celery.transport.signing import Signer

STUDY, SIGNER = "a" * 32, Signer(b"k" * 32)


class Server:
    """The commands of Redis that an inbox uses, at a time `now` in seconds. What is in the inbox stays there."""

    def __init__(self) -> None:
        self.now = 1000
        self.values: dict[str, str] = {}
        self.inbox: list[str] = []

    def evalsha(self, *_: object) -> list[Any]:
        return [1000 * self.now, *self.inbox]

    def set(self, key: str, value: str, ex: int) -> None:
        self.values[key] = value


@pytest.mark.parametrize("later", [1, VALID_SECONDS + 1, VALID_SECONDS + KEPT_SECONDS - 1])
def test_a_request_that_arrives_again_gets_its_first_answer_even_if_it_has_expired(later: float) -> None:
    server = Server()
    inbox = Inbox(server, STUDY, 1, SIGNER)
    expires = int(1000 * (server.now + VALID_SECONDS))
    request = Request(to=STUDY, fence=1, id="0" * 32, expires=expires, by="me@here", deed=Stop())
    server.inbox = [SIGNER.seal(inbox.key, request)]
    inbox.read()
    [waiting] = inbox.waiting
    inbox.answer(waiting, Answer(is_done=True, text="stopping"))
    [first] = server.values.values()
    server.now += int(later)
    inbox.read()
    assert inbox.waiting == [request], "it is not carried out again"
    assert [*server.values.values()] == [first]
