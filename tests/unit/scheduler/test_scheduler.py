"""The loop runs exactly the trials that limits and seed name, whatever the slots, the failures and the timing."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from hyperopt import hp
from msgspec.structs import replace
from services.cases import cases
from services.searching import SimulatedSearch

from shadho_celery.core.attempts import Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Event, Lost, Memory, Outcome, Result, Retry, Started, Trial, TrialState
from shadho_celery.errors import StoreOutage
from shadho_celery.fidelity.rounds import Rounds
from shadho_celery.placement.copies import record_placements
from shadho_celery.placement.model import CostModel
from shadho_celery.placement.policies import POLICIES, FifoPolicy
from shadho_celery.placement.shares import FLOOR, HOPELESS, SHARES, UniformShares
from shadho_celery.samplers import find_sampler
from shadho_celery.scheduler.executors import Executor
from shadho_celery.scheduler.proposals import WAITING_PER_SUBSPACE, Proposals, make_samplers
from shadho_celery.scheduler.scheduler import MAX_AVOIDING, TIMED_TRIALS, TURN_SECONDS, Scheduler
from shadho_celery.simulation.executor import Play, SimulatedExecutor
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.space.split import split
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.recorder import Recorder
from shadho_celery.study.state import MAX_LOST, Limits, StudyState

S = TrialState


def mixed() -> Space:
    """Three subspaces of probabilities 1/2, 1/4, 1/4."""
    return compile_space(
        hp.pchoice(
            "model",
            [
                (0.5, {"name": "net", "rate": hp.loguniform("rate", -9, 0), "width": hp.randint("width", 4, 64)}),
                (0.25, {"name": "forest", "trees": hp.quniform("trees", 10, 500, 10)}),
                (0.25, {"name": "svm", "C": hp.lognormal("C", 0, 2)}),
            ],
        )
    )


def plain() -> Space:
    return compile_space({"x": hp.uniform("x", -1, 1)})


def lasting(
    seconds: float | Callable[[Attempt, str], float], *, fails: Callable[[Attempt], bool] = lambda _: False
) -> Play:
    """Every trial lasts that long; its loss comes from its seed."""

    def play(trial: Attempt, compute_class: str) -> Outcome:
        took = seconds(trial, compute_class) if callable(seconds) else seconds
        if fails(trial):
            return Outcome(state=S.FAILED, error="it had to fail", seconds=took)
        return Outcome(state=S.COMPLETE, loss=trial.seed % 1000 / 1000, seconds=took)

    return play


class Search(SimulatedSearch):
    """A study whose trials are not copied: a late trial's copy would be one attempt more than these tests count."""

    def __init__(
        self,
        space: Space | None = None,
        *,
        slots: Mapping[str, int | Mapping[str, Any]] | None = None,
        play: Play | None = None,
        store: SqlStore | None = None,
        ahead: int = 0,
        wrap: Callable[[SimulatedExecutor], Executor] = lambda executor: executor,
        policy: str = "cost",
        shares: str = "uniform",
        sampler: str = "random",
        seed: int | None = 5,
        resume: bool = False,
        clock: ManualClock | None = None,
        speculate: bool = False,
        **limits: Any,
    ) -> None:
        super().__init__(
            space or mixed(),
            play or lasting(1.0),
            slots or {"gpu": 2, "cpu": 3},
            settings=StudySettings(sampler=sampler, policy=policy, shares=shares, speculate=speculate),
            limits=Limits(**limits),
            clock=clock or ManualClock(1000.0),
            seed=seed,
            store=store,
            resume=resume,
            wrap=wrap,
            ahead=ahead,
        )

    def resumed(self, **changes: Any) -> Search:
        """The same study taken up by another scheduler, a little later."""
        self.close()
        clock = ManualClock(self.clock.now() + 100)
        return Search(self.space, store=self.store, seed=None, resume=True, clock=clock, **changes)


Params = frozenset[tuple[str, Any]]


def drawn(study: StudyState) -> Counter[tuple[str, Params, int]]:
    """Count the trials by subspace, params and seed, in any order."""
    return Counter((t.subspace, frozenset(t.params.items()), t.seed) for t in study)


def uneven(trial: Attempt, compute_class: str) -> float:
    """Durations that put no two trials in step."""
    return 0.1 + trial.seed % 997 / 100 + (5.0 if compute_class == "cpu" else 0.0)


# The number of trials


@pytest.mark.slow
@cases("policy", POLICIES)
@cases("slots", [{"only": 1}, {"gpu": 2, "cpu": 3}, {"gpu": 50, "cpu": 40}])
@cases("ahead", [0, 7])
def test_exactly_the_given_number_of_trials_runs(policy: str, slots: dict[str, int], ahead: int) -> None:
    search = Search(slots=slots, policy=policy, trials=25, play=lasting(uneven), ahead=ahead).run()
    assert (len(search.study), search.study.counted, search.study.count(S.COMPLETE)) == (25, 25, 25)
    assert search.study.in_flight == 0
    assert {trial.attempt for trial in search.study} == {1}


def test_failed_trials_count() -> None:
    search = Search(trials=30, play=lasting(1.0, fails=lambda trial: trial.number % 3 == 0)).run()
    assert (search.study.count(S.COMPLETE), search.study.count(S.FAILED), len(search.study)) == (20, 10, 30)


@pytest.mark.parametrize("shares", ["uniform", "promise"])
def test_a_study_whose_trials_all_fail_ends_like_any_other(shares: str) -> None:
    search = Search(trials=30, shares=shares, play=lasting(1.0, fails=lambda trial: True)).run()
    assert (search.study.count(S.FAILED), len(search.study)) == (30, 30)
    assert search.study.best is None


def test_never_more_trials_are_under_way_than_may_still_count() -> None:
    search = Search(trials=10, slots={"gpu": 8, "cpu": 8}, ahead=5, play=lasting(uneven))

    def check(search: Search) -> bool:
        assert search.study.counted + search.study.in_flight <= 10
        return False

    assert search.run(check).study.counted == 10


def test_every_class_gets_its_slots_and_what_waits_ahead_but_no_more() -> None:
    search = Search(trials=100, slots={"gpu": 3, "cpu": 2}, ahead=4, play=lasting(10.0))
    search.scheduler.turn()
    assert search.study.count(S.QUEUED, compute_class="gpu") == 7
    assert search.study.count(S.QUEUED, compute_class="cpu") == 6
    search.scheduler.turn()
    assert search.study.count(S.RUNNING, compute_class="gpu") == 3
    assert search.study.count(S.RUNNING, compute_class="cpu") == 2
    assert search.study.in_flight == 13


@pytest.mark.parametrize("sampler", ["tpe", "auto"])
def test_of_what_learns_from_losses_few_wait_before_some_are_known(sampler: str) -> None:
    def grown(search: Search) -> bool:
        assert search.study.in_flight <= 2 + search.study.counted // 4, "two slots, and one for four results"
        return search.study.in_flight == 2 + 8

    search = Search(trials=100, slots={"only": 2}, ahead=8, sampler=sampler).run(grown)
    assert search.study.counted < 80, "in the end as many wait as anywhere"


def test_near_the_end_nothing_waits_behind_a_busy_slot() -> None:
    """A trial that waits is better sent to whichever slot falls free first."""
    study = Search(trials=40, slots={"gpu": 2, "cpu": 2}, ahead=4, play=lasting(uneven), policy="fifo").run().study
    waited = [(trial.started_at or 0.0) - (trial.asked_at or 0.0) for trial in study]
    assert max(waited[4:36]) > 1.0
    assert waited[36:] == [0.0] * 4


def test_a_study_without_trials_left_sends_nothing() -> None:
    search = Search(trials=5).run().resumed(trials=5)
    assert search.scheduler.done
    assert len(search.run().study) == 5


# The set of trials


TIMINGS: list[dict[str, Any]] = [
    {"slots": {"only": 1}, "play": lasting(1.0)},
    {"slots": {"gpu": 1, "cpu": 2}, "play": lasting(uneven)},
    {"slots": {"cpu": 2, "gpu": 1}, "play": lasting(uneven), "ahead": 9},
    {"slots": {f"class{place}": 1 for place in range(17)}, "play": lasting(uneven)},
    {"slots": {"gpu": 17}, "play": lasting(0.01)},
]


@pytest.mark.slow
@pytest.mark.parametrize("trials", [1, 40])
def test_the_same_seed_gives_the_same_set_of_trials_whatever_slots_durations_and_policy(trials: int) -> None:
    sets = [
        drawn(Search(trials=trials, policy=policy, **timing).run().study) for timing in TIMINGS for policy in POLICIES
    ]
    assert all(other == sets[0] for other in sets)
    assert sum(sets[0].values()) == trials


def test_failures_do_not_change_the_set_of_trials() -> None:
    without = Search(trials=40).run()
    failing = Search(trials=40, play=lasting(uneven, fails=lambda trial: trial.seed % 2 == 0)).run()
    assert failing.study.count(S.FAILED) > 5
    assert drawn(failing.study) == drawn(without.study)


def test_no_two_trials_of_a_study_have_the_same_draws_or_seed() -> None:
    study = Search(plain(), trials=200).run().study
    assert len({t.params["x"] for t in study}) == 200
    assert len({t.seed for t in study}) == 200


def test_each_trial_lies_in_its_subspace_and_subspaces_get_their_part() -> None:
    search = Search(trials=40).run()
    for subspace in split(search.space):
        trials = [trial for trial in search.study if subspace.contains(trial.params)]
        assert {trial.subspace for trial in trials} == {subspace.name}
        assert len(trials) == 40 * subspace.probability
    for trial in search.study:
        search.space.check(trial.params)


def test_a_study_continued_to_more_trials_has_the_set_of_one_that_was_never_interrupted() -> None:
    search = Search(trials=13).run()
    for trials in (14, 27, 40):
        search = search.resumed(trials=trials, slots={"a": 2, "b": 1}).run()
        assert search.study.counted == trials
    assert drawn(search.study) == drawn(Search(trials=40).run().study)


# The other limits


def test_after_the_seconds_nothing_is_sent_and_what_runs_is_finished() -> None:
    search = Search(seconds=10.0, slots={"only": 3}, play=lasting(4.0)).run()
    assert search.study.in_flight == 0
    assert search.study.count(S.COMPLETE) == 9
    assert len(search.study) == 9
    assert 1010.0 <= search.clock.now() <= 1012.0 + TURN_SECONDS


def test_the_seconds_are_those_of_this_run() -> None:
    search = Search(seconds=10.0, slots={"only": 1}, play=lasting(1.0)).run()
    first = search.study.counted
    again = search.resumed(seconds=10.0, slots={"only": 1}, play=lasting(1.0)).run()
    assert first >= 9
    assert again.study.counted >= first + 9


def test_once_the_money_is_spent_nothing_is_sent_and_what_runs_is_finished() -> None:
    slots = {"gpu": {"workers": 2, "price": 3600.0}, "cpu": {"workers": 2, "price": 360.0}}
    search = Search(money=100.0, slots=slots, play=lasting(4.0)).run()
    assert search.study.in_flight == 0
    spent, ended = search.study.recorder.spent, Counter(trial.compute_class for trial in search.study)
    assert 100.0 <= sum(spent.values()) <= 100.0 + (2 * 1.0 + 2 * 0.1) * 4.0
    assert search.scheduler.spent == pytest.approx(sum(spent.values())), "nothing runs"
    assert spent == pytest.approx({"gpu": 4.0 * ended["gpu"], "cpu": 0.4 * ended["cpu"]})


def test_an_attempt_whose_class_has_gone_while_the_store_was_away_is_recorded_without_a_prediction() -> None:
    model = SimpleNamespace(has_learned=False)
    attempt = Attempt(number=0, attempt=1, params={}, subspace="", compute_class="gpu")
    assert record_placements([(attempt, {})], ["cpu"], model, Recorder()) == [attempt]  # type: ignore[arg-type]


def test_without_a_price_no_money_is_spent() -> None:
    search = Search(money=1.0, trials=20, slots={"only": 2}).run()
    assert (search.study.counted, search.scheduler.spent) == (20, 0.0)


def test_at_the_target_what_runs_is_cancelled() -> None:
    def play(trial: Attempt, compute_class: str) -> Outcome:
        loss = 0.0 if trial.number == 6 else 1.0
        return Outcome(state=S.COMPLETE, loss=loss, seconds=1.0 + trial.number % 3)

    search = Search(target=0.0, slots={"only": 4}, play=play).run()
    assert search.study.best is not None
    assert search.study.best.number == 6
    assert search.study.in_flight == 0
    assert search.study.count(S.CANCELLED) >= 1
    assert len(search.study) < 20
    assert all(trial.outcome.loss is None for trial in search.study if trial.state is S.CANCELLED)


def test_trials_without_a_gain_end_the_study_although_a_later_one_of_the_same_turn_is_a_gain() -> None:
    """Four slots, and so four results a turn: the fifth to the seventh are no gain, and the eighth is one."""

    def play(trial: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=S.COMPLETE, loss={0: 1.0, 3: 1.0, 7: 0.0}.get(trial.number, 2.0), seconds=1.0)

    search = Search(without_gain=5, slots={"only": 4}, play=play).run()
    assert (len(search.study), search.scheduler.is_stale) == (8, True)
    assert not Search(without_gain=8, trials=8, slots={"only": 4}, play=play).run().scheduler.is_stale


def test_whichever_limit_comes_first_ends_the_study() -> None:
    def limited(**limits: Any) -> StudyState:
        return Search(slots={"only": 1}, play=lasting(1.0), **limits).run().study

    assert limited(trials=5, seconds=100.0).counted == 5
    assert limited(trials=500, seconds=5.0).counted <= 6
    assert limited(trials=5, target=-1.0).counted == 5


# Stopping and resuming


def test_stop_takes_back_what_waits_and_resuming_completes_the_set() -> None:
    search = Search(trials=60, play=lasting(uneven), ahead=6).run(lambda search: search.study.counted >= 10)
    search.scheduler.stop()
    search.run()
    stopped_with = len(search.study)
    waiting = search.study.count(S.WAITING)
    assert waiting > 0
    assert search.study.counted + waiting == stopped_with < 60
    assert search.study.in_flight == 0
    again = search.resumed(trials=60, slots={"other": 7}).run()
    assert again.study.count(S.COMPLETE) == len(again.study) == 60
    assert drawn(again.study) == drawn(Search(trials=60).run().study)


def test_a_scheduler_that_died_is_continued_with_the_same_set() -> None:
    """Its trials are left QUEUED and RUNNING; the new one, on other machines, is told what became of them."""
    search = Search(trials=40, play=lasting(uneven), ahead=6).run(lambda search: search.study.counted >= 10)
    assert search.study.count(S.QUEUED) > 0
    assert search.study.count(S.RUNNING) > 0
    again = search.resumed(trials=40, slots={"new": 3}).run()
    assert again.study.count(S.COMPLETE) == len(again.study) == 40
    assert drawn(again.study) == drawn(Search(trials=40).run().study)


def test_stop_at_once_cancels_what_runs_and_a_resumed_study_still_reaches_its_number() -> None:
    search = Search(trials=30, play=lasting(uneven)).run(lambda search: search.study.counted >= 8)
    search.scheduler.stop(running=True)
    search.run()
    cancelled = search.study.count(S.CANCELLED)
    assert cancelled > 0
    again = search.resumed(trials=30).run()
    assert again.study.counted == 30
    assert len(again.study) == 30 + cancelled
    assert drawn(again.study) == drawn(Search(trials=30 + cancelled).run().study)


# The store comes first


class Recording:
    """Passes everything on, and checks that what is sent stands in the store as it is sent."""

    def __init__(self, inner: SimulatedExecutor) -> None:
        self.inner = inner
        self.search: Search | None = None
        self.sent = 0

    def classes(self) -> Sequence[ComputeClass]:
        return self.inner.classes()

    def submit(self, attempts: Sequence[Attempt]) -> None:
        assert self.search is not None
        recorded = {trial.number: trial for trial in self.search.store.trials(self.search.study.record.key)}
        assert all(recorded[each.number].state is S.QUEUED for each in attempts)
        assert all(recorded[each.number].attempted() == each.evolve(expected=None) for each in attempts)
        self.sent += len(attempts)
        self.inner.submit(attempts)

    def poll(self, seconds: float) -> Sequence[Event]:
        return self.inner.poll(seconds)

    def renew_lock(self) -> None:
        pass

    def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
        self.inner.note_end(event, ended, is_over=is_over)

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        self.inner.cancel(numbers, running=running, pruned=pruned)

    def close(self) -> None:
        self.inner.close()


def test_a_trial_is_recorded_before_it_is_sent() -> None:
    executors: list[Recording] = []

    def wrap(inner: SimulatedExecutor) -> Executor:
        executors.append(Recording(inner))
        return executors[0]

    search = Search(trials=30, play=lasting(uneven), ahead=2, wrap=wrap)
    executors[0].search = search
    search.run()
    assert executors[0].sent == 30


def test_results_are_recorded_before_they_are_confirmed() -> None:
    """A poll confirms the events of the one before it: they must be in the store by then."""

    class Confirming(Recording):
        told: Sequence[Event] = ()

        def submit(self, attempts: Sequence[Attempt]) -> None:
            self.inner.submit(attempts)

        def poll(self, seconds: float) -> Sequence[Event]:
            assert self.search is not None
            recorded = {trial.number: trial for trial in self.search.store.trials(self.search.study.record.key)}
            results = [event for event in self.told if isinstance(event, Result)]
            assert all(recorded[event.number].outcome == event.outcome for event in results)
            self.sent += len(results)
            self.told = self.inner.poll(seconds)
            return self.told

    executors: list[Confirming] = []

    def wrap(inner: SimulatedExecutor) -> Executor:
        executors.append(Confirming(inner))
        return executors[0]

    search = Search(trials=30, play=lasting(uneven), wrap=wrap)
    executors[0].search = search
    search.run()
    assert executors[0].sent >= 20


class Unreliable(SqlStore):
    """A store whose server is away for one call in four, and leaves one in four unconfirmed."""

    #: below 0 until it begins to fail
    calls = -2

    @contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        self.calls += self.calls >= 0
        if self.calls % 4 == 1:
            raise StoreOutage
        with super()._begin() as connection:
            yield connection
        if self.calls % 4 == 3:
            raise StoreOutage


@cases("is_written_between", [False, True])
def test_with_a_store_that_is_away_now_and_then_nothing_is_sent_unrecorded_and_nothing_is_written_twice(
    is_written_between: bool,
) -> None:
    """Nor lost, when a request between two turns has what was placed recorded."""
    executors: list[Recording] = []

    def wrap(inner: SimulatedExecutor) -> Executor:
        executors.append(Recording(inner))
        return executors[0]

    store = Unreliable("sqlite://")
    search = Search(trials=30, play=lasting(uneven), ahead=2, wrap=wrap, store=store)
    executors[0].search = search
    store.calls = 0
    troubles = 0

    def count(search: Search) -> bool:
        nonlocal troubles
        troubles += search.study.trouble is not None
        if is_written_between:
            search.clock.sleep(0.6)
            search.study.commit()
        return False

    search.run(count)
    assert troubles > (0 if is_written_between else 10)
    assert executors[0].sent == 30
    recorded = list(store.trials(search.study.record.key))
    assert recorded == list(search.study)
    assert [trial.state for trial in recorded] == [S.COMPLETE] * 30
    assert {trial.attempt for trial in recorded} == {1}


# What gets lost


class Losing(Recording):
    """Loses what `loses` says, once it has started; and hides the classes that have not come up yet."""

    def __init__(self, inner: SimulatedExecutor, loses: Callable[[int, int], bool]) -> None:
        super().__init__(inner)
        self.loses = loses
        self.hidden: set[str] = set()

    def classes(self) -> Sequence[ComputeClass]:
        return [c for c in self.inner.classes() if c.name not in self.hidden]

    def submit(self, attempts: Sequence[Attempt]) -> None:
        self.sent += len(attempts)
        self.inner.submit(attempts)

    def poll(self, seconds: float) -> Sequence[Event]:
        return [self._seen(event) for event in self.inner.poll(seconds)]

    def _seen(self, event: Event) -> Event:
        if isinstance(event, Result) and self.loses(event.number, event.attempt):
            return Lost(number=event.number, attempt=event.attempt, reason="its worker fell silent")
        return event


def losing(loses: Callable[[int, int], bool], **options: Any) -> tuple[Search, Losing]:
    executors: list[Losing] = []

    def wrap(inner: SimulatedExecutor) -> Executor:
        executors.append(Losing(inner, loses))
        return executors[0]

    return Search(wrap=wrap, play=lasting(uneven), **options), executors[0]


def test_lost_attempts_are_sent_again_and_count_once() -> None:
    search, executor = losing(lambda number, attempt: number % 4 == 0 and attempt < MAX_LOST, trials=40)
    search.run()
    assert (search.study.count(S.COMPLETE), search.study.counted, len(search.study)) == (40, 40, 40)
    again = [trial for trial in search.study if trial.number % 4 == 0]
    assert {(trial.attempt, trial.lost) for trial in again} == {(MAX_LOST, MAX_LOST - 1)}
    assert executor.sent == 40 + (MAX_LOST - 1) * len(again)
    assert drawn(search.study) == drawn(Search(trials=40).run().study)


def test_a_trial_that_kills_every_worker_fails_and_counts() -> None:
    search, executor = losing(lambda number, attempt: number == 3, trials=20)
    search.run()
    assert (search.study.count(S.COMPLETE), search.study.count(S.FAILED)) == (19, 1)
    assert "fell silent" in str(search.study.trial(3).outcome.error)
    assert executor.sent == 19 + MAX_LOST


class Doubting(Recording):
    """Doubts the first failure of every trial, which another worker is to try; a class has one worker of its name."""

    def classes(self) -> Sequence[ComputeClass]:
        return [dataclasses.replace(each, names=frozenset({each.name})) for each in self.inner.classes()]

    def submit(self, attempts: Sequence[Attempt]) -> None:
        for each in attempts:
            # A worker declines what it has failed, so an attempt that it must repeat does not name it.
            assert str(each.compute_class) not in each.failed_on
        self.inner.submit(attempts)

    def poll(self, seconds: float) -> Sequence[Event]:
        return [self._doubted(event) for event in self.inner.poll(seconds)]

    def _doubted(self, event: Event) -> Event:
        if not isinstance(event, Result) or event.outcome.state is not S.FAILED or event.attempt > 1:
            return event
        return replace(event, retry=Retry(reason="it may be the worker", failed_on=event.compute_class))


@pytest.mark.parametrize("slots", [{"gpu": 1, "cpu": 1}, {"gpu": 2}], ids=["two classes", "one class"])
def test_a_second_opinion_is_that_of_another_class_where_one_has_the_only_other_worker(slots: dict[str, int]) -> None:
    fails = lasting(uneven, fails=lambda attempt: attempt.compute_class == "gpu")
    search = Search(trials=20, slots=slots, play=fails, wrap=Doubting).run()
    expected = {"cpu"} if "cpu" in slots else {"gpu"}
    assert {trial.compute_class for trial in search.study} == expected
    assert search.study.counted == 20
    assert {trial.attempt for trial in search.study} <= {1, 2}


def test_a_trial_that_nobody_else_takes_may_return_to_the_worker_that_failed_it() -> None:
    search = Search(trials=1)
    search.scheduler.classes = [ComputeClass(name="gpu", slots=2, names=frozenset({"bad", "other"}))]
    search.study.send(search.study.add("all", {}, seed=1), "gpu")
    outcome = Outcome(state=S.FAILED, error="no", seconds=1.0)
    retry = Retry(reason="elsewhere", failed_on="bad")
    search.study.tell(Result(number=0, attempt=1, outcome=outcome, at=0.0, retry=retry))
    for attempt in range(2, MAX_AVOIDING + 1):
        trial = search.study.trial(0)
        assert not search.scheduler._may_return(trial)
        assert search.study.send(trial, "gpu").failed_on == ("bad",)
        search.study.tell(Lost(number=0, attempt=attempt, reason="for another worker", claimed=False))
    assert search.scheduler._may_return(search.study.trial(0))
    assert search.study.send(search.study.trial(0), "gpu", again=True).failed_on == ()


def test_it_is_told_if_workers_end_before_their_trials_do() -> None:
    search = Search(trials=1)
    search.study.send(search.study.add("all", {}, seed=1), "gpu")
    for attempt in (1, 2, 3):
        assert search.scheduler.notices() == []
        search.study.tell(Started(number=0, attempt=attempt, host="h", at=0.0))
        facts = {"claimed": False, "given_back": True}
        search.study.tell(Lost(number=0, attempt=attempt, reason="its worker was preempted", **facts))
        search.study.send(search.study.trial(0), "gpu")
    [notice] = search.scheduler.notices()
    assert notice.startswith("trial 0 was given back by 3 workers, which ended before it did; let workers stay longer")
    search.study.cancel(0)


# Hopeless studies


def test_a_study_whose_first_trials_all_fail_in_one_way_stops_and_says_why() -> None:
    search = Search(trials=1000, failures=10, play=lasting(uneven, fails=lambda attempt: True)).run()
    assert search.scheduler.hopeless == "the first 10 trials have all failed with it had to fail"
    assert 10 <= search.study.count(S.FAILED) < 30
    again = search.resumed(trials=200, failures=10, play=lasting(uneven)).run()
    assert again.study.count(S.COMPLETE) > 150, "after a resume others are the first ones"


@pytest.mark.parametrize(
    ("failures", "fails"),
    [(None, range(200)), (10, range(5, 200)), (10, [n for n in range(200) if n != 12])],
    ids=["no limit", "the first succeed", "one beyond the first succeeds before they have ended"],
)
def test_no_other_study_is_hopeless(failures: int | None, fails: Sequence[int]) -> None:
    play = lasting(lambda attempt, _: 0.1 if attempt.number > 9 else 9.0, fails=lambda attempt: attempt.number in fails)
    search = Search(trials=200, failures=failures, slots={"gpu": 20}, play=play).run()
    assert search.study.counted == 200


def test_without_any_class_nothing_is_sent_until_one_appears() -> None:
    search, executor = losing(lambda number, attempt: False, trials=10)
    executor.hidden = {"gpu", "cpu"}
    for _ in range(20):
        search.scheduler.turn()
    assert len(search.study) == 0
    assert search.clock.now() == pytest.approx(1000.0 + 20 * TURN_SECONDS)
    executor.hidden = {"cpu"}
    assert search.run().study.count(S.COMPLETE, compute_class="gpu") == 10


# The order of the classes


def strength(search: Search) -> list[str]:
    return [compute_class.name for compute_class in search.scheduler.classes]


def test_once_all_classes_are_timed_the_faster_one_is_the_stronger() -> None:
    """The simulated machines announce the first class as the one with most cores; it is the slowest."""
    paces = {"first": 8.0, "second": 1.0, "third": 3.0}
    search = Search(trials=90, slots=dict.fromkeys(paces, 2), play=lasting(lambda trial, name: paces[name]))

    def all_timed(search: Search) -> bool:
        return min(search.study.count(S.COMPLETE, compute_class=name) for name in paces) >= TIMED_TRIALS

    while not all_timed(search):
        search.scheduler.turn()
        if not all_timed(search):
            assert strength(search) == list(paces)
    search.scheduler.turn()
    assert strength(search) == ["second", "third", "first"]
    search.run()
    assert search.study.counted == 90


def test_a_class_that_is_not_timed_yet_puts_all_back_in_the_order_of_their_hardware() -> None:
    paces = {"first": 8.0, "second": 1.0, "third": 3.0}
    search, executor = losing(lambda number, attempt: False, trials=200, slots=dict.fromkeys(paces, 2))
    executor.hidden = {"first"}
    search.run(lambda search: search.study.counted >= 40)
    executor.hidden = set()
    search.scheduler.turn()
    assert strength(search) == ["first", "second", "third"]


# Memory


GIGABYTE = 10**9


class Measuring(Losing):
    """Machines with memory, which the trials' results tell of; what does not fit the class fails."""

    #: bytes by class
    room: Mapping[str, int] = {}
    #: classes whose memory is that of GPUs
    gpus: frozenset[str] = frozenset()
    needs: Callable[[Trial], int] = staticmethod(lambda trial: 0)

    def classes(self) -> Sequence[ComputeClass]:
        return [
            dataclasses.replace(
                c, memory=self.room.get(c.name, 0), gpu_memory=self.room[c.name] if c.name in self.gpus else 0
            )
            for c in super().classes()
        ]

    def _seen(self, event: Event) -> Event:
        assert self.search is not None
        event = super()._seen(event)
        if not isinstance(event, Result):
            return event
        memory = self.needs(self.search.study.trial(event.number))
        return replace(event, outcome=replace(event.outcome, memory=memory))


def measuring(
    room: Mapping[str, int], needs: Callable[[Trial], int], *, gpus: Iterable[str] = (), **options: Any
) -> tuple[Search, Measuring]:
    executors: list[Measuring] = []

    def wrap(inner: SimulatedExecutor) -> Executor:
        executors.append(Measuring(inner, lambda number, attempt: False))
        executors[-1].room, executors[-1].needs, executors[-1].gpus = room, needs, frozenset(gpus)
        return executors[-1]

    options = {"slots": dict.fromkeys(room, 2), "play": lasting(uneven), **options}
    search = Search(wrap=wrap, **options)
    executors[-1].search = search
    return search, executors[-1]


ROOM = {"large": 16 * GIGABYTE, "small": 4 * GIGABYTE}

#: trials after which the needs of every subspace are known
LEARNED = 60


def nets_need_much(trial: Trial) -> int:
    return 10 * GIGABYTE if trial.subspace.startswith("model=net") else GIGABYTE


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_once_learned_what_does_not_fit_the_small_class_is_sent_to_the_large_one_only(policy: str) -> None:
    search, _ = measuring(ROOM, nets_need_much, trials=120, policy=policy, ahead=5)
    search.run(lambda search: search.study.counted >= LEARNED)
    known = {trial.number for trial in search.study if trial.attempt}
    study = search.run().study
    later = [trial for trial in study if trial.number not in known]
    assert {t.compute_class for t in later if nets_need_much(t) > ROOM["small"]} == {"large"}
    assert {t.compute_class for t in later if nets_need_much(t) <= ROOM["small"]} >= {"small"}
    assert (study.counted, len(study), study.in_flight) == (120, 120, 0)
    assert drawn(study) == drawn(Search(trials=120, policy="fifo").run().study)


def test_a_trial_that_waits_for_the_large_class_does_not_keep_the_small_one_idle() -> None:
    search, _ = measuring(ROOM, nets_need_much, trials=400, play=lasting(5.0))
    search.run(lambda search: search.study.counted >= LEARNED)
    idle = 0
    while search.study.counted < 250:
        search.scheduler.turn()
        idle += search.study.count(S.QUEUED, S.RUNNING, compute_class="small") < 2
    assert search.study.count(S.WAITING) > 0
    assert idle == 0


@pytest.mark.slow
def test_few_trials_wait_for_the_large_class_however_much_smaller_it_is_than_the_rest() -> None:
    """And the rest goes on with what fits it, so the search does not slow down to the large class's pace."""
    search, _ = measuring(ROOM, nets_need_much, seconds=400.0, slots={"large": 1, "small": 10}, play=lasting(10.0))

    def check(search: Search) -> bool:
        ahead = sum(map(len, search.scheduler.proposals._ahead.values()))
        assert search.study.count(S.WAITING) - ahead <= WAITING_PER_SUBSPACE
        return False

    search.run(check)
    assert search.study.counted > 0.95 * 11 * 40
    assert search.study.count(S.COMPLETE, compute_class="large") >= 37
    nets = [t for t in [*search.study.trials][LEARNED:] if nets_need_much(t) > ROOM["small"]]
    assert len(nets) > 15
    assert {t.compute_class for t in nets} == {"large"}


def test_as_the_large_class_vanishes_what_waited_for_it_goes_to_the_small_one() -> None:
    """Better to try than to wait for ever."""
    search, executor = measuring(ROOM, nets_need_much, trials=200, play=lasting(5.0))
    search.run(lambda search: search.study.counted >= LEARNED and search.study.count(S.WAITING) > 0)
    waiting = {trial.number for trial in search.study if trial.state is S.WAITING}
    executor.hidden = {"large"}
    study = search.run().study
    assert {study.trial(number).compute_class for number in waiting} == {"small"}
    assert (study.counted, len(study)) == (200, 200)
    assert drawn(study) == drawn(Search(trials=200).run().study)


@pytest.mark.slow
def test_what_was_learned_of_memory_holds_after_a_resume() -> None:
    """Also of GPUs, whose workers may not have announced themselves yet as the study is taken up."""
    room = {"gpu_large": 16 * GIGABYTE, "gpu_small": 4 * GIGABYTE}
    options: dict[str, Any] = {"gpus": room, "slots": dict.fromkeys(room, 2)}
    first, _ = measuring(room, nets_need_much, trials=LEARNED, **options)
    first.run().close()
    clock = ManualClock(first.clock.now() + 100)
    again, _ = measuring(
        room, nets_need_much, trials=200, store=first.store, seed=None, resume=True, clock=clock, **options
    )
    study = again.run().study
    later = [trial for trial in study if trial.number >= LEARNED and nets_need_much(trial) > room["gpu_small"]]
    assert len(later) > 30
    assert {trial.compute_class for trial in later} == {"gpu_large"}


# Spilling over


@pytest.mark.parametrize("policy", POLICIES)
def test_at_the_end_what_waits_in_a_crowded_queue_goes_to_a_free_slot_of_another_class(policy: str) -> None:
    """The slow class has a queue that it would work on long after the fast one has fallen idle."""
    slots, paces = {"slow": 1, "fast": 4}, {"slow": 50.0, "fast": 1.0}
    search = Search(trials=60, slots=slots, ahead=6, policy=policy, play=lasting(lambda trial, name: paces[name]))
    study = search.run().study
    assert study.counted == len(study) == 60
    assert study.count(S.COMPLETE, compute_class="slow") <= 2
    assert search.clock.now() - 1000.0 <= 2 * 50.0
    assert {trial.lost for trial in study} == {0}
    assert any(trial.attempt > 1 for trial in study), "some were taken back"


@pytest.mark.slow
def test_what_is_taken_back_is_not_sent_to_a_class_that_it_does_not_fit() -> None:
    paces = {"large": 50.0, "small": 1.0}
    search, _ = measuring(
        ROOM,
        nets_need_much,
        trials=100,
        ahead=6,
        play=lasting(lambda trial, name: paces[name]),
        slots={"large": 2, "small": 2},
    )
    search.run(lambda search: search.study.counted >= LEARNED)
    known = {trial.number for trial in search.study if trial.attempt}
    study = search.run().study
    later = [trial for trial in study if trial.number not in known and nets_need_much(trial) > ROOM["small"]]
    assert {trial.compute_class for trial in later} == {"large"}
    assert study.counted == len(study) == 100


@pytest.mark.slow
def test_no_slot_is_idle_while_a_trial_that_fits_it_waits_in_another_classs_queue() -> None:
    """Also where others, which do not fit it, wait to be sent."""
    paces = {"large": 50.0, "small": 1.0}
    search, _ = measuring(
        ROOM,
        nets_need_much,
        trials=80,
        ahead=8,
        slots={"large": 2, "small": 2},
        play=lasting(lambda trial, name: paces[name]),
    )
    idle = 0
    while not search.scheduler.done:
        search.scheduler.turn()
        free = search.study.count(S.QUEUED, S.RUNNING, compute_class="small") < 2
        queued = [t for t in search.study.sent if t.state is S.QUEUED and t.compute_class == "large"]
        fitting = [t for t in queued if nets_need_much(t) <= ROOM["small"]]
        idle = idle + 1 if free and fitting else 0
        # A turn to take it back and one to send it on.
        assert idle <= 3
    assert search.study.counted == 80


# Shares

#: policies with the shares that they have
BOTH = [(policy, shares) for policy in POLICIES for shares in SHARES if shares != "paper" or policy == "paper"]


def counts_of(policy: str, shares: str, trials: int = 300) -> Counter[str]:
    """Trials by subspace of a study whose subspaces differ in complexity, and the rough one in performance."""
    names = ("rough", "flat", "other")
    space = compile_space(hp.choice("model", [{"name": name, "x": hp.uniform(name, 0, 1)} for name in names]))

    def play(trial: Attempt, compute_class: str) -> Outcome:
        x = float(next(value for label, value in trial.params.items() if label != "model"))
        return Outcome(state=S.COMPLETE, loss=math.sin(9 * x) if "rough" in trial.subspace else 1.0, seconds=1.0)

    slots = {"a": 2, "b": 2, "c": 2}
    study = Search(space, trials=trials, slots=slots, policy=policy, shares=shares, play=play).run().study
    assert study.counted == trials
    return Counter({name: study.asked(f"model={name}") for name in names})


@pytest.mark.slow
def test_under_the_papers_shares_the_ranks_decide_the_mix_with_a_limit_on_trials_too() -> None:
    """A subspace whose loss varies with its params ranks first; under uniform shares that decides only the order."""
    assert set(counts_of("paper", "uniform").values()) == {100}
    ranked = counts_of("paper", "paper")
    assert ranked["rough"] > 1.2 * max(ranked["flat"], ranked["other"])


@pytest.mark.slow
def test_a_subspace_whose_trials_only_fail_is_not_waited_for() -> None:
    space = compile_space(hp.choice("model", [{"name": name, "x": hp.uniform(name, 0, 1)} for name in "abcd"]))

    def asked(shares: str, trials: int, fails: Callable[[Attempt], bool]) -> dict[str, int]:
        play = lasting(1.0, fails=fails)
        study = Search(space, trials=trials, slots={"a": 4}, shares=shares, play=play).run().study
        assert study.counted == trials
        return {name: study.asked(f"model={name}") for name in "abcd"}

    broken = asked("even", 310, lambda attempt: attempt.subspace == "model=a")
    assert HOPELESS <= broken["a"] <= 20
    assert max(broken[name] for name in "bcd") - min(broken[name] for name in "bcd") <= 10
    assert asked("uniform", 310, lambda attempt: attempt.subspace == "model=a")["a"] in (77, 78)
    half = asked("even", 308, lambda attempt: attempt.subspace == "model=a" and attempt.number % 8 < 4)
    assert set(half.values()) == {77}, "as long as one succeeds, counts are fixed"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "shares"), BOTH)
def test_a_whole_study_by_promise_gives_the_best_subspace_more_and_uniform_shares_do_not(
    policy: str, shares: str
) -> None:
    space = compile_space(
        hp.choice("model", [{"name": name, "x": hp.uniform(name, 0, 1)} for name in ("good", "bad", "worse")])
    )
    far = {"model=good": 0.0, "model=bad": 50.0, "model=worse": 100.0}

    def play(trial: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=S.COMPLETE, loss=far[trial.subspace] + trial.seed % 1000 / 1000, seconds=1.0)

    search = Search(space, trials=240, slots={"a": 2, "b": 2}, policy=policy, shares=shares, play=play, ahead=1)
    study = search.run().study
    asked = {name: study.asked(name) for name in far}
    assert sum(asked.values()) == study.counted == 240
    assert min(asked.values()) >= FLOOR * 80 * 0.8 or shares == "paper"
    if shares in ("uniform", "even"):
        assert set(asked.values()) == {80}
    elif policy != "paper":
        # The paper's policy draws by its own ranks.
        assert asked["model=good"] > 120
        assert max(asked["model=bad"], asked["model=worse"]) < 65


# Out of memory


def needing(limits: Mapping[str, float]) -> Play:
    """A trial with x above its class's limit runs out of memory, at once."""

    def play(trial: Attempt, compute_class: str) -> Outcome:
        if trial.params["x"] > limits[compute_class]:
            return Outcome(state=S.FAILED, error="MemoryError", out_of_memory=Memory.HOST, seconds=0.1)
        return Outcome(state=S.COMPLETE, loss=trial.params["x"], seconds=1.0)

    return play


#: by memory, the smallest first; where it is equal, or unknown as here, the class expected to be stronger is larger
LIMITS = {"cpu": -0.5, "gpu_small": 0.0, "gpu_large": 1.0}


def test_a_trial_that_runs_out_of_memory_goes_to_a_larger_class_and_none_is_lost() -> None:
    search = Search(plain(), trials=60, slots={"cpu": 2, "gpu_small": 1, "gpu_large": 1}, play=needing(LIMITS)).run()
    study = search.study
    assert (study.count(S.COMPLETE), len(study)) == (60, 60)
    escalated = [trial for trial in study if trial.outgrown]
    assert escalated
    for trial in study:
        assert trial.params["x"] <= LIMITS[str(trial.compute_class)]
        assert trial.lost == 0, "the trial is not to blame"
        outgrown = trial.outgrown.split(",") if trial.outgrown else []
        assert outgrown == sorted(outgrown, key=[*LIMITS].index), "to a larger one each time"
        assert trial.attempt == 1 + len(outgrown)


def test_what_no_class_has_memory_for_fails() -> None:
    limits = {"cpu": -0.5, "gpu_large": 0.5}
    search = Search(plain(), trials=80, slots={"cpu": 1, "gpu_large": 1}, play=needing(limits)).run()
    study = search.study
    assert study.counted == len(study) == 80
    for trial in study:
        assert (trial.state is S.FAILED) == (trial.params["x"] > 0.5)
        assert trial.state is not S.FAILED or trial.compute_class == "gpu_large"


GIB = 2**30
#: the node without GPUs has most memory of all
NODES: dict[str, dict[str, int]] = {
    "gpu_small": {"gpu_memory": 8 * GIB, "memory": 64 * GIB},
    "gpu_large": {"gpu_memory": 80 * GIB, "memory": 128 * GIB},
    "cpu": {"memory": 256 * GIB},
}


def with_memories(executor: SimulatedExecutor) -> Executor:
    """Let the classes have the memories of `NODES`."""
    plain_classes = executor.classes
    executor.classes = lambda: [  # type: ignore[method-assign]
        dataclasses.replace(each, **NODES[each.name]) for each in plain_classes()
    ]
    return executor


def on_gpus(trial: Attempt, compute_class: str) -> Outcome:
    """A trial needs the more GPU memory, the larger x is; without a GPU it is slow, and always fits."""
    holds = {"gpu_small": -0.3, "gpu_large": 0.5, "cpu": 1.0}
    if trial.params["x"] > holds[compute_class]:
        return Outcome(state=S.FAILED, error="CUDA out of memory", out_of_memory=Memory.GPU, seconds=0.1)
    return Outcome(state=S.COMPLETE, loss=trial.params["x"], seconds=30.0 if compute_class == "cpu" else 1.0)


def unlike_memories(**changes: Any) -> dict[str, Any]:
    slots = {"gpu_large": 2, "gpu_small": 4, "cpu": 2}
    return {"trials": 80, "slots": slots, "play": on_gpus, "wrap": with_memories, **changes}


def test_out_of_gpu_memory_a_trial_goes_to_a_larger_gpu_and_without_one_to_the_last_resort_which_is_said() -> None:
    search = Search(plain(), **unlike_memories()).run()
    study = search.study
    assert (study.count(S.COMPLETE), len(study)) == (80, 80)
    escalated = [trial for trial in study if trial.outgrown]
    for trial in escalated:
        assert trial.compute_class == ("gpu_large" if trial.params["x"] <= 0.5 else "cpu")
        assert {*str(trial.outgrown_memory).split(",")} == {"gpu"}
        assert ("which has no GPU" in (trial.outcome.warning or "")) == (trial.compute_class == "cpu")
    assert {trial.compute_class for trial in escalated} == {"gpu_large", "cpu"}
    [notice] = search.scheduler.notices()
    assert "so cpu, without one, is the last resort" in notice


def test_a_resumed_study_remembers_which_memory_ran_out() -> None:
    search = Search(plain(), **unlike_memories())
    search.run(lambda s: any(t.outgrown == "gpu_small" and t.state is S.WAITING for t in s.study))
    waiting = [trial.number for trial in search.study if trial.outgrown and trial.state is S.WAITING]
    assert waiting
    again = search.resumed(**unlike_memories()).run()
    for trial in (again.study.trial(number) for number in waiting):
        assert trial.compute_class == ("gpu_large" if trial.params["x"] <= 0.5 else "cpu")


def test_an_out_of_memory_reaches_the_samplers_only_where_it_is_final() -> None:
    told: list[Trial] = []
    search = Search(plain(), trials=40, slots={"cpu": 1, "gpu_large": 1}, play=needing(LIMITS))
    [sampler] = search.scheduler.proposals.samplers.values()
    before = sampler.tell
    sampler.tell = lambda trials: (told.extend(trials), before(trials))  # type: ignore[method-assign, func-returns-value]
    search.run()
    assert {trial.state for trial in told} == {S.COMPLETE}
    assert len(told) == 40


# Learning


def test_samplers_and_policy_learn_each_finished_trial_once_and_after_a_resume_again() -> None:
    told: list[int] = []

    class Learner:
        adaptive = True

        def __init__(self, subspace: Any, entropy: Sequence[int]) -> None:
            self.name = subspace.name
            self.subspace = subspace
            self.generator = np.random.default_rng(entropy)

        def ask(self, n: int, pending: Collection[Trial]) -> list[Mapping[str, Any]]:
            return list(self.subspace.sample(self.generator, n))

        def tell(self, trials: Sequence[Trial]) -> None:
            assert {trial.subspace for trial in trials} == {self.name}
            assert all(trial.state.is_finished for trial in trials)
            told.extend(trial.number for trial in trials)

    def scheduler_of(search: Search) -> Scheduler:
        subspaces = split(search.space)
        limits = Limits(trials=20)
        proposals = Proposals(
            search.study,
            subspaces,
            policy=FifoPolicy(),
            shares=UniformShares({subspace.name: subspace.probability for subspace in subspaces}),
            rounds=Rounds(),
            samplers=make_samplers(find_sampler(Learner), subspaces, (search.study.record.seed,)),
            sampler="random",
            limits=limits,
            width=lambda params: 1,
        )
        made = Scheduler(search.study, search.simulated, proposals, cost_model=CostModel(subspaces), limits=limits)
        made.begin()
        return made

    search = Search(trials=20, play=lasting(uneven, fails=lambda trial: trial.number % 5 == 0))
    search.scheduler = scheduler_of(search)
    search.run()
    assert sorted(told) == list(range(20))
    told.clear()
    again = search.resumed(trials=20)
    scheduler_of(again)
    assert sorted(told) == list(range(20))


def test_events_of_unknown_trials_are_ignored() -> None:
    search = Search(plain(), trials=3)
    search.scheduler.tell([Started(number=77, attempt=1, host="h", at=0.0), Lost(number=78, attempt=1, reason="?")])
    assert search.run().study.counted == 3


def test_the_executor_is_told_which_attempts_an_event_has_ended_and_if_it_has_ended_none() -> None:
    noted: list[tuple[int, list[int], bool]] = []

    class Noting(Recording):
        def submit(self, attempts: Sequence[Attempt]) -> None:
            self.inner.submit(attempts)

        def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
            assert isinstance(event, Result)
            noted.append((event.attempt, [each.attempt.attempt for each in ended], is_over))

    search = Search(plain(), trials=1, wrap=Noting)
    search.scheduler.turn()
    failed = Outcome(state=S.FAILED, error="no GPU")
    search.scheduler.tell([Result(number=0, attempt=2, outcome=failed, at=0.0)])
    assert noted == [(2, [], False)], "the attempt was given up, and another one runs"
    search.run()
    assert noted == [(2, [], False), (1, [1], True)]


# Pause and cancel


def test_a_paused_study_finishes_what_runs_and_starts_nothing_until_it_is_unpaused() -> None:
    search = Search(trials=30, ahead=3).run(until=lambda search: search.study.counted >= 8)
    search.scheduler.pause()
    assert search.scheduler.state == "paused"
    running = [trial.number for trial in search.study.sent if trial.state is S.RUNNING]
    for _ in range(50):
        search.scheduler.turn()
    assert (search.study.in_flight, search.scheduler.done) == (0, False)
    begun = {trial.number for trial in search.study if trial.state.is_finished}
    assert {*running} <= begun
    assert search.study.counted == len(begun) < 30
    search.scheduler.unpause()
    search.run()
    assert (search.study.counted, search.study.count(S.COMPLETE)) == (30, 30)


def test_a_paused_study_can_be_stopped_and_reaches_its_limit_of_seconds() -> None:
    for limits in ({"trials": 30}, {"seconds": 60.0}):
        search = Search(**limits).run(until=lambda search: search.study.counted >= 4)
        search.scheduler.pause()
        if "trials" in limits:
            search.scheduler.stop()
        search.run()
        assert search.study.counted < 30


@cases("shares", ["uniform", "even", "promise"])
def test_another_trial_takes_the_place_of_a_cancelled_one(shares: str) -> None:
    search = Search(trials=20, shares=shares).run(until=lambda search: search.study.counted >= 5)
    cancelled = search.study.sent[0]
    search.scheduler.cancel(cancelled)
    search.run()
    states = Counter(trial.state for trial in search.study)
    assert states == {S.COMPLETE: 20, S.CANCELLED: 1}
    assert search.study.trial(cancelled.number).state is S.CANCELLED


def test_a_waiting_trial_can_be_cancelled() -> None:
    search = Search(trials=10, slots={"gpu": 1}, ahead=4).run(until=lambda search: search.study.in_flight > 2)
    search.scheduler.pause()
    search.run(until=lambda search: search.study.in_flight == 0)
    waiting = next(trial for trial in search.study if trial.state is S.WAITING)
    search.scheduler.cancel(waiting)
    search.scheduler.unpause()
    search.run()
    assert Counter(trial.state for trial in search.study) == {S.COMPLETE: 10, S.CANCELLED: 1}
