"""Requests to the scheduler of a running study or to a worker, and the answers, over Redis.

Keys of a study, under ``shadho:{study}:``, or of a worker, under ``shadho:worker:{name}:``; both have a time to live:

``inbox``      stream of the requests that the scheduler or worker has not read; at most MAX_REQUESTS
``answer:ID``  the answer to request ID

A request expires at a time of the Redis server's clock, so the clocks of the hosts do not matter. Requests and answers
are signed if there is a signing key, and a signature is valid for one Redis key only. A request to a study contains the
fence of the scheduler that it is for, and is carried out at most once: a copy of the request gets the first answer.
Requests to a worker may be carried out repeatedly. They ask for the log or the files of a trial, or for the deletion of
folders. A worker obeys a request to delete only if control requests are allowed, as for a scheduler. The scheduler of a
study with the setting `keep` sends such requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.files import MAX_DIGESTED, MAX_PATH, LeftFile
from shadho_celery.core.payload import StudyKey
from shadho_celery.core.records import Answer, OfStudy
from shadho_celery.core.system import SystemClock
from shadho_celery.core.trial import AttemptNumber, Bytes, Int64, Name, Number
from shadho_celery.fleet.policy import Guard, Proof, proof_of
from shadho_celery.fleet.redis import Redis, keys, run, server_time, spoilt_keys_pass
from shadho_celery.fleet.signing import Sealed, Signer

D = TypeVar("D")
A = TypeVar("A")

#: maximum number of requests in an inbox, and of characters of a sealed request and of a sealed answer
MAX_REQUESTS, MAX_REQUEST, MAX_ANSWER = 20, 1_000_000, 100_000

#: seconds for which a request is valid
VALID_SECONDS = 10.0

#: seconds for which an inbox is kept after its last request, and an answer after it was given; also the longest
#: validity that a scheduler accepts
KEPT_SECONDS = 30

#: seconds for which a sender still waits for the answer after its request has expired, because the scheduler may have
#: read it just before; and seconds between two checks for the answer
GRACE_SECONDS, LOOK_SECONDS = 5.0, 0.02


class Asked(Struct, Generic[D], frozen=True, kw_only=True):
    """A request to the scheduler of a study, or to a worker."""

    #: key of the study, or key of the worker (`of_worker`)
    to: Name
    #: fence of the scheduler that may carry it out; 0 for a worker
    fence: Int64
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    #: time at which the request expires, by the Redis server's clock, in ms
    expires: Number
    #: user who has sent the request
    by: Name
    deed: D
    #: signature of the request by that user, or ""
    proof: Proof = ""


Request = Asked[OfStudy]


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[D, A]):
    """A kind of requests: how its requests and answers are decoded."""

    requests: Sealed[Asked[D]]
    answers: Sealed[A]


CONTROL = Kind(requests=Sealed[Request](Request, MAX_REQUEST), answers=Sealed[Answer](Answer, MAX_ANSWER))


class Requests(Generic[D, A]):
    """The receiver's end for one kind of requests: takes them from Redis and sends the answers."""

    def __init__(self, client: Redis, to: str, signer: Signer, kind: Kind[D, A]) -> None:
        self._client, self._to, self._signer, self._kind = client, to, signer, kind
        [self.key] = keys(to, "inbox")
        #: number of requests that were unsigned or malformed
        self.forged = 0

    def take(self, most: int = MAX_REQUESTS) -> tuple[int, list[Asked[D]]]:
        """Remove the first requests from Redis. Return the server's time in ms, and the requests with our signature.

        Raises redis-py's errors.
        """
        # A key of a wrong type counts as one malformed request.
        now, texts = 0, [""]
        with spoilt_keys_pass(partial(self._client.delete, self.key)):
            # A character has up to four bytes.
            now, *texts = run(self._client, "take_requests", self._to, most, 4 * self._kind.requests.most)
        found = [self._kind.requests.read(self.key, text, self._signer) for text in texts]
        good = [each for each in found if each is not None and each.to == self._to]
        self.forged += len(found) - len(good)
        return now, good

    def answer(self, request: Asked[D], answer: A) -> None:
        """Answer a request. Raises redis-py's errors."""
        key = _answer_key(request)
        self._client.set(key, self._signer.seal(key, answer), ex=KEPT_SECONDS)


class Inbox(Requests[OfStudy, Answer]):
    """The scheduler's end for control requests. Each request is carried out at most once."""

    def __init__(
        self, client: Redis, study: str, fence: int, signer: Signer, guard: Guard | None = None, *owners: str
    ) -> None:
        """With a `guard`, only requests of the `owners` and of admins are carried out."""
        super().__init__(client, study, signer, CONTROL)
        self._fence, self._guard, self._owners = fence, guard, owners
        #: requests that were read, each with None if the scheduler must carry it out, or else with the answer that
        #: refused it because it has expired or is for another scheduler
        self.arrived: list[tuple[Request, Answer | None]] = []
        #: id of a request -> the time at which it expires, and its answer or None; kept until KEPT_SECONDS after the
        #: request has expired. A copy of the request must not replace the answer, for which its sender may still wait
        self._known: dict[str, tuple[int, Answer | None]] = {}

    def read(self, most: int = MAX_REQUESTS) -> None:
        """Read up to `most` requests from Redis, and add new ones to `arrived`. Refuse invalid requests, and answer
        copies of earlier requests again. Raises redis-py's errors.
        """
        now, requests = self.take(most)
        oldest = now - 1000 * KEPT_SECONDS
        self._known = {each: known for each, known in self._known.items() if known[0] >= oldest}
        for request in requests:
            _, first = self._known.get(request.id, (0, None))
            if first is not None:
                super().answer(request, first)
            elif request.id in self._known:
                continue
            elif (reason := self._why_not(request, now)) is not None:
                refusal = Answer(is_done=False, text=reason)
                self.arrived.append((request, refusal))
                super().answer(request, refusal)
            else:
                self._known[request.id] = request.expires, None
                self.arrived.append((request, None))

    def answer(self, request: Request, answer: Answer) -> None:
        """Answer a request that was carried out or refused. Raises redis-py's errors."""
        self._known[request.id] = request.expires, answer
        super().answer(request, answer)

    def _why_not(self, request: Request, now: int) -> str | None:
        if request.expires < now:
            return "the request has expired before the scheduler could read it"
        if request.expires > now + 1000 * KEPT_SECONDS:
            return f"the request is valid for more than {KEPT_SECONDS} s"
        if request.fence != self._fence:
            return "the request is for an earlier scheduler of this study; repeat it"
        return None if self._guard is None else self._guard.refusal(request, *self._owners)


class Client(Generic[D, A]):
    """The sender's end for one kind of requests: sends them and waits for the answers."""

    def __init__(self, client: Redis, signer: Signer, kind: Kind[D, A]) -> None:
        self._client, self.signer, self._kind = client, signer, kind
        self._clock = SystemClock()

    def request(self, to: str, by: str, deed: D, fence: int = 0) -> Asked[D]:
        """Return a new request that is valid for VALID_SECONDS from now. Raises redis-py's errors."""
        expires = int(1000 * (server_time(self._client) + VALID_SECONDS))
        return Asked(to=to, fence=fence, id=uuid.uuid4().hex, expires=expires, by=by, deed=deed)

    def send(self, request: Asked[D]) -> str | None:
        """Send a request. Return the id of its entry, or None if the inbox is full. Raises redis-py's errors.

        Raises ValueError if the request is too long.
        """
        [key] = keys(request.to, "inbox")
        sealed = self.signer.seal(key, replace(request, proof=proof_of(request)))
        if len(sealed) > (most := self._kind.requests.most):
            raise ValueError(f"it has {len(sealed)} characters, and may have {most}")
        return str(run(self._client, "put_request", request.to, sealed, MAX_REQUESTS, KEPT_SECONDS)) or None

    def ask(self, workers: Iterable[str], by: str, deed: D) -> list[Asked[D]]:
        """Send a request to workers. Return the requests, without those for workers whose inboxes are full.

        Raises redis-py's errors.
        """
        first = self.request("", by, deed)
        requests = [replace(first, to=of_worker(name)) for name in workers]
        return [request for request in requests if self.send(request) is not None]

    def answers(self, requests: Sequence[Asked[D]], seconds: float) -> Iterator[tuple[Asked[D], A]]:
        """Yield the requests that are answered within `seconds`, with their answers. Raises redis-py's errors."""
        waiting, deadline = {_answer_key(each): each for each in requests}, self._clock.now() + seconds
        while waiting:
            for key, text in zip([*waiting], self._client.mget([*waiting]), strict=True):
                answer = None if text is None else self._kind.answers.read(key, text, self.signer)
                if answer is not None:
                    # Do not wait until the answer expires, because it may be large.
                    self._client.delete(key)
                    yield waiting.pop(key), answer
            if self._clock.now() >= deadline:
                return
            self._clock.sleep(LOOK_SECONDS)

    def wait(self, request: Asked[D], seconds: float = VALID_SECONDS + GRACE_SECONDS) -> A | None:
        """Return the answer to a request, or None if none arrives within `seconds`. Raises redis-py's errors."""
        return next((answer for _, answer in self.answers([request], seconds)), None)

    def take_back(self, request: Asked[D], entry: str) -> bool:
        """Remove a request from the inbox. Return False if it has already been read."""
        return bool(self._client.xdel(*keys(request.to, "inbox"), entry))


def of_worker(name: str) -> str:
    """Return the value of `to` in a request to this worker."""
    return f"worker:{name}"


def worker_of(request: Asked[Any]) -> str:
    """Return the name of the worker that a request is for."""
    return request.to.removeprefix(of_worker(""))


def _answer_key(request: Asked[Any]) -> str:
    [key] = keys(request.to, f"answer:{request.id}")
    return key


#: maximum number of characters of a log in an answer; every complete log fits
MAX_SENT = 2_500_000


class OfTrial(Struct, frozen=True, kw_only=True, tag=True):
    """Base of requests for the log or the files of a trial."""

    study: StudyKey
    number: Number


class ReadLog(OfTrial, frozen=True, kw_only=True):
    """Read the log of an attempt."""

    attempt: AttemptNumber
    #: position in the log at which the answer should begin
    after: Number = 0


class ListFolder(OfTrial, frozen=True, kw_only=True):
    """List the files in the folder of a trial."""


class ReadFile(OfTrial, frozen=True, kw_only=True):
    """Read a part of a file in the folder of a trial, or the digest of a part."""

    path: Annotated[bytes, Meta(max_length=MAX_PATH)]
    start: Number
    size: Annotated[int, Meta(ge=1, le=MAX_DIGESTED)]
    #: True for the digest; otherwise the part has at most MAX_PIECE bytes
    is_digest: bool = False


class Sweep(Struct, frozen=True, kw_only=True, tag=True):
    """Delete folders of trials, or only return how large they are."""

    #: by key of a study: the trials whose folders are not needed (`core.files`); None for all folders of the study
    studies: dict[StudyKey, bytes | None]
    #: True to delete the folders; False to tell what would be deleted
    is_sure: bool


LeftDeed = ReadLog | ListFolder | ReadFile
WorkerDeed = LeftDeed | Sweep


class WorkerAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer. Only the fields that belong to the request have values."""

    #: False if the worker does not have what it was asked for, or refuses the request
    is_done: bool = False
    #: reason why the request failed, or ""
    problem: str = ""
    #: the log from the requested position on, with time stamps
    text: str = ""
    #: position of the log's end, from which the next request can continue
    end: Number = 0
    #: at most MAX_FILES + 1 files; the additional file shows that there are too many
    files: list[LeftFile] = []
    #: the requested part of a file, shorter if the file ends within it; or that part's digest
    data: bytes = b""
    #: by key of a study: number and bytes of the folders that are deleted, or would be
    swept: dict[StudyKey, tuple[Number, Bytes]] = {}


TO_WORKERS = Kind(
    requests=Sealed[Asked[WorkerDeed]](Asked[WorkerDeed], MAX_REQUEST),
    answers=Sealed[WorkerAnswer](WorkerAnswer, 7 * MAX_SENT),
)

WorkerRequests = Requests[WorkerDeed, WorkerAnswer]
