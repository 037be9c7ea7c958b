"""Synchronous and asynchronous SGD on simulated workers: real gradients of a digits network, a virtual clock.

A worker is busy until its gradient is done, also where the step has gone on without it, unless it is cancelled: a
*renewal* simulation. What a step costs in virtual time depends on the draws alone, what it brings on the gradients.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from backup_played import Stragglers
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

#: test accuracy that counts as trained
TARGET = 0.955
#: the digits' pictures, the hidden units and the classes
PIXELS, HIDDEN, DIGITS = 64, 64, 10
#: pictures that the network is never trained on
TEST = 360
#: seconds within which a late worker that is told so drops its gradient
CANCEL_SECONDS = 0.010


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of one training."""

    #: virtual seconds of all steps
    seconds: float
    #: steps; in the asynchronous mode gradients
    steps: int
    #: virtual seconds until the test accuracy first reached TARGET; None where it never did
    reached: float | None
    #: mean test accuracy over the last tenth of the run
    accuracy: float

    @property
    def rate(self) -> float:
        return self.steps / self.seconds


@cache
def digits() -> tuple[Floats, NDArray[np.integer[Any]]]:
    """Pictures in [0, 1] and their digits, in an order of their own; the last TEST are for testing."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (pictures[order] / 16).astype(np.float32), labels[order]


class Network:
    """One hidden layer of rectified units. Written by hand: at batches of eight a framework is mostly overhead."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        shapes = ((PIXELS, HIDDEN), (1, HIDDEN), (HIDDEN, DIGITS), (1, DIGITS))
        fans = (PIXELS, PIXELS, HIDDEN, HIDDEN)
        # torch's own initial law of a linear layer, so that learning rates mean the same.
        self.params = [
            generator.uniform(-1, 1, shape).astype(np.float32) / np.float32(math.sqrt(fan))
            for shape, fan in zip(shapes, fans, strict=True)
        ]
        pictures, labels = digits()
        self._train, self._train_labels = pictures[:-TEST], labels[:-TEST]
        self._test, self._test_labels = pictures[-TEST:], labels[-TEST:]

    def gradient(self, generator: np.random.Generator, size: int) -> list[Floats]:
        """Of the mean cross-entropy over `size` random pictures."""
        chosen = generator.integers(0, len(self._train), size)
        x, labels = self._train[chosen], self._train_labels[chosen]
        w1, b1, w2, b2 = self.params
        hidden = np.maximum(x @ w1 + b1, 0)
        scores = hidden @ w2 + b2
        error = np.exp(scores - scores.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(size), labels] -= 1
        error /= size
        back = (error @ w2.T) * (hidden > 0)
        return [x.T @ back, back.sum(0, keepdims=True), hidden.T @ error, error.sum(0, keepdims=True)]

    def apply(self, gradient: Sequence[Floats], learning_rate: float) -> None:
        for param, slope in zip(self.params, gradient, strict=True):
            np.subtract(param, np.float32(learning_rate) * slope, out=param)

    def accuracy(self) -> float:
        w1, b1, w2, b2 = self.params
        scores = np.maximum(self._test @ w1 + b1, 0) @ w2 + b2
        return float((scores.argmax(1) == self._test_labels).mean())


@dataclass
class Cluster:
    """N + b simulated workers; `step` plays one synchronous step."""

    replicas: int
    backups: int
    law: Stragglers
    seed: int
    #: whether a late worker is told to drop its gradient
    cancel: bool = True

    def __post_init__(self) -> None:
        self.now = 0.0
        self._generator = np.random.default_rng(self.seed)
        self._busy = np.zeros(self.replicas + self.backups)

    def step(self) -> float:
        """Virtual seconds until N gradients of this step are there."""
        size = self.replicas + self.backups
        start = np.maximum(self.now, self._busy)
        finish = start + self.law.draw(self._generator, size)
        end = float(np.partition(finish, self.replicas - 1)[self.replicas - 1])
        if self.cancel:
            self._busy = np.where(finish > end, end + CANCEL_SECONDS * self._generator.random(size), finish)
        else:
            # Who was still at an older gradient when the step ended never began this one.
            self._busy = np.where(start < end, finish, self._busy)
        seconds, self.now = end - self.now, end
        return seconds


def steps_per_second(cluster: Cluster, steps: int) -> float:
    return steps / sum(cluster.step() for _ in range(steps))


def synchronous(cluster: Cluster, *, batch: int, learning_rate: float, seconds: float, until: bool = False) -> Trained:
    """Train for so many virtual `seconds`; `until` the target is reached and no longer where that is set."""
    network, generator = Network(cluster.seed), np.random.default_rng([cluster.seed, 1])
    seen: list[float] = []
    reached = None
    while cluster.now < seconds and not (until and reached is not None):
        cluster.step()
        # The mean of N gradients at the same parameters is the gradient of their pictures together.
        network.apply(network.gradient(generator, cluster.replicas * batch), learning_rate)
        seen.append(network.accuracy())
        if reached is None and seen[-1] >= TARGET:
            reached = cluster.now
    return Trained(seconds=cluster.now, steps=len(seen), reached=reached, accuracy=last_tenth(seen))


def asynchronous(
    workers: int, law: Stragglers, seed: int, *, batch: int, learning_rate: float, seconds: float
) -> Trained:
    """Train with each gradient applied as it comes, to parameters that have moved on since it was begun."""
    network, generator = Network(seed), np.random.default_rng([seed, 1])
    luck = np.random.default_rng(seed)
    under_way: list[tuple[float, int, list[Floats]]] = []
    seen: list[float] = []
    reached, gradients = None, 0

    def begin(now: float, worker: int) -> None:
        done = now + float(law.draw(luck, 1)[0])
        heapq.heappush(under_way, (done, worker, network.gradient(generator, batch)))

    for worker in range(workers):
        begin(0.0, worker)
    while (now := under_way[0][0]) < seconds:
        _, worker, gradient = heapq.heappop(under_way)
        network.apply(gradient, learning_rate)
        gradients += 1
        if gradients % workers == 0:
            seen.append(network.accuracy())
            if reached is None and seen[-1] >= TARGET:
                reached = now
        begin(now, worker)
    return Trained(seconds=seconds, steps=gradients, reached=reached, accuracy=last_tenth(seen))


def last_tenth(accuracies: Sequence[float]) -> float:
    return float(np.mean(accuracies[-max(1, len(accuracies) // 10) :]))
