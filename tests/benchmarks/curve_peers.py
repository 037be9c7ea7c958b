"""Record how other libraries search learning curves: ``python tests/benchmarks/curve_peers.py --data FOLDER``.

``fidelity.py --part curves`` shows the records beside our own searches. A library's search asks for looks at params at
a budget, and gets their losses. Its trials run on slots of a virtual clock, and params that have run at a lower budget
pay only for the rest. Trials of libraries that decide by reports report each epoch. A loss that has diverged counts as
DIVERGED. Regret is that of the params which the study would name: those with the least loss among the looks that have
reached the highest rung so far, as for our own studies.

Needed are optuna, dehb, syne-tune and neural-pipeline-search; their versions of November 2026 want an older numpy than
ours, so install them in an environment of their own. Each search that ends is written to the records at once.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import logging
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from curve_problems import TASKSET, CurveProblem, curve_names, read_curves

#: regrets by problem, then by peer with its number of slots, then by seed
TABLE = Path(__file__).parent / "data" / "curve_peers.json"
#: costs, in full evaluations, after which there is a regret; numbers of slots; and first seed of the records
AT, SLOTS, FIRST = (5, 10, 20, 40), (1, 8), 200
#: loss of a trial that has diverged
DIVERGED = 1e6
ETA = 3


class Bounds(NamedTuple):
    """Search space of a label."""

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False

    def value(self, unit: float) -> float:
        """Return the value at a place from 0 to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        value = low + unit * (high - low)
        value = min(max(math.exp(value) if self.is_log else value, self.low), self.high)
        return round(value) if self.is_whole else value


LCBENCH: Mapping[str, Bounds] = {
    "batch_size": Bounds(16, 512, is_log=True, is_whole=True),
    "learning_rate": Bounds(1e-4, 0.1, is_log=True),
    "momentum": Bounds(0.1, 0.99),
    "weight_decay": Bounds(1e-5, 0.1),
    "num_layers": Bounds(1, 5, is_whole=True),
    "max_units": Bounds(64, 1024, is_log=True, is_whole=True),
    "max_dropout": Bounds(0, 1),
}
SPACES: Mapping[str, Mapping[str, Bounds]] = {
    "lcbench": LCBENCH,
    "taskset": {name: Bounds(math.exp(low), math.exp(high), is_log=True) for name, (low, high) in TASKSET.items()},
}


class Look(NamedTuple):
    """A look at params at a budget. `of` is the library's own object for it."""

    values: Mapping[str, float]
    budget: float
    of: Any


class Peer:
    """A library's search."""

    def ask(self) -> Look | None:
        """Return the next look; None if it waits for results."""
        raise NotImplementedError

    def tell(self, look: Look, loss: float) -> Look | None:
        """Record a loss. Return the look by which the same slot continues, or None."""
        raise NotImplementedError


class OfOptuna(Peer):
    """TPE with the pruner Hyperband."""

    def __init__(self, space: Mapping[str, Bounds], least: int, most: int, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._most = most
        self._optuna, laws = optuna, optuna.distributions
        self._space = {
            name: laws.IntDistribution(int(each.low), int(each.high), log=each.is_log)
            if each.is_whole
            else laws.FloatDistribution(each.low, each.high, log=each.is_log)
            for name, each in space.items()
        }
        pruner = optuna.pruners.HyperbandPruner(min_resource=least, max_resource=most, reduction_factor=ETA)
        # The name of the study decides the bracket of each trial.
        self._study = optuna.create_study(
            study_name=f"s{seed}", sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner
        )

    def ask(self) -> Look:
        trial = self._study.ask(self._space)
        return Look(trial.params, 1, trial)

    def tell(self, look: Look, loss: float) -> Look | None:
        look.of.report(loss, int(look.budget))
        if look.budget >= self._most:
            self._study.tell(look.of, loss)
        elif look.of.should_prune():
            self._study.tell(look.of, state=self._optuna.trial.TrialState.PRUNED)
        else:
            return look._replace(budget=look.budget + 1)
        return None


class OfSyneTune(Peer):
    """ASHA or BOHB, whose trials are stopped."""

    def __init__(self, kind: str, space: Mapping[str, Bounds], least: int, most: int, seed: int) -> None:
        from syne_tune import config_space as laws
        from syne_tune.optimizer import baselines

        np.random.seed(seed)
        own = {
            name: (laws.lograndint if each.is_log else laws.randint)(int(each.low), int(each.high))
            if each.is_whole
            else (laws.loguniform if each.is_log else laws.uniform)(each.low, each.high)
            for name, each in space.items()
        }
        facts: dict[str, Any] = {"max_t": most, "grace_period": least, "reduction_factor": ETA, "random_seed": seed}
        self._scheduler = getattr(baselines, kind)(own, metric="loss", time_attr="epoch", do_minimize=True, **facts)
        self._number, self._most = itertools.count(), most

    def ask(self) -> Look:
        from syne_tune.backend.trial_status import Trial

        config = self._scheduler.suggest().config
        trial = Trial(trial_id=next(self._number), config=config, creation_time=datetime.now(timezone.utc))
        self._scheduler.on_trial_add(trial)
        return Look({name: float(value) for name, value in config.items()}, 1, trial)

    def tell(self, look: Look, loss: float) -> Look | None:
        result = {"loss": loss, "epoch": int(look.budget)}
        if look.budget >= self._most:
            self._scheduler.on_trial_complete(look.of, result)
            return None
        goes_on = self._scheduler.on_trial_result(look.of, result) == "CONTINUE"
        return look._replace(budget=look.budget + 1) if goes_on else None


class OfDehb(Peer):
    """DEHB, in the unit cube."""

    def __init__(self, space: Mapping[str, Bounds], least: int, most: int, seed: int) -> None:
        from dehb import DEHB
        from loguru import logger

        logger.remove()
        folder = tempfile.mkdtemp(prefix="dehb")
        facts: dict[str, Any] = {"min_fidelity": least, "max_fidelity": most, "eta": ETA, "n_workers": 1}
        self._search = DEHB(dimensions=len(space), seed=seed, output_path=folder, save_freq="end", **facts)
        self._space = space

    def ask(self) -> Look:
        job = self._search.ask()
        values = {name: each.value(unit) for (name, each), unit in zip(self._space.items(), job["config"], strict=True)}
        return Look(values, max(1, round(float(job["fidelity"]))), job)

    def tell(self, look: Look, loss: float) -> None:
        self._search.tell(look.of, {"fitness": loss, "cost": 1.0})


class OfNeps(Peer):
    """PriorBand or Hyperband. Without a user's prior, PriorBand mutates the best params, and draws uniformly."""

    def __init__(self, kind: str, space: Mapping[str, Bounds], least: int, most: int, seed: int) -> None:
        import neps
        import torch

        np.random.seed(seed), random.seed(seed), torch.manual_seed(seed)
        own: dict[str, Any] = {
            f"x{place}": neps.Integer(int(each.low), int(each.high), log=each.is_log)
            if each.is_whole
            else neps.Float(each.low, each.high, log=each.is_log)
            for place, each in enumerate(space.values())
        }
        own["epoch"] = neps.IntegerFidelity(least, most)
        of_kind = getattr(neps.algorithms, kind)(type("Space", (neps.PipelineSpace,), own)(), eta=ETA)
        self._search, self._names = neps.AskAndTell(of_kind), [*space]

    def ask(self) -> Look:
        trial = self._search.ask()
        values = {name: float(trial.config[f"x{place}"]) for place, name in enumerate(self._names)}
        return Look(values, int(trial.config["epoch"]), trial)

    def tell(self, look: Look, loss: float) -> None:
        self._search.tell(look.of, loss)


PEERS: Mapping[str, Callable[[Mapping[str, Bounds], int, int, int], Peer]] = {
    "optuna tpe, hyperband": OfOptuna,
    "dehb": OfDehb,
    "syne tune asha": lambda *given: OfSyneTune("ASHA", *given),
    "syne tune bohb": lambda *given: OfSyneTune("BOHB", *given),
    "neps priorband": lambda *given: OfNeps("priorband", *given),
    "neps hyperband": lambda *given: OfNeps("hyperband", *given),
}


def play_peer(problem: CurveProblem, kind: str, name: str, slots: int, seed: int) -> list[float]:
    """Return the regret after each of the costs AT of a search on so many slots."""
    search = PEERS[name](SPACES[kind], int(problem.least), int(problem.most), seed)
    reached: dict[tuple[float, ...], float] = {}
    running: list[tuple[float, int, Look, float]] = []
    number, idle, now = itertools.count(), slots, 0.0
    rungs = [round(problem.most / ETA**below) for below in range(4)]
    #: of the best look: the number of its rung, from the top, and its loss
    best = math.inf, math.inf
    path: list[tuple[float, float]] = []

    def start(look: Look) -> None:
        loss, cost = problem.look(look.values, look.budget)
        key = tuple(look.values.values())
        before = reached.get(key, 0.0)
        reached[key] = max(cost, before)
        heapq.heappush(
            running, (now + max(0.0, cost - before), next(number), look, DIVERGED if math.isnan(loss) else loss)
        )

    while now * slots < AT[-1]:
        while idle and (asked := search.ask()) is not None:
            start(asked)
            idle -= 1
        now, _, look, loss = heapq.heappop(running)
        below = next((place for place, rung in enumerate(rungs) if look.budget >= rung), len(rungs))
        if (below, loss) < best:
            best = below, loss
            path.append((now * slots, problem.regret(look.values)))
        if (more := search.tell(look, loss)) is None:
            idle += 1
        else:
            start(more)
    return [next((regret for cost, regret in reversed(path) if cost <= at * (1 + 1e-6)), 1.0) for at in AT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="see curve_problems.py")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this one; may be repeated")
    parser.add_argument("--slots", type=int, action="append", help="numbers of slots (default 1 and 8)")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=FIRST)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no search after this time")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    end = time.monotonic() + 60 * arguments.minutes
    for seed, slots, peer, name in itertools.product(
        range(arguments.first_seed, arguments.first_seed + arguments.seeds),
        arguments.slots or SLOTS,
        arguments.peer or PEERS,
        curve_names(arguments.data),
    ):
        recorded = json.loads(TABLE.read_text()) if TABLE.exists() else {}
        runs = recorded.setdefault(name, {}).setdefault(f"{peer}, {slots} slots", {})
        if str(seed) not in runs and time.monotonic() < end:
            regrets = play_peer(read_curves(arguments.data, name), name.split()[0], peer, slots, seed)
            runs[str(seed)] = [float(f"{regret:.4g}") for regret in regrets]
            TABLE.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
