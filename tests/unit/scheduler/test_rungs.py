"""Rungs and copies through the real scheduler: copies change how long a search takes, and nothing that it finds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from msgspec.structs import replace
from services.cases import cases
from services.families import Family, cluster_of, fleet_of, log_normal, slow
from services.searching import PATIENCE, SimulatedSearch

from shadho_celery.core.names import FIDELITIES
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Lost, Outcome, Result, TrialState
from shadho_celery.fidelity.brackets import Bracket, Brackets
from shadho_celery.fidelity.rounds import Wanted
from shadho_celery.program.study import minimize
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.simulation.executor import Change, SimulatedExecutor
from shadho_celery.simulation.simulation import simulate
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits, StudyState

S = TrialState

#: a ladder of 27, 9, 3 and 1 trials
RUNGS = {"least": 1, "most": 27, "eta": 3}
BRACKET = 40

SPACE = compile_space(
    hp.choice(
        "model",
        [{"name": "net", "x": hp.uniform("x", 0, 1)}, {"name": "forest", "y": hp.uniform("y", 0, 1)}],
    )
)

Delay = Callable[[np.random.Generator], float]


def one_in_twenty(factor: float) -> Delay:
    return lambda generator: factor if generator.random() < 0.05 else 1.0


def pareto(generator: np.random.Generator) -> float:
    """One trial in twenty takes 4 P times as long, P a Pareto number of shape 2."""
    return 4 * (1 + generator.pareto(2)) if generator.random() < 0.05 else 1.0


def some(attempt: Attempt) -> bool:
    return attempt.seed % 5 == 0


class Search(SimulatedSearch):
    """Trials of unlike size, slowed down at random: another attempt may have more luck, and has the same loss."""

    def __init__(
        self,
        *,
        seed: int = 0,
        slots: Mapping[str, int] | None = None,
        delay: Delay = pareto,
        speculate: bool = True,
        rungs: Mapping[str, Any] | None = RUNGS,
        fidelity: Mapping[str, Any] | None = None,
        sampler: str = "random",
        trials: int = BRACKET,
        fails: Callable[[Attempt], bool] = lambda trial: False,
        slow_is_good: bool = False,
        store: SqlStore | None = None,
        resume: bool = False,
        fills: bool = True,
    ) -> None:
        def play(attempt: Attempt, compute_class: str) -> Outcome:
            rung, budget = self.study.trial(attempt.number).rung or 0, attempt.budget or 1.0
            size = np.random.default_rng([attempt.seed, 1]).lognormal(-0.045, 0.3)
            luck = np.random.default_rng([attempt.seed, 2, rung, attempt.attempt])
            seconds = 20 * size * budget * delay(luck) * {"cpu": 2.0}.get(compute_class, 1.0)
            if fails(attempt):
                return Outcome(state=S.FAILED, error="it had to fail", seconds=seconds)
            noise = np.random.default_rng([attempt.seed, 3, rung]).normal(0, 0.1) / budget
            loss = -size if slow_is_good else (next(iter(floats(attempt))) - 0.3) ** 2 + noise
            return Outcome(state=S.COMPLETE, loss=float(loss), seconds=float(seconds))

        settings = StudySettings(
            sampler=sampler,
            fidelity=fidelity or (rungs and {**rungs, "how": "halving"}),
            speculate=speculate,
        )
        super().__init__(
            SPACE,
            play,
            slots or {"gpu": 27},
            settings=settings,
            limits=Limits(trials=trials),
            clock=ManualClock(2000.0 if resume else 1000.0),
            seed=seed,
            store=store,
            resume=resume,
        )
        self.scheduler.turn_seconds = math.inf
        self.scheduler.update_classes()
        if fills:
            self.scheduler.fill()

    @property
    def offers(self) -> Sequence[Wanted]:
        """What may be sent next."""
        return self.scheduler.proposals.rounds.offers()

    @property
    def seconds(self) -> float:
        return self.clock.now() - 1000.0


def floats(trial: Attempt) -> list[float]:
    return [value for value in trial.params.values() if isinstance(value, float)]


def promoted(study: StudyState) -> set[tuple[int | None, str, int]]:
    """Who was promoted, and how far: rung, subspace and seed, whatever their numbers."""
    return {(trial.rung, trial.subspace, trial.seed) for trial in study}


# Rungs


def test_a_bracket_goes_up_the_ladder_with_params_seed_and_subspace_of_its_origins() -> None:
    study = Search(delay=one_in_twenty(1.0)).run().study
    assert Counter((trial.rung, trial.budget) for trial in study) == {
        (0, 1.0): 27,
        (1, 3.0): 9,
        (2, 9.0): 3,
        (3, 27.0): 1,
    }
    for trial in study:
        if trial.rung:
            assert trial.origin is not None
            origin = study.trial(trial.origin)
            assert origin.rung == 0
            assert (trial.params, trial.seed, trial.subspace) == (origin.params, origin.seed, origin.subspace)
    for rung, number in ((0, 9), (1, 3), (2, 1)):
        losses = sorted(((t.outcome.loss, t.seed) for t in study if t.rung == rung), key=lambda pair: pair[0] or 0.0)
        assert {seed for _, seed in losses[:number]} == {t.seed for t in study if t.rung == rung + 1}
    assert study.best is not None
    assert study.best.rung == 3


def test_brackets_follow_one_another_to_the_limit_and_every_rung_waits_for_the_one_below() -> None:
    search = Search(trials=2 * BRACKET + 13, slots={"gpu": 5, "cpu": 4}).run()
    assert [trial.rung for trial in search.study] == 2 * ([0] * 27 + [1] * 9 + [2] * 3 + [3]) + [0] * 13
    ends = [trial.finished_at or 0.0 for trial in search.study]
    begins = [trial.asked_at or 0.0 for trial in search.study]
    for first, last in ((27, 36), (36, 39), (39, 40), (40, 67)):
        assert max(ends[:first]) <= min(begins[first:last])


def test_subspaces_get_their_part_of_every_bracket_whatever_is_promoted() -> None:
    study = Search(trials=2 * BRACKET).run().study
    assert Counter(trial.subspace for trial in study if trial.rung == 0) == {"model=net": 27, "model=forest": 27}
    assert study.asked("model=net") == 27


def test_policy_samplers_and_shares_learn_from_the_lowest_rung_only() -> None:
    search = Search()
    told: list[int | None] = []
    for sampler in search.scheduler.proposals.samplers.values():
        sampler.tell = lambda trials: told.extend(trial.rung for trial in trials)  # type: ignore[method-assign]
    search.run()
    assert Counter(told) == {0: 27}


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 38])
def test_a_resumed_search_promotes_the_same_and_sends_nothing_twice(at: int) -> None:
    first = Search(trials=2 * BRACKET, slots={"gpu": 4, "cpu": 3}).run(lambda search: search.study.counted >= at)
    first.close()
    again = Search(trials=2 * BRACKET, slots={"gpu": 2, "cpu": 9}, store=first.store, resume=True).run().study
    whole = Search(trials=2 * BRACKET).run().study
    assert again.count(S.COMPLETE) == len(again) == 2 * BRACKET
    assert promoted(again) == promoted(whole)


@pytest.mark.slow
@cases("how", FIDELITIES)
def test_a_resumed_search_chooses_as_the_one_that_was_stopped_would_have(how: str) -> None:
    """Its rounds are told what was known when each trial was sent, whatever the number of slots."""

    def search(**facts: Any) -> Search:
        # The rounds need no sampler that learns, except this one, which proposes the trials itself.
        sampler = {"dehb": "auto"}.get(how, "random")
        facts |= {"fidelity": RUNGS | {"how": how}, "sampler": sampler, "fails": some}
        return Search(trials=300, slots={"gpu": 6, "cpu": 5}, **facts)

    first = search().run(lambda search: search.study.counted >= 63)
    offers = first.offers
    first.close()
    assert search(store=first.store, resume=True, fills=False).offers == offers


@pytest.mark.parametrize("at", [3, 30])
def test_a_search_stopped_at_once_and_resumed_goes_up_the_whole_ladder(at: int) -> None:
    """Whoever had finished by then is compared with others; on each rung there are as many results as without that."""
    first = Search().run(lambda search: search.study.counted >= at)
    first.scheduler.stop(running=True)
    first.run()
    cancelled = first.study.count(S.CANCELLED)
    assert cancelled > 0
    first.close()
    study = Search(store=first.store, resume=True).run().study
    ended = [trial for trial in study if trial.state is S.COMPLETE]
    assert Counter(trial.rung for trial in ended) == {0: 27, 1: 9, 2: 3, 3: 1}
    assert (study.count(S.CANCELLED), len(study)) == (cancelled, BRACKET + cancelled)
    drawn = Counter(trial.subspace for trial in study if trial.origin is None)
    assert max(drawn.values()) - min(drawn.values()) <= 1, "and so many more are drawn of each subspace"


def test_an_objective_sees_its_budget_and_the_checkpoints_of_its_origin(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def objective(params: Mapping[str, Any], context: Any) -> float:
        seen = context.checkpoint_dir / "epochs"
        done = float(seen.read_text()) if seen.exists() else 0.0
        assert done < context.budget
        assert done in {0.0, context.budget / 3}
        seen.write_text(str(context.budget))
        return float(params["x"]) + 1 / context.budget

    rungs = {"least": 1, "most": 9}
    study = minimize(objective, {"x": hp.uniform("x", 0, 1)}, trials=26, seed=3, fidelity={**rungs, "how": "halving"})
    assert study.count(S.COMPLETE) == 26
    assert study.best is not None
    assert study.best.budget == 9.0


# Copies


@pytest.mark.slow
def test_with_copies_the_same_trials_are_promoted_and_most_of_the_waiting_for_stragglers_is_saved() -> None:
    """One trial in twenty is a straggler; as they may be very slow, a quarter of all time is saved."""
    smooth = waiting = copying = 0.0
    for seed in range(5):
        without, using = (Search(seed=seed, speculate=each).run() for each in (False, True))
        assert promoted(using.study) == promoted(without.study)
        assert [t.outcome.loss for t in using.study if t.rung == 3] == [
            t.outcome.loss for t in without.study if t.rung == 3
        ]
        assert using.study.count(S.COMPLETE) == len(using.study) == BRACKET
        waiting += without.seconds
        copying += using.seconds
        smooth += Search(seed=seed, delay=lambda generator: 1.0, speculate=False).run().seconds
    print(f"{copying / waiting:.3f} of the time; without stragglers {smooth / waiting:.3f}")
    assert copying - smooth <= (waiting - smooth) / 3
    assert copying <= 0.75 * waiting


def test_copies_run_elsewhere_while_slots_idle_and_are_few() -> None:
    search = Search(seed=2, delay=one_in_twenty(8.0), trials=3 * BRACKET, slots={"gpu": 20, "cpu": 7})
    most = 0

    def check(search: Search) -> bool:
        nonlocal most
        most = max(most, search.study.copies)
        assert search.study.copies <= max(1, 27 // 10)
        hosts = Counter((t.number, t.host) for t in search.study.attempts if t.host)
        assert set(hosts.values()) <= {1}, "no two attempts of a trial on one machine"
        for name, slots in (("gpu", 20), ("cpu", 7)):
            assert search.study.taken(name) <= slots
        return False

    search.run(check)
    assert most >= 1
    assert search.study.rescued >= 1
    assert search.study.copied >= search.study.rescued


def test_trials_that_always_fail_end_all_the_same() -> None:
    search = Search(seed=2, delay=one_in_twenty(8.0), trials=3 * BRACKET, fails=lambda trial: trial.seed % 2 == 0)
    study = search.run().study
    assert study.counted == len(study) == 3 * BRACKET
    assert study.copied > 0
    assert study.count(S.FAILED) >= 20


def test_switched_off_every_trial_has_one_attempt() -> None:
    study = Search(seed=2, delay=one_in_twenty(8.0), speculate=False).run().study
    assert {trial.attempt for trial in study} == {1}
    assert study.copied == 0


def test_the_last_trials_of_a_search_without_rungs_are_copied_too() -> None:
    def last_is_stuck(generator: np.random.Generator) -> float:
        return 50.0 if generator.random() < 0.02 else 1.0

    waiting, copying = (
        sum(
            Search(seed=seed, delay=last_is_stuck, rungs=None, trials=60, slots={"gpu": 10}, speculate=each)
            .run()
            .seconds
            for seed in range(2)
        )
        for each in (False, True)
    )
    assert copying < 0.7 * waiting


def test_once_stopped_nothing_is_copied_and_what_was_is_taken_back() -> None:
    search = Search(seed=2, delay=one_in_twenty(8.0), trials=3 * BRACKET)
    search.run(lambda search: search.study.copies > 0)
    made = search.study.copied
    search.scheduler.stop()
    search.run()
    assert (search.study.copied, search.study.copies, search.study.in_flight) == (made, 0, 0)


def test_a_search_survives_the_deaths_of_machines_that_run_copies_and_copied_trials() -> None:
    classes = {"large": 6, "cpu": 6}
    lost = 0
    for seed in (2, 3):
        changes = [
            Change(at=100.0 + 45 * turn, compute_class=name, workers=sign * (2 + turn % 3))
            for turn in range(12)
            for name, sign in (("large", (-1) ** turn), ("cpu", (-1) ** (turn + 1)))
        ]
        cluster = cluster_of(
            fleet_of(classes, changes=changes),
            {"net": Family(seconds={"large": 20, "cpu": 50}, failure_rate=0.05)},
            {"fidelity": {"least": 1, "most": 9, "how": "halving"}, "trials": 130},
            size=partial(log_normal, 0.3),
            straggler=partial(slow, 0.2, 20.0),
        )
        turns = 0

        def on_turn(study: StudyState) -> None:
            nonlocal turns
            turns += 1
            assert turns < PATIENCE
            live = list(study.attempts)
            assert sum(study.taken(name) for name in classes) == len(live) == study.in_flight + study.copies

        found = simulate(cluster, seed=seed, on_turn=on_turn)
        assert found.study.counted == len(found.study) == 130
        assert found.study.copied > 0
        lost += found.lost
    assert lost > 0


class Refusing(SimulatedExecutor):
    """Returns every copy unclaimed."""

    def submit(self, attempts: Sequence[Attempt]) -> None:
        super().submit([attempt for attempt in attempts if attempt.attempt == 1])
        for each in attempts:
            if each.attempt > 1:
                self._events.append(Lost(number=each.number, attempt=each.attempt, reason="unclaimed", claimed=False))


def test_copies_that_nobody_claims_do_not_follow_one_another_without_pause() -> None:
    def play(attempt: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=S.COMPLETE, loss=0.0, seconds=1000.0 if attempt.number == 19 else 1.0)

    clock = ManualClock(1000.0)
    study = open_study(SqlStore("sqlite://"), SPACE.describe(), name="s", seed=0, clock=clock)
    make_scheduler(Plan.of(SPACE, limits=Limits(trials=20)), study, Refusing(fleet_of({"gpu": 2}), play, clock)).run()
    assert (study.count(S.COMPLETE), study.trial(19).lost) == (20, 0)
    assert 2 <= study.copied <= 10


@pytest.mark.parametrize("waits", [False, True], ids=["running", "queued"])
def test_a_resumed_search_watches_every_attempt_that_lived_and_makes_no_other(waits: bool) -> None:
    first = Search(seed=2, delay=one_in_twenty(8.0), trials=3 * BRACKET)
    copy = S.QUEUED if waits else S.RUNNING
    first.run(lambda search: search.study.copies > 0 and {t.state for t in two_of(search.study)} == {S.RUNNING, copy})
    [original, other] = two_of(first.study)
    first.study.close()
    sent: list[Attempt] = []

    class Watching(SimulatedExecutor):
        def submit(self, attempts: Sequence[Attempt]) -> None:
            sent.extend(attempts)

    study = open_study(first.store, SPACE.describe(), name="s", clock=ManualClock(3000.0), resume=True)
    clock = ManualClock(3000.0)
    executor = Watching(fleet_of({"gpu": 27}), lambda attempt, compute_class: Outcome(state=S.COMPLETE), clock)
    plan = Plan.of(
        SPACE, StudySettings(sampler="random", fidelity={**RUNGS, "how": "halving"}), Limits(trials=3 * BRACKET)
    )
    scheduler = make_scheduler(plan, study, executor)
    # A store does not keep the workers of live attempts.
    lived = [replace(attempt, worker="") for attempt in (original, other)]
    assert [attempt for attempt in sent if attempt.number == original.number] == lived
    assert (original.attempt, other.attempt) == (1, 2)
    failed = Outcome(state=S.FAILED, error="no GPU here")
    scheduler.tell([Result(number=original.number, attempt=1, outcome=failed, at=3000.0)])
    assert not study.trial(original.number).state.is_finished


def two_of(study: StudyState) -> list[Attempt]:
    """The two live attempts of the first trial that has them."""
    live = Counter(attempt.number for attempt in study.attempts)
    number = next(number for number, attempts in live.items() if attempts == 2)
    return [attempt for attempt in study.attempts if attempt.number == number]


# The first n of n + b


@pytest.mark.slow
@pytest.mark.parametrize("slots", [{"gpu": 16}, {"gpu": 8, "large": 8, "cpu": 16}])
def test_brackets_of_hyperband_begin_only_while_those_that_have_begun_wait(
    slots: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many trials are drawn ahead: a draw belongs to the next bracket that lacks some."""
    begun, draw = [], Brackets._drawing

    def counted(brackets: Brackets, rung: int) -> Bracket | None:
        before = brackets._begun
        found = draw(brackets, rung)
        begun.append(brackets._begun - before)
        return found

    monkeypatch.setattr(Brackets, "_drawing", counted)
    fidelity = {"least": 1, "most": 27, "eta": 3, "how": "hyperband"}
    study = Search(fidelity=fidelity, sampler="tpe", slots=slots, trials=150, speculate=False).run().study
    assert study.count(S.COMPLETE) == 150
    assert sum(begun) > 2
    assert max(begun) == 1
