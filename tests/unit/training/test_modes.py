"""Strategies: each computes the same numbers as a few lines of numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from services.cases import cases
from services.played_gang import PlayedGang
from torch import Tensor, nn

from shadho_celery.errors import UsageError
from shadho_celery.training.replica.batches import Batches
from shadho_celery.training.report import Log
from shadho_celery.training.strategies import Async, Average, Elastic, Gradient, Strategy, Sync
from shadho_celery.training.wire.vectors import Quantize, Vector

SIZE, ROWS, BATCH, RATE = 3, 40, 4, 0.05
INPUTS = torch.from_numpy(np.random.default_rng(1).standard_normal((ROWS, SIZE)).astype(np.float32))
TARGETS = torch.from_numpy(np.random.default_rng(2).standard_normal((ROWS, 1)).astype(np.float32))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def gradient(x: Vector, draw: int, place: int, places: int) -> Vector:
    """Compute the gradient of batch (draw, place) by hand."""
    rows = Batches((INPUTS, TARGETS), batch=BATCH, seed=0, places=places).indices(draw, place)
    a, y = INPUTS[rows].numpy(), TARGETS[rows, 0].numpy()
    return (2 / BATCH * (a.T @ (a @ x - y))).astype(np.float32)


def trained(strategy: Strategy, steps: int, codec: Quantize | None = None) -> tuple[Vector, Log]:
    """Train a linear model on a virtual clock; return its parameters and the log."""
    model = nn.Linear(SIZE, 1, bias=False)
    nn.init.ones_(model.weight)
    gang = PlayedGang(
        strategy,
        model,
        lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
        (INPUTS, TARGETS),
        loss,
        seconds=lambda place, draw: 1.0,
        steps=steps,
        batch=BATCH,
        codec=codec,
    )
    log = gang.train().log
    return model.weight.detach().numpy()[0], log


START = np.ones(SIZE, dtype=np.float32)


def test_sync_descends_along_the_mean_of_the_replicas_gradients() -> None:
    x = START
    for step in range(12):
        x = x - RATE * np.mean([gradient(x, step, place, 3) for place in range(3)], axis=0)
    assert trained(Sync(replicas=3), 12)[0] == pytest.approx(x, abs=1e-5)


@pytest.mark.parametrize(("tau", "delay"), [(1, 0), (4, 0), (4, 2), (4, 4), (3, 1), (1, 1)])
def test_average_merges_the_delayed_average_with_the_steps_since_sending(tau: int, delay: int) -> None:
    rounds, n = 6, 3
    x = [START] * n
    done, average = 0, START
    for step in range(rounds):
        for number in range(done, tau):
            x = [each - RATE * gradient(each, step * tau + number, place, n) for place, each in enumerate(x)]
        sent, average = x, np.mean(x, axis=0)
        for number in range(delay):
            x = [each - RATE * gradient(each, (step + 1) * tau + number, place, n) for place, each in enumerate(x)]
        x = [average + (now - was) for now, was in zip(x, sent, strict=True)]
        done = delay
    assert trained(Average(replicas=n, tau=tau, delay=delay), rounds)[0] == pytest.approx(average, abs=1e-5)


def test_average_with_one_replica_is_plain_sgd() -> None:
    x = START
    for draw in range(20):
        x = x - RATE * gradient(x, draw, 0, 1)
    assert trained(Average(replicas=1, tau=4, delay=2), 5)[0] == pytest.approx(x, abs=1e-5)


def test_average_restarts_from_the_newest_parameters_after_a_missed_step() -> None:
    class Late(Scripted):
        def newest(self) -> int:
            # The round is over after its second local step.
            return 1 if len(self.draws) >= 2 else 0

        def wait(self, after: int) -> int:
            if after >= 1:
                raise Over
            return after + 1

        def load(self) -> int:
            self.loads += 1
            self.x = np.full(SIZE, 7.0, dtype=np.float32)
            return self.loads - 1

    worker = Late()
    with pytest.raises(Over):
        Average(replicas=2, tau=3).train(worker)
    assert worker.loads == 2
    # Nothing of the round that went on without it was sent, and the next one began with its own first batch.
    assert worker.draws == [0, 1, 3, 4, 5]
    assert len(worker.sent) == 1


def test_async_applies_each_gradient_at_once() -> None:
    """With one replica no gradient is stale: the same as plain SGD."""
    x = START
    for step in range(10):
        x = x - RATE * gradient(x, step, 0, 1)
    assert trained(Async(replicas=1), 10)[0] == pytest.approx(x, abs=1e-5)


def test_async_counts_every_gradient_as_a_step_and_drops_none() -> None:
    _, log = trained(Async(replicas=4), 100)
    assert log.accepted.total() == len(log.steps) == 100
    assert not log.late + log.cancelled


class Over(BaseException):
    """The last step has been taken."""


class Scripted:
    """Scripted `Replica`: each local step adds 1, the coordinator answers at once."""

    size, place = SIZE, 0

    def __init__(self, centre: Vector | None = None, sends: int = 1) -> None:
        self.x = START.copy()
        self.centre = START.copy() if centre is None else centre
        self.draws: list[int] = []
        self.sent: list[Vector] = []
        self.loads, self.step, self.sends = 0, 0, sends
        self.on_send: Callable[[Vector], None] = lambda vector: None

    def wait(self, after: int) -> int:
        return self.step

    def newest(self) -> int:
        return self.step

    def received(self, out: Vector) -> int:
        out[:] = self.centre
        return self.step

    def load(self) -> int:
        self.loads += 1
        self.x = self.centre.copy()
        return self.step

    def read(self, out: Vector) -> None:
        out[:] = self.x

    def write(self, vector: Vector) -> None:
        self.x = vector.copy()

    def gradient(self, draw: int, abandon: Callable[[], bool] | None = None) -> Gradient | None:
        raise NotImplementedError

    def descend(self, draw: int) -> float:
        if len(self.sent) >= self.sends:
            raise Over
        self.draws.append(draw)
        self.x = self.x + np.float32(1.0)
        return 0.5

    def send(self, step: int, vector: Vector, loss: float) -> None:
        self.sent.append(vector.copy())
        self.on_send(vector)
        self.step += 1


def test_elastic_moves_replica_and_centre_by_alpha_of_their_difference() -> None:
    class Watched(Scripted):
        def write(self, vector: Vector) -> None:
            written.append(vector.copy())
            super().write(vector)

    written: list[Vector] = []
    worker = Watched()
    with pytest.raises(Over):
        Elastic(replicas=1, alpha=0.25, every=4).train(worker)
    # Four local steps led from 1 to 5, the centre is at 1: both move by a quarter of 4.
    assert worker.sent[0] == pytest.approx(np.full(SIZE, 1.0))
    assert written[0] == pytest.approx(np.full(SIZE, 4.0))


def test_elastic_trains_while_an_exchange_is_in_progress() -> None:
    class Slow(Scripted):
        def send(self, step: int, vector: Vector, loss: float) -> None:
            # Not before local steps have gone on.
            assert went_on.wait(30)
            super().send(step, vector, loss)

        def descend(self, draw: int) -> float:
            if draw >= 20:
                went_on.set()
            return super().descend(draw)

    went_on = threading.Event()
    worker = Slow()
    with pytest.raises(Over):
        Elastic(replicas=1, alpha=0.5, every=2).train(worker)
    assert max(worker.draws) >= 20


def test_elastic_ends_with_the_error_of_its_background_thread() -> None:
    class Broken(Scripted):
        def send(self, step: int, vector: Vector, loss: float) -> None:
            raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError, match="gone"):
        Elastic(replicas=1, alpha=0.5, every=1).train(Broken())


class Parameters:
    """`Centre` without an optimizer."""

    def __init__(self) -> None:
        self.x = START

    def descend(self, gradient: Vector) -> None:
        raise NotImplementedError

    def read(self, out: Vector) -> None:
        out[:] = self.x

    def write(self, vector: Vector) -> None:
        self.x = vector.copy()


def test_the_elastic_centre_adds_the_difference() -> None:
    centre = Parameters()
    Elastic(replicas=2).apply(centre, np.array([1.0, 0.0, -2.0], dtype=np.float32))
    assert centre.x.tolist() == [2.0, 1.0, -1.0]


@pytest.mark.parametrize("strategy", [Sync(replicas=2), Average(replicas=2, tau=2, delay=1)], ids=["sync", "average"])
def test_a_quantised_training_keeps_its_direction(strategy: Strategy) -> None:
    exact, near = (trained(strategy, 20, codec)[0] for codec in (None, Quantize(8)))
    assert near == pytest.approx(exact, abs=0.03)


@cases(
    "make",
    [
        lambda: Async(replicas=0),
        lambda: Average(replicas=2, tau=0),
        lambda: Average(replicas=2, tau=4, delay=5),
        lambda: Average(replicas=2, tau=4, delay=-1),
        lambda: Average(replicas=2, backups=-1),
        lambda: Elastic(replicas=2, alpha=0.0),
        lambda: Elastic(replicas=2, alpha=1.0),
        lambda: Elastic(replicas=2, alpha=float("nan")),
        lambda: Async(replicas=2, backups=1),
        lambda: Elastic(replicas=2, backups=1),
        lambda: Elastic(replicas=2, every=0),
        lambda: Elastic(replicas=True),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="give"):
        make()
