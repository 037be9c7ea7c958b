"""Commit rule: the vectors that count for a step, those that are dropped, and steps with missing replicas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import LocalContext
from shadho_celery.training.coordinator.backups import MIN_TIMES
from shadho_celery.training.coordinator.centre import ModelCentre
from shadho_celery.training.coordinator.coordinator import Coordinator, QuorumPolicy
from shadho_celery.training.coordinator.listener import Arrived, Joined, Left, Rejected
from shadho_celery.training.coordinator.run import Diverged, Run
from shadho_celery.training.plan import Plan
from shadho_celery.training.report import Log
from shadho_celery.training.strategies import Async, Strategy, Sync
from shadho_celery.training.wire.frames import Frame, Header, Kind
from shadho_celery.training.wire.vectors import Layout

EPOCH = 2


class FakePeer:
    """Replica without a connection; it keeps the steps and notices sent to it."""

    def __init__(self, place: int) -> None:
        self.place = self.rank = place
        self.sent: list[int] = []
        self.notices: list[tuple[Kind, int]] = []
        self.dropped: str | None = None
        self.dismissed: str | None = None
        self.read = 0

    def publish(self, frame: Frame) -> None:
        self.sent.append(frame.header.step)

    def notify(self, frame: Frame) -> None:
        self.notices.append((Kind.STEP, frame.header.step))

    def release_payload(self) -> None:
        self.read += 1

    def drop(self, reason: str) -> None:
        self.dropped = reason

    def dismiss(self, reason: str, *, error: bool = False) -> None:
        self.dismissed = reason


class Play:
    """Coordinator that gets its events from the test, on a model of two parameters that start at zero; rate 1."""

    def __init__(
        self,
        strategy: Strategy,
        tmp_path: Path,
        *,
        policy: QuorumPolicy | None = None,
        peers: int = 0,
        can_come: Callable[[], int] | None = None,
    ) -> None:
        self.model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        plan = Plan(self.model, optimizer, (), lambda model, batch: model(batch), steps=100, checkpoint_every=0)
        centre = ModelCentre(plan, strategy.replicas)
        self.layout = Layout(centre.shape, None, 8)
        self.time = 0.0
        log = Log(replicas=strategy.replicas, places=8)
        self.run = Run(plan, centre, LocalContext(checkpoints=tmp_path), log, digest="", now=self.now)
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        backups = strategy.backups if isinstance(strategy.backups, int) else 2
        self.coordinator = Coordinator(
            self.run,
            strategy,
            self.layout,
            self.inbox,
            epoch=EPOCH,
            backups=backups,
            policy=policy or QuorumPolicy(),
            can_come=can_come,
            now=self.now,
        )
        self.peers = [FakePeer(place) for place in range(peers or strategy.replicas + backups)]
        for peer in self.peers:
            self.coordinator.handle(Joined(peer=peer))  # type: ignore[arg-type]
        self.coordinator.begin()

    def now(self) -> float:
        return self.time

    def send(
        self,
        place: int,
        values: tuple[float, float],
        *,
        step: int = -1,
        loss: float = 1.0,
        epoch: int = EPOCH,
        at: float | None = None,
        weight: float = 1.0,
        payload: bytes | None = None,
    ) -> None:
        peer: Any = self.peers[place]
        vector = np.array(values, dtype=np.float32)
        header = Header(kind=Kind.GRAD, epoch=epoch, step=self.run.step if step < 0 else step)
        frame = self.layout.grad(header, loss, weight, np.zeros(0, dtype=np.float32), vector, seed=0)
        sent = memoryview(bytearray(b"".join(frame.parts) if payload is None else payload))
        came = self.time if at is None else at
        self.coordinator.handle(Arrived(peer=peer, header=header, payload=sent, at=came))
        self.step_if_due()

    def step_if_due(self) -> None:
        for mean in self.coordinator.due_steps():
            self.coordinator.strategy.apply(self.run.centre, mean)

    def leave(self, place: int, reason: str = "closed") -> None:
        peer: Any = self.peers[place]
        self.coordinator.handle(Left(peer=peer, reason=reason))
        self.step_if_due()

    def join(self, place: int) -> None:
        """Let a new replica join at a place."""
        peer: Any = FakePeer(place)
        self.peers[place] = peer
        self.coordinator.handle(Joined(peer=peer))

    def put_in_quarantine(self, place: int) -> None:
        """Quarantine the replica at this place, of two."""
        for _ in range(3):
            self.send(place, (math.nan, 0))
            self.send(1 - place, (0, 0))
        assert self.peers[place].dismissed

    def wait(self, seconds: float) -> None:
        self.time += seconds
        self.step_if_due()

    @property
    def weights(self) -> list[float]:
        return [float(x) for x in self.model.weight.detach().flatten()]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Play]:
    return lambda strategy, **settings: Play(strategy, tmp_path, **settings)


@pytest.mark.slow
def test_the_first_n_vectors_make_the_step_as_their_mean(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=2, backups=1))
    assert [peer.sent for peer in it.peers] == [[0], [0], [0]]
    it.send(2, (1, 0))
    assert it.run.step == 0
    it.send(0, (3, 8))
    assert it.run.step == 1
    assert it.weights == [-2, -4]
    assert it.run.log.steps[0].accepted == (2, 0)
    assert [peer.sent for peer in it.peers] == [[0, 1]] * 3


def test_a_late_vector_is_dropped_for_good_and_counted(play: Callable[..., Play]) -> None:
    """Its replica, which is busy, gets the notice of the next step."""
    it = play(Sync(replicas=1, backups=1))
    it.send(0, (1, 1))
    assert [peer.notices for peer in it.peers] == [[], [(Kind.STEP, 1)]]
    it.send(1, (100, 100), step=0)
    assert it.weights == [-1, -1]
    assert it.run.log.late == {1: 1}
    assert +it.run.log.cancelled == Counter()
    it.send(1, (1, 1))
    assert it.run.log.steps[-1].accepted == (1,)


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({"step": 5}, "is for step 5, but the current step is 0"),
        ({"weight": -1.0}, "the GRAD has the weight -1"),
        ({"payload": b""}, "the GRAD has 0 bytes"),
        ({"payload": b"short"}, "the GRAD has 5 bytes"),
        ({"payload": bytes(100)}, "the GRAD has 100 bytes"),
    ],
    ids=["future step", "weight", "empty", "short", "long"],
)
def test_a_vector_that_breaks_the_rules_of_the_wire_ends_the_connection(
    play: Callable[..., Play], changes: dict[str, Any], dropped: str
) -> None:
    it = play(Sync(replicas=1))
    it.send(0, (1, 1), **changes)
    assert dropped in (it.peers[0].dropped or "")
    assert (it.peers[0].read, it.run.step) == (1, 0)


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        ([EPOCH, EPOCH], "second vector for a step"),
        ([EPOCH - 1], "from an earlier epoch or connection"),
    ],
    ids=["second", "epoch"],
)
def test_a_vector_of_another_epoch_and_a_second_one_do_not_count(
    play: Callable[..., Play], sent: list[int], cause: str
) -> None:
    it = play(Sync(replicas=2))
    for epoch in sent:
        it.send(0, (1, 1), epoch=epoch)
    assert it.run.step == 0
    assert it.run.log.refused == {cause: 1}


@pytest.mark.parametrize(
    ("values", "loss"), [((np.nan, 0), 1.0), ((np.inf, 0), 1.0), ((0, 0), np.nan)], ids=["nan", "infinite", "loss"]
)
def test_a_vector_that_is_not_finite_is_refused_and_the_others_make_the_step(
    play: Callable[..., Play], values: tuple[float, float], loss: float
) -> None:
    it = play(Sync(replicas=2))
    it.send(1, values, loss=loss)
    it.send(0, (2, 2))
    assert it.run.step == 1
    # Half of the batch: half of the learning rate.
    assert it.weights == [-1, -1]
    assert it.run.log.refused == {"not finite": 1}


def test_a_replica_is_in_quarantine_after_three_that_are_not_finite(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=1, backups=1))
    for _ in range(3):
        assert it.peers[1].dismissed is None
        it.send(1, (np.nan, 0))
        it.send(0, (0, 0))
    assert "quarantine" in (it.peers[1].dismissed or "")
    assert "replica 1 is in quarantine" in it.run.log.notes[-1]
    it.send(0, (0, 0))
    assert it.run.step == 4
    assert it.peers[1].sent[-1] == 2


def test_the_next_replica_of_a_quarantined_rank_is_quarantined_at_its_first_bad_vector_or_counts_again(
    play: Callable[..., Play],
) -> None:
    """It may run on the same machine, or on one that works."""
    it = play(Sync(replicas=1, backups=1))
    it.put_in_quarantine(1)
    it.join(1)
    it.send(1, (np.nan, 0))
    assert "quarantine" in (it.peers[1].dismissed or "")
    it.send(0, (0, 0))
    it.join(1)
    it.send(1, (1, 1))
    assert it.run.log.steps[-1].accepted == (1,)
    for _ in range(2):
        it.send(1, (np.nan, 0))
        it.send(0, (0, 0))
    assert it.peers[1].dismissed is None


@pytest.mark.parametrize("strategy", [Sync(replicas=2), Async(replicas=2)], ids=["sync", "async"])
def test_a_loss_that_is_nan_everywhere_from_the_first_step_is_one_clear_error(
    play: Callable[..., Play], strategy: Strategy
) -> None:
    it = play(strategy)
    it.send(0, (np.nan, 0))
    with pytest.raises(UsageError, match="from the first step; check the data"):
        it.send(1, (np.nan, 0))


@pytest.mark.parametrize("strategy", [Sync(replicas=1), Async(replicas=1)], ids=["sync", "async"])
def test_a_training_that_diverges_later_says_so_after_three_steps(
    play: Callable[..., Play], strategy: Strategy
) -> None:
    it = play(strategy)
    it.send(0, (1, 1))
    for step in (2, 3):
        it.send(0, (np.inf, 1))
        assert it.run.step == step, "passed over"
        assert it.weights == [-1, -1]
    with pytest.raises(Diverged, match="at step 3"):
        it.send(0, (np.inf, 1))


def test_single_steps_without_a_finite_vector_are_skipped(play: Callable[..., Play]) -> None:
    """Only three in a row are a divergence."""
    it = play(Sync(replicas=1))
    for _ in range(5):
        it.send(0, (1, 1))
        it.send(0, (np.nan, 1))
    assert it.run.step == 10
    assert [step.accepted for step in it.run.log.steps] == [(0,), ()] * 5
    assert it.peers[0].dismissed is None


def test_without_lockstep_a_vector_that_is_not_finite_delays_its_replica_by_one_step(play: Callable[..., Play]) -> None:
    it = play(Async(replicas=2))
    it.send(0, (np.nan, 0))
    assert it.peers[0].sent == [0]
    it.send(1, (1, 1))
    assert it.peers[0].sent == it.peers[1].sent == [0, 1]
    assert it.run.step == 1


def test_a_step_does_not_stall_if_one_replica_dies_and_the_vector_of_the_other_is_refused(
    play: Callable[..., Play],
) -> None:
    """The replica that is left gets another batch."""
    it = play(Sync(replicas=2), policy=QuorumPolicy(grace_seconds=0.0))
    it.send(0, (1, 1))
    it.send(1, (1, 1))
    it.send(0, (np.nan, 0))
    it.leave(1)
    it.wait(0)
    assert it.run.step == 2
    it.send(0, (1, 1))
    assert it.run.step == 3
    assert it.run.log.steps[-1].scale == 0.5


def test_a_gang_that_waits_for_replicas_ends_once_none_can_come(play: Callable[..., Play]) -> None:
    can_come = [1]
    policy = QuorumPolicy(grace_seconds=0.0, on_few="wait")
    it = play(Sync(replicas=1), policy=policy, can_come=lambda: can_come[0])
    it.leave(0, "ValueError: no such column")
    it.wait(1000)
    can_come[0] = 0
    with pytest.raises(ShadhoError, match="ValueError: no such column"):
        it.wait(1)


def test_the_learning_rate_is_in_proportion_to_the_vectors_of_the_step_not_to_the_quorum(
    play: Callable[..., Play],
) -> None:
    it = play(Sync(replicas=4), policy=QuorumPolicy(grace_seconds=5.0))
    for place in (0, 1, 2):
        it.send(place, (1, 0))
    for place in (0, 1, 3):
        it.leave(place)
    it.wait(1)
    it.wait(10)
    assert it.run.log.steps[0].accepted == (0, 1, 2)
    assert it.run.log.steps[0].scale == 0.75


def test_a_replica_that_reconnects_has_no_late_vector_from_its_earlier_connection(play: Callable[..., Play]) -> None:
    """The new connection begins before the end of the old one is noticed."""
    it = play(Sync(replicas=2, backups=1, cancel=False))
    it.send(0, (1, 0))
    it.send(1, (1, 0))
    old, it.peers[2] = it.peers[2], FakePeer(2)
    it.coordinator.handle(Joined(peer=it.peers[2]))  # type: ignore[arg-type]
    it.coordinator.handle(Left(peer=old, reason="closed"))  # type: ignore[arg-type]
    it.send(2, (1, 0))
    it.send(0, (1, 0))
    assert it.run.step == 2


@pytest.mark.parametrize("sends_first", [False, True])
def test_a_replica_that_dies_before_it_sent_is_replaced_by_a_backup_and_else_its_vector_counts(
    play: Callable[..., Play], *, sends_first: bool
) -> None:
    it = play(Sync(replicas=2, backups=1))
    if sends_first:
        it.send(0, (1, 1))
    it.leave(0)
    for place, value in ((2, 3), (1, 1)):
        it.send(place, (value, value))
    assert it.run.log.steps[0].accepted == ((0, 2) if sends_first else (2, 1))
    assert it.weights == [-2, -2]


def test_the_gang_shrinks_after_the_grace_with_its_learning_rate(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=4), policy=QuorumPolicy(grace_seconds=5))
    for place in (0, 1):
        it.send(place, (4, 4))
    it.leave(2)
    it.leave(3)
    it.wait(4.9)
    assert it.run.step == 0
    it.wait(5.1)
    assert it.run.step == 1
    assert it.weights == [-2, -2]
    assert it.run.log.steps[0].scale == 0.5
    assert any("2 of 4 replicas are left (the last one left: closed)" in note for note in it.run.log.notes)


def test_the_quorum_grows_again_when_replicas_return(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=3), policy=QuorumPolicy(grace_seconds=0))
    it.leave(1)
    it.leave(2)
    it.wait(1)
    it.send(0, (3, 3))
    assert it.run.log.steps[-1].scale == pytest.approx(1 / 3)
    it.coordinator.handle(Joined(peer=it.peers[1]))  # type: ignore[arg-type]
    it.wait(0)
    it.send(0, (3, 3))
    assert it.run.step == 1
    it.send(1, (3, 3))
    assert it.run.log.steps[-1].scale == pytest.approx(2 / 3)


def test_a_gang_with_the_policy_to_wait_waits(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=2), policy=QuorumPolicy(grace_seconds=1, on_few="wait"))
    it.send(0, (1, 1))
    it.leave(1)
    it.wait(1e6)
    assert it.run.step == 0
    it.coordinator.handle(Joined(peer=it.peers[1]))  # type: ignore[arg-type]
    it.send(1, (1, 1))
    assert it.run.step == 1
    assert it.run.log.steps[0].scale == 1


def test_a_gang_with_the_policy_to_fail_fails(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=2), policy=QuorumPolicy(grace_seconds=1, on_few="fail"))
    it.leave(1)
    with pytest.raises(ShadhoError, match="1 of 2 replicas are left"):
        it.wait(2)


@pytest.mark.parametrize("strategy", [Sync(replicas=2), Async(replicas=2)], ids=["sync", "async"])
def test_a_gang_without_replicas_is_an_error_that_names_the_last_reason(
    play: Callable[..., Play], strategy: Strategy
) -> None:
    it = play(strategy, policy=QuorumPolicy(grace_seconds=1))
    it.leave(0)
    it.leave(1, "ValueError: no such column")
    with pytest.raises(ShadhoError, match=r"0 of 2 .*ValueError: no such column"):
        it.wait(2)


def test_parameters_that_are_being_sent_do_not_change_and_their_memory_is_used_again(tmp_path: Path) -> None:
    play = Play(Sync(replicas=1), tmp_path)
    sent = play.coordinator._current
    assert sent is not None
    before = bytes(sent.parts[0])
    for _ in range(3):
        play.send(0, (1.0, 1.0))
    assert bytes(sent.parts[0]) == before
    assert not play.coordinator._free, "the second memory holds the current step"
    del sent
    assert len(play.coordinator._free) == 1


def test_a_late_joiner_is_sent_the_current_parameters(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=1, backups=1), peers=1)
    it.send(0, (1, 1))
    late: Any = FakePeer(3)
    it.peers += [late] * 3
    it.coordinator.handle(Joined(peer=late))
    assert late.sent == [1]
    it.send(3, (1, 1))
    assert it.run.log.steps[-1].accepted == (3,)


def test_without_cancelling_a_replica_finishes_its_stale_gradient_before_the_next_step(
    play: Callable[..., Play],
) -> None:
    it = play(Sync(replicas=1, backups=1, cancel=False))
    recorded: list[tuple[int, float]] = []

    def record(place: int, seconds: float, *, finished: bool = True) -> None:
        recorded.append((place, seconds))

    it.coordinator.tuner.times.record = record  # type: ignore[method-assign]
    it.send(0, (1, 1))
    it.time = 7.0
    it.send(1, (1, 1), step=0)
    assert it.run.log.late == {1: 1}
    # Its time on the next step counts from here on.
    it.time = 7.5
    it.send(1, (1, 1))
    assert it.run.step == 2
    assert [seconds for place, seconds in recorded if place == 1] == [7.0, 0.5]


def test_backups_that_bring_nothing_rest_until_a_replica_is_lost(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=2, backups=2), policy=QuorumPolicy(grace_seconds=1e9))
    it.coordinator.backups = 0
    it.send(0, (0, 0))
    it.send(1, (0, 0))
    assert [peer.sent[-1] == it.run.step for peer in it.peers] == [True, True, False, False]
    it.leave(1)
    assert [peer.sent[-1] == it.run.step for peer in it.peers[2:]] == [True, False]
    it.send(0, (0, 0))
    assert it.run.step == 1
    it.send(2, (0, 0))
    assert it.run.step == 2


def test_a_probe_is_not_told_of_the_next_step_and_gets_it_when_its_late_vector_is_dropped(
    play: Callable[..., Play],
) -> None:
    it = play(Sync(replicas=1, backups="auto"), peers=2)
    it.send(0, (1, 1))
    assert it.peers[1].sent == [0]
    assert it.peers[1].notices == []
    it.time = 5.0
    it.send(0, (1, 1))
    assert it.run.step == 2
    it.send(1, (9, 9), step=0)
    assert it.peers[1].sent == [0, 2]
    assert it.weights == [-2, -2]
    assert it.run.log.late == {1: 1}
    assert it.run.log.cancelled == {}
    law = it.coordinator.tuner.times._rings[1]
    assert list(law) == [(5.0, True)]


def test_a_response_time_ends_with_the_arrival_of_the_vector_not_with_its_handling(
    play: Callable[..., Play],
) -> None:
    """The coordinator may be evaluating the model in between."""
    it = play(Sync(replicas=1))
    for _ in range(40):
        asked = it.time
        it.time += 10.0
        it.send(0, (0, 0), at=asked + 0.25)
    law = it.coordinator.tuner.times.law()
    assert law is not None
    assert law(np.random.default_rng(0), 5, 1) == pytest.approx(0.25)


def test_the_times_of_a_replica_that_has_left_are_removed(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=1))
    for _ in range(MIN_TIMES):
        it.send(0, (0, 0))
    assert it.coordinator.tuner.times.law() is not None
    it.leave(0)
    assert it.coordinator.tuner.times.law() is None


def test_a_step_is_the_mean_by_weight(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=2))
    it.send(0, (1, 0), weight=300.0, loss=2.0)
    it.send(1, (5, 4), weight=100.0, loss=6.0)
    assert it.weights == [-2, -1]
    assert it.run.log.steps[0].loss == 3.0


def test_weights_that_are_all_zero_are_one_clear_error(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=2))
    it.send(0, (1, 0), weight=0.0)
    with pytest.raises(UsageError, match="weights of all batches of a step are 0"):
        it.send(1, (1, 0), weight=0.0)


def test_an_error_of_the_users_code_in_a_replica_ends_the_training(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=2, backups=1))
    peer: Any = it.peers[1]
    with pytest.raises(ShadhoError, match="replica 1 ended at step 0: UsageError: the data set failed"):
        it.coordinator.handle(Left(peer=peer, reason="UsageError: the data set failed", is_error=True))


def test_replicas_with_other_data_are_named_if_too_few_come(play: Callable[..., Play]) -> None:
    it = play(Sync(replicas=1), policy=QuorumPolicy(grace_seconds=1))
    it.leave(0)
    it.coordinator.handle(Rejected(reason="its data have 90 examples, the coordinator's 100"))
    with pytest.raises(ShadhoError, match="90 examples"):
        it.wait(2)


def test_staleness_is_recorded_with_every_gradient(play: Callable[..., Play]) -> None:
    it = play(Async(replicas=2))
    it.send(0, (1, 1))
    it.send(0, (1, 1))
    it.send(1, (1, 1), step=0)
    it.send(0, (1, 1), step=2)
    assert [step.staleness for step in it.run.log.steps] == [0, 0, 2, 1]
    assert it.weights == [-4, -4]
    assert [peer.sent for peer in it.peers] == [[0, 1, 2, 4], [0, 3]]
