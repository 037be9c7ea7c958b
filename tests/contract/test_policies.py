"""What every placement policy owes the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.names import POLICIES
from shadho_celery.core.trial import Trial
from shadho_celery.placement.base import Offers, Policy, Slot
from shadho_celery.placement.model import CostModel
from shadho_celery.placement.policies import make_policy
from shadho_celery.placement.pool import WHOLE
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SUBSPACES = split(compile_space(hp.choice("k", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.uniform("b", 0, 1)}])))
NAMES = [subspace.name for subspace in SUBSPACES]
CLASSES = [ComputeClass(name="gpu", slots=4, hosts={"g": 4}), ComputeClass(name="cpu", slots=12, hosts={"c": 12})]
EVEN = dict.fromkeys(NAMES, 0.0)


class NoLoad:
    """A study none of whose attempts takes a slot."""

    def taken(self, compute_class: str) -> int:
        return 0

    def running(self) -> Mapping[str, int]:
        return {}


SLOTS = [Slot(each, NoLoad()) for each in CLASSES]


def made(name: str, *, spans_space: bool = False) -> Policy:
    generator = np.random.default_rng(0)
    policy = make_policy(name, SUBSPACES, CostModel(SUBSPACES), generator, spans_space=spans_space)
    policy.see(CLASSES)
    return policy


def anything(trial: Trial, compute_class: ComputeClass) -> bool:
    return True


def nothing(trial: Trial, compute_class: ComputeClass) -> bool:
    return False


def trial_of(place: int, number: int, **facts: int) -> Trial:
    params = {"k": place, "ab"[place]: 0.5}
    return Trial(number=number, subspace=NAMES[place], params=params, **facts)


@pytest.mark.parametrize("name", POLICIES)
def test_a_slot_gets_nothing_where_nothing_is_offered_and_else_a_subspace_that_is_open(name: str) -> None:
    policy = made(name)
    for slot in SLOTS:
        assert policy.pick(slot, Offers(EVEN, []), anything) is None
        for open_ in (NAMES, NAMES[::-1], NAMES[:1], NAMES[1:]):
            choice = policy.pick(slot, Offers(EVEN, open_), anything)
            assert choice is not None
            assert choice.picked in open_


@pytest.mark.parametrize("name", POLICIES)
def test_a_promoted_trial_is_sent_where_a_slot_could_get_nothing_else(name: str) -> None:
    promoted = trial_of(0, 7, rung=1, origin=7)
    for slot in SLOTS:
        choice = made(name).pick(slot, Offers(EVEN, [], promotions=[promoted]), anything)
        assert choice is not None
        assert choice.picked == promoted


@pytest.mark.parametrize("name", POLICIES)
def test_each_trial_that_is_drawn_ahead_is_given_out_once(name: str) -> None:
    policy, offered, got = made(name), [], []
    for subspace, count in policy.wants().items():
        drawn = [trial_of(NAMES.index(subspace), len(offered) + number) for number in range(count)]
        policy.offer(drawn)
        offered += drawn
    assert bool(offered) == (name == "cost")
    assert not policy.wants()
    if offered:
        assert policy.pick(SLOTS[0], Offers(EVEN, []), nothing) is None
    while (choice := policy.pick(SLOTS[len(got) % 2], Offers(EVEN, []), anything)) is not None:
        got += [choice.picked] if isinstance(choice.picked, Trial) else []
    assert sorted(trial.number for trial in got) == [trial.number for trial in offered]


@pytest.mark.parametrize("name", ["cost", "fifo"])
def test_where_one_sampler_spans_the_space_it_draws_once_nothing_drawn_ahead_fits(name: str) -> None:
    policy = made(name, spans_space=True)
    whole = Offers({}, [WHOLE])
    if count := policy.wants().get(WHOLE):
        policy.offer([trial_of(number % 2, number) for number in range(count)])
        choice = policy.pick(SLOTS[0], whole, anything)
        assert choice is not None
        assert isinstance(choice.picked, Trial)
    choice = policy.pick(SLOTS[1], whole, nothing)
    assert choice is not None
    assert choice.picked == WHOLE
