"""Records in Redis of drained workers, and of the workers that a scaler has started.

A drained worker finishes its running trials and takes no others. The place of a worker is the part CLASS@HOST of its
name, which stays the same when the worker restarts (`registry.place_of`). ``shadho:drains`` is a hash: place -> latest
`Drain` as JSON, preceded by a signature if there is a key. A drain has no time to live. It also applies to workers that
start at the place later, until somebody undrains the place. An undrain is recorded as a `Drain` too. A record under the
full name of a worker is for that worker alone, and may tell it to end.
Each record of a place has a greater sequence number than the record before it, so that a worker can refuse an old
record that another client has written again.

``shadho:starts:CLASS`` is the record of the workers that a scaler has started in a class (`Starts`), in the same form.
A scaler that restarts reads it. It expires.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.files import MAX_WORKERS
from shadho_celery.core.trial import Moment, Name, Number
from shadho_celery.fleet.policy import Guard, Proof, proof_of
from shadho_celery.fleet.redis import Redis, server_time, spoilt_keys_pass
from shadho_celery.fleet.signing import Sealed, Signer

KEY = "shadho:drains"

#: maximum number of characters of a `Drain` in Redis: its JSON and the signature
MAX_DRAIN = 2000


class Drain(Struct, frozen=True, kw_only=True):
    """Record that somebody has drained or undrained the workers of a place."""

    #: user and host that drained or undrained
    by: Name
    #: seconds since the epoch, by the server's clock
    at: Moment
    #: greater than in all earlier records of the place: milliseconds since the epoch, unless the clock was set back
    sequence: Number
    #: True if the workers were drained, False if they were undrained
    is_drained: bool = True
    #: True if the record is for one worker, under its full name
    alone: bool = False
    #: True if the worker must end when its running trials have ended
    ends: bool = False
    #: signature of the record by that user, or ""
    proof: Proof = ""


_DRAINS = Sealed[Drain](Drain, MAX_DRAIN)


class Drains:
    """The records of drains in Redis. A record's signature is valid for one place only.

    If the key has a wrong type, which only another client can cause, it counts as empty. Schedulers remove such keys.
    """

    def __init__(self, client: Redis, signer: Signer, guard: Guard | None = None) -> None:
        """With a `guard`, only records of admins count."""
        self._client = client
        self._signer = signer
        self._guard = guard
        #: keys of the signer at the last call of `follow_keys`
        self._keys: tuple[str, ...] = ()

    def latest(self, place: str) -> Drain | None:
        """Return the latest record of a place, or None if there is none with our signature."""
        text = None
        with spoilt_keys_pass():
            text = self._client.hget(KEY, place)
        return self._read(place, text)

    def _read(self, place: str, text: str | None) -> Drain | None:
        found = None if text is None else _DRAINS.read(_about(place), text, self._signer)
        is_refused = found is not None and self._guard is not None and self._guard.refusal(found, about=place)
        return None if is_refused else found

    def all(self, obeyed: Mapping[str, int] = MappingProxyType({})) -> dict[str, Drain]:
        """Return the records of the drained places.

        Records without our signature are left out, and so are records that are older than the one that workers of the
        place already obey. `obeyed` has the sequences that workers announce, by place.
        """
        texts: dict[str, str] = {}
        with spoilt_keys_pass():
            texts = self._client.hgetall(KEY)
        found = {place: self._read(place, text) for place, text in texts.items()}
        return {
            place: drain
            for place, drain in sorted(found.items())
            if drain is not None and drain.is_drained and not drain.ends and drain.sequence >= obeyed.get(place, 0)
        }

    def put(
        self, place: str, by: str, *, is_drained: bool = True, after: int = 0, alone: bool = False, ends: bool = False
    ) -> None:
        """Drain or undrain the workers of a place, or with `alone` the worker with this full name. With `ends`, tell it
        to end after its running trials.

        `by` is the user and host. `after` is the greatest sequence that these workers have obeyed, in case Redis has
        lost their record.
        """
        now, before = server_time(self._client), self.latest(place)
        known = max(after, 0 if before is None else before.sequence)
        sequence = max(int(1000 * now), known + 1)
        drain = Drain(by=by, at=now, sequence=sequence, is_drained=is_drained, alone=alone, ends=ends)
        drain = replace(drain, proof=proof_of(drain, place))
        self._client.hset(KEY, place, self._signer.seal(_about(place), drain))

    def follow_keys(self) -> None:
        """If the keys of our signer have changed, sign the records again, because a drain outlasts a rotation.

        The first call signs them, too. Raises redis-py's errors.
        """
        if (keys := self._signer.fingerprints) != self._keys:
            # If somebody drains a worker at this moment, the transaction is repeated.
            with spoilt_keys_pass():
                self._client.transaction(self._sign_again, KEY)
            self._keys = keys

    def _sign_again(self, pipe: Redis) -> None:
        texts = pipe.hgetall(KEY)
        pipe.multi()
        for place, text in texts.items():
            drain = self._read(place, text)
            if drain is not None and (anew := self._signer.seal(_about(place), drain)) != text:
                pipe.hset(KEY, place, anew)

    def forget(self, workers: Collection[str]) -> None:
        """Remove the records of workers that have ended, by their full names."""
        if workers:
            self._client.hdel(KEY, *workers)


class DrainWatch:
    """Finds new drains and undrains that workers obey, so that a scheduler can record them.

    Operators write drains to Redis, not to a scheduler, so a scheduler learns of them from the sequences that workers
    announce.
    """

    def __init__(self, drains: Drains) -> None:
        self.drains = drains
        #: place -> sequence of its latest known drain or undrain
        self._known: dict[str, int] = {}

    def news(self, obeyed: Mapping[str, int]) -> dict[str, Drain]:
        """Return the drains and undrains that workers obey since the last call, by place. `obeyed` is as in `all`.

        Records that Redis has lost are left out. Raises redis-py's errors.
        """
        new = {place: sequence for place, sequence in obeyed.items() if sequence > self._known.get(place, 0)}
        latest = {place: self.drains.latest(place) for place in new}
        self._known |= new
        return {place: drain for place, drain in latest.items() if drain is not None and drain.sequence == new[place]}


def _about(place: str) -> str:
    return f"{KEY}:{place}"


#: maximum number of characters of a `Starts` in Redis: its JSON, with the names of thousands of workers, and the
#: signature
MAX_RECORD = 3_000_000

#: maximum of the counter of failed starts
MAX_FAILURES = 20

_Workers = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


class Start(Struct, frozen=True, kw_only=True):
    """Workers of one class that were started together, while at least one of them has not announced itself yet."""

    count: _Workers
    #: number of started workers that have not announced themselves yet
    missing: _Workers
    #: time of the start in seconds since the epoch, by the server's clock
    at: Moment


class Starts(Struct, frozen=True, kw_only=True):
    """Record of the started workers of one class that have not announced themselves yet, and of failed starts."""

    #: starts with missing workers, the earliest first
    starts: Annotated[list[Start], Meta(max_length=MAX_WORKERS)]
    #: names of the workers of the class that were live before; a live worker with another name was started since
    known: Annotated[list[Name], Meta(max_length=2 * MAX_WORKERS)] = []
    #: id of the SLURM job of the latest start, or ""
    job: Annotated[str, Meta(pattern=r"^[0-9]{0,20}\Z")] = ""
    #: number of failed starts since a started worker last announced itself
    failures: Annotated[int, Meta(ge=0, le=MAX_FAILURES)] = 0
    #: earliest time of the next start, by the server's clock; None without a failed start
    retry_at: Moment | None = None


_SEALED = Sealed[Starts](Starts, MAX_RECORD)


class StartRecords:
    """The records of started workers in Redis, one per class. Unsigned and malformed records are ignored."""

    def __init__(self, client: Redis, signer: Signer) -> None:
        self._client, self._signer = client, signer

    def latest(self, name: str) -> Starts | None:
        """Return the record of a class, or None if there is none."""
        text = None
        with spoilt_keys_pass():
            text = self._client.get(_key(name))
        return _SEALED.read(_key(name), text or "", self._signer)

    def put(self, name: str, record: Starts, seconds: float) -> None:
        """Store the record of a class; it expires after `seconds`."""
        self._client.set(_key(name), self._signer.seal(_key(name), record), px=int(seconds * 1000))

    def remove(self, name: str) -> None:
        """Remove the record of a class."""
        self._client.delete(_key(name))


def _key(name: str) -> str:
    return f"shadho:starts:{name}"
