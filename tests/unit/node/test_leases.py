"""What runs in a worker, apart from Redis."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock

import pytest
from msgspec import to_builtins

from shadho_celery.core.trial import MAX_COUNT
from shadho_celery.fleet.registry import MAX_ANNOUNCEMENT, MAX_SLOTS, MAX_TOLD, RunningTrial, Share
from shadho_celery.fleet.seats import Seat
from shadho_celery.node.leases import GIVEN_BACK, Lease, Leases


def lease(number: int = 1, study: str = "study", seat: Seat | None = None) -> Lease:
    return Lease(study=study, number=number, attempt=1, delivery=f"d{number}", runner=MagicMock(), seat=seat)


@pytest.fixture
def channel() -> MagicMock:
    """Answers that all attempts may run on."""
    return MagicMock(**{"renew.side_effect": lambda study, attempts: ["ok" for _ in attempts]})


@pytest.fixture
def seats() -> MagicMock:
    return MagicMock(**{"renew.side_effect": lambda study, held: ["ok" for _ in held]})


@pytest.fixture
def leases(channel: MagicMock, seats: MagicMock) -> Leases:
    return Leases(channel, seats)


def test_a_trial_that_has_ended_is_not_stopped_any_more_for_its_slot_may_run_another(leases: Leases) -> None:
    """Its lease ends with it, so a renewal that was under way is told that the lease is gone."""
    held = lease()
    leases.stop(held, "gone")
    held.runner.stop_trial.assert_not_called()  # type: ignore[attr-defined]
    assert not held.stopped
    with leases.holding(held):
        assert len(leases) == 1
        leases.stop(held, "cancel")
    assert len(leases) == 0
    held.runner.stop_trial.assert_called_once()  # type: ignore[attr-defined]
    assert held.stopped == "cancel"


def test_where_the_system_refuses_threads_a_trial_is_stopped_without_time_to_stop_by_itself(
    leases: Leases, refuse_threads: Callable[[str], None]
) -> None:
    refuse_threads("_while_live")
    held = lease()
    with leases.holding(held):
        leases.stop(held, "prune")
    runner = held.runner
    assert isinstance(runner, MagicMock)
    assert [call[0] for call in runner.mock_calls] == ["stop_trial", "stop_trial", "kill"]


def test_what_runs_is_renewed_study_by_study_and_replicas_by_their_seat(
    leases: Leases, channel: MagicMock, seats: MagicMock
) -> None:
    seat = Seat(number=3, attempt=1, call=1, rank=2)
    first, second, replica = lease(1, "a"), lease(2, "b"), lease(3, "b", seat)
    with leases.holding(first), leases.holding(second), leases.holding(replica):
        leases.renew()
    renewed = sorted((call.args[0], list(call.args[1])) for call in channel.renew.call_args_list)
    assert renewed == [("a", [(1, 1)]), ("b", [(2, 1)])]
    seats.renew.assert_called_once_with("b", [(seat, "d3")])
    leases.renew()
    assert (channel.renew.call_count, seats.renew.call_count) == (2, 1), "nothing runs any more"


@pytest.mark.parametrize("answer", ["cancel", "gone"])
def test_an_attempt_that_is_to_end_is_stopped_once_and_the_others_go_on(
    leases: Leases, channel: MagicMock, answer: str
) -> None:
    unwanted, other = lease(1), lease(2)
    channel.renew.side_effect = None
    channel.renew.return_value = [answer, "ok"]
    with leases.holding(unwanted), leases.holding(other):
        for _ in range(2):
            leases.renew()
    unwanted.runner.stop_trial.assert_called_once()  # type: ignore[attr-defined]
    other.runner.stop_trial.assert_not_called()  # type: ignore[attr-defined]
    assert (unwanted.stopped, other.stopped) == (answer, "")


def test_a_backup_whose_slot_is_wanted_is_stopped(leases: Leases, seats: MagicMock) -> None:
    replica = lease(3, seat=Seat(number=3, attempt=1, call=1, rank=2))
    seats.renew.side_effect = None
    seats.renew.return_value = ["yield"]
    with leases.holding(replica):
        leases.renew()
    assert replica.stopped == "yield"


def test_once_closed_all_that_runs_or_begins_is_given_back_but_not_what_was_stopped_before(leases: Leases) -> None:
    running, cancelled, late = lease(1), lease(2), lease(3)
    with leases.holding(running), leases.holding(cancelled):
        leases.stop(cancelled, "cancel")
        leases.close()
        with leases.holding(late):
            assert [each.stopped for each in (running, cancelled, late)] == [GIVEN_BACK, "cancel", GIVEN_BACK]


def trial(number: int, rank: int | None = None, **facts: Any) -> RunningTrial:
    return RunningTrial(number=number, started_at=50.0 + number, rank=rank, **facts)


def test_a_worker_tells_whose_trials_it_runs(leases: Leases) -> None:
    held = [
        Lease(
            study=key,
            name=f"study {key}",
            started_at=50.0 + n,
            number=n,
            attempt=1,
            delivery=f"d{n}",
            runner=MagicMock(),
        )
        for n, key in enumerate("aab")
    ]
    held[1].seat = Seat(number=1, attempt=1, call=1, rank=2)
    held[2].slots, held[2].expected = 4, 90.0
    with leases.holding(held[0]), leases.holding(held[1]), leases.holding(held[2]):
        assert leases.studies() == {
            "a": Share(name="study a", slots=2, trials=[trial(0), trial(1, rank=2)]),
            "b": Share(name="study b", slots=4, trials=[trial(2, slots=4, expected=90.0)]),
        }
    assert leases.studies() == {}


def test_a_worker_of_very_many_slots_tells_of_some_trials_so_that_its_announcement_is_not_too_long(
    leases: Leases,
) -> None:
    with ExitStack() as stack:
        for number in range(MAX_TOLD + 5):
            stack.enter_context(leases.holding(lease(number)))
        [share] = leases.studies().values()
    assert (share.slots, len(share.trials)) == (MAX_TOLD + 5, MAX_TOLD)
    longest = RunningTrial(number=MAX_COUNT, started_at=1e10 / 3, rank=MAX_COUNT, slots=MAX_SLOTS, expected=1e12 / 3)
    assert len(json.dumps(to_builtins(longest))) * MAX_TOLD < MAX_ANNOUNCEMENT / 2


def test_all_running_trials_are_told_of_a_preemption_and_may_return(leases: Leases) -> None:
    """They are not interrupted, and those that have ended are not told."""
    held, ended = lease(), lease(2)
    with leases.holding(ended):
        pass
    with leases.holding(held):
        leases.preempt()
        assert not held.stopped
    held.runner.preempt.assert_called_once_with()  # type: ignore[attr-defined]
    ended.runner.preempt.assert_not_called()  # type: ignore[attr-defined]
    assert leases.preempted.is_set()
