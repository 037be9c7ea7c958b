"""Trials are shared out by probability, or by promise: less where the best can hardly be beaten, never nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.cases import cases

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.placement.shares import (
    FLOOR,
    HALF_LIFE,
    HOPELESS,
    MIN_LOSSES,
    RENEW_RESULTS,
    SHARES,
    EvenShares,
    PaperShares,
    PromiseShares,
    UniformShares,
    make_shares,
    promise,
)

S = TrialState

#: a subspace's next loss, None where its trial fails
Law = Callable[[np.random.Generator], float | None]


def ended(subspace: str, loss: float | None, state: TrialState | None = None, budget: float | None = None) -> Trial:
    state = state or (S.FAILED if loss is None else S.COMPLETE)
    outcome = Outcome(state=state, loss=loss)
    return Trial(number=0, subspace=subspace, params={}, state=state, outcome=outcome, budget=budget)


def next_in_turn(shares: UniformShares) -> str:
    return next(iter(shares.backlogs()))


def flat(n: int) -> dict[str, float]:
    return {f"s{place}": 1 / n for place in range(n)}


def normalised(weights: Sequence[float]) -> dict[str, float]:
    return {f"s{place}": weight / sum(weights) for place, weight in enumerate(weights)}


WEIGHTS = st.one_of(
    st.lists(st.integers(1, 20).map(float), min_size=1, max_size=30),  # many ties
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30),
)


# Uniform shares


def step_by_step(probabilities: Mapping[str, float], trials: int) -> list[str]:
    """Webster's rule to the letter: the next trial goes to the greatest p / (2 d + 1), the earliest of equals."""
    dealt = dict.fromkeys(probabilities, 0)
    order = []
    for _ in range(trials):
        name = max(probabilities, key=lambda name: probabilities[name] / (2 * dealt[name] + 1))
        dealt[name] += 1
        order.append(name)
    return order


@pytest.mark.slow
@settings(max_examples=150)
@given(WEIGHTS, st.integers(0, 200))
def test_quotas_are_where_websters_rule_stands_after_as_many_trials(weights: list[float], trials: int) -> None:
    probabilities = normalised(weights)
    expected = Counter(step_by_step(probabilities, trials))
    quotas = UniformShares(probabilities).quotas(trials)
    assert quotas == {name: expected[name] for name in probabilities}
    assert sum(quotas.values()) == trials


@settings(max_examples=50)
@given(WEIGHTS)
def test_the_first_in_turn_is_the_next_that_websters_rule_deals_to(weights: list[float]) -> None:
    probabilities = normalised(weights)
    shares = UniformShares(probabilities)
    for expected in step_by_step(probabilities, 60):
        backlogs = shares.backlogs()
        assert next(iter(backlogs)) == expected
        assert sorted(backlogs) == sorted(probabilities)
        shares.deal(expected)


@settings(max_examples=60)
@given(WEIGHTS, st.lists(st.integers(0, 29), max_size=60))
def test_a_backlog_is_how_many_trials_a_subspace_is_behind_the_one_furthest_ahead(
    weights: list[float], deals: list[int]
) -> None:
    probabilities = normalised(weights)
    names = list(probabilities)
    shares = UniformShares(probabilities)
    dealt: Counter[str] = Counter()
    for deal in deals:
        name = names[deal % len(names)]
        shares.deal(name)
        dealt[name] += 1
    progress = {name: dealt[name] / (probabilities[name] * len(names)) for name in names}
    for name, behind in shares.backlogs().items():
        assert behind == pytest.approx(max(progress.values()) - progress[name])
        assert behind >= 0


def test_a_thousand_subspaces_share_out_exactly_and_by_probability() -> None:
    probabilities = normalised(list(np.random.default_rng(0).random(1000) + 0.01))
    shares = UniformShares(probabilities)
    few = shares.quotas(10)
    assert sum(few.values()) == 10
    assert {name for name, n in few.items() if n} == set(sorted(probabilities, key=probabilities.__getitem__)[-10:])
    many = shares.quotas(100_000)
    assert sum(many.values()) == 100_000
    assert all(abs(n - 100_000 * probabilities[name]) < 1.5 for name, n in many.items())


def test_what_has_been_dealt_does_not_change_the_quotas() -> None:
    shares = UniformShares({"a": 0.6, "b": 0.4})
    before = shares.quotas(10)
    for _ in range(5):
        shares.deal("b")
        shares.tell(ended("b", None))
    assert shares.quotas(10) == before


# Failures


def dealt_out(
    shares: UniformShares, laws: Mapping[str, Law], trials: int, seed: int = 0, in_flight: int = 0
) -> Counter[str]:
    """Trials by subspace when each goes to the one in turn and its result comes `in_flight` trials later."""
    generator = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    running: list[Trial] = []
    for _ in range(trials):
        name = next_in_turn(shares)
        shares.deal(name)
        counts[name] += 1
        running.append(ended(name, laws[name](generator)))
        if len(running) > in_flight:
            shares.tell(running.pop(0))
    return counts


def fails(_: np.random.Generator) -> None:
    return None


def fails_at_times(part: float) -> Law:
    return lambda generator: None if generator.random() < part else 0.5


@pytest.mark.parametrize("in_flight", [0, 20])
def test_failures_are_made_up_for_while_they_are_a_minority(in_flight: int) -> None:
    """So that as many trials succeed in the subspace as in the others."""
    part = 0.25
    laws = {"s0": fails_at_times(part), "s1": fails_at_times(0.0), "s2": fails_at_times(0.0)}
    counts = dealt_out(UniformShares(flat(3)), laws, 3000, in_flight=in_flight)
    assert counts["s0"] * (1 - part) == pytest.approx(counts["s1"], rel=0.05)
    assert counts["s1"] == pytest.approx(counts["s2"], abs=2)


@cases("name", SHARES)
@cases("probabilities", [flat(2), flat(10), {"s0": 0.2, "s1": 0.7, "s2": 0.1}])
def test_a_subspace_that_always_fails_gets_a_tenth_of_its_share_unless_they_are_uniform_and_the_others_never_starve(
    name: str, probabilities: dict[str, float]
) -> None:
    laws: dict[str, Law] = dict.fromkeys(probabilities, lambda generator: generator.random())
    counts = dealt_out(make_shares(name, probabilities), {**laws, "s0": fails}, 2000)
    if name in ("uniform", "paper"):
        assert counts["s0"] == pytest.approx(probabilities["s0"] * 2000, abs=2)
    else:
        left = {"even": FLOOR, "promise": 0.75}[name] * probabilities["s0"]
        assert 0 < counts["s0"] <= 2000 * left / (left + 1 - probabilities["s0"]) + 2 * HOPELESS
    for other in list(probabilities)[1:]:
        assert counts[other] > 0.5 * FLOOR * probabilities[other] * 2000


def test_quotas_leave_a_tenth_to_a_subspace_that_only_fails_until_one_of_its_trials_succeeds() -> None:
    even, uniform = EvenShares(flat(4)), UniformShares(flat(4))
    for shares in (even, uniform):
        for _ in range(HOPELESS):
            assert shares.quotas(310) == uniform.quotas(310), "failures are no reason yet"
            shares.tell(ended("s0", None))
    assert even.quotas(310) == {"s0": 10, "s1": 100, "s2": 100, "s3": 100}
    even.tell(ended("s0", None, S.CANCELLED))
    assert even.quotas(310)["s0"] == 10
    even.tell(ended("s0", 0.5))
    assert even.quotas(310) == uniform.quotas(310)


@cases("led", [False, True])
@cases("name", ["even", "promise"])
@cases("before", [0, 200])
def test_a_subspace_that_only_fails_gets_a_tenth_from_then_on_and_its_full_share_from_its_first_success(
    name: str, before: int, *, led: bool
) -> None:
    """It neither pays for what it had before, nor is it paid for what it missed."""
    shares = make_shares(name, flat(2))
    if led and isinstance(shares, PromiseShares):
        shares.follow({"s0": 1.0, "s1": 1.0})
    for _ in range(before):
        shares.deal("s1")  # far ahead of its share
    for _ in range(HOPELESS):
        shares.deal("s1")
        shares.tell(ended("s1", None))
    assert shares.notice == "subspaces that get a tenth of their share until a trial of them succeeds: s1"

    def dealt(trials: int) -> list[int]:
        """Places of the trials of s1 among the next ones."""
        order = []
        for _ in range(trials):
            order.append(next_in_turn(shares))
            shares.deal(order[-1])
        return [place for place, each in enumerate(order) if each == "s1"]

    failing = dealt(220)
    # An outlook divides a tenth of all trials by the probabilities, so that the others get all that is left.
    assert len(failing) == pytest.approx(11 if led and name == "promise" else 20, abs=3)
    assert failing[0] <= 12
    shares.tell(ended("s1", 0.5))
    assert shares.notice is None
    after = dealt(220)
    assert 105 <= len(after) <= 115
    assert 8 <= len([place for place in after if place < 22]) <= 14, "no burst"


def test_a_subspace_that_recovers_while_nothing_is_expected_of_the_others_keeps_its_share_when_that_changes() -> None:
    """Its count after a restart is by what the others had, not by their share of the moment."""
    shares = PromiseShares(flat(2))
    shares.follow({"s0": 1.0, "s1": 1.0})
    for _ in range(HOPELESS):
        shares.deal("s1")
        shares.tell(ended("s1", None))
    for _ in range(40):
        shares.deal("s0")
    shares.follow({"s0": 1e-4, "s1": 1.0})
    shares.tell(ended("s1", 0.5))
    assert as_things_stand(shares, 20)["s1"] >= 1.7
    shares.follow({"s0": 1.0, "s1": 1.0})
    assert as_things_stand(shares, 40)["s1"] >= 0.5


def test_quotas_leave_what_was_dealt_before_a_subspace_only_fails() -> None:
    """Of 20 trials nine were its own: of the other 110 it gets a tenth of its share, and half of those after a fix."""
    shares = EvenShares(flat(2))
    for name in ("s0", "s1") * 9 + ("s0", "s0"):
        shares.deal(name)
    assert shares.quotas(130) == {"s0": 65, "s1": 65}
    for _ in range(9):
        shares.tell(ended("s1", None))
    assert shares.quotas(130) == {"s0": 11 + 100, "s1": 9 + 10}
    shares.restart(["s1"])
    assert next_in_turn(shares) in ("s0", "s1")
    shares.tell(ended("s1", 0.5))
    assert shares.quotas(130) == {"s0": 11 + 55, "s1": 9 + 55}


def test_a_restarted_subspace_is_as_far_ahead_as_the_others_on_average() -> None:
    shares = UniformShares(flat(3))
    for name, count in (("s0", 30), ("s1", 20), ("s2", 400)):
        for _ in range(count):
            shares.deal(name)
    shares.restart(["s2"])
    assert shares.backlogs() == pytest.approx({"s1": 10.0, "s2": 5.0, "s0": 0.0})
    shares.restart(["s0", "s1", "s2"])
    assert set(shares.backlogs().values()) == {0.0}


@pytest.mark.parametrize("name", SHARES)
def test_where_every_trial_fails_all_keep_their_share(name: str) -> None:
    probabilities = {"s0": 0.5, "s1": 0.3, "s2": 0.2}
    counts = dealt_out(make_shares(name, probabilities), dict.fromkeys(probabilities, fails), 1000, in_flight=7)
    for subspace, probability in probabilities.items():
        assert counts[subspace] == pytest.approx(1000 * probability, rel=0.1)


@pytest.mark.parametrize("name", SHARES)
def test_only_failed_trials_are_made_up_for(name: str) -> None:
    shares = make_shares(name, flat(2))
    for subspace in ("s0", "s1") * 3:
        shares.deal(subspace)
    for state in (S.PRUNED, S.CANCELLED, S.COMPLETE):
        shares.tell(ended("s1", 0.5, state))
    assert next_in_turn(shares) == "s0"
    shares.tell(ended("s1", None))
    assert next_in_turn(shares) == "s1"


@pytest.mark.parametrize("name", SHARES)
def test_trials_of_a_subspace_that_there_is_not_change_nothing(name: str) -> None:
    shares = make_shares(name, flat(3))
    before = shares.backlogs()
    shares.deal("of an older version")
    shares.tell(ended("of an older version", None))
    for _ in range(3 * MIN_LOSSES):
        shares.tell(ended("of an older version", -1e9))
    assert shares.backlogs() == before


# By promise


def uniform_from(low: float) -> Law:
    return lambda generator: low + generator.random()


@pytest.mark.parametrize(
    "probabilities",
    [
        flat(2),
        flat(10),
        {"s0": 0.1, "s1": 0.9},
    ],
    ids=["two", "ten", "a rare one of two"],
)
def test_a_subspace_that_cannot_beat_the_best_gets_about_a_tenth_of_its_share(probabilities: dict[str, float]) -> None:
    """Less, but never nothing, however rare it is under the search space's own law."""
    laws: dict[str, Law] = {name: uniform_from(0.0) for name in probabilities}
    shares = PromiseShares(probabilities)
    # In these trials every subspace gets its first losses, and the deals before that decay.
    dealt_out(shares, {**laws, "s0": uniform_from(100.0)}, int(5 * HALF_LIFE / probabilities["s0"]))
    trials = int(100 / (FLOOR * probabilities["s0"]))
    counts = dealt_out(shares, {**laws, "s0": uniform_from(100.0)}, trials, seed=1)
    assert 0.5 * FLOOR < counts["s0"] / (trials * probabilities["s0"]) < 2.5 * FLOOR
    others = [counts[name] / (trials * probabilities[name]) for name in list(probabilities)[1:]]
    assert min(others) > 0.6


def test_the_more_promising_of_two_gets_more() -> None:
    """Both can beat the best, one of them seldom."""
    shares = PromiseShares(flat(2))
    wide, narrow = (
        (lambda generator: float(generator.normal(0, 1.0))),
        (lambda generator: float(generator.normal(0, 0.5))),
    )
    counts = dealt_out(shares, {"s0": wide, "s1": narrow}, 2000)
    assert 1.2 * counts["s1"] < counts["s0"]
    assert counts["s1"] > FLOOR * 1000 * 0.8


def as_things_stand(shares: PromiseShares, trials: int) -> dict[str, float]:
    """Deal trials without new results. Return each subspace's part of them, relative to its even share."""
    counts: Counter[str] = Counter()
    for _ in range(trials):
        name = next_in_turn(shares)
        shares.deal(name)
        counts[name] += 1
    return {name: counts[name] * len(shares.backlogs()) / trials for name in shares.backlogs()}


def judged(losses: Mapping[str, Iterable[float]]) -> PromiseShares:
    """Even shares of these subspaces, told these losses by turns and as much of a useless one as makes it look."""
    shares = PromiseShares({name: 1 / len(losses) for name in losses})
    for name, values in losses.items():
        for value in values:
            shares.tell(ended(name, value))
    worst = max((value for values in losses.values() for value in values), default=0.0)
    for _ in range(RENEW_RESULTS):
        shares.tell(ended(next(iter(losses)), worst))
    return shares


SPREAD = [0.1 * n for n in range(5 * MIN_LOSSES)]


def test_a_subspace_with_too_few_losses_to_be_judged_keeps_its_full_share() -> None:
    few = [1e6] * (MIN_LOSSES - 1)
    got = as_things_stand(judged({"good": SPREAD, "bad": [value + 1e6 for value in SPREAD], "new": few}), 3000)
    assert got["new"] >= 1.0
    assert got["new"] >= 0.95 * got["good"]
    assert got["bad"] < 2 * FLOOR


def test_with_too_few_losses_everywhere_shares_are_even() -> None:
    got = as_things_stand(judged({"a": [], "b": SPREAD[: MIN_LOSSES - 1], "c": [1e300, 2.0]}), 3000)
    assert got == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0}, abs=0.02)


def test_where_all_losses_are_equal_shares_are_even() -> None:
    for loss in (0.0, -5.0, 1e300):
        got = as_things_stand(judged({name: [loss] * 30 for name in "abc"}), 3000)
        assert got == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0}, abs=0.02)


def test_a_subspace_of_constant_losses_is_not_expected_to_win() -> None:
    got = as_things_stand(judged({"varied": SPREAD, "constant": [SPREAD[0]] * 50}), 3000)
    assert got["constant"] < 2 * FLOOR


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from("abcde"),
        st.lists(st.one_of(st.floats(-1e300, 1e300), st.sampled_from([0.0, 1.0, 1e-300, -1e300, 1e300])), max_size=60),
        min_size=1,
    )
)
def test_whatever_the_losses_every_subspace_keeps_about_a_tenth_of_its_share_at_least(
    losses: dict[str, list[float]],
) -> None:
    shares = judged(losses)
    assert all(math.isfinite(behind) and behind >= 0 for behind in shares.backlogs().values())
    got = as_things_stand(shares, 500 * len(losses))
    assert min(got.values()) >= 0.6 * FLOOR


def test_a_promise_that_changes_is_followed_and_the_past_is_not_made_up_for() -> None:
    """Once it proves to be the best, a subspace gets the larger part at once, but not all that it missed before."""
    shares = PromiseShares(flat(2))
    dealt_out(shares, {"s0": uniform_from(100.0), "s1": uniform_from(0.0)}, 1000)
    before = as_things_stand(shares, 200)
    assert before["s0"] < 2 * FLOOR
    for n in range(MIN_LOSSES * 5):
        shares.tell(ended("s0", -100.0 - n))
    soon = as_things_stand(shares, 4 * HALF_LIFE * 2)
    assert soon["s0"] > 1.3
    assert soon["s1"] > 0, "s0 is not given all that it did not get before"
    later = as_things_stand(shares, 1000)
    assert later["s1"] > 0.5 * FLOOR
    assert later["s0"] == pytest.approx(soon["s0"], rel=0.35)


def test_losses_are_compared_at_the_budget_at_which_most_trials_began_of_late() -> None:
    def told(budget_of_few: float) -> dict[str, float]:
        shares = PromiseShares(flat(2))
        for n in range(60):
            shares.tell(ended("s0", 1.0 + n % 7, budget=9.0))
            shares.tell(ended("s1", 100.0 + n % 7, budget=9.0))
            if n % 2:
                # At another budget s1 is the better one, which says nothing of this one.
                shares.tell(ended("s1", -1.0 - n, budget=budget_of_few))
                shares.tell(ended("s0", 50.0 + n, budget=budget_of_few))
        return as_things_stand(shares, 400)

    assert told(1.0)["s1"] < 2 * FLOOR
    assert told(9.0)["s1"] > 1.0


@pytest.mark.parametrize("budget", [1.0, 9.0])
def test_a_subspace_that_only_fails_has_no_promise_at_whichever_budget(budget: float) -> None:
    shares = PromiseShares(flat(2))
    for n in range(80):
        shares.tell(ended("s0", 1.0 + n % 7, budget=9.0))
        shares.tell(ended("s1", None, budget=budget))
    assert as_things_stand(shares, 400)["s1"] < 2 * FLOOR


@pytest.mark.parametrize(("budget", "counts"), [(9.0, True), (1.0, False)])
def test_failures_at_another_budget_count_no_more_than_losses_there(budget: float, *, counts: bool) -> None:
    shares = PromiseShares(flat(2))
    for n in range(80):
        shares.tell(ended("s0", 1.0 + n % 7, budget=9.0))
        shares.tell(ended("s1", 1.0 + n % 7, budget=9.0))
        if n % 2:
            shares.tell(ended("s1", None, budget=budget))
    assert (as_things_stand(shares, 400)["s1"] < 0.95) == counts


def test_trials_of_elsewhere_count_as_those_of_the_lowest_budget() -> None:
    shares = PromiseShares(flat(2))
    for n in range(100):
        shares.tell(ended("s0", 1.0 + n % 7))
        shares.tell(ended("s1", 100.0 + n % 7))
    for n in range(60):
        shares.tell(ended("s0", 1.0 + n % 7, budget=1.0))
        shares.tell(ended("s1", -100.0 + n % 7, budget=1.0))
    assert as_things_stand(shares, 400)["s1"] > 1.5


def test_the_shares_in_force_are_looked_at_anew_after_so_many_results_and_not_before() -> None:
    shares = PromiseShares(flat(2))
    for place in range(RENEW_RESULTS * 4):
        shares.tell(ended("s1", 100.0 + place))
        shares.tell(ended("s0", float(place)))
    for _ in range(50):
        shares.deal("s0")
        shares.deal("s1")
    known = shares.backlogs()
    for _ in range(RENEW_RESULTS - 1):
        shares.tell(ended("s1", -1e6))
    assert shares.backlogs() == known
    shares.tell(ended("s1", -2e6))
    assert shares.backlogs() != known


def test_until_something_is_known_promise_deals_by_the_spaces_own_law() -> None:
    probabilities = {"s0": 0.2, "s1": 0.7, "s2": 0.1}
    shares = PromiseShares(probabilities)
    counts: Counter[str] = Counter()
    for _ in range(500):
        name = next_in_turn(shares)
        shares.deal(name)
        counts[name] += 1
    for name, probability in probabilities.items():
        assert counts[name] == pytest.approx(500 * probability, rel=0.1)


# The promise itself


def test_the_promise_of_exponential_losses_is_the_chance_that_the_next_one_is_the_best() -> None:
    """Over many histories: -log(uniform) turned over has an exponential lower tail, as the estimate assumes."""
    generator = np.random.default_rng(0)
    chances, hits = [], []
    for _ in range(3000):
        losses = -generator.exponential(size=61)
        best = float(losses[:60].min())
        chances.append(promise(list(losses[:60]), best))
        hits.append(losses[60] < best)
    assert np.mean(hits) == pytest.approx(1 / 61, rel=0.35)
    assert np.mean(chances) == pytest.approx(np.mean(hits), rel=0.5)


def test_a_promise_falls_with_the_distance_from_the_best() -> None:
    promises = [promise(SPREAD, best) for best in (0.0, -1.0, -10.0, -1e9)]
    assert promises == sorted(promises, reverse=True)
    assert promises[0] > promises[1] > 0
    assert promises[-1] == 0.0


@given(
    st.lists(st.floats(-1e300, 1e300), min_size=MIN_LOSSES, max_size=100),
    st.floats(0, 1e300),
)
def test_a_promise_is_a_chance(losses: list[float], further: float) -> None:
    assert 0.0 <= promise(losses, min(losses) - further) <= 1.0


def test_failures_lower_a_promise_and_nothing_is_expected_where_all_trials_fail() -> None:
    failed = [math.inf] * len(SPREAD)
    assert promise(SPREAD + failed, -1.0) == pytest.approx(promise(SPREAD, -1.0) / 2)
    for successes in ([], [0.0], [0.0, 1.0, 2.0]):
        assert promise(successes + failed, -1.0) == 0.0


def test_of_too_few_losses_there_is_no_promise() -> None:
    assert math.isnan(promise([0.0] * (MIN_LOSSES - 1), -1.0))
    assert not math.isnan(promise([0.0] * MIN_LOSSES, -1.0))


# By name


def test_shares_are_made_by_name_and_an_unknown_one_is_refused_with_the_known() -> None:
    assert type(make_shares("uniform", flat(2))) is UniformShares
    assert type(make_shares("promise", flat(2))) is PromiseShares
    assert type(make_shares("even", flat(2))) is EvenShares
    with pytest.raises(UsageError, match=r"'fair'.*even, uniform, promise, paper"):
        make_shares("fair", flat(2))


def test_only_uniform_and_even_shares_are_fixed_by_the_number_of_trials() -> None:
    assert UniformShares(flat(2)).fixed
    assert EvenShares(flat(2)).fixed
    assert not PaperShares(flat(2)).fixed
    assert not PromiseShares(flat(2)).fixed
