"""Training by gangs, measured: ``python tests/benchmarks/backup_sgd.py [--only PART ...]``.

The exit code is 1 where a goal of a part is missed.

``real``: stragglers in real processes: steps a second, seconds to a test accuracy and the accuracy at the end for
several numbers of backups, with and without cancelling, for asynchronous SGD, and for torch's DDP over gloo.

The next parts are played by the product's coordinator, strategies and tuner on a virtual clock; gradients are real:

``a``: test error against the staleness of gradients.
``b``: seconds to a test accuracy against the number of backups, 50 workers in all.
``c``: N = 16 and b = 4 against b = 0 and against asynchronous SGD, each with its best learning rate.
``slow``: the share of examples that make their batch slow in what counts.
``auto``: b = "auto" without stragglers and with them, on a virtual clock, beside each fixed b.

These parts are of other strategies, and run only if they are named:

``modes``: strategies and codecs on a slowed wire, through a proxy that lets 15 MB/s pass in each direction; Average
with a delay and Elastic, whose exchanges overlap the local steps, run on a free wire too. Three minutes a seed.
``adsaga``: gradient evaluations and seconds until the error of a least-squares problem is 1e-8, by SAGA on one machine
and by ADSAGA on forty, played and in real processes (not with --quick), and the error at which asynchronous SGD stalls.
``drop``: DropCompute beside DistributedDataParallel where ranks are slow now and then.

Stragglers sleep rather than compute, so that many replicas fit on few cores.
"""

from __future__ import annotations

import os

# Many processes share the cores, and the simulations multiply small matrices: threads of theirs only get in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from backup_played import (
    CROWDED,
    TARGET,
    Job,
    Stragglers,
    Trained,
    held_out_accuracy,
    seconds_a_step,
    train,
    wide_network,
    with_slow_examples,
)
from backup_replicas import Called, Ranks, in_ranks, train_in_processes
from figures import beside, count, finish, goal, interval, make_parser, runs_of, show

from shadho_celery.objective.context import LocalContext
from shadho_celery.training.strategies import Async, Average, Elastic, Strategy, Sync
from shadho_celery.training.wire.vectors import Quantize
from tasks import adsaga

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Json = dict[str, Any]
#: figures of a part, and goals by what they say
Found = tuple[Json, Json]

#: of the real stragglers: replicas that a step takes, and steps
REPLICAS, STEPS = 8, 160
#: what is compared, and with how many seeds: the luck of one run moves its rate by a tenth
COMPARED, RUNS = ("b = 0", "b = 2", "b = 2, no cancel"), 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line says."""

    #: of each comparison; None for each part's own number
    seeds: int | None
    #: fewer seeds, steps and values
    quick: bool
    #: processes that play gangs
    pool: ProcessPoolExecutor
    #: folder to draw (a), (b) and (c) in; None for nowhere
    pictures: Path | None

    def seeds_of(self, whole: int, quick: int) -> range:
        """Return the seeds of a part that has these numbers of them, as a whole and if it must be quick."""
        return range(self.seeds or (quick if self.quick else whole))

    def values_of(self, whole: Sequence[V], every: int = 2) -> Sequence[V]:
        """Return the values that a part compares, or both ends and every so many between if it must be quick."""
        return whole if not self.quick else [*whole[:-1:every], whole[-1]]

    def played(self, jobs: Mapping[K, Callable[[int], V]], seeds: Sequence[int]) -> dict[K, list[V]]:
        """Play the jobs with each of the seeds."""
        return runs_of(self.pool, "trainings", jobs, seeds)


def stragglers(settings: Settings) -> Found:
    """Real processes with stragglers: 50 ms a gradient, 1 of 20 takes 4 P times that, P Pareto."""
    law = Stragglers()
    strategies: dict[str, Strategy] = {f"b = {b}": Sync(replicas=REPLICAS, backups=b) for b in (0, 1, 2, 4)}
    strategies["b = 2, no cancel"] = Sync(replicas=REPLICAS, backups=2, cancel=False)
    strategies["async"] = Async(replicas=REPLICAS)
    courses = {
        name: [
            train_in_processes(strategy, law, steps=STEPS, seed=seed)
            for seed in (settings.seeds_of(RUNS, 1) if name in COMPARED else range(1))
        ]
        for name, strategy in strategies.items()
    }
    [(course, _)] = in_ranks([Ranks(law=law, steps=STEPS, seed=0)], REPLICAS)
    courses["DDP over gloo"] = [course]
    figures = {name: _mean(runs) for name, runs in courses.items()}
    rows = {name: {"runs": len(courses[name]), **_told(row)} for name, row in figures.items()}
    show(rows, "mode", f"N = {REPLICAS} processes, {STEPS} steps")
    rate = {name: row["steps_per_second"] for name, row in figures.items()}
    return figures, {
        "steps/s, b = 2 without cancel / b = 0": goal(rate["b = 2, no cancel"] / rate["b = 0"], at_least=1.7),
        "steps/s, b = 2 / b = 0": goal(rate["b = 2"] / rate["b = 0"], at_least=2.5),
    }


def _mean(runs: Sequence[Trained]) -> Json:
    """Of runs of equally many steps: steps over seconds, all taken together, and the means of the rest."""
    reached = [run.reached for run in runs if run.reached is not None]
    return {
        "steps_per_second": statistics.harmonic_mean([run.rate for run in runs]),
        "reached": statistics.mean(reached) if len(reached) == len(runs) else None,
        "accuracy": statistics.mean(run.accuracy for run in runs),
    }


def _told(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items()}


#: seeds of (a), (b) and (c): those that tune, and the number of those that judge, from 0 on
TUNING, JUDGING = range(1000, 1004), 12
#: of (a): replicas of the asynchronous training, whose staleness is one less if none is slow; learning rates; steps
STALE, STALE_RATES, STALE_STEPS, STALE_BATCH = (1, 2, 4, 8), (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1), 500, 16
MOMENTUM, STALE_RATE = 0.9, 0.05
#: of (b): workers in all, numbers of backups, pictures of a gradient, and the learning rate if all workers counted
WORKERS, BACKUPS, BATCH, LEARNING_RATE = 50, (0, 1, 2, 4, 8, 16, 25, 35, 44), 2, 0.8
#: of (c): replicas N, backups b, pictures of a gradient, virtual seconds, and learning rates of N gradients
WIDE, SPARE, WIDE_BATCH, WIDE_SECONDS, WIDE_RATES = 16, 4, 8, 40.0, (0.2, 0.4, 0.8, 1.6)


def staleness(settings: Settings) -> Found:
    """(a) Test error against the staleness of gradients, with momentum: at one rate, and at the best rate for each."""
    counts, rates = settings.values_of(STALE, every=3), settings.values_of(STALE_RATES)

    def job(replicas: int, rate: float) -> Job:
        return Job(
            strategy=Async(replicas=replicas),
            law=Stragglers(probability=0.0),
            rate=rate,
            momentum=MOMENTUM,
            batch=STALE_BATCH,
            steps=STALE_STEPS,
            look_every=10,
        )

    best = _tuned(settings, {n: {rate: job(n, rate) for rate in rates} for n in counts}, lambda run: -run.accuracy)
    tuned = _judged(settings, {n: job(n, best[n]) for n in counts})
    fixed = _judged(settings, {n: job(n, STALE_RATE) for n in counts})
    figures: Json = {}
    rows = {}
    for n in counts:
        errors = [[100 * (1 - run.accuracy) for run in runs[n]] for runs in (fixed, tuned)]
        stale = statistics.mean(run.staleness for run in tuned[n])
        row = {"staleness": stale, "rate": best[n], "error_at_one_rate": errors[0], "error_tuned": errors[1]}
        figures[f"{n} replicas"] = row
        means = {f"error at {STALE_RATE}, %": statistics.mean(errors[0]), "tuned, %": statistics.mean(errors[1])}
        rows[f"{n} replicas"] = _told({"staleness": stale, "rate": best[n], **means})
    show(rows, "replicas", f"test error, {STALE_STEPS} gradients")
    rises = [100 * (one.accuracy - many.accuracy) for one, many in zip(fixed[STALE[0]], fixed[STALE[-1]], strict=True)]
    _draw(settings, "staleness", figures)
    rise = "points of test error at staleness 7 over those at 0, at one rate"
    return figures, {rise: goal(rises, at_least=20.0, by_mean=settings.quick)}


def curve(settings: Settings) -> Found:
    """(b) Seconds to the target against the number of backups b, with N + b fixed."""

    def job(backups: int) -> Job:
        replicas = WORKERS - backups
        return Job(
            strategy=Sync(replicas=replicas, backups=backups),
            law=CROWDED,
            rate=LEARNING_RATE * replicas / WORKERS,
            batch=BATCH,
            until=True,
        )

    counts = settings.values_of(BACKUPS)
    runs = _judged(settings, {b: job(b) for b in counts})
    seconds = {b: [run.seconds for run in each] for b, each in runs.items()}
    means = {b: statistics.mean(each) for b, each in seconds.items()}
    least = min(means, key=lambda b: means[b])
    rows = {}
    for b, each in seconds.items():
        low, high = interval(each)
        steps = f"{statistics.mean(run.steps for run in runs[b]):.0f}"
        rows[f"b = {b}"] = {"seconds": f"{means[b]:.1f}", "interval": f"{low:.1f} to {high:.1f}", "steps": steps}
    show(rows, "backups", f"seconds to {TARGET}, {WORKERS} workers in all")
    figures = {"backups": list(counts), "seconds": list(seconds.values()), "least": least}
    _draw(settings, "backups", {**figures, "accuracy": TARGET})
    return figures, {
        f"seconds at b = {end} / those at b = {least}, the least": goal(
            beside(seconds[end], seconds[least]), at_least=1.5, by_mean=settings.quick
        )
        for end in (counts[0], counts[-1])
    }


def against(settings: Settings) -> Found:
    """(c) N = 16 and b = 4 against no backups and against asynchronous SGD, on the same workers, each tuned."""
    # Three seeds do not tell b = 4 from asynchronous SGD, and most of the work follows after the target is reached.
    most = WIDE_SECONDS / 2 if settings.quick else WIDE_SECONDS
    strategies: dict[str, tuple[Strategy, float]] = {
        # The learning rate of one gradient is the share that it has in a step's mean.
        "b = 4": (Sync(replicas=WIDE, backups=SPARE), 1.0),
        "b = 0": (Sync(replicas=WIDE + SPARE), 1.0),
        "async": (Async(replicas=WIDE + SPARE), 1 / WIDE),
    }

    def job(name: str, rate: float) -> Job:
        strategy, share = strategies[name]
        return Job(
            strategy=strategy,
            law=Stragglers(),
            rate=rate * share,
            batch=WIDE_BATCH,
            seconds=most,
            look_every=1 if strategy.lockstep else strategy.replicas,
        )

    candidates = {
        name: {
            rate: replace(job(name, rate), until=True, seconds=WIDE_SECONDS) for rate in settings.values_of(WIDE_RATES)
        }
        for name in strategies
    }
    best = _tuned(settings, candidates, lambda run: run.reached or WIDE_SECONDS)
    runs = _judged(settings, {name: job(name, best[name]) for name in strategies}, quick_seeds=6)
    figures = {
        name: {
            "rate": best[name],
            "reached": [run.reached or most for run in each],
            "accuracy": [run.accuracy for run in each],
            "staleness": statistics.mean(run.staleness for run in each),
        }
        for name, each in runs.items()
    }
    means = {name: {k: float(np.mean(value)) for k, value in row.items()} for name, row in figures.items()}
    show({name: _told(row) for name, row in means.items()}, "mode", f"{WIDE + SPARE} workers, {most:g} s")
    courses = {name: [run.course for run in each] for name, each in runs.items()}
    _draw(settings, "against", {"courses": courses, "accuracy": TARGET})
    four, none, stale = (figures[name] for name in ("b = 4", "b = 0", "async"))
    gains = [a - b for a, b in zip(four["accuracy"], stale["accuracy"], strict=True)]
    reached, by_mean = f"seconds to {TARGET}, b = 4 /", settings.quick
    return figures, {
        f"{reached} b = 0": goal(beside(four["reached"], none["reached"]), at_most=0.6, by_mean=by_mean),
        f"{reached} async": goal(beside(four["reached"], stale["reached"]), at_most=1.0, by_mean=by_mean),
        "accuracy at the end, b = 4 - async": goal(gains, at_least=0.0, by_mean=by_mean),
    }


def _tuned(
    settings: Settings, jobs: Mapping[K, Mapping[float, Job]], score: Callable[[Trained], float]
) -> dict[K, float]:
    """Return the learning rate of each setting with the least mean score over the seeds for tuning."""
    each = {(name, rate): partial(train, job) for name, rates in jobs.items() for rate, job in rates.items()}
    runs = settings.played(each, TUNING[:1] if settings.quick else TUNING)
    scores = {key: statistics.mean(map(score, found)) for key, found in runs.items()}
    return {name: min(rates, key=lambda rate: scores[name, rate]) for name, rates in jobs.items()}


def _judged(settings: Settings, jobs: Mapping[K, Job], quick_seeds: int = 3) -> dict[K, list[Trained]]:
    """Return trainings with each of the seeds for judging, or with the first `quick_seeds` if it must be quick."""
    each = {name: partial(train, job) for name, job in jobs.items()}
    return settings.played(each, settings.seeds_of(JUDGING, quick_seeds))


def _draw(settings: Settings, name: str, figures: Mapping[str, Any]) -> None:
    if settings.pictures is not None:
        import picture

        picture.TRAINING[name](figures, settings.pictures / f"{name}.png")


#: of the slow examples: replicas, numbers of backups, epochs and examples for each replica, as a whole and if it must
#: be quick, and seeds
SLOW_REPLICAS, SLOW_BACKUPS, SLOW_WHOLE, SLOW_QUICK, SLOW_SEEDS = 40, (2, 4), (4, 100), (3, 50), 3


def slow_examples(settings: Settings) -> Found:
    """A tenth of the examples make their batch four times slower: their share in what counted."""
    epochs, examples = SLOW_QUICK if settings.quick else SLOW_WHOLE
    play = partial(with_slow_examples, SLOW_REPLICAS, epochs=epochs, examples=examples)
    jobs = {
        f"b = {b}" if returns else f"b = {b}, dropped for good": partial(play, b, returns)
        for b in SLOW_BACKUPS
        for returns in (False, True)
    }
    runs = settings.played(jobs, settings.seeds_of(SLOW_SEEDS, 1))
    figures = {name: {key: statistics.mean(run[key] for run in each) for key in each[0]} for name, each in runs.items()}
    show({name: _told(row) for name, row in figures.items()}, "backups", f"N = {SLOW_REPLICAS}, a tenth is slow")
    goals = {}
    for b in SLOW_BACKUPS:
        with_returns, without = figures[f"b = {b}"], figures[f"b = {b}, dropped for good"]
        off = abs(with_returns["share"] - 0.099)
        goals[f"b = {b}: distance of their share from .099"] = goal(off, at_most=0.01)
        fewer = 1 - with_returns["steps_per_second"] / without["steps_per_second"]
        goals[f"b = {b}: fewer steps a second than without returns"] = goal(fewer, at_most=0.15)
    return figures, goals


#: of `auto`: replicas, the b that it starts with, steps, the first steps in which b is not chosen yet, and seeds
AUTO_REPLICAS, AUTO_BACKUPS, AUTO_STEPS, AUTO_FIRST, AUTO_SEEDS = 8, 3, 500, 20, 5
#: name of the law with stragglers
SLOW = "1 of 20 is slow"


def auto(settings: Settings) -> Found:
    """b = "auto" on a virtual clock: no backups without stragglers, and near the best fixed b with them."""
    laws = {f"jitter {jitter:.0%}": Stragglers(jitter=jitter, probability=0.0) for jitter in (0.02, 0.2)}
    laws[SLOW] = Stragglers(jitter=0.02)
    tries: dict[str, Sequence[Any]] = {law: ["auto"] for law in laws}
    tries[SLOW] = ["auto", *range(AUTO_BACKUPS + 1)]
    steps = AUTO_STEPS // (2 if settings.quick else 1)
    jobs = {(law, b): partial(seconds_a_step, laws[law], AUTO_REPLICAS, b, steps) for law in laws for b in tries[law]}
    reports = settings.played(jobs, settings.seeds_of(AUTO_SEEDS, 1))
    figures: Json = {}
    goals: Json = {}
    rows = {}
    for law, drawn in laws.items():
        tuned = reports[law, "auto"]
        seconds = {b: [report.seconds / report.steps for report in reports[law, b]] for b in tries[law]}
        kept = [report.backups for report in tuned]
        predicted = [report.predictions[report.backups] for report in tuned]
        true = [statistics.mean(step.seconds for step in report.log.steps[AUTO_FIRST:]) for report in tuned]
        # Each seed's best b in hindsight.
        over = [chosen / min(row, default=chosen) for chosen, *row in zip(*seconds.values(), strict=True)]
        figures[law] = {"kept": kept, "predicted": predicted, "true": true, "over_the_best": over} | {
            f"b = {b}": each for b, each in seconds.items()
        }
        columns = {"predicted": predicted, "true": true} | {str(b): each for b, each in seconds.items()}
        rows[law] = {"kept": " ".join(map(str, kept))} | {
            name: f"{1e3 * statistics.mean(each):.1f}" for name, each in columns.items()
        }
        if drawn.probability:
            goals[f"{law}: seconds / those of the best fixed b, the worst seed"] = goal(max(over), at_most=1.05)
        else:
            off = max(abs(ratio - 1) for ratio in beside(predicted, true))
            goals[f"{law}: backups kept, the most"] = goal(max(kept), at_most=0)
            goals[f"{law}: error of the predicted step, the worst seed"] = goal(off, at_most=0.1)
    show(rows, "law", f"N = {AUTO_REPLICAS}, milliseconds a step")
    return figures, goals


#: of the modes: gradients of each of the REPLICAS, local steps from one exchange to the next, those from sending to
#: merging, pictures for testing, and seeds
GRADIENTS, TAU, DELAY, HELD_OUT, MODE_SEEDS = 250, 4, 2, 600, 10
#: bytes a second that the wire lets pass in each direction, by its name
WIRES = {"slowed": 15e6, "free": math.inf}
_Mode = partial(
    Called,
    law=Stragglers(probability=0.0),
    steps=GRADIENTS,
    network=wide_network,
    momentum=0.9,
    test=HELD_OUT,
)
SYNC, DELAYED, ELASTIC = "sync", f"average, delay {DELAY}", "elastic"
MODES: Mapping[str, Called] = {
    SYNC: _Mode(strategy=Sync(replicas=REPLICAS)),
    "sync, 2 bits": _Mode(strategy=Sync(replicas=REPLICAS), codec=Quantize(2)),
    "average": _Mode(strategy=Average(replicas=REPLICAS, tau=TAU), steps=GRADIENTS // TAU),
    DELAYED: _Mode(strategy=Average(replicas=REPLICAS, tau=TAU, delay=DELAY), steps=GRADIENTS // TAU),
    ELASTIC: _Mode(
        strategy=Elastic(replicas=REPLICAS, alpha=0.9 / REPLICAS, every=TAU), steps=REPLICAS * GRADIENTS // TAU
    ),
}
#: modes whose exchanges overlap the local steps, which also run on the free wire
OVERLAPPED = (DELAYED, ELASTIC)
#: most bytes of a mode as a share of those of synchronous SGD
SHARES = {"sync, 2 bits": 0.08, "average": 0.27, DELAYED: 0.27, ELASTIC: 0.27}


def modes(settings: Settings) -> Found:
    """Strategies and codecs on a slowed wire: an accuracy no more than a point lower, and bytes in proportion."""
    names = [SYNC, "sync, 2 bits"] if settings.quick else [*MODES]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    # A seed runs in all modes before the next one, so that other work on the machine hits them all alike.
    for seed in settings.seeds_of(MODE_SEEDS, 1):
        for name, wire in [(n, w) for n in names for w in WIRES if w == "slowed" or n in OVERLAPPED]:
            model, report = replace(MODES[name], seed=seed).lead(WIRES[wire])
            figures = {"megabytes": report.bytes_in / 1e6, "seconds": report.seconds}
            runs.setdefault((name, wire), []).append({"accuracy": held_out_accuracy(model, HELD_OUT), **figures})
    means = {
        f"{name}, {wire}": {figure: statistics.mean(run[figure] for run in each) for figure in each[0]}
        for (name, wire), each in runs.items()
    }
    title = f"N = {REPLICAS} processes, {GRADIENTS} gradients of each"
    show({name: _told(row) for name, row in means.items()}, "mode, wire", title)

    def ratios(figure: str, above: tuple[str, str], below: tuple[str, str]) -> list[float]:
        return beside(*([run[figure] for run in runs[each]] for each in (above, below)))

    goals: Json = {}
    for (name, wire), each in runs.items():
        if wire == "free":
            slower = ratios("seconds", (name, "slowed"), (name, "free"))
            goals[f"{name}: seconds, slowed wire / free"] = goal(slower, at_most=1.15)
        elif name != SYNC:
            sync = (SYNC, "slowed")
            lost = [a["accuracy"] - b["accuracy"] for a, b in zip(runs[sync], each, strict=True)]
            moved = ratios("megabytes", (name, wire), sync)
            goals[f"{name}: accuracy less than that of sync"] = goal(lost, at_most=0.01)
            goals[f"{name}: bytes / those of sync"] = goal(moved, at_most=SHARES[name])
        if (name, wire) == (DELAYED, "slowed"):
            faster = ratios("seconds", (name, wire), ("average", wire))
            goals[f"{name}: seconds / those without delay, slowed wire"] = goal(faster, at_most=0.85)
    return means, goals


#: of ADSAGA: steps, that of asynchronous SGD, machines, and mean seconds of the work on a row
SAGA_STEPS, SGD_STEP, MACHINES, ROW_SECONDS = (0.3, 0.35, 0.4), 0.1, 40, 0.2


def forty(settings: Settings) -> Found:
    """ADSAGA with forty processes over the bus of a gang; the seconds of machines that are played are .2 a row."""
    figures: Json = {}

    def played(name: str, machines: int) -> tuple[dict[str, Any], float]:
        """Return the params with the best of the steps, and the evaluations until it is solved."""
        tried = []
        for step in SAGA_STEPS:
            params = {"method": "adsaga", "machines": machines, "step": step}
            found = adsaga.objective(params, LocalContext(budget=20_000))
            tried.append((found.get("evaluations", math.inf), step, params))
        evaluations, _, params = min(tried, key=lambda each: each[:2])
        figures[name] = {"evaluations": evaluations, "seconds": evaluations / machines * ROW_SECONDS}
        return params, evaluations

    def real(params: dict[str, Any], evaluations: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            return adsaga.with_a_gang(params, LocalContext(budget=evaluations, checkpoints=Path(folder)))

    _, alone = played("SAGA, played", 1)
    params, simulated = played(f"ADSAGA, {MACHINES} machines, played", MACHINES)
    ratio = "ADSAGA's {}, {}, in SAGA's".format
    goals = {ratio("evaluations", "simulated"): goal(simulated / alone, at_most=1.5)}
    if not settings.quick:
        # The evaluations end a little later than those of the simulation.
        found = real({**params, "seconds": ROW_SECONDS}, int(1.3 * simulated))
        evaluations, seconds = (found.get(name, math.inf) for name in ("evaluations", "seconds"))
        figures[f"ADSAGA, {MACHINES} processes"] = {"evaluations": evaluations, "seconds": seconds}
        error = 10 ** real({"method": "sgd", "machines": MACHINES, "step": SGD_STEP}, 20_000)["loss"]
        goals |= {
            ratio("evaluations", "real"): goal(evaluations / alone, at_most=1.5),
            ratio("seconds", "real"): goal(seconds / (alone * ROW_SECONDS), at_most=0.05),
            "error at which asynchronous SGD stalls": goal(error, at_least=1e-5),
        }
    show({name: _told(row) for name, row in figures.items()}, "method", "until the error is 1e-8")
    return figures, goals


#: of DropCompute: ranks, steps, and seeds
DROP_STEPS, DROP_SEEDS = 200, 5


def drop_compute(settings: Settings) -> Found:
    """DropCompute beside DistributedDataParallel, with stragglers as in ``real``."""
    seeds, steps = settings.seeds_of(DROP_SEEDS, 1), 30 if settings.quick else DROP_STEPS
    # All trainings run in the same ranks, which take long to start.
    job = Ranks(law=Stragglers(), steps=steps, seed=0, rate=0.2, momentum=0.9)
    found = in_ranks([replace(job, seed=seed, drops=drops) for drops in (False, True) for seed in seeds], REPLICAS)
    figures = {
        name: {**_mean([run for run, _ in each]), "share": statistics.mean(share for _, share in each)}
        for name, each in (("DDP", found[: len(seeds)]), ("DropCompute", found[len(seeds) :]))
    }
    show({name: _told(row) for name, row in figures.items()}, "method", f"{REPLICAS} ranks, {steps} steps")
    ddp, drop = figures.values()
    return figures, {
        "steps/s, DropCompute / DDP": goal(drop["steps_per_second"] / ddp["steps_per_second"], at_least=1.5),
        "share of the micro-batches that count": goal(drop["share"], at_least=0.8),
        "mean test accuracy less than that of DDP": goal(ddp["accuracy"] - drop["accuracy"], at_most=0.005),
    }


PARTS: Mapping[str, Callable[[Settings], Found]] = {
    "real": stragglers,
    "a": staleness,
    "b": curve,
    "c": against,
    "slow": slow_examples,
    "auto": auto,
    "modes": modes,
    "adsaga": forty,
    "drop": drop_compute,
}
#: parts that run only if they are named
NAMED = ("modes", "adsaga", "drop")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given again")
    parser.add_argument(
        "--seeds",
        type=count,
        help=f"of each comparison; {JUDGING} for a to c, {SLOW_SEEDS} to {MODE_SEEDS} elsewhere, fewer with --quick",
    )
    parser.add_argument("--pictures", type=Path, help="draw a, b and c in this folder")
    parser.add_argument(
        "--quick", action="store_true", help="fewer seeds and values; means, not intervals, reach a goal"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Its processes may also run where the wire gives them nothing to say.
    logging.disable(logging.WARNING)
    figures, goals = {}, {}
    # Ten processes that wake together need the cores for themselves: with others at work, `real` measures those.
    load = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the start"
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), get_context("spawn")) as pool:
        settings = Settings(seeds=given.seeds, quick=given.quick, pool=pool, pictures=given.pictures)
        for name in [name for name in PARTS if name in (given.only or PARTS.keys() - NAMED)]:
            figures[name], reached = PARTS[name](settings)
            goals |= {f"({name}) {words}": row for words, row in reached.items()}
    all_reached = finish(figures, goals, {"seeds": given.seeds, "quick": given.quick, "machine": load})
    sys.exit(0 if all_reached else 1)


if __name__ == "__main__":
    main()
