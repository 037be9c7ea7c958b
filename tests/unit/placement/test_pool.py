"""Of the drawn trials a slot takes the one its class is comparatively good at, and none waits for ever."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hyperopt import hp
from msgspec.structs import replace

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.placement.base import Excess, Offers, Slot
from shadho_celery.placement.model import TYPICAL, CostModel, Costs
from shadho_celery.placement.policies import CostPolicy
from shadho_celery.placement.pool import ASIDE, LEAST, MOST, MOST_WAIT, REFILL, Pool
from shadho_celery.space.compile import compile_space
from shadho_celery.space.features import Array
from shadho_celery.space.split import Subspace, split

FLAT = split(compile_space({"w": hp.uniform("w", 0, 1)}))
HALVES = split(
    compile_space(
        hp.choice("h", [{"a": hp.uniform("a", 0, 1), "b": hp.uniform("b", 0, 1)}, {"w": hp.uniform("w", 0, 1)}])
    )
)
CLASSES = ["gpu", "cpu"]
#: seconds of params by class
Seconds = Callable[[Params], Sequence[float]]


def by_width(params: Params) -> tuple[float, float]:
    return 20 + 10 * float(params["w"]), 20 + 400 * float(params["w"])


def crossing(params: Params) -> tuple[float, float]:
    return 20.0, 40 * float(params["w"])


class Known(CostModel):
    """Seconds that are known for certain. Those of typical trials are the same on all classes."""

    def __init__(self, subspaces: Sequence[Subspace], seconds: Seconds = by_width) -> None:
        super().__init__(subspaces)
        self.known = seconds

    def costs(self, trials: Sequence[Trial], classes: Sequence[str], optimism: float = 0.0) -> Costs:
        columns = [CLASSES.index(name) for name in classes]
        rows = [(1.0, 1.0) if trial.params is TYPICAL else self.known(trial.params) for trial in trials]
        logs = np.log(np.array(rows, float).reshape(len(rows), len(CLASSES))[:, columns])
        return Costs(logs, np.zeros(logs.shape))


def drawn(number: int, w: float = 0.5, subspace: str = "all", slots: int = 1) -> Trial:
    return Trial(number=number, subspace=subspace, params={"w": w}, slots=slots)


def pool_of(
    *trials: Trial,
    shares: Mapping[str, float] | None = None,
    slots: int = 16,
    model: CostModel | None = None,
    is_adaptive: bool = False,
) -> Pool:
    pool = Pool(model or Known(FLAT), shares or {"all": 1.0}, is_adaptive=is_adaptive)
    pool.see(CLASSES, slots)
    pool.add(trials)
    return pool


def policy_of(
    *trials: Trial,
    model: CostModel | None = None,
    shares: Mapping[str, float] | None = None,
    fleet: tuple[int, int] = (4, 12),
) -> CostPolicy:
    model = model or Known(FLAT)
    policy = CostPolicy(model, Pool(model, shares or {"all": 1.0}))
    policy.see([ComputeClass(name=name, slots=slots) for name, slots in zip(CLASSES, fleet, strict=True)])
    policy.offer(trials)
    return policy


class NoLoad:
    """A study none of whose attempts takes a slot."""

    def taken(self, compute_class: str) -> int:
        return 0

    def running(self) -> Mapping[str, int]:
        return {}


def pick(
    policy: CostPolicy,
    name: str,
    backlogs: Mapping[str, float] | None = None,
    fits: Callable[[Trial], bool] = lambda trial: True,
    seconds_left: float = math.inf,
    excess: Excess | None = None,
) -> Trial | str | None:
    backlogs = backlogs or {"all": 0.0}
    slot = Slot(ComputeClass(name=name, slots=1), NoLoad(), excess=excess, seconds_left=seconds_left)
    choice = policy.pick(slot, Offers(backlogs, [*backlogs]), lambda trial, compute_class: fits(trial))
    return None if choice is None else choice.picked


# Its size


@pytest.mark.parametrize(
    ("slots", "size", "size_adaptive"),
    [(2, 8, None), (16, 32, 8), (150, 74, 37), (10_000, 2 * MOST, MOST)],
)
def test_it_holds_32_trials_or_half_of_the_slots_and_fewer_on_small_fleets(
    slots: int, size: int, size_adaptive: int | None
) -> None:
    assert pool_of(slots=slots).missing() == {"all": size}
    assert pool_of(slots=slots, is_adaptive=True).missing() == ({} if size_adaptive is None else {"all": size_adaptive})


def test_for_several_subspaces_it_holds_a_quarter_of_the_slots() -> None:
    halves = dict.fromkeys((subspace.name for subspace in HALVES), 0.5)
    assert pool_of(shares=halves, slots=160, model=Known(HALVES)).missing() == dict.fromkeys(halves, 20)


def test_without_a_choice_of_classes_nothing_is_drawn_ahead() -> None:
    pool = pool_of()
    for classes in ([], ["gpu"]):
        pool.see(classes, 16)
        assert pool.missing() == {}


def test_each_subspace_has_its_part_and_the_smallest_ones_have_none() -> None:
    shares = {"half": 0.5, "quarter": 0.25, "least": 0.05}
    assert pool_of(shares=shares).missing() == {"half": 16, "quarter": 8}
    assert pool_of(shares=shares, is_adaptive=True).missing() == {"half": 4, "quarter": 2}


def test_what_is_missing_is_drawn_some_at_a_time() -> None:
    pool = pool_of(*map(drawn, range(LEAST)))
    for number in range(LEAST // REFILL - 1):
        pool.take(number)
        assert pool.missing() == {}
    pool.take(0)
    assert pool.missing() == {"all": LEAST // REFILL}


# What it holds


def test_it_keeps_the_order_and_the_seconds_of_its_trials_whatever_is_taken() -> None:
    trials = [drawn(number, number / 10) for number in range(10)]
    pool = pool_of(*trials)
    for number in (3, 0, 9, 5):
        pool.take(pool.trials.index(trials[number]))
    assert [trial.number for trial in pool.trials] == [1, 2, 4, 6, 7, 8]
    assert pool.costs().log_seconds == pytest.approx(np.log([by_width(trial.params) for trial in pool.trials]))
    pool.see(["cpu"], 1)
    assert pool.costs().log_seconds == pytest.approx(np.log([by_width(trial.params)[1:] for trial in pool.trials]))
    pool.see([], 0)
    assert pool.costs().log_seconds.shape == (6, 0)


def test_what_is_learned_counts_for_the_trials_that_are_there() -> None:
    model = CostModel(FLAT)
    pool = pool_of(drawn(0, 0.05), drawn(1, 0.95), model=model)
    assert np.ptp(pool.costs().log_seconds) == 0.0
    generator = np.random.default_rng(0)
    for number in range(200):
        w, column = float(generator.random()), int(generator.integers(2))
        outcome = Outcome(state=TrialState.COMPLETE, seconds=by_width({"w": w})[column])
        ended = drawn(number + 2, w).evolve(compute_class=CLASSES[column])
        model.tell(
            Trial(
                **{
                    **{f: getattr(ended, f) for f in ended.__struct_fields__},
                    "state": outcome.state,
                    "outcome": outcome,
                }
            )
        )
    ratios = np.diff(pool.costs().log_seconds, axis=1)[:, 0]
    assert ratios == pytest.approx([np.log(40 / 20.5), np.log(400 / 29.5)], abs=0.3)


# The choice


def test_a_class_takes_what_it_is_comparatively_good_at() -> None:
    small, large = drawn(0, 0.1), drawn(1, 0.9)
    model = Known(FLAT, crossing)
    for order in ([small, large], [large, small]):
        for name, best in (("gpu", large), ("cpu", small)):
            assert pick(policy_of(*order, model=model), name) == best


def test_of_trials_alike_the_oldest_is_taken() -> None:
    for model in (CostModel(FLAT), Known(FLAT, lambda params: (7.0, 21.0))):
        for name in CLASSES:
            assert pick(policy_of(*(drawn(number, number / 9) for number in range(9)), model=model), name) == drawn(
                0, 0
            )


def test_of_what_fits_the_best_is_taken_and_a_new_one_is_wanted_only_if_nothing_fits() -> None:
    policy = policy_of(drawn(0, 0.1), drawn(1, 0.3), drawn(2, 0.9), model=Known(FLAT, crossing))
    assert pick(policy, "gpu", fits=lambda trial: trial.number < 2) == drawn(1, 0.3)
    assert pick(policy, "gpu", fits=lambda trial: False) == "all"


def test_a_subspace_far_behind_comes_first_drawn_ahead_or_not() -> None:
    names = [subspace.name for subspace in HALVES]
    ahead = drawn(0, subspace=names[0])
    model = Known(HALVES, lambda params: (10.0, 20.0))
    policy = policy_of(ahead, model=model, shares=dict.fromkeys(names, 0.5))
    assert pick(policy, "gpu", {names[0]: 0.0, names[1]: 100.0}) == names[1]
    assert pick(policy, "gpu", {names[0]: 100.0, names[1]: 0.0}) == ahead


@pytest.mark.parametrize("fleet", [(4, 12), (1, 15)])
def test_the_prices_keep_every_class_busy_with_what_it_is_good_at(fleet: tuple[int, int]) -> None:
    """Known seconds, a slot after the other: nearly the trials an hour of the best threshold between the classes."""
    generator = np.random.default_rng(3)
    policy = policy_of(fleet=fleet)
    free = sorted((0.0, place, CLASSES[place >= fleet[0]]) for place in range(sum(fleet)))
    count = number = 0
    while free[0][0] < 20_000.0:
        for _ in range(policy.wants().get("all", 0)):
            policy.offer([drawn(number, float(generator.random()))])
            number += 1
        now, place, name = free.pop(0)
        trial = pick(policy, name)
        assert isinstance(trial, Trial)
        seconds = by_width(trial.params)[CLASSES.index(name)]
        free = sorted([*free, (now + seconds, place, name)])
        count += 1
    assert count / 20_000 > 0.95 * best_threshold(fleet)


def test_a_trial_of_three_slots_moves_a_price_as_far_as_three_trials_of_one_slot() -> None:
    moved = []
    for slots in (1, 3):
        trials = [replace(drawn(n, x), slots=slots) for n, x in enumerate((0.1, 0.5, 0.9))]
        policy = policy_of(*trials, model=Known(FLAT, crossing))
        taken = pick(policy, "cpu", fits=lambda trial: trial.number == 2)
        assert isinstance(taken, Trial)
        prices = policy.prices("all")
        moved.append(math.log(prices["gpu"] / prices["cpu"]))
    assert moved[1] == pytest.approx(3 * moved[0])
    assert moved[0] > 0.0


def best_threshold(fleet: tuple[int, int]) -> float:
    """Trials a second if the CPUs do those up to a width, and the GPUs the others: the best such width."""
    widths = np.linspace(0.001, 0.999, 999)
    cpu, gpu = widths * (20 + 400 * widths / 2), (1 - widths) * (20 + 10 * (1 + widths) / 2)
    return float(np.minimum(fleet[1] / cpu, fleet[0] / gpu).max())


# The wait


def newest_first(trials: Sequence[Trial]) -> Array:
    return np.array([-100.0 * trial.number for trial in trials])


def picks_before(policy: CostPolicy, name: str, wanted: Trial, most: int, seconds_left: float = math.inf) -> int:
    """Return how many trials a class takes, the newest first, before this one: at most `most`."""
    for number in range(most):
        if pick(policy, name, excess=newest_first, seconds_left=seconds_left) == wanted:
            return number
        policy.offer([drawn(wanted.number + number + LEAST)])
    return most


@pytest.mark.parametrize(("name", "rounds"), [("gpu", 1), ("cpu", 2)])
def test_a_trial_that_has_waited_is_taken_where_it_costs_least_and_later_everywhere(name: str, rounds: int) -> None:
    unwanted = drawn(0, 0.5)
    policy = policy_of(unwanted, *(drawn(number) for number in range(1, LEAST)))
    bound = rounds * MOST_WAIT * LEAST
    assert picks_before(policy, name, unwanted, 2 * bound) == bound


def test_an_overdue_trial_is_not_taken_where_it_would_end_too_late() -> None:
    unwanted = drawn(0, 0.5)
    policy = policy_of(unwanted, *(drawn(number, 0.01) for number in range(1, LEAST)))
    bound = 2 * MOST_WAIT * LEAST
    assert picks_before(policy, "cpu", unwanted, bound + 9, seconds_left=60.0) == bound + 9
    assert pick(policy, "gpu", excess=newest_first, seconds_left=60.0) == unwanted


def test_the_wait_counts_trials_of_its_own_subspace() -> None:
    often, rare = [subspace.name for subspace in HALVES]
    pool = pool_of(drawn(0, subspace=rare), model=Known(HALVES), shares={often: 0.5, rare: 0.125})
    for number in range(1, 500):
        pool.add([drawn(number, subspace=often)])
        assert pool.take(1).number == number
    assert pool.waits() == [0.0]


# The limit on time


def test_near_the_limit_a_slot_takes_what_ends_in_time_and_before_what_it_is_good_at() -> None:
    narrow, wide = drawn(0, 0.1), drawn(1, 0.9)
    for seconds_left, best in ((math.inf, wide), (3600.0, wide), (25.0, narrow)):
        policy = policy_of(narrow, wide, model=Known(FLAT, lambda params: (200 * params["w"], 900 * params["w"] ** 2)))
        assert pick(policy, "gpu", seconds_left=seconds_left) == best


def test_trials_that_would_end_too_late_on_each_class_take_no_places_up_to_a_number() -> None:
    policy = policy_of(*(drawn(number, 0.9) for number in range(LEAST)), drawn(LEAST, 0.0))
    assert policy.wants() == {}
    assert pick(policy, "gpu", seconds_left=22.0) == drawn(LEAST, 0.0)
    # Sixteen slots.
    assert policy.wants() == {"all": ASIDE * 16}
    policy.offer([drawn(LEAST + number, 0.9) for number in range(1, ASIDE * 16 + 1)])
    pick(policy, "gpu", seconds_left=22.0)
    assert policy.wants() == {}
    pick(policy, "gpu")
    assert policy.wants() == {}
