"""The loop runs exactly the trials that limits and seed name, whatever the slots, the failures and the timing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.assignment import FifoPolicy
from shadho_celery.clock import ManualClock
from shadho_celery.context import Outcome
from shadho_celery.executors.base import Executor
from shadho_celery.executors.simulated import Play, SimulatedExecutor
from shadho_celery.hardware import ComputeClass
from shadho_celery.opening import open_study
from shadho_celery.scheduler import TURN_SECONDS, Scheduler
from shadho_celery.search import make_scheduler
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.space.split import split
from shadho_celery.store import Store
from shadho_celery.study import MAX_LOST, Limits, Study
from shadho_celery.trial import Event, Lost, Result, Started, Trial, TrialState

S = TrialState

#: turns after which a loop is taken to be endless
PATIENCE = 20_000


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
    seconds: float | Callable[[Trial, str], float], *, fails: Callable[[Trial], bool] = lambda _: False
) -> Play:
    """Every trial lasts that long; its loss comes from its seed."""

    def play(trial: Trial, compute_class: str) -> Outcome:
        took = seconds(trial, compute_class) if callable(seconds) else seconds
        if fails(trial):
            return Outcome(state=S.FAILED, error="it had to fail", seconds=took)
        return Outcome(state=S.COMPLETE, loss=trial.seed % 1000 / 1000, seconds=took)

    return play


class Search:
    """A study and its scheduler on simulated machines."""

    def __init__(
        self,
        space: Space | None = None,
        *,
        slots: dict[str, int] | None = None,
        play: Play | None = None,
        store: Store | None = None,
        ahead: int = 0,
        wrap: Callable[[SimulatedExecutor], Executor] = lambda executor: executor,
        policy: str = "paper",
        seed: int | None = 5,
        resume: bool = False,
        clock: ManualClock | None = None,
        **limits: Any,
    ) -> None:
        self.clock = clock or ManualClock(1000.0)
        self.space = space or mixed()
        self.store = store or Store("sqlite://")
        self.study: Study = open_study(
            self.store, self.space.describe(), name="s", seed=seed, clock=self.clock, resume=resume
        )
        self.simulated = SimulatedExecutor(slots or {"gpu": 2, "cpu": 3}, play or lasting(1.0), self.clock, ahead)
        self.scheduler: Scheduler = make_scheduler(
            self.space, self.study, wrap(self.simulated), Limits(**limits), policy=policy
        )

    def run(self, until: Callable[[Search], bool] = lambda _: False) -> Search:
        """Turn the loop to its end, or until that holds."""
        for _ in range(PATIENCE):
            if self.scheduler.done or until(self):
                return self
            self.scheduler.turn()
        pytest.fail("the loop does not come to an end")

    def close(self) -> Search:
        self.simulated.close()
        self.study.close()
        return self

    def resumed(self, **changes: Any) -> Search:
        """The same study taken up by another scheduler, a little later."""
        self.close()
        clock = ManualClock(self.clock.now() + 100)
        return Search(self.space, store=self.store, seed=None, resume=True, clock=clock, **changes)


Params = frozenset[tuple[str, Any]]


def drawn(study: Study) -> Counter[tuple[str, Params, int]]:
    """What the trials are, whatever their order: subspace, params and seed."""
    return Counter((t.subspace, frozenset(t.params.items()), t.seed) for t in study)


def uneven(trial: Trial, compute_class: str) -> float:
    """Durations that put no two trials in step."""
    return 0.1 + trial.seed % 997 / 100 + (5.0 if compute_class == "cpu" else 0.0)


# The number of trials


@pytest.mark.parametrize("policy", ["paper", "fifo"])
@pytest.mark.parametrize("slots", [{"only": 1}, {"gpu": 2, "cpu": 3}, {"gpu": 50, "cpu": 40}])
@pytest.mark.parametrize("ahead", [0, 7])
def test_exactly_the_given_number_of_trials_runs(policy: str, slots: dict[str, int], ahead: int) -> None:
    search = Search(slots=slots, policy=policy, trials=25, play=lasting(uneven), ahead=ahead).run()
    assert (len(search.study), search.study.counted, search.study.count(S.COMPLETE)) == (25, 25, 25)
    assert search.study.in_flight == 0
    assert {trial.attempt for trial in search.study} == {1}


def test_failed_trials_count() -> None:
    search = Search(trials=30, play=lasting(1.0, fails=lambda trial: trial.number % 3 == 0)).run()
    assert (search.study.count(S.COMPLETE), search.study.count(S.FAILED), len(search.study)) == (20, 10, 30)


def test_a_study_whose_trials_all_fail_ends_like_any_other() -> None:
    search = Search(trials=30, play=lasting(1.0, fails=lambda trial: True)).run()
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


def test_near_the_end_nothing_waits_behind_a_busy_slot() -> None:
    """A trial that waits is better sent to whichever slot falls free first."""
    study = Search(trials=40, slots={"gpu": 2, "cpu": 2}, ahead=4, play=lasting(uneven)).run().study
    waited = [(trial.started_at or 0.0) - (trial.asked_at or 0.0) for trial in study]
    assert max(waited[4:36]) > 1.0
    assert waited[36:] == [0.0] * 4


def test_a_study_without_trials_left_sends_nothing() -> None:
    search = Search(trials=5).run().resumed(trials=5)
    assert search.scheduler.done
    assert len(search.run().study) == 5


def test_all_slots_are_busy_while_there_is_work() -> None:
    """Whatever the policy: a slot without a trial of its own subspaces takes one of the others."""
    for policy in ("paper", "fifo"):
        search = Search(trials=300, slots={"a": 1, "b": 1, "c": 1}, policy=policy, play=lasting(10.0))
        idle = 0
        while not search.scheduler.done:
            search.scheduler.turn()
            idle += search.study.in_flight < min(3, 300 - search.study.counted)
        assert idle == 0
        assert search.clock.now() - 1000.0 == pytest.approx(1000.0, abs=1)


# The set of trials


TIMINGS: list[dict[str, Any]] = [
    {"slots": {"only": 1}, "play": lasting(1.0)},
    {"slots": {"gpu": 1, "cpu": 2}, "play": lasting(uneven)},
    {"slots": {"cpu": 2, "gpu": 1}, "play": lasting(uneven), "ahead": 9},
    {"slots": {f"class{place}": 1 for place in range(17)}, "play": lasting(uneven)},
    {"slots": {"gpu": 17}, "play": lasting(0.01)},
]


@pytest.mark.parametrize("trials", [1, 7, 40])
def test_the_same_seed_gives_the_same_set_of_trials_whatever_slots_durations_and_policy(trials: int) -> None:
    sets = [
        drawn(Search(trials=trials, policy=policy, **timing).run().study)
        for timing in TIMINGS
        for policy in ("paper", "fifo")
    ]
    assert all(other == sets[0] for other in sets)
    assert sum(sets[0].values()) == trials


def test_failures_do_not_change_the_set_of_trials() -> None:
    without = Search(trials=40).run()
    failing = Search(trials=40, play=lasting(uneven, fails=lambda trial: trial.seed % 2 == 0)).run()
    assert failing.study.count(S.FAILED) > 5
    assert drawn(failing.study) == drawn(without.study)


def test_another_seed_gives_other_params_and_other_seeds() -> None:
    one, other = drawn(Search(trials=20, seed=1).run().study), drawn(Search(trials=20, seed=2).run().study)
    assert not one & other


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


def test_the_trials_of_a_shorter_study_are_among_those_of_a_longer_one() -> None:
    assert drawn(Search(trials=13).run().study) < drawn(Search(trials=40).run().study)


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


def test_at_the_target_what_runs_is_cancelled() -> None:
    def play(trial: Trial, compute_class: str) -> Outcome:
        loss = 0.0 if trial.number == 6 else 1.0
        return Outcome(state=S.COMPLETE, loss=loss, seconds=1.0 + trial.number % 3)

    search = Search(target=0.0, slots={"only": 4}, play=play).run()
    assert search.study.best is not None
    assert search.study.best.number == 6
    assert search.study.in_flight == 0
    assert search.study.count(S.CANCELLED) >= 1
    assert len(search.study) < 20
    assert all(trial.loss is None for trial in search.study if trial.state is S.CANCELLED)


def test_whichever_limit_comes_first_ends_the_study() -> None:
    def limited(**limits: Any) -> Study:
        return Search(slots={"only": 1}, play=lasting(1.0), **limits).run().study

    assert limited(trials=5, seconds=100.0).counted == 5
    assert limited(trials=500, seconds=5.0).counted <= 6
    assert limited(trials=5, target=-1.0).counted == 5


# Stopping and resuming


def test_stop_takes_back_what_waits_and_resuming_completes_the_set() -> None:
    search = Search(trials=40, play=lasting(uneven), ahead=6).run(lambda search: search.study.counted >= 10)
    search.scheduler.stop()
    search.run()
    stopped_with = len(search.study)
    waiting = search.study.count(S.WAITING)
    assert waiting > 0
    assert search.study.counted + waiting == stopped_with < 40
    assert search.study.in_flight == 0
    again = search.resumed(trials=40, slots={"other": 7}).run()
    assert again.study.count(S.COMPLETE) == len(again.study) == 40
    assert drawn(again.study) == drawn(Search(trials=40).run().study)


def test_a_scheduler_that_died_is_continued_with_the_same_set() -> None:
    """Its trials are left QUEUED and RUNNING; the new one's executor tells what became of them."""
    search = Search(trials=40, play=lasting(uneven), ahead=6).run(lambda search: search.study.counted >= 10)
    assert search.study.count(S.QUEUED) > 0
    assert search.study.count(S.RUNNING) > 0
    again = search.resumed(trials=40).run()
    assert again.study.count(S.COMPLETE) == len(again.study) == 40
    assert drawn(again.study) == drawn(Search(trials=40).run().study)


def test_a_study_resumed_on_other_machines_finishes_there() -> None:
    search = Search(trials=20, slots={"gone": 2}, ahead=3, play=lasting(5.0)).run(lambda s: s.study.counted >= 3)
    again = search.resumed(trials=20, slots={"new": 2}).run()
    assert again.study.count(S.COMPLETE) == 20
    assert again.study.count(S.COMPLETE, compute_class="new") >= 15


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

    def submit(self, trials: Sequence[Trial]) -> None:
        assert self.search is not None
        recorded = {trial.number: trial for trial in self.search.store.trials(self.search.study.record.key)}
        assert all(recorded[trial.number] == trial for trial in trials)
        self.sent += len(trials)
        self.inner.submit(trials)

    def poll(self, seconds: float) -> Sequence[Event]:
        return self.inner.poll(seconds)

    def cancel(self, numbers: Iterable[int], *, running: bool) -> None:
        self.inner.cancel(numbers, running=running)

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

        def submit(self, trials: Sequence[Trial]) -> None:
            self.inner.submit(trials)

        def poll(self, seconds: float) -> Sequence[Event]:
            assert self.search is not None
            recorded = {trial.number: trial for trial in self.search.store.trials(self.search.study.record.key)}
            results = [event for event in self.told if isinstance(event, Result)]
            assert all(recorded[event.number].state is event.state for event in results)
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


# What gets lost


class Losing(Recording):
    """Loses what `loses` says, once it has started; and hides the classes that have not come up yet."""

    def __init__(self, inner: SimulatedExecutor, loses: Callable[[int, int], bool]) -> None:
        super().__init__(inner)
        self.loses = loses
        self.hidden: set[str] = set()

    def classes(self) -> Sequence[ComputeClass]:
        return [c for c in self.inner.classes() if c.name not in self.hidden]

    def submit(self, trials: Sequence[Trial]) -> None:
        self.sent += len(trials)
        self.inner.submit(trials)

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
    assert "fell silent" in str(search.study.trial(3).error)
    assert executor.sent == 19 + MAX_LOST


def test_a_class_that_appears_late_gets_work() -> None:
    search, executor = losing(lambda number, attempt: False, trials=60, slots={"gpu": 4, "cpu": 1})
    executor.hidden = {"gpu"}
    search.run(lambda search: search.study.counted >= 5)
    assert search.study.count(*S, compute_class="gpu") == 0
    executor.hidden = set()
    search.run()
    assert search.study.count(S.COMPLETE, compute_class="gpu") > 20
    assert search.study.counted == 60


def test_without_any_class_nothing_is_sent_until_one_appears() -> None:
    search, executor = losing(lambda number, attempt: False, trials=10)
    executor.hidden = {"gpu", "cpu"}
    for _ in range(20):
        search.scheduler.turn()
    assert len(search.study) == 0
    assert search.clock.now() == pytest.approx(1000.0 + 20 * TURN_SECONDS)
    executor.hidden = {"cpu"}
    assert search.run().study.count(S.COMPLETE, compute_class="gpu") == 10


def test_a_class_that_disappears_leaves_the_work_to_the_others() -> None:
    search, executor = losing(lambda number, attempt: False, trials=40, slots={"gpu": 2, "cpu": 2})
    search.run(lambda search: search.study.counted >= 10)
    executor.hidden = {"gpu"}
    assert search.run().study.counted == 40


def test_classes_are_known_strongest_first() -> None:
    search = Search(trials=4, slots={"strong": 1, "middling": 1, "weak": 1})
    search.scheduler.turn()
    assert [c.name for c in search.scheduler.classes] == ["strong", "middling", "weak"]


# Learning


def test_samplers_and_policy_learn_each_finished_trial_once_and_after_a_resume_again() -> None:
    told: list[int] = []

    class Learner:
        adaptive = True

        def __init__(self, subspace: Any, entropy: Sequence[int]) -> None:
            self.name = subspace.name
            self.subspace = subspace
            self.generator = np.random.default_rng(entropy)

        def ask(self, index: int) -> dict[str, Any]:
            return dict(self.subspace.sample(self.generator, 1)[0])

        def tell(self, trial: Trial) -> None:
            assert trial.subspace == self.name
            assert trial.state.is_finished
            told.append(trial.number)

    def scheduler_of(search: Search) -> Scheduler:
        return Scheduler(
            search.study,
            split(search.space),
            search.simulated,
            policy=FifoPolicy(),
            make_sampler=Learner,
            limits=Limits(trials=20),
        )

    search = Search(trials=20, play=lasting(uneven, fails=lambda trial: trial.number % 5 == 0))
    search.scheduler = scheduler_of(search)
    search.run()
    assert sorted(told) == list(range(20))
    told.clear()
    again = search.resumed(trials=20)
    scheduler_of(again)
    assert sorted(told) == list(range(20))


def test_turns_are_told_to_whoever_watches() -> None:
    search = Search(plain(), trials=5, slots={"only": 1})
    seen: list[int] = []
    search.scheduler.run(lambda: seen.append(search.study.counted))
    assert seen == sorted(seen)
    assert seen[-1] == 5


def test_events_of_unknown_trials_are_ignored() -> None:
    search = Search(plain(), trials=3)
    search.scheduler.tell([Started(number=77, attempt=1, host="h", at=0.0), Lost(number=78, attempt=1, reason="?")])
    assert search.run().study.counted == 3
