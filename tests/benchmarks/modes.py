"""What each strategy and codec costs and gives: ``python tests/benchmarks/modes.py [--seeds 2]``.

A small network on handwritten digits, eight simulated replicas that each do 400 gradients: test accuracy, and the bytes
that replicas send. Only the rules are at work here: there are no sockets, and nobody is late.

An accuracy is reached where it is no more than a point under the one it is held against: a point is six of the 600
test digits, and the mean over two seeds moves by about that much. Bytes are reached where they are at most 10 % more.
Asynchronous SGD and two fixed bits are there for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from figures import finish, goal
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))

from services.hub import Hub, HubReplica, TorchCentre

from shadho_celery.training.strategies import Async, Average, Elastic, Strategy, Sync
from shadho_celery.training.wire.codecs import Codec, Quantize, Raw

REPLICAS, GRADIENTS, BATCH = 8, 400, 16
RATE, MOMENTUM = 0.1, 0.9
#: how far under its goal an accuracy may be, and how far off the bytes
POINTS, SHARE = 0.01, 0.10


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A strategy, a codec, and the accuracy and megabytes that they should come to, where they should."""

    strategy: Strategy
    codec: Codec = field(default_factory=Raw)
    #: steps in which each replica does 400 gradients
    steps: int = GRADIENTS
    rate: float = RATE
    momentum: float = MOMENTUM
    expected: tuple[float, float] | None = None


MODES: Mapping[str, Mode] = {
    "sync": Mode(strategy=Sync(replicas=REPLICAS), expected=(0.978, 334)),
    "average tau=4 delay=2": Mode(
        strategy=Average(replicas=REPLICAS, tau=4, delay=2), steps=GRADIENTS // 4, expected=(0.983, 84)
    ),
    "elastic": Mode(
        strategy=Elastic(replicas=REPLICAS, alpha=0.9 / REPLICAS, every=4),
        steps=REPLICAS * GRADIENTS // 4,
        expected=(0.975, 84),
    ),
    "sync, 2-bit": Mode(strategy=Sync(replicas=REPLICAS), codec=Quantize(2)),
    "sync, dynamic bits": Mode(strategy=Sync(replicas=REPLICAS), codec=Quantize(), expected=(0.978, 27)),
    # Momentum comes on top of the staleness, which acts like it already (Mitliagkas et al., arXiv 1605.09774).
    "async": Mode(
        strategy=Async(replicas=REPLICAS),
        steps=REPLICAS * GRADIENTS,
        rate=RATE / 4,
        momentum=0.0,
    ),
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16.0, labels, test_size=600, random_state=0, stratify=labels)
    x, held_x, y, held_y = (torch.tensor(each) for each in split)
    return (x.float(), y.long()), (held_x.float(), held_y.long())


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def train(mode: Mode, seed: int, data: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return test accuracy and megabytes sent."""

    def core() -> TorchCentre:
        model = network(seed)
        return TorchCentre(model, torch.optim.SGD(model.parameters(), lr=mode.rate, momentum=mode.momentum))

    hub = Hub(mode.strategy, core(), steps=mode.steps, codec=mode.codec)
    hub.run([HubReplica(hub, place, core(), cross_entropy, data, BATCH, seed) for place in range(REPLICAS)])
    with torch.no_grad():
        right = (hub.centre.model(held[0]).argmax(1) == held[1]).float().mean()
    return float(right), hub.bytes_in / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=MODES, action="append", help="this mode; may be given again")
    given = parser.parse_args()
    seeds, modes = given.seeds, {name: MODES[name] for name in given.only or MODES}
    torch.set_num_threads(1)
    data, held = digits()
    figures, goals = {}, {}
    print(f"{'mode':24s}{'accuracy':>10s}{'MB sent':>10s}{'seconds':>10s}")
    for name, mode in modes.items():
        began = time.perf_counter()
        runs = [train(mode, seed, data, held) for seed in range(seeds)]
        accuracy, megabytes = (statistics.mean(column) for column in zip(*runs, strict=True))
        seconds = (time.perf_counter() - began) / seeds
        print(f"{name:24s}{accuracy:10.3f}{megabytes:10.1f}{seconds:10.1f}", flush=True)
        figures[name] = {"accuracy": accuracy, "megabytes": megabytes}
        if mode.expected is not None:
            goals[f"{name}: accuracy"] = goal(accuracy, at_least=round(mode.expected[0] - POINTS, 4))
            goals[f"{name}: MB"] = goal(megabytes, at_most=round(mode.expected[1] * (1 + SHARE), 1))
    finish(figures, goals, {"replicas": REPLICAS, "gradients": GRADIENTS, "batch": BATCH, "seeds": seeds})


if __name__ == "__main__":
    main()
