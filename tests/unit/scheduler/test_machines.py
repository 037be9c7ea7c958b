"""A trial that takes slots of one worker starts on a machine that has them; otherwise a machine is reserved for it."""

from __future__ import annotations

from dataclasses import replace as evolve

import pytest

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Lost, Started, Trial
from shadho_celery.placement.memory import MemoryFit
from shadho_celery.placement.widths import Reservations
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.state import StudyState


def fleet(*slots: int, allowance: float | None = None, widest: int = 0) -> ComputeClass:
    """A class with a machine of each of these numbers of slots: a, b and so on, each with one worker."""
    machines = tuple(
        ComputeClass(name="gpu", slots=count, widest=widest or count, hosts={host: count}, host=host)
        for host, count in zip("abc", slots, strict=False)
    )
    hosts = dict(zip("abc", slots, strict=False))
    return ComputeClass(
        name="gpu",
        slots=sum(slots),
        allowance=allowance,
        widest=widest or max(slots),
        hosts=hosts,
        machines=machines,
    )


@pytest.fixture
def study() -> StudyState:
    record = StudyRecord(key="k", name="n", module="", seed=0, space={}, created_at=0.0)
    return StudyState(MemoryStore(), record, 1, clock=ManualClock())


def added(study: StudyState, slots: int = 1) -> Trial:
    return study.add("all", {}, seed=0, slots=slots)


def run_on(study: StudyState, host: str, slots: int) -> None:
    study.send(added(study, slots), "gpu", only_on=host)


def test_a_class_is_as_wide_as_its_largest_worker(study: StudyState) -> None:
    known = fleet(4, 2)
    assert (known.slots, known.room, [place.room for place in known.targets]) == (6, 4, [4, 2])
    assert fleet(4, widest=2).room == 2, "two workers of two slots on one machine"
    assert ComputeClass(name="gpu", slots=3).targets == [ComputeClass(name="gpu", slots=3)]


def test_a_machine_has_the_slots_that_its_trials_leave_within_the_studys_share(study: StudyState) -> None:
    run_on(study, "a", 3)
    reservations = Reservations(study)
    assert [reservations.free(place) for place in fleet(4, 2).targets] == [1, 2]
    assert [reservations.free(place) for place in fleet(4, 2, allowance=4.0).targets] == [1, 1]


def test_the_slots_of_an_attempt_are_those_of_the_machine_that_runs_it_until_it_ends(study: StudyState) -> None:
    attempt, reservations = study.send(added(study, 2), "gpu"), Reservations(study)
    places = fleet(4, 2).targets
    assert [reservations.free(place) for place in places] == [4, 2]
    study.tell(Started(number=attempt.number, attempt=1, host="b", worker="b1", at=0.0))
    assert [reservations.free(place) for place in places] == [4, 0]
    study.tell(Lost(number=attempt.number, attempt=1, reason="silent"))
    assert [reservations.free(place) for place in places] == [4, 2]


def test_a_trial_starts_where_it_leaves_fewest_slots_free_or_where_its_checkpoint_is(study: StudyState) -> None:
    run_on(study, "a", 2)
    places, reservations = fleet(4, 4, 4).targets, Reservations(study)
    assert reservations.best(added(study, 2), places, None).host == "a"
    assert reservations.best(added(study, 2), places, "c").host == "c"
    assert reservations.best(added(study, 3), places, None).host == "b"


def test_the_emptiest_machine_is_reserved_and_the_others_go_on(study: StudyState) -> None:
    run_on(study, "a", 3)
    run_on(study, "b", 1)
    places, reservations = fleet(4, 4).targets, Reservations(study)
    a, b = places
    wide, narrow = added(study, 4), added(study, 1)
    assert not [place for place in places if reservations.may_start(wide, place)]
    assert reservations.best(wide, places, None) == b
    reservations.reserved[b.key] = wide.number
    assert (reservations.may_take(b, narrow), reservations.may_take(a, narrow)) == (False, True)
    assert (reservations.may_take(b, wide), reservations.may_take(a, wide)) == (True, False)
    reservations.see([fleet(4, 2)])
    assert not reservations.reserved, "the machine became too narrow"


@pytest.mark.parametrize("allowance", [4.0, 2.0])
def test_other_machines_leave_a_reserved_one_its_part_of_the_studys_share(study: StudyState, allowance: float) -> None:
    """Otherwise the study would use its share up on other machines, and the wide trial would wait for ever."""
    run_on(study, "b", 1)
    a, b = fleet(4, 4, allowance=allowance).targets
    reservations = Reservations(study)
    wide = added(study, 4)
    reservations.reserved[b.key] = wide.number
    assert reservations.free(a) <= 0


def test_of_two_reservations_the_earlier_one_does_not_wait_for_the_later_one(study: StudyState) -> None:
    a, b = fleet(4, 4, allowance=4.0).targets
    reservations = Reservations(study)
    first, second = added(study, 4), added(study, 4)
    reservations.reserved = {a.key: first.number, b.key: second.number}
    assert (reservations.may_start(first, a), reservations.free(b)) == (True, 0)


def test_a_trial_wider_than_each_worker_fits_no_class(study: StudyState) -> None:
    from shadho_celery.placement.model import CostModel

    fit = MemoryFit(CostModel([]), ())
    known = fleet(4, 2)
    fit.see([known])
    assert [fit.fits(added(study, slots), known) for slots in (4, 5)] == [True, False]


def test_a_trial_starts_on_a_machine_once_one_of_its_workers_has_the_slots(study: StudyState) -> None:
    machine = evolve(fleet(8, widest=4).targets[0], by_worker={"a1": 4, "a2": 4})
    reservations = Reservations(study)

    def widest() -> int:
        return max(n for n in range(5) if n == 0 or reservations.may_start(added(study, n), machine))

    for worker, most in {"a1": 4, "a2": 2}.items():
        attempt = study.send(added(study, 2), "gpu", only_on="a")
        study.tell(Started(number=attempt.number, attempt=1, host="a", worker=worker, at=0.0))
        assert widest() == most
    assert reservations.free(machine) == 4
    run_on(study, "a", 1)
    assert widest() == 2, "what no worker has claimed yet leaves the other one alone"
    run_on(study, "a", 2)
    assert widest() == 1


def test_a_wide_trial_exceeds_the_share_in_its_turn_and_does_not_wait_until_slots_are_free(study: StudyState) -> None:
    """Narrow trials of other studies use all slots."""
    [found] = fleet(4, allowance=3.0).targets
    machine = evolve(found, busy=4)
    reservations, wide = Reservations(study), added(study, 2)
    assert reservations.may_start(wide, machine)
    run_on(study, "a", 2)
    assert reservations.may_start(wide, machine), "a part of the share is free"
    assert not reservations.may_start(wide, evolve(machine, turn=0)), "it is the turn of others"
    assert not reservations.may_start(wide, evolve(machine, most=3)), "the limit of the user"
    assert not reservations.may_start(wide, evolve(machine, allowance=2.0)), "all of the share is used"
