"""Trials that are drawn ahead run all the same: the same set whatever the fleet, each within a bounded wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
from hyperopt import hp
from msgspec.structs import replace
from services.cases import cases
from services.searching import SimulatedSearch

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, Params, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.placement.base import Choice, Fits, Offers, Slot
from shadho_celery.placement.model import CostModel
from shadho_celery.placement.pool import LEAST, MOST_WAIT, REFILL
from shadho_celery.simulation.executor import Change
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.space.split import Subspace, split
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.state import Limits, StudyState

FLEET = {"gpu": 4, "cpu": 12}
Seconds = Callable[[Mapping[str, Any]], Mapping[str, float]]


def flat() -> Space:
    return compile_space({"w": hp.uniform("w", 0, 1)})


def by_width(params: Mapping[str, Any]) -> Mapping[str, float]:
    return {"gpu": 20 + 10 * params["w"], "cpu": 20 + 400 * params["w"], "late": 30.0}


class Search(SimulatedSearch):
    """A study on simulated machines, whose trials take the seconds of their params."""

    def __init__(
        self,
        space: Space | None = None,
        *,
        seconds: Seconds = by_width,
        slots: Mapping[str, int] = FLEET,
        changes: tuple[Change, ...] = (),
        store: SqlStore | None = None,
        resume: bool = False,
        settings: StudySettings | None = None,
        trials: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.seconds = seconds
        super().__init__(
            space or flat(),
            self.play,
            slots,
            settings=settings or StudySettings(sampler="random", speculate=False),
            limits=limits or Limits(trials=trials),
            clock=ManualClock(0.0),
            seed=7,
            store=store,
            resume=resume,
            changes=changes,
        )

    def play(self, attempt: Attempt, compute_class: str) -> Outcome:
        seconds = self.seconds(attempt.params)[compute_class]
        loss = float(attempt.params.get("w", 0.5))
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)

    @property
    def pooled(self) -> int:
        return sum(map(len, self.scheduler.proposals._ahead.values()))


def drawn(study: StudyState) -> list[tuple[str, int, tuple[tuple[str, Any], ...]]]:
    return sorted((trial.subspace, trial.seed, tuple(trial.params.items())) for trial in study)


@cache
def fifo(trials: int) -> tuple[float, list[tuple[str, int, tuple[tuple[str, Any], ...]]]]:
    """Return the seconds that first come, first served takes, and what it has drawn."""
    search = Search(settings=StudySettings(sampler="random", policy="fifo", speculate=False), trials=trials).run()
    return search.clock.now(), drawn(search.study)


@pytest.mark.slow
def test_a_flat_space_is_searched_faster_than_first_come_first_served() -> None:
    assert fifo(400)[0] / Search(trials=400).run().clock.now() > 1.12


@pytest.mark.slow
@pytest.mark.parametrize("trials", [1, 15, 16, 17, 60])
def test_a_limit_on_trials_gives_the_set_of_first_come_first_served(trials: int) -> None:
    sets = []
    for slots, policy in ((FLEET, "fifo"), (FLEET, "cost"), ({"gpu": 1, "cpu": 1}, "cost"), ({"cpu": 3}, "cost")):
        search = Search(
            slots=slots, settings=StudySettings(sampler="random", policy=policy, speculate=False), trials=trials
        ).run()
        assert search.study.count(TrialState.COMPLETE) == len(search.study) == trials
        sets.append(drawn(search.study))
    assert all(each == sets[0] for each in sets)


@pytest.mark.slow
def test_with_several_subspaces_each_runs_a_prefix_of_its_own_stream() -> None:
    space = compile_space(
        hp.pchoice("k", [(0.6, {"w": hp.uniform("w", 0, 1)}), (0.3, {"v": hp.uniform("v", 0, 1)}), (0.1, {"c": 3})])
    )

    def seconds(params: Mapping[str, Any]) -> Mapping[str, float]:
        w = params.get("w", params.get("v", 0.1))
        return {"gpu": 20.0 + w, "cpu": 20 + 300 * w}

    sets = [
        drawn(
            Search(
                space,
                seconds=seconds,
                settings=StudySettings(sampler="random", policy=policy, speculate=False),
                trials=90,
            )
            .run()
            .study
        )
        for policy in ("fifo", "cost")
    ]
    assert sets[0] == sets[1]


def passed_over(study: StudyState) -> int:
    """By how many later draws the trial that waited longest was passed over."""
    order = [trial.number for trial in sorted(study.trials, key=lambda trial: trial.started_at or 0.0)]
    return max(place - number for place, number in enumerate(order))


@pytest.mark.slow
def test_no_trial_waits_for_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if every slot prefers the latest draw."""
    search = Search(trials=700, slots={"gpu": 1, "cpu": 15})
    policy = search.scheduler.proposals.policy
    choose = policy.pick

    def latest(slot: Slot, offers: Offers, fits: Fits) -> Choice | None:
        return choose(slot._replace(excess=lambda trials: np.array([-100.0 * t.number for t in trials])), offers, fits)

    monkeypatch.setattr(policy, "pick", latest)
    search.run()
    # Those that are overdue together go one by one.
    assert LEAST < passed_over(search.study) <= 2 * MOST_WAIT * LEAST + sum(FLEET.values())


@pytest.mark.slow
def test_with_a_limit_on_time_more_trials_end_before_it() -> None:
    def seconds(params: Mapping[str, Any]) -> Mapping[str, float]:
        return {"gpu": 20 + 400 * params["w"], "cpu": 30 + 1600 * params["w"]}

    ended = []
    for limits in (Limits(seconds=3600.0), Limits(trials=500)):
        search = Search(seconds=seconds, limits=limits)
        search.run(lambda search: search.clock.now() >= 3600.0)
        ended.append(search.study.count(TrialState.COMPLETE))
    assert ended[0] > 1.1 * ended[1]


@pytest.mark.slow
@pytest.mark.parametrize("at", [20, 40, 150])
def test_a_resumed_study_runs_what_had_been_drawn_and_draws_nothing_twice(at: int) -> None:
    first = Search(trials=250)
    first.run(lambda search: search.study.counted >= at)
    assert first.pooled > 0
    waiting = [trial.number for trial in first.study if trial.state is TrialState.WAITING]
    assert len(waiting) >= first.pooled
    first.close()
    again = Search(trials=250, store=first.store, resume=True).run()
    assert again.study.count(TrialState.COMPLETE) == len(again.study) == 250
    assert drawn(again.study) == fifo(250)[1]
    assert len({trial.seed for trial in again.study}) == 250


@pytest.mark.slow
def test_what_had_been_drawn_is_placed_by_its_params_after_a_resumption() -> None:
    def seconds(params: Mapping[str, Any]) -> Mapping[str, float]:
        return {"gpu": 20 + 400 * params["w"], "cpu": 30 + 4000 * params["w"]}

    first = Search(seconds=seconds, limits=Limits(seconds=3600.0))
    first.run()
    waiting = {trial.number for trial in first.study if trial.state is TrialState.WAITING}
    assert len(waiting) > LEAST
    first.close()
    again = Search(seconds=seconds, trials=300, store=first.store, resume=True).run()
    assert again.study.count(TrialState.COMPLETE) == len(again.study) == 300
    by_class = {
        name: np.median([t.params["w"] for t in again.study if t.number in waiting and t.compute_class == name])
        for name in FLEET
    }
    assert by_class["gpu"] > by_class["cpu"] + 0.1
    assert drawn(again.study) == fifo(300)[1]


@pytest.mark.slow
def test_a_class_that_disappears_or_comes_leaves_nothing_behind_in_the_pool() -> None:
    changes = (
        Change(at=300.0, compute_class="gpu", workers=-4),
        Change(at=900.0, compute_class="late", workers=6),
        Change(at=1500.0, compute_class="cpu", workers=-12),
    )
    search = Search(trials=400, slots={**FLEET, "late": 0}, changes=changes).run()
    assert search.study.count(TrialState.COMPLETE) == 400
    assert search.pooled == 0
    late = [trial for trial in search.study.trials if (trial.started_at or 0.0) > 1600]
    assert {trial.compute_class for trial in late} == {"late"}


def test_one_class_runs_the_stream_in_its_order() -> None:
    search = Search(trials=60, slots={"cpu": 5}).run()
    started = sorted(search.study.trials, key=lambda trial: (trial.started_at or 0.0, trial.number))
    assert [trial.number for trial in started] == list(range(60))
    assert search.pooled == 0


@pytest.mark.slow
def test_what_no_class_has_the_slots_for_does_not_clog_the_pool() -> None:
    """Wide trials wait in the study, and the narrow ones go on."""
    space = compile_space({"w": hp.uniform("w", 0, 1), "n": hp.choice("n", [1, 9])})
    settings = StudySettings(sampler="random", slots="n", speculate=False)
    search = Search(space, settings=settings, slots={"gpu": 4, "cpu": 4}, limits=Limits(seconds=2_000.0))
    search.run()
    assert search.study.count(TrialState.COMPLETE) > 50
    assert {trial.slots for trial in search.study.trials} == {1}


def test_tpe_is_asked_beside_what_waits_in_the_pool() -> None:
    settings = StudySettings(sampler="tpe", speculate=False)
    search = Search(settings=settings, trials=150).run()
    assert search.study.count(TrialState.COMPLETE) == len(search.study) == 150
    assert len({trial.params["w"] for trial in search.study}) == 150
    assert len({trial.seed for trial in search.study}) == 150
    best = search.study.best
    assert best is not None
    assert (best.outcome.loss or 0.0) < 0.01


def test_rungs_are_complete_before_the_next_begins_whatever_is_drawn_ahead() -> None:
    settings = StudySettings(
        sampler="random", fidelity={"least": 1, "most": 9, "eta": 3, "how": "halving"}, speculate=False
    )
    study = Search(settings=settings, trials=39).run().study
    assert study.count(TrialState.COMPLETE) == len(study) == 39
    rungs = Counter(trial.rung for trial in study)
    assert rungs == {0: 27, 1: 9, 2: 3}


class Wrong(CostModel):
    """A model that takes each trial's params for those of another, and their effects for the opposite."""

    def _rates(self, trials: Any) -> Any:
        typical = self.durations.estimate().mean[[self.row_of[trial.subspace] for trial in trials]]
        found = super()._rates(trials) - typical
        return typical - found[np.random.default_rng(len(trials)).permutation(len(found))]


@pytest.mark.slow
def test_with_a_model_that_is_wrong_on_purpose_nothing_much_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadho_celery.scheduler.plan.CostModel", Wrong)
    wrong = Search(trials=400).run().clock.now()
    assert fifo(400)[0] / wrong > 0.97


def test_strings_and_lists_among_the_options_are_placed_by_their_index() -> None:
    models = ["net", ["a", "list"], {"a": "dict"}, None]
    table = [(10.0, 200.0), (200.0, 10.0), (10.0, 200.0), (200.0, 10.0)]

    def seconds(params: Mapping[str, Any]) -> Mapping[str, float]:
        return dict(zip(("gpu", "cpu"), table[params["m"]], strict=True))

    space = compile_space({"m": hp.choice("m", models)})
    study = Search(space, seconds=seconds, trials=400, slots={"gpu": 4, "cpu": 4}).run().study
    late = [trial for trial in study.trials[200:] if trial.number < 380]
    assert {trial.compute_class for trial in late} == {"gpu", "cpu"}
    right = [trial.compute_class == ("gpu" if trial.params["m"] in {0, 2} else "cpu") for trial in late]
    assert np.mean(right) > 0.8


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, None])
def test_seconds_that_are_none_teach_nothing(wrong: float | None) -> None:
    """One trial of ten says so, as an executor of one's own may."""
    space = flat()
    [subspace] = split(space)
    model, without = CostModel([subspace]), CostModel([subspace])
    generator = np.random.default_rng(0)
    for number, params in enumerate(subspace.sample(generator, 60)):
        name = "gpu" if number % 2 else "cpu"
        seconds = wrong if number % 10 == 0 else by_width(params)[name]
        outcome = Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=seconds)
        trial = Trial(number=number, subspace="all", params=params, state=TrialState.COMPLETE)
        trial = trial.evolve(outcome=outcome, compute_class=name)
        model.tell(trial)
        if number % 10:
            without.tell(trial)
    probes = subspace.sample(generator, 5)
    trials = [Trial(number=0, subspace="all", params=params) for params in probes]
    assert model.version == without.version
    found, expected = (each.predict(trials, ["gpu", "cpu"]).mean.tolist() for each in (model, without))
    assert found == expected
    assert np.isfinite(found).all()


@pytest.mark.slow
def test_trials_of_no_time_and_of_very_long_ones_are_placed() -> None:
    def seconds(params: Mapping[str, Any]) -> Mapping[str, float]:
        return {"gpu": 0.0 if params["w"] < 0.5 else 1e4, "cpu": 1e-9}

    search = Search(seconds=seconds, trials=100).run()
    assert search.study.count(TrialState.COMPLETE) == 100


# How many, and who draws them


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "most"), [(0, 0), (5, 5), (200, 200), (None, LEAST)])
def test_the_number_of_trials_drawn_ahead_can_be_set(pool: int | None, most: int) -> None:
    settings = StudySettings(sampler="random", pool=pool, speculate=False)
    search = Search(settings=settings, trials=250)
    seen = []
    search.run(lambda search: seen.append(search.pooled) or False)  # type: ignore[func-returns-value]
    # A turn ends with those that were left by its own trials.
    assert most - most // REFILL - 1 <= max(seen) <= most if most else max(seen) == 0
    assert drawn(search.study) == fifo(250)[1]


TWO = {
    "k": hp.choice("k", [{"w": hp.uniform("w", 0, 1)}, {"v": hp.uniform("v", 0, 1)}, {"u": hp.uniform("u", 0, 1)}]),
}


class OneForAll:
    """A sampler of the whole space, which draws nine of ten trials with w, and none with u."""

    adaptive = True
    spans_space = True
    made: ClassVar[list[OneForAll]] = []

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        self.subspace, self.entropy = subspace, tuple(entropy)
        self.told: list[Trial] = []
        self.most_pending = 0
        self.made.append(self)

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        self.most_pending = max(self.most_pending, len(pending))
        first = len(self.told) + len(pending)
        return [{"k": 1, "v": 0.5} if (first + i) % 10 == 9 else {"k": 0, "w": (first + i) % 7 / 7} for i in range(n)]

    def tell(self, trials: Sequence[Trial]) -> None:
        self.told += trials


def spanning(**given: Any) -> Search:
    OneForAll.made.clear()

    def seconds(params: Mapping[str, Any]) -> Mapping[str, float]:
        return by_width({"w": params.get("w", 0.2)})

    settings = replace(given.pop("settings", StudySettings(speculate=False)), sampler=OneForAll)
    return Search(compile_space(TWO), seconds=seconds, settings=settings, **given)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cost", "fifo"])
def test_a_sampler_of_the_whole_space_chooses_the_subspaces_itself(policy: str) -> None:
    search = spanning(trials=200, settings=StudySettings(sampler="random", policy=policy, speculate=False)).run()
    [sampler] = OneForAll.made
    assert (sampler.subspace.name, sampler.entropy) == ("all", (7,))
    assert set(sampler.subspace.domains) == {"k", "w", "v", "u"}
    assert Counter(trial.subspace for trial in search.study) == {"k={'w': w}": 180, "k={'v': v}": 20}
    assert len({(trial.subspace, trial.seed) for trial in search.study}) == len(search.study) == 200
    assert sorted(trial.number for trial in sampler.told) == list(range(200))
    # A quarter of 16 slots, as it learns from losses.
    assert sampler.most_pending <= 16 + (4 if policy == "cost" else 0)


@pytest.mark.slow
def test_what_it_draws_ahead_is_placed_by_params_and_none_waits_for_ever() -> None:
    settings = StudySettings(sampler="random", pool=16, speculate=False)
    cost, fifo = (
        spanning(trials=300, settings=each).run()
        for each in (settings, StudySettings(sampler="random", policy="fifo", speculate=False))
    )
    assert fifo.clock.now() / cost.clock.now() > 1.1
    assert passed_over(cost.study) <= MOST_WAIT * 16 + sum(FLEET.values())


def test_a_resumed_study_goes_on_with_what_it_had_drawn() -> None:
    first = spanning(trials=100)
    first.run(lambda search: search.study.counted >= 40)
    assert first.pooled > 0
    first.close()
    again = spanning(trials=100, store=first.store, resume=True).run()
    assert again.study.count(TrialState.COMPLETE) == len(again.study) == 100
    assert len({(trial.subspace, trial.seed) for trial in again.study}) == 100
    [sampler] = OneForAll.made
    assert sorted(trial.number for trial in sampler.told) == list(range(100))


@pytest.mark.slow
def test_further_trials_have_the_mix_of_the_latest_ones_where_a_sampler_chooses_the_subspaces() -> None:
    first = spanning(trials=200)
    assert set(first.scheduler.proposals.mix(60).values()) == {20.0}
    first.run(lambda search: search.study.counted >= 150)
    mix = first.scheduler.proposals.mix(63)
    assert sum(mix.values()) == pytest.approx(63)
    assert mix["k={'w': w}"] >= 50
    assert mix["k={'u': u}"] == 1, "that of the space, of which nothing came"
    first.close()
    assert spanning(trials=200, store=first.store, resume=True).scheduler.proposals.mix(63) == pytest.approx(mix, abs=2)


@pytest.mark.slow
@cases("shares", ["even", "promise"])
def test_fixed_shares_divide_further_trials_and_by_promise_the_latest_show_the_mix(shares: str) -> None:
    settings = StudySettings(sampler="gp", shares=shares, speculate=False)
    search = Search(compile_space(TWO), seconds=lambda _: by_width({"w": 0.2}), settings=settings, trials=60).run()
    latest = Counter(trial.subspace for trial in search.study)
    mix = search.scheduler.proposals.mix(63)
    assert mix == {name: 21 if shares == "even" else latest[name] + 1 for name in mix}


def test_further_trials_with_fixed_shares_are_those_that_each_subspace_still_lacks() -> None:
    """A plan by money would otherwise take too few slots for a subspace whose long trials are sent last."""
    settings = StudySettings(sampler="random", shares="even", speculate=False)
    search = Search(compile_space(TWO), seconds=lambda _: by_width({"w": 0.2}), settings=settings, trials=61)
    search.run(lambda search: search.study.counted >= 20)
    study, proposals = search.study, search.scheduler.proposals
    # Trials of one subspace that were sent out of turn.
    for _ in range(5):
        study.send(study.add(proposals.subspaces[0], {"k": 0, "u": 0.5}, seed=1), "cpu")
    left = 61 - study.counted - study.in_flight
    mix = proposals.mix(left)
    sent = {name: study.asked(name) - study.count(TrialState.WAITING, subspace=name) for name in mix}
    assert sum(mix.values()) == left
    assert {name: mix[name] + sent[name] for name in mix} == proposals.shares.quotas(61)


@pytest.mark.slow
def test_what_no_class_has_the_slots_for_does_not_clog_it_either() -> None:
    settings = StudySettings(sampler="random", slots=lambda params: 9 if "v" in str(params) else 1, speculate=False)
    search = spanning(settings=settings, slots={"gpu": 4, "cpu": 4}, limits=Limits(seconds=2_000.0)).run()
    assert search.study.count(TrialState.COMPLETE) > 35
    assert {trial.subspace for trial in search.study.trials} == {"k={'w': w}"}


def test_policy_paper_which_ranks_subspaces_is_refused_beside_it() -> None:
    with pytest.raises(UsageError, match="ranks subspaces, but this sampler chooses them itself; choose cost or fifo"):
        spanning(settings=StudySettings(sampler="random", policy="paper"), trials=1)


class Broken(Search):
    """Whose first of three subspaces only fails."""

    def play(self, attempt: Attempt, compute_class: str) -> Outcome:
        state = TrialState.FAILED if "w" in attempt.params else TrialState.COMPLETE
        return Outcome(state=state, loss=1.0 if state is TrialState.COMPLETE else None, seconds=1.0)


def test_nothing_is_drawn_ahead_of_a_subspace_that_only_fails() -> None:
    """Every trial that is drawn is run: the pool would undo the tenth of its share that such a subspace gets."""
    failed = []
    for pool in (0, None, 1000):
        settings = StudySettings(sampler="random", pool=pool, speculate=False)
        search = Broken(compile_space(TWO), settings=settings, slots={"gpu": 4, "cpu": 4}, trials=60).run()
        failed.append(search.study.count(TrialState.FAILED))
    assert max(failed) <= failed[0] + 2
    assert failed[0] < 15
