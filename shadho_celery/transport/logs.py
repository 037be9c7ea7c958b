"""Logs of trials on other machines, requested and answered over Redis.

Keys, both with a short time to live:

``shadho:worker:NAME:logs``  list of the requests that worker NAME has not read yet
``shadho:STUDY:log:ID``      list of the answers to request ID

Requests and answers are signed if there is a signing key. A signature is valid only for one Redis key.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Iterator
from typing import Annotated

import redis
from msgspec import Meta, Struct

from shadho_celery.core.clock import SystemClock
from shadho_celery.core.payload import StudyKey
from shadho_celery.core.trial import Number, Place
from shadho_celery.transport.redis import Redis, is_spoilt, run_on
from shadho_celery.transport.signing import UNSIGNED, Sealed, Signer

#: seconds for which a request and its answers are kept
KEPT_SECONDS = 30

#: maximum number of requests that a worker reads at a time
MAX_REQUESTS = 10

#: maximum number of characters of a log in an answer; no log is longer
MAX_SENT = 2_500_000
#: maximum size of a sealed request and of a sealed answer
MAX_REQUEST, MAX_ANSWER = 1000, 7 * MAX_SENT


class LogRequest(Struct, frozen=True, kw_only=True):
    """Request of a client to a worker for the log of an attempt."""

    study: StudyKey
    number: Number
    attempt: Place
    #: position from which the log is wanted
    after: Number = 0
    #: id of the request
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class LogAnswer(Struct, frozen=True, kw_only=True):
    """A worker's answer to a request."""

    worker: str
    #: the log after the requested position, with time stamps; None if the worker does not have this log
    text: str | None = None
    #: position of the log's end, from which the next request can continue
    end: Number = 0


_REQUESTS, _ANSWERS = Sealed[LogRequest](LogRequest, MAX_REQUEST), Sealed[LogAnswer](LogAnswer, MAX_ANSWER)


class WorkerLogs:
    """A worker's end: the requests to it, and its answers."""

    def __init__(self, client: Redis, worker: str, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._worker = worker
        self._signer = signer
        self._requests = _requests(worker)
        #: number of requests that were unsigned or malformed
        self.refused = 0

    def requests(self) -> list[LogRequest]:
        """Remove the first waiting requests from Redis and return them. Raises redis-py's errors."""
        try:
            texts = run_on(self._client, "take_requests", [self._requests], MAX_REQUESTS, MAX_REQUEST)
        except redis.ResponseError as error:
            if not is_spoilt(error):
                raise
            self.refused += self._client.delete(self._requests)
            return []
        found = [_REQUESTS.read(self._requests, text, self._signer) for text in texts]
        self.refused += found.count(None)
        return [request for request in found if request is not None]

    def answer(self, request: LogRequest, text: str | None, end: int = 0) -> None:
        """Answer a request. Raises redis-py's errors."""
        key = _answers(request)
        answer = LogAnswer(worker=self._worker, text=None if text is None else text[-MAX_SENT:], end=end)
        with self._client.pipeline() as pipe:
            pipe.rpush(key, self._signer.seal(key, answer)).expire(key, KEPT_SECONDS).execute()


class LogClient:
    """The end of a process that wants to read logs."""

    def __init__(self, client: Redis, signer: Signer = UNSIGNED) -> None:
        self._client = client
        self._signer = signer
        self._clock = SystemClock()
        #: answers that were not signed with our key, or malformed
        self.refused = 0

    def ask(
        self, workers: Collection[str], study: str, number: int, attempt: int, *, after: int = 0, seconds: float = 10.0
    ) -> Iterator[LogAnswer]:
        """Ask workers for the log of an attempt. Yield their answers as they arrive, for at most this many seconds.

        Raises redis-py's errors.
        """
        request = LogRequest(study=study, number=number, attempt=attempt, after=after, id=uuid.uuid4().hex)
        with self._client.pipeline(transaction=False) as pipe:
            for worker in workers:
                key = _requests(worker)
                pipe.rpush(key, self._signer.seal(key, request)).expire(key, KEPT_SECONDS)
            pipe.execute()
        key, deadline = _answers(request), self._clock.now() + seconds
        waiting = {*workers}
        while waiting and (left := deadline - self._clock.now()) > 0:
            # At most 5 seconds, which is shorter than the client's timeout for a server that does not respond.
            found = self._client.blpop([key], timeout=min(5, math.ceil(left)))
            answer = found and _ANSWERS.read(key, found[1], self._signer)
            if found and answer is None:
                self.refused += 1
            elif answer and answer.worker in waiting:
                waiting.remove(answer.worker)
                yield answer


def _requests(worker: str) -> str:
    return f"shadho:worker:{worker}:logs"


def _answers(request: LogRequest) -> str:
    return f"shadho:{request.study}:log:{request.id}"
