"""Training by gangs, measured: ``python tests/benchmarks/backup_sgd.py [--only PART ...]``.

Each part prints its figures and says pass or fail; the exit code is 1 where one fails. The last line is one JSON object
with the figures and goals of all parts.

1. Replicas are killed at random times: how long training stalls.
2. A replica joins late: how soon it contributes.
3. Stragglers, real processes: steps a second, seconds to a test accuracy and the accuracy at the end for several
   numbers of backups, with and without cancelling, for asynchronous SGD, and for torch's DDP over gloo.
The next parts are played by the product's coordinator, strategies and tuner on a virtual clock; gradients are real:

``a``: test error against the staleness of gradients.
``b``: seconds to a test accuracy against the number of backups, 50 workers in all.
``c``: N = 16 and b = 4 against b = 0 and against asynchronous SGD, each with its best learning rate.
``slow``: the share of examples that make their batch slow in what counts.
``auto``: b = "auto" without stragglers and with them, on a virtual clock, beside each fixed b.
``bus``: bytes a second of the bus beside those of a bare socket.

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

import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import backup_replicas
import backup_wire
import click
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
from backup_replicas import Called, Ranks, in_ranks, join_late
from figures import goal, interval
from rich.console import Console
from rich.table import Table

from shadho_celery.objective.context import LocalContext
from shadho_celery.training.coordinator.backups import simulate
from shadho_celery.training.coordinator.coordinator import CANCEL_SECONDS
from shadho_celery.training.strategies import Async, Average, Elastic, Strategy, Sync
from shadho_celery.training.wire.vectors import Quantize
from tasks import adsaga

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: of the real stragglers: replicas that a step takes, and steps
REPLICAS, STEPS = 8, 160
#: what is compared, and with how many seeds: the luck of one run moves its rate by a tenth
COMPARED, RUNS = ("b = 0", "b = 2", "b = 2, no cancel"), 3
#: of the deaths: replicas that a step takes, steps of a training, and trainings with a backup and without
FEW, SHORT, DEATHS = 4, 30, {1: 20, 0: 10}
#: of the late joiners: trainings, the step after which the late one starts, and steps in all
JOINERS, JOIN_AT, JOIN_LIMIT = 4, 15, 60
#: of the bus: parameters by vectors sent
VECTORS = {1_000_000: 20, 10_000_000: 10, 25_000_000: 10}
#: the bus, in clear and as with a signing key, and the least share of a bare socket's rate that each must reach
BUSES = {"bus": 0.7, "encrypted bus": 0.45}
WAYS = tuple(f"{name} {to}" for to in ("out", "in") for name in ("raw", *BUSES))


@dataclass
class Outcome:
    """What a part has found, and the table of it."""

    #: title of the table, and of its first column
    title: str = ""
    first: str = ""
    #: texts of the table by row and column
    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    #: whatever it measured, as JSON takes it
    figures: dict[str, Any] = field(default_factory=dict)
    #: figures beside what they should reach, by what they say
    goals: dict[str, Mapping[str, Any]] = field(default_factory=dict)


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


def deaths(settings: Settings) -> Outcome:
    """Replicas are killed with SIGKILL at random moments."""
    outcome = Outcome(f"N = {FEW}, milliseconds", "backups")
    for backups, most in DEATHS.items():
        repeats = most // 5 if settings.quick else most
        seen = [backup_replicas.kill_one(FEW, backups, steps=SHORT, seed=seed) for seed in range(repeats)]
        worst = max(death["longest_after"] / (2 * death["median"] + death["detection"]) for death in seen)
        row = {"median": statistics.median(death["median"] for death in seen)}
        for name in ("detection", "longest_before", "stall", "longest_after"):
            row[name] = max(death[name] for death in seen)
        outcome.figures[f"b = {backups}"] = row
        outcome.rows[str(backups)] = {"repeats": str(repeats)} | {
            name.replace("_", " "): f"{1e3 * value:.1f}" for name, value in row.items()
        }
        finished = sum(death["finished"] for death in seen)
        outcome.goals |= {
            f"b = {backups}: longest step after it / (2 x median step + detection)": goal(worst, at_most=1.0),
            f"b = {backups}: trainings that took all steps": goal(finished, at_least=repeats),
        }
    return outcome


def joiners(settings: Settings) -> Outcome:
    """Replicas join in mid-training: in place of one that was killed, and as a backup beyond those that are needed."""
    outcome = Outcome("steps until its first gradient counts", "late replica")
    for words, backups in (("in place of a dead one", 0), ("as a backup", 1)):
        rank = FEW if backups else FEW - 1
        jobs = [
            Called(strategy=Sync(replicas=FEW, backups=backups), steps=JOIN_LIMIT, seed=seed) for seed in range(JOINERS)
        ]
        steps = outcome.figures[words] = [join_late(job, rank, at=JOIN_AT) or JOIN_LIMIT for job in jobs]
        median = f"{statistics.median(steps):g}"
        outcome.rows[words] = {"each training": " ".join(map(str, steps)), "median": median}
    needed, spare = outcome.figures.values()
    outcome.goals = {
        "steps until one that is needed contributes, the most": goal(max(needed), at_most=3),
        # A backup's gradient may well be the slowest of a step, and is then dropped as it should be.
        "steps until a backup contributes, median": goal(statistics.median(spare), at_most=3),
    }
    return outcome


def stragglers(settings: Settings) -> Outcome:
    """Real processes with stragglers: 50 ms a gradient, 1 of 20 takes 4 P times that, P Pareto."""
    law = Stragglers()
    strategies: dict[str, Strategy] = {f"b = {b}": Sync(replicas=REPLICAS, backups=b) for b in (0, 1, 2, 4)}
    strategies["b = 2, no cancel"] = Sync(replicas=REPLICAS, backups=2, cancel=False)
    strategies["async"] = Async(replicas=REPLICAS)
    courses = {
        name: [
            backup_replicas.train(strategy, law, steps=STEPS, seed=seed)
            for seed in (settings.seeds_of(RUNS, 1) if name in COMPARED else range(1))
        ]
        for name, strategy in strategies.items()
    }
    [(course, _)] = in_ranks([Ranks(law=law, steps=STEPS, seed=0)], REPLICAS)
    courses["DDP over gloo"] = [course]
    outcome = Outcome(f"N = {REPLICAS} processes, {STEPS} steps", "mode")
    for name, runs in courses.items():
        row = _mean(runs)
        strategy = strategies.get(name)
        if strategy is None or isinstance(strategy, Sync):
            row["simulated"] = _expected(strategy, law)
        expected, reached = row.get("simulated"), row["reached"]
        outcome.rows[name] = {
            "runs": str(len(runs)),
            "steps/s": f"{row['steps_per_second']:.2f}",
            "simulated": "" if expected is None else f"{expected:.2f}",
            f"s to {TARGET}": "never" if reached is None else f"{reached:.1f}",
            "accuracy": f"{row['accuracy']:.4f}",
        }
        outcome.figures[name] = row
    rate = {name: row["steps_per_second"] for name, row in outcome.figures.items()}
    outcome.goals = {
        "steps/s, b = 2 without cancel / b = 0": goal(rate["b = 2, no cancel"] / rate["b = 0"], at_least=1.7),
        "steps/s, b = 2 / b = 0": goal(rate["b = 2"] / rate["b = 0"], at_least=2.5),
    }
    return outcome


def _mean(runs: Sequence[Trained]) -> dict[str, float | None]:
    """Of runs of equally many steps: steps over seconds, all taken together, and the means of the rest."""
    reached = [run.reached for run in runs if run.reached is not None]
    return {
        "steps_per_second": statistics.harmonic_mean([run.rate for run in runs]),
        "reached": statistics.mean(reached) if len(reached) == len(runs) else None,
        "accuracy": statistics.mean(run.accuracy for run in runs),
    }


def _expected(strategy: Sync | None, law: Stragglers) -> float:
    """Steps a second by the renewal simulation, where communication takes no time; DDP is b = 0."""
    backups, cancel = (int(strategy.backups), strategy.cancel) if strategy else (0, True)
    seconds = simulate(
        lambda generator, runs, n: law.draw(generator, runs * n).reshape(runs, n),
        REPLICAS,
        backups,
        cancel_seconds=CANCEL_SECONDS if cancel else None,
        generator=np.random.default_rng(0),
        runs=200,
    )
    return 1 / seconds


def wire(settings: Settings) -> Outcome:
    """The bus beside a bare socket, over loopback."""
    title = "MB/s to another process (out) and from it (in), the fastest, and as a share of a bare socket's"
    outcome = Outcome(title, "parameters")
    for parameters, count in VECTORS.items():
        rates = backup_wire.megabytes_per_second(parameters, count)
        # Whatever else the machine does makes some of them slower, and none faster.
        best = {way: max(rates[way]) for way in WAYS}
        shares = {(bus, to): best[f"{bus} {to}"] / best[f"raw {to}"] for bus in BUSES for to in ("out", "in")}
        outcome.rows[f"{parameters / 1e6:g} M"] = {way: f"{best[way]:.0f}" for way in WAYS} | {
            f"{bus} / raw {to}": f"{share:.2f}" for (bus, to), share in shares.items()
        }
        outcome.figures[str(parameters)] = best
    for (bus, to), share in shares.items():
        outcome.goals[f"{bus} / raw socket, {to}, {parameters / 1e6:g} M"] = goal(share, at_least=BUSES[bus])
    return outcome


#: seeds of (a), (b) and (c): those that tune, and the number of those that judge, from 0 on
TUNING, JUDGING = range(1000, 1004), 12
#: of (a): replicas of the asynchronous training, whose staleness is one less if none is slow; learning rates; steps
STALE, STALE_RATES, STALE_STEPS, STALE_BATCH = (1, 2, 4, 8), (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1), 500, 16
MOMENTUM, STALE_RATE = 0.9, 0.05
#: of (b): workers in all, numbers of backups, pictures of a gradient, and the learning rate if all workers counted
WORKERS, BACKUPS, BATCH, LEARNING_RATE = 50, (0, 1, 2, 4, 8, 16, 25, 35, 44), 2, 0.8
#: of (c): replicas N, backups b, pictures of a gradient, virtual seconds, and learning rates of N gradients
WIDE, SPARE, WIDE_BATCH, WIDE_SECONDS, WIDE_RATES = 16, 4, 8, 40.0, (0.2, 0.4, 0.8, 1.6)


def staleness(settings: Settings) -> Outcome:
    """(a) Test error against the staleness of gradients, with momentum: at one rate, and at the best rate for each."""
    calm = Stragglers(probability=0.0)
    counts, rates = settings.values_of(STALE, every=3), settings.values_of(STALE_RATES)

    def job(replicas: int, rate: float) -> Job:
        return Job(
            strategy=Async(replicas=replicas),
            law=calm,
            rate=rate,
            momentum=MOMENTUM,
            seed=0,
            batch=STALE_BATCH,
            steps=STALE_STEPS,
            look_every=10,
        )

    best = _tuned(
        settings,
        {n: {rate: job(n, rate) for rate in rates} for n in counts},
        lambda run: -run.accuracy,
    )
    tuned = _judged(settings, {n: job(n, best[n]) for n in counts})
    fixed = _judged(settings, {n: job(n, STALE_RATE) for n in counts})
    outcome = Outcome(f"test error, {STALE_STEPS} gradients", "replicas")
    for n in counts:
        errors = [[100 * (1 - run.accuracy) for run in runs[n]] for runs in (fixed, tuned)]
        stale = statistics.mean(run.staleness for run in tuned[n])
        at_one, at_best = (f"{statistics.mean(each):.1f} %" for each in errors)
        outcome.rows[str(n)] = {
            "staleness": f"{stale:.2f}",
            f"rate {STALE_RATE}": at_one,
            "tuned": at_best,
            "rate": f"{best[n]:g}",
        }
        outcome.figures[f"{n} replicas"] = {
            "staleness": stale,
            "rate": best[n],
            "error_at_one_rate": errors[0],
            "error_tuned": errors[1],
        }
    rises = [100 * (one.accuracy - many.accuracy) for one, many in zip(fixed[STALE[0]], fixed[STALE[-1]], strict=True)]
    outcome.goals["points of test error at staleness 7 over those at 0, at one rate"] = goal(
        rises, at_least=20.0, by_mean=settings.quick
    )
    _draw(settings, "staleness", outcome.figures)
    return outcome


def curve(settings: Settings) -> Outcome:
    """(b) Seconds to the target against the number of backups b, with N + b fixed."""

    def job(backups: int) -> Job:
        replicas = WORKERS - backups
        return Job(
            strategy=Sync(replicas=replicas, backups=backups),
            law=CROWDED,
            rate=LEARNING_RATE * replicas / WORKERS,
            seed=0,
            batch=BATCH,
            until=True,
        )

    counts = settings.values_of(BACKUPS)
    runs = _judged(settings, {b: job(b) for b in counts})
    seconds = {b: [run.seconds for run in each] for b, each in runs.items()}
    means = {b: statistics.mean(each) for b, each in seconds.items()}
    least = min(means, key=lambda b: means[b])
    outcome = Outcome(f"seconds to {TARGET}, {WORKERS} workers in all", "backups")
    outcome.figures = {"backups": list(counts), "seconds": list(seconds.values()), "least": least}
    for b, each in seconds.items():
        low, high = interval(each)
        steps = f"{statistics.mean(run.steps for run in runs[b]):.0f}"
        outcome.rows[str(b)] = {"seconds": f"{means[b]:.1f}", "interval": f"{low:.1f} to {high:.1f}", "steps": steps}
    for end in (counts[0], counts[-1]):
        ratios = [one / other for one, other in zip(seconds[end], seconds[least], strict=True)]
        outcome.goals[f"seconds at b = {end} / those at b = {least}, the least"] = goal(
            ratios, at_least=1.5, by_mean=settings.quick
        )
    _draw(settings, "backups", outcome.figures)
    return outcome


def against(settings: Settings) -> Outcome:
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
            seed=0,
            batch=WIDE_BATCH,
            seconds=most,
            look_every=1 if strategy.lockstep else strategy.replicas,
        )

    rates = settings.values_of(WIDE_RATES)
    candidates = {
        name: {rate: replace(job(name, rate), until=True, seconds=WIDE_SECONDS) for rate in rates}
        for name in strategies
    }
    best = _tuned(settings, candidates, lambda run: run.reached or WIDE_SECONDS)
    runs = _judged(settings, {name: job(name, best[name]) for name in strategies}, quick_seeds=6)
    outcome = Outcome(f"{WIDE + SPARE} workers, {most:g} s", "mode")
    for name, each in runs.items():
        reached = [run.reached or most for run in each]
        accuracy = [run.accuracy for run in each]
        stale = statistics.mean(run.staleness for run in each)
        outcome.rows[name] = {
            "rate": f"{best[name]:g}",
            f"s to {TARGET}": f"{statistics.mean(reached):.1f}",
            "accuracy": f"{statistics.mean(accuracy):.4f}",
            "stale": f"{stale:.1f}",
        }
        outcome.figures[name] = {"rate": best[name], "reached": reached, "accuracy": accuracy, "staleness": stale}
    four, none, stale_ones = (outcome.figures[name] for name in ("b = 4", "b = 0", "async"))

    def ratio(other: Mapping[str, Any]) -> list[float]:
        return [a / b for a, b in zip(four["reached"], other["reached"], strict=True)]

    gains = [a - b for a, b in zip(four["accuracy"], stale_ones["accuracy"], strict=True)]
    outcome.goals = {
        f"seconds to {TARGET}, b = 4 / b = 0": goal(ratio(none), at_most=0.6, by_mean=settings.quick),
        f"seconds to {TARGET}, b = 4 / async": goal(ratio(stale_ones), at_most=1.0, by_mean=settings.quick),
        "accuracy at the end, b = 4 - async": goal(gains, at_least=0.0, by_mean=settings.quick),
    }
    courses = {name: [run.course for run in each] for name, each in runs.items()}
    _draw(settings, "against", courses)
    return outcome


def _tuned(
    settings: Settings, jobs: Mapping[K, Mapping[float, Job]], score: Callable[[Trained], float]
) -> dict[K, float]:
    """Return the learning rate of each setting with the least mean score over the seeds for tuning."""
    seeds = TUNING[:1] if settings.quick else TUNING
    runs = {
        (name, rate): [settings.pool.submit(train, replace(job, seed=seed)) for seed in seeds]
        for name, rates in jobs.items()
        for rate, job in rates.items()
    }
    scores = {key: statistics.mean(score(run.result()) for run in each) for key, each in runs.items()}
    return {name: min(rates, key=lambda rate: scores[name, rate]) for name, rates in jobs.items()}


def _judged(settings: Settings, jobs: Mapping[K, Job], quick_seeds: int = 3) -> dict[K, list[Trained]]:
    """Return trainings with each of the seeds for judging, or with the first `quick_seeds` if it must be quick."""
    seeds = settings.seeds_of(JUDGING, quick_seeds)
    runs = {
        name: [settings.pool.submit(train, replace(job, seed=seed)) for seed in seeds] for name, job in jobs.items()
    }
    return {name: [run.result() for run in each] for name, each in runs.items()}


def _draw(settings: Settings, name: str, figures: Mapping[str, Any]) -> None:
    if settings.pictures is not None:
        import backup_pictures

        backup_pictures.DRAWN[name](figures, settings.pictures / f"{name}.png")


#: of the slow examples: replicas, numbers of backups, epochs and examples for each replica, as a whole and if it must
#: be quick, and seeds
SLOW_REPLICAS, SLOW_BACKUPS, SLOW_WHOLE, SLOW_QUICK, SLOW_SEEDS = 40, (2, 4), (4, 100), (3, 50), 3


def slow_examples(settings: Settings) -> Outcome:
    """A tenth of the examples make their batch four times slower: their share in what counted."""
    seeds = settings.seeds_of(SLOW_SEEDS, 1)
    epochs, examples = SLOW_QUICK if settings.quick else SLOW_WHOLE
    play = partial(with_slow_examples, SLOW_REPLICAS, epochs=epochs, examples=examples)
    runs = {
        (b, returns): [settings.pool.submit(play, backups=b, seed=seed, returns=returns) for seed in seeds]
        for b in SLOW_BACKUPS
        for returns in (False, True)
    }
    outcome = Outcome(f"N = {SLOW_REPLICAS}, a tenth is slow", "backups")
    for (b, returns), each in runs.items():
        found = [run.result() for run in each]
        name = f"b = {b}" if returns else f"b = {b}, dropped for good"
        row = outcome.figures[name] = {key: statistics.mean(run[key] for run in found) for key in found[0]}
        outcome.rows[name] = {
            "share": f"{row['share']:.3f}",
            "steps/s": f"{row['steps_per_second']:.2f}",
            "never counted": f"{row['never_counted']:.1%}",
        }
    for b in SLOW_BACKUPS:
        with_returns, without = outcome.figures[f"b = {b}"], outcome.figures[f"b = {b}, dropped for good"]
        off = abs(with_returns["share"] - 0.099)
        outcome.goals[f"b = {b}: distance of their share from .099"] = goal(off, at_most=0.01)
        fewer = 1 - with_returns["steps_per_second"] / without["steps_per_second"]
        outcome.goals[f"b = {b}: fewer steps a second than without returns"] = goal(fewer, at_most=0.15)
    return outcome


#: of `auto`: replicas, the b that it starts with, steps, the first steps in which b is not chosen yet, and seeds
AUTO_REPLICAS, AUTO_BACKUPS, AUTO_STEPS, AUTO_FIRST, AUTO_SEEDS = 8, 3, 500, 20, 5
#: name of the law with stragglers
SLOW = "1 of 20 is slow"


def auto(settings: Settings) -> Outcome:
    """b = "auto" on a virtual clock: no backups without stragglers, and near the best fixed b with them."""
    laws = {f"jitter {jitter:.0%}": Stragglers(jitter=jitter, probability=0.0) for jitter in (0.02, 0.2)}
    laws[SLOW] = Stragglers(jitter=0.02)
    tries: dict[str, Sequence[Any]] = {law: ["auto"] for law in laws}
    tries[SLOW] = ["auto", *range(AUTO_BACKUPS + 1)]
    seeds, steps = settings.seeds_of(AUTO_SEEDS, 1), AUTO_STEPS // (2 if settings.quick else 1)
    outcome = Outcome(f"N = {AUTO_REPLICAS}, milliseconds a step", "law")
    runs = {
        (law, b): [
            settings.pool.submit(seconds_a_step, laws[law], AUTO_REPLICAS, b, steps=steps, seed=seed) for seed in seeds
        ]
        for law in laws
        for b in tries[law]
    }
    reports = {key: [run.result() for run in each] for key, each in runs.items()}
    for law, drawn in laws.items():
        tuned = reports[law, "auto"]
        seconds = {b: [report.seconds / report.steps for report in reports[law, b]] for b in tries[law]}
        kept = [report.backups for report in tuned]
        predicted = [report.predictions[report.backups] for report in tuned]
        true = [statistics.mean(step.seconds for step in report.log.steps[AUTO_FIRST:]) for report in tuned]
        # Each seed's best b in hindsight.
        over = [chosen / min(row, default=chosen) for chosen, *row in zip(*seconds.values(), strict=True)]
        outcome.figures[law] = {"kept": kept, "predicted": predicted, "true": true, "over_the_best": over} | {
            f"b = {b}": each for b, each in seconds.items()
        }
        columns = {"predicted": predicted, "true": true} | {str(b): each for b, each in seconds.items()}
        outcome.rows[law] = {"kept": " ".join(map(str, kept))} | {
            name: f"{1e3 * statistics.mean(each):.1f}" for name, each in columns.items()
        }
        if drawn.probability:
            outcome.goals[f"{law}: seconds / those of the best fixed b, the worst seed"] = goal(max(over), at_most=1.05)
        else:
            off = max(abs(a / b - 1) for a, b in zip(predicted, true, strict=True))
            outcome.goals[f"{law}: backups kept, the most"] = goal(max(kept), at_most=0)
            outcome.goals[f"{law}: error of the predicted step, the worst seed"] = goal(off, at_most=0.1)
    return outcome


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


def modes(settings: Settings) -> Outcome:
    """Strategies and codecs on a slowed wire: an accuracy no more than a point lower, and bytes in proportion."""
    names = [SYNC, "sync, 2 bits"] if settings.quick else [*MODES]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    # A seed runs in all modes before the next one, so that other work on the machine hits them all alike.
    for seed in settings.seeds_of(MODE_SEEDS, 1):
        for name, wire in [(n, w) for n in names for w in WIRES if w == "slowed" or n in OVERLAPPED]:
            model, g = replace(MODES[name], seed=seed).lead(bandwidth=WIRES[wire])
            figures = {"megabytes": g.report.bytes_in / 1e6, "seconds": g.report.seconds}
            runs.setdefault((name, wire), []).append({"accuracy": held_out_accuracy(model, HELD_OUT), **figures})
    outcome = Outcome(f"N = {REPLICAS} processes, {GRADIENTS} gradients of each", "mode")

    def ratios(figure: str, above: tuple[str, str], below: tuple[str, str]) -> list[float]:
        return [a[figure] / b[figure] for a, b in zip(runs[above], runs[below], strict=True)]

    for (name, wire), each in runs.items():
        row = {figure: statistics.mean(run[figure] for run in each) for figure in each[0]}
        outcome.figures[f"{name}, {wire}"] = row
        told = outcome.rows.setdefault(
            name, {"accuracy": f"{row['accuracy']:.3f}", "MB sent": f"{row['megabytes']:.1f}"}
        )
        told[f"s, {wire}"] = f"{row['seconds']:.1f}"
        if wire == "free":
            slower = ratios("seconds", (name, "slowed"), (name, "free"))
            outcome.goals[f"{name}: seconds, slowed wire / free"] = goal(slower, at_most=1.15)
        elif name != SYNC:
            sync = (SYNC, "slowed")
            lost = [a["accuracy"] - b["accuracy"] for a, b in zip(runs[sync], each, strict=True)]
            moved = ratios("megabytes", (name, wire), sync)
            outcome.goals[f"{name}: accuracy less than that of sync"] = goal(lost, at_most=0.01)
            outcome.goals[f"{name}: bytes / those of sync"] = goal(moved, at_most=SHARES[name])
        if (name, wire) == (DELAYED, "slowed"):
            faster = ratios("seconds", (name, wire), ("average", wire))
            outcome.goals[f"{name}: seconds / those without delay, slowed wire"] = goal(faster, at_most=0.85)
    return outcome


#: of ADSAGA: steps, that of asynchronous SGD, machines, and mean seconds of the work on a row
SAGA_STEPS, SGD_STEP, MACHINES, ROW_SECONDS = (0.3, 0.35, 0.4), 0.1, 40, 0.2


def forty(settings: Settings) -> Outcome:
    """ADSAGA with forty processes over the bus of a gang; the seconds of machines that are played are .2 a row."""
    outcome = Outcome("until the error is 1e-8", "method")

    def tell(name: str, evaluations: float, seconds: float) -> None:
        outcome.figures[name] = {"evaluations": evaluations, "seconds": seconds}
        outcome.rows[name] = {"evaluations": f"{evaluations:.0f}", "seconds": f"{seconds:.0f}"}

    def played(name: str, machines: int) -> tuple[dict[str, Any], float]:
        """Return the params with the best of the steps, and the evaluations until it is solved."""
        tried = []
        for step in SAGA_STEPS:
            params = {"method": "adsaga", "machines": machines, "step": step}
            found = adsaga.objective(params, LocalContext(budget=20_000))
            tried.append((found.get("evaluations", math.inf), step, params))
        evaluations, _, params = min(tried, key=lambda each: each[:2])
        tell(name, evaluations, evaluations / machines * ROW_SECONDS)
        return params, evaluations

    def real(params: dict[str, Any], evaluations: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            return adsaga.with_a_gang(params, LocalContext(budget=evaluations, checkpoints=Path(folder)))

    _, alone = played("SAGA, played", 1)
    params, simulated = played(f"ADSAGA, {MACHINES} machines, played", MACHINES)
    ratio = "ADSAGA's {}, {}, in SAGA's".format
    outcome.goals[ratio("evaluations", "simulated")] = goal(simulated / alone, at_most=1.5)
    if not settings.quick:
        # The evaluations end a little later than those of the simulation.
        found = real({**params, "seconds": ROW_SECONDS}, int(1.3 * simulated))
        evaluations, seconds = (found.get(name, math.inf) for name in ("evaluations", "seconds"))
        tell(f"ADSAGA, {MACHINES} processes", evaluations, seconds)
        error = 10 ** real({"method": "sgd", "machines": MACHINES, "step": SGD_STEP}, 20_000)["loss"]
        outcome.figures["sgd"] = error
        outcome.goals |= {
            ratio("evaluations", "real"): goal(evaluations / alone, at_most=1.5),
            ratio("seconds", "real"): goal(seconds / (alone * ROW_SECONDS), at_most=0.05),
            "error at which asynchronous SGD stalls": goal(error, at_least=1e-5),
        }
    return outcome


#: of DropCompute: ranks, steps, and seeds
DROP_STEPS, DROP_SEEDS = 200, 5


def drop_compute(settings: Settings) -> Outcome:
    """DropCompute beside DistributedDataParallel, with the stragglers of (3)."""
    seeds, steps = settings.seeds_of(DROP_SEEDS, 1), 30 if settings.quick else DROP_STEPS
    outcome = Outcome(f"{REPLICAS} ranks, {steps} steps", "method")
    # All trainings run in the same ranks, which take long to start.
    job = Ranks(law=Stragglers(), steps=steps, seed=0, rate=0.2, momentum=0.9)
    found = in_ranks([replace(job, seed=seed, drops=drops) for drops in (False, True) for seed in seeds], REPLICAS)
    for name, each in (("DDP", found[: len(seeds)]), ("DropCompute", found[len(seeds) :])):
        share = statistics.mean(share for _, share in each)
        row = outcome.figures[name] = {**_mean([run for run, _ in each]), "share": share}
        outcome.rows[name] = {
            "steps/s": f"{row['steps_per_second']:.2f}",
            "share": f"{share:.3f}",
            "accuracy": f"{row['accuracy']:.4f}",
        }
    ddp, drop = outcome.figures.values()
    lost = ddp["accuracy"] - drop["accuracy"]
    outcome.goals = {
        "steps/s, DropCompute / DDP": goal(drop["steps_per_second"] / ddp["steps_per_second"], at_least=1.5),
        "share of the micro-batches that count": goal(drop["share"], at_least=0.8),
        "mean test accuracy less than that of DDP": goal(lost, at_most=0.005),
    }
    return outcome


PARTS: Mapping[str, Callable[[Settings], Outcome]] = {
    "1": deaths,
    "2": joiners,
    "3": stragglers,
    "a": staleness,
    "b": curve,
    "c": against,
    "slow": slow_examples,
    "auto": auto,
    "bus": wire,
    "modes": modes,
    "adsaga": forty,
    "drop": drop_compute,
}
#: parts that run only if they are named
NAMED = ("modes", "adsaga", "drop")


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="this part; may be given again")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    help=f"of each comparison; {JUDGING} for (a) to (c), {SLOW_SEEDS} to {MODE_SEEDS} elsewhere, fewer with --quick",
)
@click.option("--pictures", type=click.Path(path_type=Path), help="draw (a), (b) and (c) in this folder")
@click.option("--quick", is_flag=True, help="fewer seeds and values; means reach a goal, not their intervals")
def main(only: Sequence[str], seeds: int, pictures: Path | None, quick: bool) -> None:
    torch.set_num_threads(1)
    # Its processes may also run where the wire gives them nothing to say.
    logging.disable(logging.WARNING)
    pool = ProcessPoolExecutor(min(2, os.cpu_count() or 1), get_context("spawn"))
    settings, console = Settings(seeds=seeds, quick=quick, pool=pool, pictures=pictures), Console()
    outcomes: dict[str, Outcome] = {}
    # Ten processes that wake together need the cores for themselves: with others at work, (1) and (3) measure those.
    load = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the start"
    console.print(load, highlight=False)
    for name, part in PARTS.items():
        if name not in (only or PARTS.keys() - NAMED):
            continue
        began = time.perf_counter()
        console.rule(f"{name}: {(part.__doc__ or '').splitlines()[0]}", align="left")
        outcomes[name] = part(settings)
        outcomes[name].figures["wall_seconds"] = time.perf_counter() - began
        tell(console, outcomes[name])
    missed = [
        f"({name}) {words}"
        for name, each in outcomes.items()
        for words, row in each.goals.items()
        if not row["reached"]
    ]
    console.rule("all" if not missed else "missed", align="left")
    for line in missed:
        console.print(f"[red]fail[/] {line}")
    pool.shutdown()
    parts = {name: {"figures": each.figures, "goals": each.goals} for name, each in outcomes.items()}
    print(json.dumps({"machine": load, **parts}))
    sys.exit(1 if missed else 0)


def tell(console: Console, outcome: Outcome) -> None:
    """Print the table, and say of each goal whether it is reached."""
    columns = dict.fromkeys(column for row in outcome.rows.values() for column in row)
    table = Table(outcome.first, title=outcome.title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in outcome.rows.items():
        table.add_row(name, *(row.get(column, "") for column in columns))
    if outcome.rows:
        console.print(table)
    for words, row in outcome.goals.items():
        verdict = "[green]pass[/]" if row["reached"] else "[red]FAIL[/]"
        ends = "" if "interval" not in row else " [{:.3g} to {:.3g}]".format(*row["interval"])
        console.print(f"{verdict} {words}: {row['value']:.3g}{ends} (goal {row['goal']})", highlight=False)
    console.print(f"[dim]{outcome.figures['wall_seconds']:.0f} s[/]", highlight=False)


if __name__ == "__main__":
    main()
