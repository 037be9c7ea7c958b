"""Studies share the slots of a class by weight, in slot seconds: on a manual clock, beside a Redis in a dictionary."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import MagicMock

import msgspec
import pytest
from services.cases import cases

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, TrialState
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.dispatch import LOOK_SECONDS, Pace
from shadho_celery.fleet.policy import User
from shadho_celery.fleet.registry import StudyWants, Worker
from shadho_celery.fleet.workers import (
    MESSAGE_SECONDS,
    Claim,
    FleetStudy,
    Servers,
    Turns,
    Workers,
    allow,
    divide,
    entitle,
    in_all,
    parts,
)
from shadho_celery.node.heartbeat import ANNOUNCE_EVERY

#: seconds that a message or an event takes
WAY_SECONDS = 0.005


class Redis:
    """The commands of Redis that announcements need; nothing expires."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {"shadho:workers": set(), "shadho:studies": set()}
        self.texts: dict[str, str] = {}

    def pipeline(self, *, transaction: bool) -> Redis:
        return self

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sadd(self, key: str, name: str) -> None:
        self.names[key].add(name)

    def srem(self, key: str, *names: str) -> None:
        self.names[key] -= {*names}

    def set(self, key: str, text: str, px: int = 0) -> None:
        self.texts[key] = text

    def delete(self, key: str) -> None:
        self.texts.pop(key, None)

    def execute(self) -> list[int]:
        return [0, 1]

    def smembers(self, key: str) -> set[str]:
        return self.names[key]

    def mget(self, keys: list[str]) -> list[str | None]:
        return [self.texts.get(key) for key in keys]

    def announce(self, kind: str, name: str, announcement: msgspec.Struct) -> None:
        self.sadd({"worker": "shadho:workers", "study": "shadho:studies"}[kind], name)
        self.set(f"shadho:{kind}:{name}", json.dumps(msgspec.to_builtins(announcement)))


class Fleet:
    """A worker of each class with so many slots, and a queue; first come, first served."""

    def __init__(self, **slots: int) -> None:
        self.clock, self.redis, self.random = ManualClock(), Redis(), random.Random(7)
        self.slots = slots
        #: users of the policy
        self.users: dict[str, User] = {}
        #: by owner: most slots that ran trials at any moment
        self.most: Counter[str] = Counter()
        self.studies: list[Study] = []
        self._busy: Counter[str] = Counter()
        self._queues: dict[str, deque[tuple[Study, Sent]]] = {name: deque() for name in slots}
        #: class, study, moments of begin and end of the trials that have begun
        self._ran: list[tuple[str, str, float, float]] = []
        self._future: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._announce()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._future, (self.clock.now() + seconds, next(self._order), action))

    def play(self, seconds: float) -> None:
        until = self.clock.now() + seconds
        while self._future and self._future[0][0] <= until:
            moment, _, action = heapq.heappop(self._future)
            self.clock.advance_to(moment)
            action()
        self.clock.advance_to(until)

    def send(self, study: Study, sent: Sent) -> None:
        self._queues[str(sent.attempt.compute_class)].append((study, sent))
        self._start(str(sent.attempt.compute_class))

    def used(self, seconds: float, name: str = "cpu") -> dict[str, float]:
        """Return the parts of a class's slot seconds that each study gets within the next ones."""
        began = self.clock.now()
        self.play(seconds)
        whole = seconds * self.slots[name]
        found = dict.fromkeys((study.name for study in self.studies), 0.0)
        for where, study, first, last in self._ran:
            if where == name:
                found[study] += max(0.0, min(last, began + seconds) - max(first, began)) / whole
        return found

    def _start(self, name: str) -> None:
        while self._queues[name] and self._busy[name] < self.slots[name]:
            study, sent = self._queues[name].popleft()
            self._busy[name] += 1
            study.running += 1
            owner = study.workers.study.owner
            ours = sum(each.running for each in self.studies if each.workers.study.owner == owner)
            self.most[owner] = max(self.most[owner], ours)
            now, seconds = self.clock.now(), study.draw()
            self._ran.append((name, study.name, now, now + seconds))
            study.hear(sent, None)
            self.after(seconds + MESSAGE_SECONDS, partial(self._end, name, study, sent, seconds))

    def _end(self, name: str, study: Study, sent: Sent, seconds: float) -> None:
        self._busy[name] -= 1
        study.running -= 1
        study.hear(sent, seconds)
        self._start(name)

    def _announce(self) -> None:
        for name, slots in self.slots.items():
            worker = Worker(protocol=PROTOCOL, compute_class=name, slots=slots, busy=self._busy[name], imports=["m"])
            self.redis.announce("worker", name, worker)
        self.after(ANNOUNCE_EVERY, self._announce)


class Study:
    """A scheduler's turns: look at the others, hear events, fill the queues of some classes."""

    def __init__(
        self, fleet: Fleet, weight: float, mean: float, classes: Sequence[str] = ("cpu",), *, owner: str = ""
    ) -> None:
        """Its trials take `mean` seconds, or half as long or one and a half times as long."""
        self.name = str(len(fleet.studies))
        fleet.studies.append(self)
        guard = MagicMock(users=fleet.users, unwelcome=lambda *facts: None) if fleet.users else None
        connection = Servers(client=fleet.redis, publisher=MagicMock(), guard=guard)  # type: ignore[arg-type]
        template = Payload(study=self.name, module="m", attempts=[])
        self.workers = Workers(connection, FleetStudy(template=template, weight=weight, owner=owner))
        self.in_flight = Attempts[Sent]()
        self.is_pausing, self.running = False, 0
        self._fleet, self._clock = fleet, fleet.clock
        self._mean, self._classes, self._pace = mean, classes, Pace(fleet.clock)
        self._events: list[tuple[Sent, float | None]] = []
        self._numbers = itertools.count()
        self._looked_at = self._due = -1.0
        self._wake(fleet.random.random())

    def draw(self) -> float:
        return self._mean * self._fleet.random.uniform(0.5, 1.5)

    def hear(self, sent: Sent, seconds: float | None) -> None:
        self._events.append((sent, seconds))
        self._wake(WAY_SECONDS)

    def end(self) -> None:
        self.is_pausing, self._looked_at = True, float("inf")
        self.workers.withdraw()

    def _wake(self, seconds: float) -> None:
        """Have the next turn after so many seconds, if not sooner."""
        moment = self._clock.now() + seconds
        if self._due < self._clock.now() or moment < self._due:
            self._due = moment
            self._fleet.after(seconds, partial(self._turn, moment))

    def _turn(self, moment: float) -> None:
        if moment != self._due:
            return
        now = self._clock.now()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self.workers.look(now, self.in_flight, set())
        for sent, seconds in self._events:
            if seconds is None:
                worker = str(sent.attempt.compute_class)
                sent.attempt, sent.began = sent.attempt.evolve(state=TrialState.RUNNING, worker=worker), now
            else:
                self._pace.tell(str(sent.attempt.compute_class), seconds)
                self.workers.turns.end(sent, now, seconds)
                self.in_flight.lose(*sent.key)
        self._events.clear()
        for known in self.workers.take_turns(now, self.in_flight):
            if known.name in self._classes and not self.is_pausing:
                self._fill(known, now)
        self._due = -1.0
        self._wake(0.5 if self.in_flight else 0.1)

    def _fill(self, known: ComputeClass, now: float) -> None:
        taken = sum(each.attempt.compute_class == known.name for each in self.in_flight)
        ahead = 0 if known.most is not None else self._pace.ahead(known)
        for _ in range(known.limit + ahead - taken):
            facts = {"attempt": 1, "subspace": "all", "params": {}, "compute_class": known.name}
            sent = Sent(Attempt(number=next(self._numbers), **facts), now)  # type: ignore[arg-type]
            self.in_flight.put(*sent.key, sent)
            self._fleet.after(WAY_SECONDS, partial(self._fleet.send, self, sent))


@pytest.mark.slow
@cases(
    "slots, weights, means",
    [
        (1, (4, 1), (1, 1)),
        (1, (4, 1), (0.2, 2)),
        (1, (2, 1, 1), (1, 1, 3)),
        (2, (3, 1), (0.3, 3)),
        (2, (2, 1, 1), (3, 1, 0.3)),
        (2, (1, 1, 1), (0.5, 3, 3)),
        (3, (1, 1), (3, 0.5)),
        (4, (2, 1, 1), (1, 0.3, 2)),
        (5, (4, 1), (2, 0.2)),
    ],
)
def test_slot_seconds_go_by_weight_whatever_the_slots_and_the_seconds_of_trials(
    slots: int, weights: tuple[float, ...], means: tuple[float, ...]
) -> None:
    fleet = Fleet(cpu=slots)
    for weight, mean in zip(weights, means, strict=True):
        Study(fleet, weight, mean)
    fleet.play(2.0)
    for _ in range(2):
        found = fleet.used(max(60.0, 20 * max(means)))
        assert sum(found.values()) > 0.95, "no slot is idle"
        shares = [weight / sum(weights) for weight in weights]
        assert [*found.values()] == pytest.approx(shares, abs=0.1)


def user(weight: float = 1.0, slots: int | None = None) -> User:
    return User(key="0" * 64, weight=weight, slots=slots)


@pytest.mark.slow
@cases(
    "slots, weights",
    [
        (6, {"anna": 1.0, "bert": 1.0}),
        (1, {"anna": 1.0, "bert": 1.0}),
        (5, {"anna": 2.0, "bert": 1.0}),
    ],
)
def test_slots_go_to_users_first_and_then_to_their_studies(slots: int, weights: dict[str, float]) -> None:
    """The first user has one study, the second one two, of which one has twice the weight of the other."""
    fleet = Fleet(cpu=slots)
    fleet.users = {name: user(weight) for name, weight in weights.items()}
    for owner, weight in (("anna", 1.0), ("bert", 2.0), ("bert", 1.0)):
        Study(fleet, weight, 1.0, owner=owner)
    fleet.play(5.0)
    found = fleet.used(120.0)
    part = weights["anna"] / sum(weights.values())
    assert [*found.values()] == pytest.approx([part, (1 - part) * 2 / 3, (1 - part) / 3], abs=0.08)


@cases("limit, count", [(3, 1), (3, 2), (1, 2), (4, 3)])
def test_a_user_never_has_more_slots_than_his_limit_and_uses_all_of_it(limit: int, count: int) -> None:
    """His studies begin one after the other, and one of them ends; the others of the fleet get the rest."""
    fleet = Fleet(cpu=10)
    fleet.users = {"anna": user(slots=limit), "bert": user()}
    Study(fleet, 1, 1.0, owner="bert")
    hers = []
    for _ in range(count):
        hers.append(Study(fleet, 1, 2.0, owner="anna"))
        fleet.play(20.0)
    found = fleet.used(100.0)
    assert sum(found[each.name] for each in hers) * 10 > 0.6 * limit
    assert found["0"] > 0.98 - limit / 10
    if count > 1:
        assert min(found[each.name] for each in hers) > 0.0, "they take turns"
        hers[0].is_pausing = True
        fleet.play(5.0)
        hers[0].end()
        fleet.play(20.0)
    assert fleet.most["anna"] == limit


def test_a_limit_below_what_runs_ends_nothing_and_sends_nothing() -> None:
    fleet = Fleet(cpu=10)
    fleet.users = {"anna": user(slots=8)}
    study = Study(fleet, 1, 60.0, owner="anna")
    fleet.play(20.0)
    assert study.running == 8
    fleet.users["anna"] = user(slots=2)
    fleet.play(6.0)
    assert study.running == 8
    fleet.play(200.0)
    assert study.running == 2


def test_a_user_with_many_studies_gets_no_more_than_one_with_one() -> None:
    hers = [Claim("anna", 1.0, 10.0)] * 9
    assert entitle(10, Claim("bert", 1.0, 0.0), hers, {}) == 5.0
    assert entitle(10, Claim("anna", 1.0, 0.0), [*hers, Claim("bert", 1.0, 10.0)], {}) == 0.5
    assert entitle(10, Claim("bert", 1.0, 0.0), hers, {"anna": user(slots=2)}) == 8.0
    assert in_all([("bert", 5.0), ("anna", 1.0), ("anna", 3.0)], {"bert": user(2.0)}) == [2.0, 0.25, 0.75]


def test_a_limit_is_divided_in_whole_slots_and_the_last_one_goes_to_the_study_behind() -> None:
    first, second = (StudyWants(asks=10, spent=spent) for spent in (700.0, 300.0))
    assert divide(3, {"a": first, "b": second}) == {"a": 2, "b": 1}
    assert divide(1, {"a": first, "b": second}) == {"a": 0, "b": 1}
    assert divide(9, {"a": first, "b": StudyWants(asks=2)}) == {"a": 7, "b": 2}
    assert divide(0, {"a": first, "b": second}) == {"a": 0, "b": 0}


def test_a_study_that_comes_late_or_again_starts_from_now_and_one_that_is_away_leaves_all() -> None:
    fleet = Fleet(cpu=1)
    first, second = Study(fleet, 1, 1), Study(fleet, 1, 1)
    second.is_pausing = True
    for _ in range(2):
        fleet.play(5.0)
        assert fleet.used(100.0)["0"] > 0.97, "what one does not want goes to the other"
        second.is_pausing = False
        fleet.play(2.0)
        assert [*fleet.used(60.0).values()] == pytest.approx([0.5, 0.5], abs=0.1)
        second.is_pausing = True
    fleet.play(5.0)
    second.is_pausing = False
    fleet.play(5.0)
    first.end()
    fleet.play(3.0)
    assert fleet.used(30.0)["1"] > 0.97


def test_studies_take_turns_in_each_class_by_itself() -> None:
    fleet = Fleet(cpu=1, gpu=1)
    Study(fleet, 4, 1, ["cpu", "gpu"])
    Study(fleet, 1, 1, ["gpu"])
    fleet.play(5.0)
    assert [*fleet.used(60.0, "gpu").values()] == pytest.approx([0.8, 0.2], abs=0.1)
    assert [*fleet.used(60.0, "cpu").values()] == [pytest.approx(1.0, abs=0.03), 0.0]


def test_one_does_not_wait_for_a_study_of_an_older_version() -> None:
    fleet = Fleet(cpu=1)
    Study(fleet, 1, 1)
    fleet.redis.announce("study", "older", StudyWants(weight=4.0, wants={"cpu": 1.0}))
    assert fleet.used(60.0)["0"] > 0.97


def test_one_does_not_wait_long_for_a_study_whose_trials_do_not_start() -> None:
    fleet = Fleet(cpu=1)
    Study(fleet, 1, 1)
    fleet.redis.announce("study", "stuck", StudyWants(wants={"cpu": 1.0}, turns={"cpu": 0.0}))
    fleet.play(30.0)
    assert fleet.used(60.0)["0"] > 0.97


CPU = ComputeClass(name="cpu", slots=2, allowance=1.0)


def running(began: float = 0.0, slots: int = 1) -> Sent:
    facts = {"attempt": 1, "subspace": "all", "params": {}, "compute_class": "cpu", "state": TrialState.RUNNING}
    return Sent(Attempt(number=0, slots=slots, **facts), began, began)  # type: ignore[arg-type]


def test_seconds_that_others_lose_between_their_trials_are_no_debt() -> None:
    """Of two slots one study uses all of its one, and the other one nearly."""
    turns, other = Turns(), 0.0
    for now in range(1000):
        other = 0.9 * now
        virtual = turns.look(CPU, [(1.0, other)], [running()], now, is_wanting=True, weight=1.0)
    assert virtual - other < 5.0


def test_virtual_time_is_that_of_ended_and_running_attempts_for_each_slot_and_at_least_their_messages() -> None:
    turns = Turns()
    turns.end(running(slots=2), 10.0)
    turns.end(running(slots=2), 10.0, seconds=5.0)
    turns.end(running(), 10.0, seconds=0.0)
    used = 20.0 + 10.0 + MESSAGE_SECONDS
    assert turns.look(CPU, [], [], 10.0, is_wanting=True, weight=4.0) == pytest.approx(used / 4)
    assert turns.look(CPU, [], [running(10.0, slots=3)], 12.0, is_wanting=True, weight=4.0) == pytest.approx(
        (used + 6) / 4
    )


@cases("slots, mean", [(1, 1.0), (2, 0.3), (5, 2.0)])
def test_a_weight_that_changes_applies_from_now_on(slots: int, mean: float) -> None:
    """What was used before is neither a debt nor a credit."""
    fleet = Fleet(cpu=slots)
    first, second = Study(fleet, 1, mean), Study(fleet, 1, 1)
    fleet.play(2.0)
    assert [*fleet.used(60.0).values()] == pytest.approx([0.5, 0.5], abs=0.1)
    for weight, share in ((4.0, 0.8), (0.25, 0.2)):
        first.workers.weight = weight
        fleet.play(2 * ANNOUNCE_EVERY)
        assert fleet.used(60.0)["0"] == pytest.approx(share, abs=0.1)
    assert second.workers.weight == 1.0


def test_virtual_time_stays_when_the_weight_changes() -> None:
    turns, sent = Turns(), running(slots=2)
    look = partial(turns.look, CPU, [(1.0, 0.0)], [sent], is_wanting=True)
    turns.end(running(), 10.0)
    before = look(10.0, weight=1.0)
    assert look(10.0, weight=4.0) == pytest.approx(before)
    assert look(12.0, weight=4.0) == pytest.approx(before + 4.0 / 4.0)


def test_a_study_without_others_takes_all_of_its_share_at_any_time() -> None:
    turns = Turns()
    turns.look(CPU, [], [running()], 1e6, is_wanting=True, weight=1.0)
    assert turns.extras([running()], 1e6) == {}


def test_whole_shares_have_no_part_left_by_rounding() -> None:
    assert allow(10, 0.7, [(0.2, 10), (0.1, 10)]) == 7.0
    assert parts(10, 7.0, [0.2 / 0.7, 0.1 / 0.7]) == [0.0, 0.0, 0.0]
    assert parts(1, 0.8, [0.25]) == [0.8, pytest.approx(0.2)]
    assert allow(1, 1e-12, [(1.0, 1)]) > 0.0, "the smallest share is one"
