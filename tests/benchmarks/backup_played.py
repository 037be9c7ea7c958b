"""Trainings of the digits network by gangs on a virtual clock: the product's coordinator, strategies and tuner.

The gradients are real. The seconds of a gradient are drawn by (seed, place, step): two runs of one seed meet the same
luck. All workers are played by one process, so a training takes much less time than it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import figures  # noqa: F401 -- lets the next ones be found
import numpy as np
import torch
from numpy.typing import NDArray
from services.played_gang import PlayedGang
from torch import Tensor, nn

from shadho_celery.training.replica.batches import Batches, Draws
from shadho_celery.training.replica.replica import Delay
from shadho_celery.training.replica.update import Diverged
from shadho_celery.training.report import Log, Report
from shadho_celery.training.strategies import Strategy, Sync

Floats = NDArray[np.floating[Any]]

#: test accuracy that counts as trained
TARGET = 0.955
#: pictures that the network is never trained on
TEST = 360
#: accuracy of guessing, which a training that diverged counts with
GUESSED = 0.1


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Seconds of a gradient: `seconds` with some jitter, and sometimes `factor` P times that, P Pareto."""

    #: seconds of an ordinary gradient
    seconds: float = 0.050
    #: an ordinary gradient takes up to this fraction longer (uniform)
    jitter: float = 0.0
    #: chance that one is slow
    probability: float = 0.05
    factor: float = 4.0
    #: of Pareto's law with x_m = 1
    alpha: float = 2.0

    def draw(self, generator: np.random.Generator, size: int) -> Floats:
        """Seconds of `size` gradients. Always takes 3 `size` draws, so that two runs of one seed meet the same luck."""
        slow = generator.random(size) < self.probability
        pareto = (1 - generator.random(size)) ** (-1 / self.alpha)
        return self.seconds * np.where(slow, self.factor * pareto, 1.0) * (1 + self.jitter * generator.random(size))

    def delay(self, seed: int) -> Delay:
        """Seconds by place and step."""
        return lambda place, step: float(self.draw(np.random.default_rng([seed, place, step]), 1)[0])


#: Arrivals as Chen et al. have them on 100 workers: nearly 80 % of the 98th gradients come within 2 s, and 30 % of the
#: last. The numbers were fixed before anything was trained.
CROWDED = Stragglers(seconds=1.15, jitter=0.4, probability=0.014, factor=2.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training of the digits network."""

    strategy: Strategy
    law: Stragglers
    #: learning rate of a step
    rate: float
    #: pictures of a gradient
    batch: int
    momentum: float = 0.0
    #: virtual seconds, and steps, after which it ends
    seconds: float = math.inf
    steps: int = 10**9
    #: it ends when the test accuracy has reached TARGET
    until: bool = False
    #: steps from one look at the test accuracy to the next
    look_every: int = 1


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of one training."""

    #: seconds of all steps, and their number; of played asynchronous trainings, the number of gradients
    seconds: float
    steps: int
    #: seconds until the test accuracy first reached TARGET; None where it never did
    reached: float | None
    #: mean test accuracy over the last tenth of the run
    accuracy: float
    #: seconds and test accuracies
    course: Sequence[tuple[float, float]]
    #: mean staleness of the gradients
    staleness: float = 0.0

    @property
    def rate(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds


@cache
def digits() -> tuple[Floats, NDArray[np.integer[Any]]]:
    """Pictures in [0, 1] and their digits, in an order of their own; the last ones are for testing."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (pictures[order] / 16).astype(np.float32), labels[order]


def network(seed: int) -> nn.Module:
    """One hidden layer of rectified units."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def wide_network(seed: int) -> nn.Module:
    """Two hidden layers of rectified units, twice as wide."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def pictures(test: int = TEST) -> tuple[Tensor, Tensor]:
    """Pictures to train on, and their digits: all but the `test` last ones."""
    x, y = digits()
    return torch.from_numpy(x[:-test]), torch.from_numpy(y[:-test])


def held_out_accuracy(model: nn.Module, test: int = TEST) -> float:
    """Share of the test pictures that are classified correctly."""
    x, y = digits()
    with torch.no_grad():
        return float((model(torch.from_numpy(x[-test:])).argmax(1) == torch.from_numpy(y[-test:])).float().mean())


def mean_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def last_tenth(accuracies: Sequence[float]) -> float:
    """Mean over the last tenth of a run."""
    return float(np.mean(accuracies[-max(1, len(accuracies) // 10) :]))


def train(job: Job, seed: int) -> Trained:
    """Play one training."""
    torch.set_num_threads(1)
    model = network(seed)
    course: list[tuple[float, float]] = []
    reached: list[float] = []

    def look(gang: PlayedGang, step: int) -> None:
        if step % job.look_every == 0 and gang.now < job.seconds:
            course.append((gang.now, held_out_accuracy(model)))
            if course[-1][1] >= TARGET and not reached:
                reached.append(gang.now)

    gang = PlayedGang(
        job.strategy,
        model,
        lambda model: torch.optim.SGD(model.parameters(), lr=job.rate, momentum=job.momentum),
        pictures(),
        mean_loss,
        seconds=job.law.delay(seed),
        steps=job.steps,
        batch=job.batch,
        seed=seed,
        on_step=look,
        stop=lambda gang: gang.now >= job.seconds or bool(job.until and reached),
    )
    try:
        report = gang.train()
    except Diverged:
        return Trained(seconds=gang.now, steps=0, reached=None, accuracy=GUESSED, course=course)
    return Trained(
        seconds=gang.now,
        steps=report.steps,
        reached=reached[0] if reached else None,
        accuracy=last_tenth([accuracy for _, accuracy in course]),
        course=course,
        staleness=report.staleness(),
    )


def seconds_a_step(law: Stragglers, replicas: int, backups: Any, steps: int, seed: int) -> Report:
    """Train on so little that only the time matters."""
    return _trifle(law, replicas, backups, steps=steps, seed=seed, examples=64).train()


def with_slow_examples(
    replicas: int, backups: int, returns: bool, seed: int, *, epochs: int, examples: int
) -> dict[str, float]:
    """Play `epochs` in which a tenth of the examples make a gradient four times slower; a batch is one example.

    There are so many `examples` for each place of a replica. Return the share of the slow ones in what counted, the
    steps a second, and the share of the batches that never counted.
    """
    places = replicas + backups
    examples *= places
    slow = np.random.default_rng([seed, 7]).random(examples) < 0.1
    gang = _trifle(
        Stragglers(probability=0.0, jitter=0.02),
        replicas,
        backups,
        steps=epochs * examples // replicas,
        seed=seed,
        examples=examples,
        slowness=lambda chosen: 4.0 if slow[chosen.numpy()].any() else 1.0,
        returns=returns,
    )
    report = gang.train()
    counted = examples_that_counted(report.log, examples, seed=seed, returns=returns)
    log = report.log
    lost = log.dropped_batches if returns else sum(log.cancelled.values())
    return {
        "share": float(slow[counted].mean()) / float(slow.mean()) * 0.1,
        "steps_per_second": report.steps / report.seconds,
        "never_counted": lost / (lost + len(counted)),
    }


def examples_that_counted(log: Log, examples: int, *, seed: int, returns: bool) -> NDArray[np.int64]:
    """Return the examples of all gradients that counted, where a batch is one example."""
    batches = Batches((torch.empty(examples),), batch=1, seed=seed, places=log.places)
    draws = Draws(log.places, batch=1, examples=examples if returns else 0)
    counted: list[int] = []
    for step in log.steps:
        numbers = draws.numbers
        counted += [int(batches.indices(*divmod(numbers[place], log.places))[0]) for place in step.accepted]
        draws.end_step(step.accepted)
    return np.array(counted)


def _trifle(
    law: Stragglers,
    replicas: int,
    backups: Any,
    *,
    steps: int,
    seed: int,
    examples: int,
    slowness: Callable[[Tensor], float] | None = None,
    returns: bool = True,
) -> PlayedGang:
    """Return a gang that learns next to nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return PlayedGang(
        Sync(replicas=replicas, backups=backups),
        nn.Linear(2, 1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        (torch.randn(examples, 2), torch.randn(examples, 1)),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        seconds=law.delay(seed),
        steps=steps,
        seed=seed,
        slowness=slowness,
        returns=returns,
    )
