"""Requests to the scheduler of a running study, and its answers, over Redis.

Keys of a study, under ``shadho:{study}:``; both have a time to live:

``inbox``      stream of the requests that the scheduler has not read; at most MAX_REQUESTS
``answer:ID``  the answer to request ID

A request is for one scheduler, which its fence names, and is valid until a moment of the server's clock, so the clocks
of the hosts do not matter. A scheduler carries a request out at most once: a request that arrives again gets the first
answer. Requests and answers are signed if there is a key, and each signature is valid for one key of Redis only.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

from shadho_celery.core.actions import Answer, OfStudy
from shadho_celery.core.clock import SystemClock
from shadho_celery.core.payload import StudyKey
from shadho_celery.core.trial import Int64, Name, Number
from shadho_celery.transport.redis import Redis, keys, run
from shadho_celery.transport.signing import Sealed, Signer

#: maximum number of requests in an inbox, and of characters of a sealed request and of a sealed answer
MAX_REQUESTS, MAX_REQUEST, MAX_ANSWER = 20, 1_000_000, 100_000

#: seconds for which a request is valid, and the longest time that a scheduler accepts
VALID_SECONDS, MOST_VALID_SECONDS = 10.0, 60.0

#: seconds for which an inbox is kept after its last request, and an answer after it was given
KEPT_SECONDS = 120

#: seconds after the end of a request's validity for which its answer is waited for, because the scheduler may have read
#: it just before; and seconds between two checks
GRACE_SECONDS, LOOK_SECONDS = 5.0, 0.05


class Request(Struct, frozen=True, kw_only=True):
    """A request to the scheduler of a study."""

    study: StudyKey
    #: fence of the scheduler that may carry it out
    fence: Int64
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    #: moment of the server's clock, in ms, until which it is valid
    expires: Number
    #: user and host
    by: Name
    deed: OfStudy


_REQUESTS, _ANSWERS = Sealed[Request](Request, MAX_REQUEST), Sealed[Answer](Answer, MAX_ANSWER)


@dataclass
class Inbox:
    """The scheduler's end: the requests to it, and its answers."""

    client: Redis
    study: str
    fence: int
    signer: Signer
    #: number of entries that were unsigned or malformed
    forged: int = 0
    #: requests that were read and are to be carried out
    waiting: list[Request] = field(default_factory=list)
    #: requests that were refused because they have expired, or are for another scheduler, with their answers
    refused: list[tuple[Request, Answer]] = field(default_factory=list)
    #: by id of a request, until KEPT_SECONDS after it has expired: the end of its validity, and its answer, or None
    #: before that. A copy of the request must not replace the answer, for which its sender may still wait
    _known: dict[str, tuple[int, Answer | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        [self.key] = keys(self.study, "inbox")

    def read(self, entries: Sequence[tuple[str, Mapping[str, str]]]) -> None:
        """Remove entries of the stream from Redis, and sort the requests in them. Raises redis-py's errors."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.xdel(self.key, *(entry for entry, _ in entries)).time()
            _, (seconds, micros) = pipe.execute()
        now = 1000 * seconds + micros // 1000
        oldest = now - 1000 * KEPT_SECONDS
        self._known = {each: known for each, known in self._known.items() if known[0] >= oldest}
        for _, fields in entries:
            request = _REQUESTS.read(self.key, fields.get("r", ""), self.signer)
            if request is None or request.study != self.study:
                self.forged += 1
            elif request.id in self._known:
                self._repeat(request)
            elif (reason := self._why_not(request, now)) is not None:
                self.refused.append((request, Answer(is_done=False, text=reason)))
                self._send(*self.refused[-1])
            else:
                self._known[request.id] = request.expires, None
                self.waiting.append(request)

    def answer(self, request: Request, answer: Answer) -> None:
        """Answer a request that was carried out or refused. Raises redis-py's errors."""
        self._known[request.id] = request.expires, answer
        self._send(request, answer)

    def _why_not(self, request: Request, now: int) -> str | None:
        if request.expires < now:
            return "the request has expired before the scheduler could read it"
        if request.expires > now + 1000 * MOST_VALID_SECONDS:
            return f"the request is valid for more than {MOST_VALID_SECONDS:.0f} s"
        if request.fence != self.fence:
            return "the request is for an earlier scheduler of this study; repeat it"
        return None

    def _repeat(self, request: Request) -> None:
        """Give a request that arrives again its first answer, if there is one yet."""
        _, answer = self._known[request.id]
        if answer is not None:
            self._send(request, answer)

    def _send(self, request: Request, answer: Answer) -> None:
        key = _answer_key(request)
        self.client.set(key, self.signer.seal(key, answer), ex=KEPT_SECONDS)


class ControlClient:
    """The end of a process that sends requests to the scheduler of one study."""

    def __init__(self, client: Redis, signer: Signer) -> None:
        self._client = client
        self._signer = signer
        self._clock = SystemClock()

    def request(self, study: str, fence: int, by: str, deed: OfStudy) -> Request:
        """Return a new request that is valid for VALID_SECONDS from now. Raises redis-py's errors."""
        seconds, micros = self._client.time()
        expires = 1000 * seconds + micros // 1000 + int(1000 * VALID_SECONDS)
        return Request(study=study, fence=fence, id=uuid.uuid4().hex, expires=expires, by=by, deed=deed)

    def send(self, request: Request) -> str | None:
        """Send a request. Return the id of its entry, or None if the inbox is full. Raises redis-py's errors.

        Raises ValueError if the request is too long.
        """
        [key] = keys(request.study, "inbox")
        sealed = self._signer.seal(key, request)
        if len(sealed) > MAX_REQUEST:
            raise ValueError(f"it has {len(sealed)} characters, and may have {MAX_REQUEST}")
        return str(run(self._client, "put_request", request.study, sealed, MAX_REQUESTS, KEPT_SECONDS)) or None

    def wait(self, request: Request, seconds: float = VALID_SECONDS + GRACE_SECONDS) -> Answer | None:
        """Return the answer to a request, or None if there is none within `seconds`. Raises redis-py's errors."""
        key, deadline = _answer_key(request), self._clock.now() + seconds
        while True:
            text: Any = self._client.get(key)
            answer = None if text is None else _ANSWERS.read(key, text, self._signer)
            if answer is not None or self._clock.now() >= deadline:
                return answer
            self._clock.sleep(LOOK_SECONDS)

    def take_back(self, request: Request, entry: str) -> bool:
        """Remove a request from the inbox. Return False if the scheduler has already read it."""
        return bool(self._client.xdel(*keys(request.study, "inbox"), entry))


def _answer_key(request: Request) -> str:
    [key] = keys(request.study, f"answer:{request.id}")
    return key
