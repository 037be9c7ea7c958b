"""Trials are shared out by probability, and placed as the policy says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shadho_celery import heuristics, ranking
from shadho_celery.assignment import (
    REFRESH_RESULTS,
    REFRESH_SECONDS,
    FifoPolicy,
    PaperPolicy,
    Shares,
    make_policy,
)
from shadho_celery.clock import ManualClock
from shadho_celery.errors import UsageError
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split
from shadho_celery.trial import Trial, TrialState

# Shares


def step_by_step(probabilities: Mapping[str, float], trials: int) -> list[str]:
    """Webster's rule to the letter: the next trial goes to the greatest p / (2 d + 1), the earliest of equals."""
    dealt = dict.fromkeys(probabilities, 0)
    order = []
    for _ in range(trials):
        name = max(probabilities, key=lambda name: probabilities[name] / (2 * dealt[name] + 1))
        dealt[name] += 1
        order.append(name)
    return order


def normalised(weights: Sequence[float]) -> dict[str, float]:
    return {f"s{place}": weight / sum(weights) for place, weight in enumerate(weights)}


WEIGHTS = st.one_of(
    st.lists(st.integers(1, 20).map(float), min_size=1, max_size=30),  # many ties
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30),
)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(0, 200))
def test_quotas_are_where_websters_rule_stands_after_as_many_trials(weights: list[float], trials: int) -> None:
    probabilities = normalised(weights)
    expected = Counter(step_by_step(probabilities, trials))
    quotas = Shares(probabilities).quotas(trials)
    assert quotas == {name: expected[name] for name in probabilities}
    assert sum(quotas.values()) == trials


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(0, 150), st.integers(0, 150))
def test_a_longer_study_gives_no_subspace_less(weights: list[float], fewer: int, more: int) -> None:
    assume(fewer <= more)
    shares = Shares(normalised(weights))
    short, long = shares.quotas(fewer), shares.quotas(more)
    assert all(short[name] <= long[name] for name in short)


@settings(max_examples=50, deadline=None)
@given(WEIGHTS)
def test_the_first_in_order_is_the_next_that_websters_rule_deals_to(weights: list[float]) -> None:
    probabilities = normalised(weights)
    shares = Shares(probabilities)
    dealt: Counter[str] = Counter()
    for expected in step_by_step(probabilities, 60):
        order = shares.in_order(dealt)
        assert order[0] == expected
        assert sorted(order) == sorted(probabilities)
        dealt[expected] += 1


@pytest.mark.parametrize(
    ("probabilities", "trials", "quotas"),
    [
        ({"all": 1.0}, 7, {"all": 7}),
        ({"a": 0.5, "b": 0.5}, 1, {"a": 1, "b": 0}),
        ({"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25}, 3, {"a": 1, "b": 1, "c": 1, "d": 0}),
        ({"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25}, 40, {"a": 10, "b": 10, "c": 10, "d": 10}),
        ({"a": 0.6, "b": 0.4}, 10, {"a": 6, "b": 4}),
        ({"a": 0.99, "b": 0.01}, 20, {"a": 20, "b": 0}),
        ({"a": 0.99, "b": 0.01}, 100, {"a": 99, "b": 1}),
        ({"a": 0.5, "b": 0.5}, 0, {"a": 0, "b": 0}),
    ],
)
def test_quotas_of_known_cases(probabilities: dict[str, float], trials: int, quotas: dict[str, int]) -> None:
    assert Shares(probabilities).quotas(trials) == quotas


def test_a_thousand_subspaces_share_out_exactly_and_by_probability() -> None:
    probabilities = normalised(list(np.random.default_rng(0).random(1000) + 0.01))
    shares = Shares(probabilities)
    few = shares.quotas(10)
    assert sum(few.values()) == 10
    assert {name for name, n in few.items() if n} == set(sorted(probabilities, key=probabilities.__getitem__)[-10:])
    many = shares.quotas(100_000)
    assert sum(many.values()) == 100_000
    assert all(abs(n - 100_000 * probabilities[name]) < 1.5 for name, n in many.items())


# Policies


def complex_last() -> tuple[Subspace, ...]:
    """Four subspaces of clearly different complexity, the simplest first."""
    expression = hp.choice(
        "model", [{"name": f"m{width}", "x": hp.uniform(f"x{width}", 0, 10.0**width)} for width in range(1, 5)]
    )
    return split(compile_space(expression))


NAMES = [subspace.name for subspace in complex_last()]


def paper(clock: ManualClock | None = None, seed: int = 0) -> PaperPolicy:
    return PaperPolicy(complex_last(), np.random.default_rng(seed), clock or ManualClock())


def ended(subspace: str, number: int, loss: float | None) -> Trial:
    width = NAMES.index(subspace) + 1
    x = 10.0**width * (number % 10) / 10
    state = TrialState.FAILED if loss is None else TrialState.COMPLETE
    params = {"model": width - 1, f"x{width}": x}
    return Trial(number=number, subspace=subspace, params=params, loss=loss, state=state)


def test_first_come_first_served_takes_what_is_next_by_the_shares() -> None:
    policy = FifoPolicy()
    policy.see_classes(["gpu", "cpu"])
    for choices in (NAMES, NAMES[::-1], NAMES[2:3]):
        assert {policy.pick(name, choices) for name in ("gpu", "cpu", "unheard of")} == {choices[0]}


def test_before_any_result_complexity_alone_maps_subspaces_to_classes() -> None:
    policy = paper()
    policy.see_classes(["large", "small", "cpu"])
    assert policy.mapping == ranking.pair(NAMES[::-1], ["large", "small", "cpu"])


def test_without_live_classes_nothing_is_mapped_and_the_next_by_the_shares_is_taken() -> None:
    policy = paper()
    policy.see_classes([])
    assert dict(policy.mapping) == {}
    assert policy.pick("late", NAMES) == NAMES[0]


def test_a_class_that_appears_late_gets_its_part_of_the_ranking() -> None:
    policy = paper()
    policy.see_classes(["cpu"])
    assert dict(policy.mapping) == {"cpu": NAMES[::-1]}
    policy.see_classes(["gpu", "cpu"])
    assert policy.mapping == ranking.pair(NAMES[::-1], ["gpu", "cpu"])
    policy.see_classes(["gpu"])
    assert dict(policy.mapping) == {"gpu": NAMES[::-1]}


def test_a_class_draws_its_subspaces_by_plancks_weights() -> None:
    policy = paper()
    policy.see_classes(["large", "small", "cpu"])
    mine = policy.mapping["small"]
    assert len(mine) == 4
    picks = Counter(policy.pick("small", NAMES) for _ in range(4000))
    for name, weight in zip(mine, ranking.planck_weights(len(mine)), strict=True):
        # Four standard deviations of a binomial count.
        assert abs(picks[name] - 4000 * weight) < 4 * (4000 * weight * (1 - weight)) ** 0.5


def test_weights_are_those_of_the_subspaces_that_may_still_get_a_trial() -> None:
    policy = paper()
    policy.see_classes(["cpu"])
    open_ones = [NAMES[0], NAMES[2]]
    picks = Counter(policy.pick("cpu", open_ones) for _ in range(4000))
    first, second = ranking.planck_weights(2)
    assert abs(picks[NAMES[2]] - 4000 * first) < 4 * (4000 * first * second) ** 0.5
    assert sum(picks.values()) == picks[NAMES[2]] + picks[NAMES[0]]


def test_a_class_never_leaves_its_own_subspaces_while_one_of_them_is_open() -> None:
    policy = paper()
    policy.see_classes(["large", "small", "cpu"])
    assert {policy.pick("large", NAMES) for _ in range(200)} == set(policy.mapping["large"])
    assert set(policy.mapping["large"]) < set(NAMES)


def test_a_class_whose_own_subspaces_are_used_up_helps_with_the_next_by_the_shares() -> None:
    policy = paper()
    policy.see_classes(["large", "small", "cpu"])
    others = [name for name in NAMES if name not in policy.mapping["large"]]
    assert others
    assert {policy.pick("large", others) for _ in range(20)} == {others[0]}


def test_the_same_seed_picks_the_same() -> None:
    def picks(seed: int) -> list[str]:
        policy = paper(seed=seed)
        policy.see_classes(["a", "b"])
        return [policy.pick(name, NAMES) for name in ("a", "b") * 30]

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

    monkeypatch.setattr(heuristics, "performance", performance)
    return seen


def test_it_ranks_anew_after_ten_results_and_not_before(scored: list[int]) -> None:
    clock = ManualClock()
    policy = paper(clock)
    policy.see_classes(["large", "small", "cpu"])
    before = dict(policy.mapping)
    clock.sleep(10 * REFRESH_SECONDS)
    for number in range(REFRESH_RESULTS - 1):
        policy.tell(ended(NAMES[0], number, 1000.0))
    assert scored == []
    assert policy.mapping == before
    policy.tell(ended(NAMES[1], 99, 0.0))
    assert sorted(scored) == [1, REFRESH_RESULTS - 1]
    complexities = {s.name: heuristics.complexity(s.leaves) for s in complex_last()}
    performances = {NAMES[0]: 1000.0, NAMES[1]: 0.0, NAMES[2]: heuristics.START_VALUE, NAMES[3]: heuristics.START_VALUE}
    ranked = ranking.rank(NAMES[::-1], complexities, performances)
    assert policy.mapping == ranking.pair(ranked, ["large", "small", "cpu"]) != before


def test_it_ranks_anew_only_so_often_however_fast_results_come(scored: list[int]) -> None:
    clock = ManualClock()
    policy = paper(clock)
    policy.see_classes(["gpu", "cpu"])
    for number in range(5 * REFRESH_RESULTS):
        policy.tell(ended(NAMES[0], number, 1.0))
    assert scored == []
    clock.sleep(REFRESH_SECONDS)
    policy.tell(ended(NAMES[0], 999, 1.0))
    assert scored == [5 * REFRESH_RESULTS + 1]


def test_only_subspaces_with_new_results_are_scored_anew(scored: list[int]) -> None:
    clock = ManualClock()
    policy = paper(clock)
    policy.see_classes(["gpu", "cpu"])
    for turn, name in enumerate((NAMES[0], NAMES[1]), start=1):
        clock.sleep(REFRESH_SECONDS)
        for number in range(REFRESH_RESULTS):
            policy.tell(ended(name, number, 1.0))
        assert scored == [REFRESH_RESULTS] * turn


def test_failed_trials_and_those_of_other_subspaces_teach_nothing(scored: list[int]) -> None:
    clock = ManualClock()
    policy = paper(clock)
    policy.see_classes(["gpu", "cpu"])
    clock.sleep(REFRESH_SECONDS)
    for number in range(5 * REFRESH_RESULTS):
        policy.tell(ended(NAMES[0], number, None))
        policy.tell(ended(NAMES[0], number, 1.0).evolve(subspace="of an older version"))
    assert scored == []


def test_policies_are_made_by_name_and_an_unknown_one_is_refused_with_the_known() -> None:
    generator, clock = np.random.default_rng(0), ManualClock()
    assert isinstance(make_policy("paper", complex_last(), generator, clock), PaperPolicy)
    assert isinstance(make_policy("fifo", complex_last(), generator, clock), FifoPolicy)
    with pytest.raises(UsageError, match=r"'best'.*paper, fifo"):
        make_policy("best", complex_last(), generator, clock)
