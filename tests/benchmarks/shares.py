"""Play a week of a fleet: 40 studies of ten users share 200 workers by the rule of `fleet.workers`, no scheduler.

    python tests/benchmarks/shares.py [--seed 0] [--days 7]

Each worker has two slots. A fifth of the studies have wide trials, which take both slots of one worker. Studies begin
and end in the course of the week, so that the users who want slots change. Three users have a limit on their slots.
Prints for each user the slot seconds that he got, and those that the policy gives him: at each moment the slots are
divided by the weights of the users whose studies want slots, up to their limits. A free slot that a worker keeps for a
wide trial counts as used by the trial's user, because nobody else gets it. Also prints how long narrow and wide
trials wait from the moment at which they are sent until they start.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from shadho_celery.core.attempts import Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, TrialState
from shadho_celery.fleet.policy import User
from shadho_celery.fleet.registry import StudyWants
from shadho_celery.fleet.workers import Claim, Turns, allow, divide, entitle, in_all

#: slots of a worker, seconds between two announcements of a study, and mean seconds of a trial
SLOTS, LOOK, TRIAL = 2, 30.0, 600.0
DAY = 86400.0
POOL = "cpu"


@dataclass
class Study:
    """A study that wants all slots it can get from `begins` to `ends`."""

    name: str
    owner: str
    weight: float
    width: int
    begins: float
    ends: float
    turns: Turns = field(default_factory=Turns)
    live: dict[int, Sent] = field(default_factory=dict)
    told: StudyWants | None = None
    known: ComputeClass | None = None
    is_limited: bool = False
    spent: float = 0.0
    used: float = 0.0

    @property
    def taken(self) -> int:
        return self.width * len(self.live)


class Fleet:
    """Workers, and one queue; a worker that takes a wide trial keeps its slots until they are enough."""

    def __init__(self, workers: int, users: dict[str, User], studies: list[Study], seed: int) -> None:
        self.users, self.studies, self.random = users, studies, random.Random(seed)
        self.slots, self.now = workers * SLOTS, 0.0
        self.free = [SLOTS] * workers
        #: workers by number of free slots, and by worker: the wide trial that waits there for its second slot
        self.open: list[set[int]] = [set(), set(), set(range(workers))]
        self.held: dict[int, tuple[Study, int, float]] = {}
        #: by user: slot seconds for which workers have kept a free slot for a wide trial
        self.kept: defaultdict[str, float] = defaultdict(float)
        self.queue: deque[tuple[Study, int]] = deque()
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, str, object]] = []
        #: by user: slot seconds, and the most slots at any moment; by width: waits
        self.used: defaultdict[str, float] = defaultdict(float)
        self.peak: defaultdict[str, int] = defaultdict(int)
        self.waits: dict[int, list[float]] = {1: [], 2: []}
        for study in studies:
            self.at(study.begins + self.random.random() * LOOK, "look", study)

    def at(self, moment: float, what: str, about: object) -> None:
        heapq.heappush(self.events, (moment, next(self.numbers), what, about))

    def play(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, what, about = heapq.heappop(self.events)
            if what == "look":
                self.look(about)
            else:
                self.end(*about)
        self.now = until

    def look(self, study: Study) -> None:
        """Look at the announcements of the others, announce, and send trials, as `Workers.look` does."""
        if self.now >= study.ends and not study.live:
            study.told = None
            return
        fellows = {each.name: each.told for each in self.studies if each.told is not None and each is not study}
        user, part = self.users[study.owner], 0
        known = ComputeClass(name=POOL, slots=self.slots)
        own = Claim(study.owner, study.weight, float("inf"))
        claims = [Claim(each.owner, each.weight, each.wants[POOL]) for each in fellows.values()]
        share = entitle(self.slots, own, claims, self.users) if claims else float(self.slots)
        known = replace(known, allowance=share)
        was_limited, study.is_limited = study.is_limited, False
        if user.slots is not None:
            siblings = {key: each for key, each in fellows.items() if each.owner == study.owner}
            if study.told is not None:
                part = divide(user.slots, {study.name: study.told, **siblings})[study.name]
                part = max(0, min(part, user.slots - sum(each.taken for each in siblings.values())))
            left, wanted = part - study.taken, max(0, -int(-share // 1) - study.taken)
            study.is_limited = left < wanted
            known = replace(known, most=study.taken + max(-study.taken, min(left, wanted)))
        # A study that has less than a trial's slots left of its limit wants more.
        is_asking = self.now < study.ends and (study.known is None or study.taken + study.width > study.known.limit)
        is_wanting = is_asking and not was_limited
        rivals = [(each.owner, each.weight, each.turns[POOL]) for each in fellows.values() if POOL in each.turns]
        weight, *weights = in_all([(study.owner, study.weight), *(each[:2] for each in rivals)], self.users)
        behind = [(each, rival[2]) for each, rival in zip(weights, rivals, strict=True)]
        sent = [*study.live.values()]
        virtual = study.turns.look(known, behind, sent, self.now, is_wanting=is_wanting, weight=weight)
        used = study.turns.used(sent, self.now)
        study.spent, study.used = study.spent + max(0.0, used - study.used) / study.weight, used
        if study.told is None or not is_asking:
            siblings = [each.spent for each in fellows.values() if each.owner == study.owner]
            study.spent = max([study.spent, *([min(siblings)] if siblings else [])])
        study.known = known
        study.told = StudyWants(
            owner=study.owner,
            weight=study.weight,
            taken=max(study.taken, part),
            asks=self.slots if is_asking else study.taken,
            wants={POOL: float(self.slots if is_wanting else study.taken)},
            spent=study.spent,
            turns={POOL: virtual} if is_wanting else {},
        )
        self.fill(study)
        self.at(self.now + LOOK, "look", study)

    def fill(self, study: Study) -> None:
        if study.known is None or self.now >= study.ends:
            return
        turns = study.turns.extras(study.live.values(), self.now)
        known = replace(study.known, turn=turns.get(POOL))
        while study.taken + study.width <= known.limit or self.may_exceed(study, known):
            number = next(self.numbers)
            attempt = Attempt(
                number=number, attempt=1, subspace="all", params={}, compute_class=POOL, slots=study.width
            )
            study.live[number] = Sent(attempt, self.now)
            self.queue.append((study, number))
        self.start()

    def may_exceed(self, study: Study, known: ComputeClass) -> bool:
        """Return whether a wide trial may exceed the study's share, as in `Reservations.may_start`."""
        within = known.most is None or study.taken + study.width <= known.most
        return within and known.turn != 0 and study.taken < min(known.share, known.limit)

    def start(self) -> None:
        """Let workers with free slots take messages, first come, first served."""
        while self.queue and (self.open[1] or self.open[2]):
            study, number = self.queue.popleft()
            place = (
                next(iter(self.open[2] or self.open[1]))
                if study.width > 1
                else next(iter(self.open[1] or self.open[2]))
            )
            if study.width <= self.free[place]:
                self.begin(study, number, place)
            else:
                self.held[place] = study, number, self.now
                self.open[self.free[place]].discard(place)

    def begin(self, study: Study, number: int, place: int) -> None:
        sent = study.live[number]
        self.waits[study.width].append(self.now - sent.at)
        sent.attempt, sent.began = sent.attempt.evolve(state=TrialState.RUNNING, worker=str(place)), self.now
        self.change(place, -study.width)
        running = (
            sum(
                each.attempt.slots
                for one in self.studies
                if one.owner == study.owner
                for each in one.live.values()
                if each.is_claimed
            )
            if self.users[study.owner].slots
            else 0
        )
        self.peak[study.owner] = max(self.peak[study.owner], running)
        self.at(self.now + TRIAL * self.random.uniform(0.5, 1.5), "end", (study, number, place))

    def end(self, study: Study, number: int, place: int) -> None:
        sent = study.live.pop(number)
        study.turns.end(sent, self.now)
        self.used[study.owner] += sent.slot_seconds(self.now)
        self.change(place, study.width)
        self.fill(study)
        self.start()

    def change(self, place: int, slots: int) -> None:
        self.open[self.free[place]].discard(place)
        self.free[place] += slots
        if place in self.held:
            study, number, since = self.held[place]
            if study.width <= self.free[place]:
                self.kept[study.owner] += self.now - since
                del self.held[place]
                self.begin(study, number, place)
        elif self.free[place]:
            self.open[self.free[place]].add(place)


def lab(seed: int, days: float) -> tuple[dict[str, User], list[Study]]:
    """Return ten users and 40 studies."""
    generator = random.Random(seed)
    users = {
        f"user{index}": User(key="0" * 64, weight=weight, slots=slots)
        for index, (weight, slots) in enumerate(
            [(1, None), (1, None), (1, None), (2, None), (2, None), (3, None), (0.5, None), (1, 20), (2, 7), (4, 60)]
        )
    }
    studies = []
    for number in range(40):
        begins = 0.0 if number < 10 else generator.uniform(0.0, 0.6) * days * DAY
        ends = min(begins + generator.uniform(0.25, 0.9) * days * DAY, days * DAY)
        weight, width = generator.choice([1.0, 1.0, 2.0]), 2 if number in range(20, 28) else 1
        studies.append(Study(f"study{number}", f"user{number % 10}", weight, width, begins, ends))
    return users, studies


def policy_seconds(users: dict[str, User], studies: list[Study], slots: int) -> dict[str, float]:
    """Return the slot seconds of each user by the policy: the slots divided by weight among those who want some."""
    found = dict.fromkeys(users, 0.0)
    moments = sorted({moment for each in studies for moment in (each.begins, each.ends)})
    for first, last in itertools.pairwise(moments):
        wanting = {each.owner for each in studies if each.begins <= first and each.ends >= last}
        for name in wanting:
            others = [(users[each].weight, float(users[each].slots or slots)) for each in wanting - {name}]
            part = min(users[name].slots or slots, allow(slots, users[name].weight, others))
            found[name] += part * (last - first)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--workers", type=int, default=200)
    asked = parser.parse_args()
    users, studies = lab(asked.seed, asked.days)
    fleet = Fleet(asked.workers, users, studies, asked.seed)
    fleet.play(asked.days * DAY + 2 * TRIAL)
    due = policy_seconds(users, studies, fleet.slots)
    print("user    weight  limit   most  slot hours       kept  by policy  difference")
    for name, user in users.items():
        got, kept, part = fleet.used[name] / 3600, fleet.kept[name] / 3600, due[name] / 3600
        limit = "-" if user.slots is None else user.slots
        numbers = f"{got:11.0f} {kept:10.0f} {part:10.0f} " + (f"{(got + kept) / part - 1:11.2%}" if part else "")
        print(f"{name}  {user.weight:6g} {limit:>6} {fleet.peak[name] or '-':>6} {numbers}")
    for width, waits in fleet.waits.items():
        cuts = statistics.quantiles(waits, n=20)
        kind = "narrow" if width == 1 else "wide"
        most = f"{cuts[9]:.0f} s in the median, {cuts[18]:.0f} s at most in 95 %, {max(waits):.0f} s at most"
        print(f"{kind}: {len(waits)} trials, which wait {statistics.mean(waits):.0f} s in the mean, {most}")
    used, whole = sum(fleet.used.values()) + sum(fleet.kept.values()), sum(due.values())
    print(f"all: {used / 3600:.0f} slot hours of {whole / 3600:.0f}")


if __name__ == "__main__":
    main()
