"""DropCompute beside DistributedDataParallel where ranks are slow now and then: steps a second, and test accuracy.

    python tests/benchmarks/drop_compute.py
    python tests/benchmarks/drop_compute.py --seeds 1 --steps 60

Eight ranks on this machine learn digits, each in a process of its own. A batch takes a rank at least 50 ms, with
probability .05 multiplied by 4 P, where P is Pareto distributed (x_m = 1, alpha = 2). The rest of the time is waiting,
so the ranks need few cores. Both methods have the same steps, batches and delays.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from shadho_celery.context import LocalContext
from shadho_celery.ranks import DropCompute, process_group

RANKS, MICRO_BATCHES, EXAMPLES = 8, 4, 4
#: seconds of a rank's batch without delay; the probability of a delay and its least factor
SECONDS, PROBABILITY, FACTOR = 0.05, 0.05, 4.0


def digits(seed: int) -> list[Tensor]:
    """Return training and test pixels, training and test labels."""
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels / 16, labels, test_size=0.25, random_state=seed, stratify=labels)
    kinds = (torch.float32, torch.float32, torch.int64, torch.int64)
    return [torch.as_tensor(part, dtype=kind) for part, kind in zip(parts, kinds, strict=True)]


def trained(seed: int, steps: int, *, drops: bool) -> dict[str, float]:
    """Train by one of the methods. Return seconds, test accuracy and the share of micro-batches that counted."""
    train, test, labels, test_labels = digits(seed)
    with TemporaryDirectory() as folder, process_group(LocalContext(checkpoints=Path(folder)), ranks=RANKS) as pg:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        model = plain if drops else DistributedDataParallel(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        drop = DropCompute(pg, plain) if drops else None
        own = np.random.default_rng([seed, pg.rank])
        kept = given = 0
        began = time.perf_counter()
        for _ in range(steps):
            slow = FACTOR * (1 + own.pareto(2)) if own.random() < PROBABILITY else 1.0
            picked = torch.as_tensor(own.integers(0, len(train), (MICRO_BATCHES, EXAMPLES)))
            optimizer.zero_grad()
            for number, part in enumerate(picked if drop is None else drop.parts(picked)):
                until = time.perf_counter() + slow * SECONDS / MICRO_BATCHES
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = number == MICRO_BATCHES - 1
                loss = cross_entropy(model(train[part]), labels[part])
                (loss if drops else loss / MICRO_BATCHES).backward()
                time.sleep(max(0.0, until - time.perf_counter()))
            kept += RANKS * MICRO_BATCHES if drop is None else drop.reduce()
            given += RANKS * MICRO_BATCHES
            optimizer.step()
        seconds = time.perf_counter() - began
        with torch.no_grad():
            accuracy = (plain(test).argmax(dim=1) == test_labels).float().mean().item()
    return {"seconds": seconds, "accuracy": accuracy, "share": kept / given}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--steps", type=int, default=200, help="number of steps")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, drops in (("ddp", False), ("drop", True)):
        runs = [trained(seed, options.steps, drops=drops) for seed in range(options.seeds)]
        figures[name] = {key: round(float(np.mean([run[key] for run in runs])), 4) for key in runs[0]}
        figures[name]["steps_a_second"] = round(options.steps / figures[name]["seconds"], 2)
    ddp, drop = figures["ddp"], figures["drop"]
    goals = {
        "at least 1.5 times the steps a second of DistributedDataParallel": drop["seconds"] * 1.5 <= ddp["seconds"],
        "at least 80 % of the micro-batches count": drop["share"] >= 0.8,
        "the mean test accuracy is at most half a point lower": drop["accuracy"] >= ddp["accuracy"] - 0.005,
    }
    print(json.dumps({"figures": figures, "goals": goals}, indent=2))


if __name__ == "__main__":
    main()
