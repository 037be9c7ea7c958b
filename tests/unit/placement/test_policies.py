"""A free slot takes the subspace that its policy says, of those that may get a trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from hypothesis import given, settings
from hypothesis import strategies as st

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.placement import paper as rules
from shadho_celery.placement.base import Offers, Policy, Slot
from shadho_celery.placement.model import CostModel, Costs
from shadho_celery.placement.paper import REFRESH_RESULTS, PaperPolicy
from shadho_celery.placement.policies import (
    DIGITS,
    OPTIMISM,
    PATIENCE,
    POLICIES,
    CostPolicy,
    FifoPolicy,
    make_policy,
)
from shadho_celery.placement.pool import Pool
from shadho_celery.placement.shares import UniformShares
from shadho_celery.space import features
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split


def complex_last() -> tuple[Subspace, ...]:
    """Four subspaces of clearly different complexity, the simplest first."""
    expression = hp.choice(
        "model", [{"name": f"m{width}", "x": hp.uniform(f"x{width}", 0, 10.0**width)} for width in range(1, 5)]
    )
    return split(compile_space(expression))


NAMES = [subspace.name for subspace in complex_last()]


def even(names: Sequence[str]) -> dict[str, float]:
    """Backlogs of subspaces that are all where they should be, in that turn."""
    return dict.fromkeys(names, 0.0)


class NoLoad:
    """A study none of whose attempts takes a slot."""

    def taken(self, compute_class: str) -> int:
        return 0

    def running(self) -> Mapping[str, int]:
        return {}


def see(policy: Policy, names: Sequence[str]) -> None:
    policy.see([ComputeClass(name=name, slots=1) for name in names])


def pick(policy: Policy, name: str, backlogs: Mapping[str, float]) -> str:
    """The subspace that a slot of a class gets a new trial of, of those with a backlog."""
    slot = Slot(ComputeClass(name=name, slots=1), NoLoad())
    choice = policy.pick(slot, Offers(backlogs, [*backlogs]), lambda trial, compute_class: True)
    assert choice is not None
    assert isinstance(choice.picked, str)
    return choice.picked


def cost(model: CostModel) -> CostPolicy:
    """The policy without trials drawn ahead."""
    return CostPolicy(model, Pool(model, {}))


def paper(seed: int = 0) -> PaperPolicy:
    return PaperPolicy(complex_last(), np.random.default_rng(seed))


def ended(
    subspace: str, number: int, loss: float | None, *, seconds: float | None = None, compute_class: str | None = None
) -> Trial:
    width = NAMES.index(subspace) + 1
    x = 10.0**width * (number % 10) / 10
    state = TrialState.FAILED if loss is None else TrialState.COMPLETE
    params = {"model": width - 1, f"x{width}": x}
    outcome = Outcome(state=state, loss=loss, seconds=seconds)
    return Trial(
        number=number, subspace=subspace, params=params, state=state, outcome=outcome, compute_class=compute_class
    )


def test_first_come_first_served_takes_what_is_next_by_the_shares() -> None:
    policy = FifoPolicy()
    see(policy, ["gpu", "cpu"])
    for choices in (NAMES, NAMES[::-1], NAMES[2:3]):
        assert {pick(policy, name, even(choices)) for name in ("gpu", "cpu", "unheard of")} == {choices[0]}


# By cost


def timed(subspace: str, compute_class: str, seconds: float) -> Trial:
    return ended(subspace, 0, 0.5, compute_class=compute_class, seconds=seconds)


#: seconds by class and subspace
Table = Mapping[str, Mapping[str, float]]


def learned(table: Table, times: int = 40) -> CostModel:
    """A cost model that has seen every pair that often."""
    model = CostModel(complex_last())
    for _ in range(times):
        for compute_class, row in table.items():
            for subspace, seconds in row.items():
                model.tell(timed(subspace, compute_class, seconds))
    return model


class Known(CostModel):
    """Durations that are known for certain."""

    def __init__(self, table: Table) -> None:
        super().__init__(complex_last())
        self.table = table

    def costs(self, trials: Sequence[Trial], classes: Sequence[str], optimism: float = 0.0) -> Costs:
        logs = np.log([[self.table[c][trial.subspace] for c in classes] for trial in trials])
        return Costs(logs, np.zeros(logs.shape))


def index(table: Table, live: Sequence[str], compute_class: str, subspace: str, backlog: float) -> float:
    """The rule to the letter: (backlog_j + k) * min_c' S_jc' / S_jc over live classes c'."""
    fastest = min(table[other][subspace] for other in live)
    return (backlog + PATIENCE) * fastest / table[compute_class][subspace]


CLASSES = ["large", "small", "cpu"]
SECONDS = st.floats(0.01, 1e5)
TABLES = st.fixed_dictionaries({c: st.fixed_dictionaries(dict.fromkeys(NAMES, SECONDS)) for c in CLASSES})
BACKLOGS = st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e4), min_size=1)


@pytest.mark.slow
@settings(max_examples=200)
@given(TABLES, BACKLOGS, st.lists(st.sampled_from(CLASSES), min_size=1, unique=True))
def test_with_known_durations_a_slot_takes_the_subspace_of_the_greatest_index(
    table: Table, backlogs: dict[str, float], live: list[str]
) -> None:
    policy = cost(Known(table))
    see(policy, live)
    for compute_class in live:
        values = {name: index(table, live, compute_class, name, behind) for name, behind in backlogs.items()}
        # Indices that differ by less are equals.
        assert values[pick(policy, compute_class, backlogs)] == pytest.approx(max(values.values()), rel=10.0**-DIGITS)


def test_of_equal_indices_the_first_in_turn_is_taken() -> None:
    policy = cost(Known({"cpu": dict.fromkeys(NAMES, 7.0)}))
    see(policy, ["cpu"])
    for names in (NAMES, NAMES[::-1], [*NAMES[2:], *NAMES[:2]]):
        assert pick(policy, "cpu", even(names)) == names[0]


def test_each_class_takes_what_it_is_comparatively_good_at_until_the_others_fall_behind() -> None:
    a, b = NAMES[:2]
    table = {"gpu": {a: 1.0, b: 10.0}, "cpu": {a: 8.0, b: 20.0}}
    policy = cost(learned(table))
    see(policy, ["gpu", "cpu"])
    assert pick(policy, "gpu", {b: 0.0, a: 0.0}) in (a, b)
    # The GPU is faster at both, the CPU less far behind at b.
    assert pick(policy, "cpu", {a: 0.0, b: 0.0}) == b
    assert pick(policy, "cpu", {a: 10 * PATIENCE, b: 0.0}) == a


class Dealer:
    """Deals trials to slots by a policy, as the scheduler does."""

    def __init__(self, policy: CostPolicy | FifoPolicy, shares: UniformShares) -> None:
        self.policy = policy
        self.shares = shares
        self.counts: Counter[str] = Counter()
        see(policy, CLASSES)

    def deal(self, compute_class: str) -> str:
        name = pick(self.policy, compute_class, self.shares.backlogs())
        self.shares.deal(name)
        self.counts[name] += 1
        return name


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_on_machines_that_differ_only_in_speed_it_takes_the_same_as_first_come_first_served(noise: float) -> None:
    generator = np.random.default_rng(0)
    model = CostModel(complex_last())
    for _ in range(60):
        for c, factor in zip(CLASSES, (1.0, 2.0, 4.0), strict=True):
            for name, seconds in zip(NAMES, (1.0, 5.0, 20.0, 100.0), strict=True):
                model.tell(timed(name, c, seconds * factor * generator.lognormal(0, noise)))
    flat = {name: 1 / len(NAMES) for name in NAMES}
    dealer = Dealer(cost(model), UniformShares(flat))
    fifo = Dealer(FifoPolicy(), UniformShares(flat))
    for place in generator.integers(len(CLASSES), size=1000):
        dealer.deal(CLASSES[place])
        fifo.deal(CLASSES[place])
        apart = max(abs(dealer.counts[name] - fifo.counts[name]) for name in NAMES)
        assert apart <= (1 if noise == 0 else PATIENCE / 2)


def test_every_subspace_gets_about_its_share_however_the_durations_differ() -> None:
    """It falls behind by some times k at most, where no class is good at it."""
    generator = np.random.default_rng(1)
    table = {c: {name: float(generator.lognormal(3, 1)) for name in NAMES} for c in CLASSES}
    dealer = Dealer(cost(Known(table)), UniformShares({name: 1 / len(NAMES) for name in NAMES}))
    for place in generator.integers(len(CLASSES), size=20_000):
        dealer.deal(CLASSES[place])
    assert min(dealer.counts.values()) > 0.8 * 20_000 / len(NAMES)


def test_without_any_trial_it_takes_what_is_furthest_behind() -> None:
    policy = cost(CostModel(complex_last()))
    see(policy, CLASSES)
    for c in CLASSES:
        assert pick(policy, c, even(NAMES[::-1])) == NAMES[-1]
        assert pick(policy, c, {**even(NAMES), NAMES[2]: 0.5}) == NAMES[2]


def test_one_class_alone_takes_what_is_furthest_behind_however_long_it_takes() -> None:
    seconds = dict(zip(NAMES, (1.0, 1e4, 3.0, 0.01), strict=True))
    policy = cost(learned({"cpu": seconds}))
    see(policy, ["cpu"])
    for name in NAMES:
        assert pick(policy, "cpu", {**even(NAMES), name: 1.0}) == name


def test_a_class_nothing_is_known_of_gets_work_as_it_appears_and_leaves_no_trace_when_it_goes() -> None:
    generator = np.random.default_rng(2)
    table = {c: {name: float(generator.lognormal(3, 1)) for name in NAMES} for c in CLASSES}
    policy = cost(learned(table))
    see(policy, CLASSES)
    many = [dict(zip(NAMES, generator.exponential(10, len(NAMES)).tolist(), strict=True)) for _ in range(50)]
    before = [pick(policy, c, backlogs) for backlogs in many for c in CLASSES]
    see(policy, ["unheard of", *CLASSES])
    for c in ("unheard of", *CLASSES):
        assert {pick(policy, c, backlogs) for backlogs in many} <= set(NAMES)
        for name in NAMES:
            assert pick(policy, c, {**even(NAMES), name: 1e6}) == name
    see(policy, CLASSES)
    assert [pick(policy, c, backlogs) for backlogs in many for c in CLASSES] == before


def test_a_class_that_vanished_is_no_measure_any_more() -> None:
    """What it was best at is nobody else's weakness once it is gone."""
    a, b = NAMES[:2]
    alike = dict.fromkeys(NAMES, 10.0)
    policy = cost(Known({"gpu": {**alike, a: 1.0}, "cpu": {**alike, a: 100.0}}))
    see(policy, ["gpu", "cpu"])
    assert pick(policy, "cpu", {a: 1.0, b: 0.0}) == b
    see(policy, ["cpu"])
    assert pick(policy, "cpu", {a: 1.0, b: 0.0}) == a


def test_what_is_learned_between_two_picks_counts_at_once() -> None:
    a, b = NAMES[:2]
    model = CostModel(complex_last())
    policy = cost(model)
    see(policy, ["gpu", "cpu"])
    assert pick(policy, "cpu", {a: 0.0, b: 0.0}) == a
    for _ in range(20):
        for name, c, seconds in [(a, "gpu", 1.0), (a, "cpu", 50.0), (b, "gpu", 9.0), (b, "cpu", 10.0)]:
            model.tell(timed(name, c, seconds))
    assert pick(policy, "cpu", {a: 0.0, b: 0.0}) == b


def test_a_pair_that_was_never_tried_is_given_the_benefit_of_the_doubt() -> None:
    a, b = NAMES[:2]
    model = CostModel(complex_last())
    for _ in range(30):
        for name, c, seconds in [(a, "gpu", 10.0), (a, "cpu", 20.0), (b, "gpu", 10.0)]:
            model.tell(timed(name, c, seconds))
    policy = cost(model)
    see(policy, ["gpu", "cpu"])
    assert OPTIMISM > 0
    assert pick(policy, "cpu", {a: 0.0, b: 0.0}) == b


# As in the paper


def test_before_any_result_complexity_alone_maps_subspaces_to_classes() -> None:
    policy = paper()
    see(policy, ["large", "small", "cpu"])
    assert policy.mapping == rules.pair(NAMES[::-1], ["large", "small", "cpu"])


def test_without_live_classes_nothing_is_mapped_and_the_next_by_the_shares_is_taken() -> None:
    policy = paper()
    see(policy, [])
    assert dict(policy.mapping) == {}
    assert pick(policy, "late", even(NAMES)) == NAMES[0]


def test_a_class_that_appears_late_gets_its_part_of_the_ranking() -> None:
    policy = paper()
    see(policy, ["cpu"])
    assert dict(policy.mapping) == {"cpu": NAMES[::-1]}
    see(policy, ["gpu", "cpu"])
    assert policy.mapping == rules.pair(NAMES[::-1], ["gpu", "cpu"])
    see(policy, ["gpu"])
    assert dict(policy.mapping) == {"gpu": NAMES[::-1]}


def test_a_class_draws_its_subspaces_by_plancks_weights() -> None:
    policy = paper()
    see(policy, ["large", "small", "cpu"])
    mine = policy.mapping["small"]
    assert len(mine) == 4
    picks = Counter(pick(policy, "small", even(NAMES)) for _ in range(4000))
    for name, weight in zip(mine, rules.planck_weights(len(mine)), strict=True):
        # Four standard deviations of a binomial count.
        assert abs(picks[name] - 4000 * weight) < 4 * (4000 * weight * (1 - weight)) ** 0.5


def test_weights_are_those_of_the_subspaces_that_may_still_get_a_trial() -> None:
    policy = paper()
    see(policy, ["cpu"])
    open_ones = [NAMES[0], NAMES[2]]
    picks = Counter(pick(policy, "cpu", even(open_ones)) for _ in range(4000))
    first, second = rules.planck_weights(2)
    assert abs(picks[NAMES[2]] - 4000 * first) < 4 * (4000 * first * second) ** 0.5
    assert sum(picks.values()) == picks[NAMES[2]] + picks[NAMES[0]]


def test_a_class_never_leaves_its_own_subspaces_while_one_of_them_is_open() -> None:
    policy = paper()
    see(policy, ["large", "small", "cpu"])
    assert {pick(policy, "large", even(NAMES)) for _ in range(200)} == set(policy.mapping["large"])
    assert set(policy.mapping["large"]) < set(NAMES)


def test_a_class_whose_own_subspaces_are_used_up_helps_with_the_next_by_the_shares() -> None:
    policy = paper()
    see(policy, ["large", "small", "cpu"])
    others = [name for name in NAMES if name not in policy.mapping["large"]]
    assert others
    assert {pick(policy, "large", even(others)) for _ in range(20)} == {others[0]}


def test_the_same_seed_picks_the_same() -> None:
    def picks(seed: int) -> list[str]:
        policy = paper(seed=seed)
        see(policy, ["a", "b"])
        return [pick(policy, name, even(NAMES)) for name in ("a", "b") * 30]

    assert picks(1) == picks(1) != picks(2)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of losses at each scoring; a subspace's performance is set to its mean loss."""
    seen: list[int] = []

    def performance(features: Any, losses: Any, generator: Any) -> float:
        assert features.shape == (len(losses), 1)
        assert ((features >= 0) & (features <= 1)).all()
        seen.append(len(losses))
        return float(losses.mean())

    monkeypatch.setattr(rules, "performance", performance)
    return seen


def test_it_ranks_anew_after_ten_results_and_not_before(scored: list[int]) -> None:
    policy = paper()
    see(policy, ["large", "small", "cpu"])
    before = dict(policy.mapping)
    for number in range(REFRESH_RESULTS - 1):
        policy.tell([ended(NAMES[0], number, 1000.0)])
    assert scored == []
    assert policy.mapping == before
    policy.tell([ended(NAMES[1], 99, 0.0)])
    assert sorted(scored) == [1, REFRESH_RESULTS - 1]
    complexities = {s.name: features.complexity(s.domains.values()) for s in complex_last()}
    performances = {NAMES[0]: 1000.0, NAMES[1]: 0.0, NAMES[2]: rules.START_VALUE, NAMES[3]: rules.START_VALUE}
    ranked = rules.rank(NAMES[::-1], complexities, performances)
    assert policy.mapping == rules.pair(ranked, ["large", "small", "cpu"]) != before


def test_only_subspaces_with_new_results_are_scored_anew(scored: list[int]) -> None:
    policy = paper()
    see(policy, ["gpu", "cpu"])
    for turn, name in enumerate((NAMES[0], NAMES[1]), start=1):
        for number in range(REFRESH_RESULTS):
            policy.tell([ended(name, number, 1.0)])
        assert scored == [REFRESH_RESULTS] * turn


def test_failed_trials_and_those_of_other_subspaces_teach_nothing(scored: list[int]) -> None:
    policy = paper()
    see(policy, ["gpu", "cpu"])
    for number in range(5 * REFRESH_RESULTS):
        policy.tell([ended(NAMES[0], number, None)])
        policy.tell([ended(NAMES[0], number, 1.0).evolve(subspace="of an older version")])
    assert scored == []


def test_policies_are_made_by_name_and_an_unknown_one_is_refused_with_the_known() -> None:
    def make(name: str) -> object:
        return make_policy(name, complex_last(), CostModel(complex_last()), np.random.default_rng(0))

    kinds = {"cost": CostPolicy, "paper": PaperPolicy, "fifo": FifoPolicy}
    assert {name: type(make(name)) for name in POLICIES} == kinds
    with pytest.raises(UsageError, match=r"'best'.*cost, paper, fifo"):
        make("best")
