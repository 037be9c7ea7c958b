"""Strategies and codecs on a slowed wire: ``python tests/benchmarks/modes.py [--seeds 10]``.

Eight processes train a small network on handwritten digits. Each computes 250 gradients of at least 50 ms, which is
played by waiting. All but the coordinator's own reach it through a proxy, which lets 15 MB/s pass in each direction
(``slowed``). `Average` with a delay and `Elastic`, whose exchanges overlap the local steps, run on a free wire too.
Printed are test accuracy, megabytes from the replicas, and seconds.

The goals, each with its interval over the seeds: an accuracy no more than a point under that of synchronous SGD, bytes
in proportion, and that the slowed wire costs the two at most 15 %. A seed takes about three minutes, so ten take half
an hour. Other work on the machine widens the intervals.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from backup_replicas import forks
from figures import finish, goal
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))

from services.proxy import Proxy

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.objective.context import LocalContext, ReplicaDone
from shadho_celery.training import gang
from shadho_celery.training.report import Report
from shadho_celery.training.strategies import Average, Elastic, Strategy, Sync
from shadho_celery.training.wire.codecs import Quantize

REPLICAS, GRADIENTS, BATCH = 8, 250, 16
RATE, MOMENTUM = 0.1, 0.9
#: least seconds of a gradient
SECONDS = 0.050
#: bytes a second that the wire lets pass in each direction, by its name
WIRES = {"slowed": 15e6, "free": math.inf}
#: local steps from one exchange to the next, and those from sending to merging
TAU, DELAY = 4, 2


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A strategy and a codec."""

    strategy: Strategy
    codec: Quantize | None = None
    #: steps in which each replica computes GRADIENTS gradients
    steps: int = GRADIENTS


SYNC, DELAYED, ELASTIC = "sync", f"average, delay {DELAY}", "elastic"
MODES: Mapping[str, Mode] = {
    SYNC: Mode(strategy=Sync(replicas=REPLICAS)),
    "sync, 2 bits": Mode(strategy=Sync(replicas=REPLICAS), codec=Quantize(2)),
    "average": Mode(strategy=Average(replicas=REPLICAS, tau=TAU), steps=GRADIENTS // TAU),
    DELAYED: Mode(strategy=Average(replicas=REPLICAS, tau=TAU, delay=DELAY), steps=GRADIENTS // TAU),
    ELASTIC: Mode(
        strategy=Elastic(replicas=REPLICAS, alpha=0.9 / REPLICAS, every=TAU), steps=REPLICAS * GRADIENTS // TAU
    ),
}
#: modes whose exchanges overlap the local steps, which also run on the free wire
OVERLAPPED = (DELAYED, ELASTIC)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


@cache
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16.0, labels, test_size=600, random_state=0, stratify=labels)
    x, held_x, y, held_y = (torch.tensor(each) for each in split)
    return (x.float(), y.long()), (held_x.float(), held_y.long())


def cross_entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of one training."""

    accuracy: float
    #: from the replicas
    megabytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training, whose replicas are called, as those of a fleet are: it runs in the processes of them all."""

    mode: str
    seed: int

    def run(self, context: LocalContext) -> tuple[nn.Module, Report]:
        torch.set_num_threads(1)
        mode, model = MODES[self.mode], network(self.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        with gang(
            context, strategy=mode.strategy, codec=mode.codec, host="127.0.0.1", delay=lambda place, draw: SECONDS
        ) as g:
            report = g.fit(model, optimizer, digits()[0], cross_entropy, steps=mode.steps, batch=BATCH, seed=self.seed)
        return model, report

    def take_part(self, seat: ReplicaSeat) -> None:
        with suppress(ReplicaDone):
            self.run(LocalContext(slots=REPLICAS, replica=seat))

    def through(self, bandwidth: float) -> Trained:
        """Train on a wire with this bandwidth."""
        processes, proxies = [], []

        def call(address: str, token: str, backups: int) -> None:
            proxies.append(Proxy(int(address.rpartition(":")[2])))
            proxies[0].bandwidth = bandwidth
            for rank in range(1, REPLICAS):
                seat = ReplicaSeat(address=f"127.0.0.1:{proxies[0].port}", token=token, rank=rank)
                processes.append(forks().Process(target=self.take_part, args=(seat,), daemon=True))
                processes[-1].start()

        with tempfile.TemporaryDirectory() as folder:
            try:
                context = LocalContext(checkpoints=Path(folder), slots=REPLICAS, on_call_replicas=call)
                model, report = self.run(context)
            finally:
                for process in processes:
                    process.join(5)
                    process.kill()
                for proxy in proxies:
                    proxy.__exit__()
        x, y = digits()[1]
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).float().mean())
        return Trained(accuracy=accuracy, megabytes=report.bytes_in / 1e6, seconds=report.seconds)


def judged(runs: Mapping[str, Mapping[str, Sequence[Trained]]]) -> dict[str, dict[str, object]]:
    """Return the goals of the modes that were run, each by the differences or ratios of the seeds."""

    def seconds(mode: str, wire: str) -> Sequence[float]:
        return [run.seconds for run in runs[mode][wire]]

    def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
        return [a / b for a, b in zip(above, below, strict=True)]

    goals = {}
    pairs = {name: list(zip(runs[name]["slowed"], runs[SYNC]["slowed"], strict=True)) for name in runs if SYNC in runs}
    for name, most in (("sync, 2 bits", 0.08), ("average", 0.27), (DELAYED, 0.27), (ELASTIC, 0.27)):
        if name in pairs:
            lost = [sync.accuracy - run.accuracy for run, sync in pairs[name]]
            goals[f"{name}: accuracy less than that of sync"] = goal(lost, at_most=0.01)
            bytes_moved = [run.megabytes / sync.megabytes for run, sync in pairs[name]]
            goals[f"{name}: bytes / those of sync"] = goal(bytes_moved, at_most=most)
    if {"average", DELAYED} <= {*runs}:
        faster = ratio(seconds(DELAYED, "slowed"), seconds("average", "slowed"))
        goals[f"{DELAYED}: seconds / those without delay, slowed wire"] = goal(faster, at_most=0.85)
    for name in OVERLAPPED:
        if name in runs:
            slower = ratio(seconds(name, "slowed"), seconds(name, "free"))
            goals[f"{name}: seconds, slowed wire / free"] = goal(slower, at_most=1.15)
    return goals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", choices=MODES, action="append", help="this mode; may be given again")
    given = parser.parse_args()
    names, seeds = given.only or list(MODES), range(given.seeds)
    # Its processes may also run where the wire gives them nothing to say.
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # A seed runs in all modes before the next one, so that other work on the machine hits them all alike.
    runs: dict[str, dict[str, list[Trained]]] = {
        name: {wire: [] for wire in WIRES if wire == "slowed" or name in OVERLAPPED} for name in names
    }
    for seed in seeds:
        for name in names:
            for wire, trained in runs[name].items():
                trained.append(Training(mode=name, seed=seed).through(WIRES[wire]))
    figures = {}
    print(f"{'mode':20s}{'accuracy':>10s}{'MB sent':>10s}" + "".join(f"{f's, {wire}':>12s}" for wire in WIRES))
    for name, by_wire in runs.items():
        accuracy = statistics.mean(run.accuracy for run in by_wire["slowed"])
        megabytes = statistics.mean(run.megabytes for run in by_wire["slowed"])
        seconds = {wire: statistics.mean(run.seconds for run in each) for wire, each in by_wire.items()}
        row = "".join(f"{each:12.1f}" for each in seconds.values())
        print(f"{name:20s}{accuracy:10.3f}{megabytes:10.1f}{row}")
        figures[name] = {"accuracy": accuracy, "megabytes": megabytes, "seconds": seconds}
    settings = {"replicas": REPLICAS, "gradients": GRADIENTS, "batch": BATCH, "gradient_seconds": SECONDS}
    finish(figures, judged(runs), {**settings, "bytes_a_second": WIRES["slowed"], "seeds": given.seeds})


if __name__ == "__main__":
    main()
