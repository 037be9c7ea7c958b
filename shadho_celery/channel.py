"""The way between workers and schedulers, in Redis: both ends, and the scripts that keep them honest.

The broker only delivers; here is decided who runs what. An attempt is *claimed* by the worker that will run it, its
*lease* is renewed while it runs, and its result is taken only from a worker that still holds the lease. Redis is the
gate; the store stays the authority, so that losing Redis costs a re-run and never a double count.

Keys of a study, under ``shadho:{study}:``

========  ======  ===================================================================================
events    stream  what the scheduler has not confirmed yet, one JSON record an entry
attempts  hash    trial number -> highest attempt that was claimed or taken back, or ``done``
leases    zset    ``number.attempt`` -> moment the lease ends (ms, the server's clock); 0 once it has
cancel    set     numbers of running trials that should stop
========  ======  ===================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shadho_celery.registry import Redis
from shadho_celery.trial import Event, Lost, Report, Result, Started, TrialState

#: seconds for which the silence of a running trial is believed
LEASE_SECONDS = 30.0

#: seconds for which messages of a study that has ended are refused
ERASED_SECONDS = 7 * 86400

#: events read at once
READ = 1000

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

#: KEYS attempts leases events cancel; ARGV lease_ms, then number attempt event of a result and of a claim, each with an
#: empty number where there is none. Returns for both 1: taken, 0: refused.
_STEP = (
    _NOW
    + """
local function finish(number, attempt, event)
  local last = redis.call('HGET', KEYS[1], number)
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  if last == 'done' or not last or not lease or tonumber(lease) == 0 then return 0 end
  redis.call('XADD', KEYS[3], '*', 'e', event)
  redis.call('HSET', KEYS[1], number, 'done')
  for each = 1, tonumber(last) do redis.call('ZREM', KEYS[2], number .. '.' .. each) end
  redis.call('SREM', KEYS[4], number)
  return 1
end
local function claim(number, attempt, event)
  local last = redis.call('HGET', KEYS[1], number)
  if last == 'done' or (last and tonumber(last) >= tonumber(attempt)) then return 0 end
  redis.call('HSET', KEYS[1], number, attempt)
  redis.call('SREM', KEYS[4], number)
  redis.call('ZADD', KEYS[2], now + ARGV[1], number .. '.' .. attempt)
  redis.call('XADD', KEYS[3], '*', 'e', event)
  return 1
end
local finished, claimed = 0, 0
if ARGV[2] ~= '' then finished = finish(ARGV[2], ARGV[3], ARGV[4]) end
if ARGV[5] ~= '' then claimed = claim(ARGV[5], ARGV[6], ARGV[7]) end
return {finished, claimed}
"""
)

#: KEYS leases cancel; ARGV lease_ms number.attempt... Renews; returns per attempt 'ok', 'cancel' or 'gone'.
_RENEW = (
    _NOW
    + """
local answer = {}
for i = 2, #ARGV do
  local lease = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if not lease or tonumber(lease) == 0 then answer[i - 1] = 'gone'
  else
    redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i])
    local number = string.match(ARGV[i], '^(%d+)')
    answer[i - 1] = redis.call('SISMEMBER', KEYS[2], number) == 1 and 'cancel' or 'ok'
  end
end
return answer
"""
)

#: KEYS leases. Ends the leases that have run out and returns all that have ended and are not forgotten.
_EXPIRE = (
    _NOW
    + """
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', now)) do redis.call('ZADD', KEYS[1], 0, member) end
return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 0)
"""
)

#: KEYS attempts cancel events; ARGV running, then number attempt event each. Takes back what is not claimed.
_CANCEL = """
for i = 2, #ARGV, 3 do
  local last = redis.call('HGET', KEYS[1], ARGV[i])
  if not last or (last ~= 'done' and tonumber(last) < tonumber(ARGV[i + 1])) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    redis.call('XADD', KEYS[3], '*', 'e', ARGV[i + 2])
  elseif last ~= 'done' and ARGV[1] == '1' then redis.call('SADD', KEYS[2], ARGV[i]) end
end
"""

_KINDS: dict[str, Callable[..., Event]] = {"started": Started, "report": Report, "result": Result, "lost": Lost}


@dataclass(frozen=True)
class Keys:
    """The names of a study's keys."""

    study: str

    def __getattr__(self, name: str) -> str:
        return f"shadho:{self.study}:{name}"


class WorkerChannel:
    """A worker's end: claim, renew, report, finish."""

    def __init__(self, client: Redis, lease_seconds: float = LEASE_SECONDS) -> None:
        self._client = client
        self._lease_ms = int(lease_seconds * 1000)
        self._step = client.register_script(_STEP)
        self._renew = client.register_script(_RENEW)

    def claim(self, study: str, started: Started) -> bool:
        """Take the attempt for this worker; False where it is not to be run (any more)."""
        return self.step(study, None, started)[1]

    def finish(self, study: str, result: Result) -> bool:
        """Send a result and end the trial's leases; False where this attempt has lost its lease: nothing was sent."""
        return self.step(study, result, None)[0]

    def step(self, study: str, result: Result | None, started: Started | None) -> tuple[bool, bool]:
        """Finish one attempt and claim the next in one round trip; either may be None."""
        keys = Keys(study)
        parts = [part for event in (result, started) for part in _numbered(event)]
        finished, claimed = self._step(
            keys=[keys.attempts, keys.leases, keys.events, keys.cancel], args=[self._lease_ms, *parts]
        )
        return bool(finished), bool(claimed)

    def renew(self, study: str, attempts: Sequence[tuple[int, int]]) -> list[str]:
        """Renew the leases of (number, attempt) pairs; for each ``ok``, ``cancel`` or ``gone`` (not ours)."""
        keys = Keys(study)
        members = [f"{number}.{attempt}" for number, attempt in attempts]
        return list(self._renew(keys=[keys.leases, keys.cancel], args=[self._lease_ms, *members]))

    def report(self, study: str, report: Report) -> None:
        """Send a report."""
        self._client.xadd(Keys(study).events, {"e": encode(report)})


class SchedulerChannel:
    """A scheduler's end: drain events, see leases end, take attempts back."""

    def __init__(self, client: Redis, study: str) -> None:
        self._client = client
        self._keys = Keys(study)
        self._expire = client.register_script(_EXPIRE)
        self._cancel = client.register_script(_CANCEL)
        #: id of the last event read; the stream holds what an earlier life did not confirm
        self._last = "0"

    def drain(self, wait_ms: int) -> list[Event]:
        """Events since the last call, waiting up to `wait_ms` (0: not at all) for the first one."""
        answer: Any = self._client.xread({self._keys.events: self._last}, count=READ, block=wait_ms or None)
        if not answer:
            return []
        entries = next(iter(answer.values()))[0] if isinstance(answer, dict) else answer[0][1]
        self._last = entries[-1][0]
        return [decode(fields["e"]) for _, fields in entries]

    def confirm(self) -> None:
        """Forget the events drained so far: they are recorded."""
        if self._last != "0":
            moment, place = self._last.split("-")
            self._client.xtrim(self._keys.events, minid=f"{moment}-{int(place) + 1}", approximate=False)

    def ended_leases(self) -> list[tuple[int, int]]:
        """(number, attempt) of the claimed attempts that fell silent, again and again until they are forgotten."""
        members: list[str] = self._expire(keys=[self._keys.leases])
        return [_pair(member) for member in members]

    def end_leases(self) -> None:
        """End all leases of the study now: whoever held them is known to be gone."""
        for member in self._client.zrange(self._keys.leases, 0, -1):
            self._client.zadd(self._keys.leases, {member: 0})

    def forget(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Forget ended leases: their loss is recorded."""
        members = [f"{number}.{attempt}" for number, attempt in attempts]
        if members:
            self._client.zrem(self._keys.leases, *members)

    def leased(self, attempts: Sequence[tuple[int, int]]) -> list[bool]:
        """For each (number, attempt) whether Redis knows a lease of it, ended or not."""
        if not attempts:
            return []
        scores = self._client.zmscore(self._keys.leases, [f"{number}.{attempt}" for number, attempt in attempts])
        return [score is not None for score in scores]

    def cancel(self, attempts: Sequence[tuple[int, int]], *, running: bool) -> None:
        """Take back the attempts that are not claimed (each gives a Lost event); with `running` stop the others."""
        arguments: list[Any] = [int(running)]
        for number, attempt in attempts:
            lost = Lost(number=number, attempt=attempt, reason="taken back", claimed=False)
            arguments += [number, attempt, encode(lost)]
        self._cancel(keys=[self._keys.attempts, self._keys.cancel, self._keys.events], args=arguments)

    def open(self) -> None:
        """Take the study's keys up again, where an earlier scheduler has erased them."""
        self._client.persist(self._keys.attempts)

    def erase(self) -> None:
        """Remove the study's keys: it has ended and all is recorded.

        The attempts are kept for ERASED_SECONDS: messages that were taken back may still lie in a queue, and whoever
        gets one must be told that it is not to be run.
        """
        keys = self._keys
        self._client.delete(keys.events, keys.leases, keys.cancel)
        self._client.expire(keys.attempts, ERASED_SECONDS)


def encode(event: Event) -> str:
    """An event as JSON."""
    kind = next(kind for kind, type_ in _KINDS.items() if type(event) is type_)
    # Not `asdict`, which would copy metrics deeply first.
    return json.dumps({"kind": kind, **{name: getattr(event, name) for name in type(event).__slots__}})


def decode(text: str) -> Event:
    """The event that `encode` made `text` of."""
    values = json.loads(text)
    kind = _KINDS[values.pop("kind")]
    if kind is Result:
        values["state"] = TrialState(values["state"])
    return kind(**values)


def _numbered(event: Result | Started | None) -> list[Any]:
    return ["", "", ""] if event is None else [event.number, event.attempt, encode(event)]


def _pair(member: str) -> tuple[int, int]:
    number, attempt = member.split(".")
    return int(number), int(attempt)
