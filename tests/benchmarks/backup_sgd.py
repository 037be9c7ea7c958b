"""Synchronous SGD with backup workers, measured: ``python tests/benchmarks/backup_sgd.py [--only PART ...]``.

Each part prints its figures and says pass or fail; the exit code is 1 where one fails.

1. Replicas are killed at random times: how long training stalls.
2. A replica joins late: how soon it contributes.
3. Stragglers, real processes: steps a second, seconds to a test accuracy and the accuracy at the end for several
   numbers of backups, with and without cancelling, for asynchronous SGD, and for torch's DDP over gloo.
4. A run is computed again in one process from its log.
5. One replica without backups against a plain training loop.
6. The same as in 3 on simulated workers with a virtual clock.

``auto``: b = "auto" without stragglers and with them, on a virtual clock, beside each fixed b.
``curve``: seconds to the test accuracy against the number of backups, 100 simulated workers in all.
``bus``: bytes a second of the bus beside those of a bare socket.

Stragglers sleep rather than compute, so that many replicas fit on few cores.
"""

from __future__ import annotations

import os

# Many processes share the cores, and the simulations multiply small matrices: threads of theirs only get in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import backup_gloo
import backup_replicas
import backup_wire
import click
import torch
from backup_played import Stragglers, seconds_a_step
from backup_replicas import Course, Trial, join_late
from backup_simulation import TARGET, Cluster, Trained, asynchronous, steps_per_second, synchronous
from figures import goal
from rich.console import Console
from rich.table import Table

from shadho_celery.training.strategies import Async, Strategy, Sync

#: learning rate of a step over all simulated workers, in proportion to N (linear scaling): the best for every mode of
#: 0.4, 0.8 and 1.6. An asynchronous gradient gets the share that it has in a synchronous step's mean.
LEARNING_RATE = 0.8
#: of the simulated part: workers, virtual seconds, pictures a gradient
WORKERS, SECONDS, BATCH = 20, 60.0, 8
#: of the real stragglers: replicas that a step takes, and steps
REPLICAS, STEPS = 8, 160
#: what is compared, with every seed: the luck of one run moves its rate by a tenth
COMPARED = ("b = 0", "b = 2", "b = 2, no cancel")
#: of the deaths: replicas that a step takes, steps of a training, and trainings with a backup and without
FEW, SHORT, DEATHS = 4, 30, {1: 20, 0: 10}
#: of the late joiners: trainings, the step after which the late one starts, and steps in all
JOINERS, JOIN_AT, JOIN_LIMIT = 4, 15, 60
#: of the bus: parameters by vectors sent
VECTORS = {1_000_000: 20, 10_000_000: 10, 25_000_000: 10}
#: the bus, in clear and as with a signing key, and the least share of a bare socket's rate that each must reach
BUSES = {"bus": 0.7, "encrypted bus": 0.45}
WAYS = tuple(f"{name} {to}" for to in ("out", "in") for name in ("raw", *BUSES))
#: of the curve: workers, pictures a gradient, seeds, and backups tried
MANY, MANY_BATCH, MANY_SEEDS = 100, 2, 8
BACKUPS = (0, 1, 2, 4, 6, 8, 10, 12, 16, 20, 30, 40, 50, 60, 70, 80)


@dataclass
class Outcome:
    """What a part has found."""

    #: whatever it measured, as JSON takes it
    figures: dict[str, Any] = field(default_factory=dict)
    #: figures beside what they should reach, by what they say
    goals: dict[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line says."""

    console: Console
    #: of the simulated part, and of those real stragglers that are compared
    seeds: int
    #: fewer seeds and steps
    quick: bool
    #: processes that play gangs at the same time
    processes: int
    #: where the curve is drawn to; None for nowhere
    picture: Path | None


def deaths(settings: Settings) -> Outcome:
    """Replicas are killed with SIGKILL at random moments."""
    table = _table(
        f"N = {FEW}, milliseconds",
        "backups",
        "repeats",
        "median step",
        "noticed",
        "longest before",
        "stall",
        "longest after",
    )
    outcome = Outcome()
    for backups, repeats in DEATHS.items():
        seen = [backup_replicas.kill_one(FEW, backups, steps=SHORT, seed=seed) for seed in range(repeats)]
        worst = max(death.longest_after / death.allowed for death in seen)
        row = {
            "median": statistics.median(death.median for death in seen),
            "detection": max(death.detection for death in seen),
            "longest_before": max(death.longest_before for death in seen),
            "stall": max(death.stall for death in seen),
            "longest_after": max(death.longest_after for death in seen),
        }
        table.add_row(str(backups), str(repeats), *(f"{1e3 * value:.1f}" for value in row.values()))
        outcome.figures[f"b = {backups}"] = row
        outcome.goals |= {
            f"b = {backups}: longest step after it / (2 x median step + detection)": goal(worst, at_most=1.0),
            f"b = {backups}: trainings that took all steps": goal(sum(d.finished for d in seen), at_least=repeats),
        }
    settings.console.print(table)
    return outcome


def joiners(settings: Settings) -> Outcome:
    """Replicas join in mid-training: in place of one that was killed, and as a backup beyond those that are needed."""
    table = _table("steps until its first gradient counts", "late replica", "each training", "median")
    outcome = Outcome()
    for words, backups in (("in place of a dead one", 0), ("as a backup", 1)):
        rank = FEW if backups else FEW - 1
        trials = [Trial(replicas=FEW, backups=backups, steps=JOIN_LIMIT, seed=seed) for seed in range(JOINERS)]
        steps = [join_late(trial, rank, at=JOIN_AT) or JOIN_LIMIT for trial in trials]
        table.add_row(words, " ".join(map(str, steps)), f"{statistics.median(steps):g}")
        outcome.figures[words] = steps
    settings.console.print(table)
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
            for seed in range(settings.seeds if name in COMPARED else 1)
        ]
        for name, strategy in strategies.items()
    }
    courses["DDP over gloo"] = [c for c in [backup_gloo.train(REPLICAS, law, steps=STEPS, seed=0)] if c is not None]
    table = _table(
        f"N = {REPLICAS} processes, {STEPS} steps", "mode", "runs", "steps/s", "simulated", f"s to {TARGET}", "accuracy"
    )
    outcome = Outcome()
    for name, runs in courses.items():
        if not runs:
            table.add_row(name, "0", *["cannot run here"] * 4)
            continue
        row = _mean(runs)
        strategy = strategies.get(name)
        if strategy is None or isinstance(strategy, Sync):
            row["simulated"] = _expected(strategy, law)
        expected, reached = row.get("simulated"), row["reached"]
        table.add_row(
            name,
            str(len(runs)),
            f"{row['steps_per_second']:.2f}",
            "" if expected is None else f"{expected:.2f}",
            "never" if reached is None else f"{reached:.1f}",
            f"{row['accuracy']:.4f}",
        )
        outcome.figures[name] = row
    settings.console.print(table)
    rate = {name: row["steps_per_second"] for name, row in outcome.figures.items()}
    outcome.goals = {
        "steps/s, b = 2 without cancel / b = 0": goal(rate["b = 2, no cancel"] / rate["b = 0"], at_least=1.7),
        "steps/s, b = 2 / b = 0": goal(rate["b = 2"] / rate["b = 0"], at_least=2.5),
    }
    return outcome


def _mean(runs: Sequence[Course]) -> dict[str, float | None]:
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
    return steps_per_second(Cluster(REPLICAS, backups, law, 0, cancel), 20_000)


def replays(settings: Settings) -> Outcome:
    """A training with stragglers and a death is computed again in one process."""
    difference, equal = backup_replicas.replayed(Stragglers(), steps=100, seed=0)
    settings.console.print(f"all bits are equal: {equal}", highlight=False)
    return Outcome(
        figures={"difference": difference, "equal": equal},
        goals={"largest difference of a parameter": goal(difference, at_most=1e-6)},
    )


def alone(settings: Settings) -> Outcome:
    """One replica, no backups, against a plain training loop, 300 steps."""
    rules: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
        "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "Adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    }
    equal = {name: backup_replicas.alone_equals_plain(rule, steps=300, seed=0) for name, rule in rules.items()}
    return Outcome(
        figures=dict(equal),
        goals={f"{name}: equal, bit for bit": goal(float(same), at_least=1.0) for name, same in equal.items()},
    )


def wire(settings: Settings) -> Outcome:
    """The bus beside a bare socket, over loopback."""
    title = "MB/s to another process (out) and from it (in), the fastest, and as a share of a bare socket's"
    table = _table(title, "parameters", *WAYS, *(f"{bus} / raw {to}" for bus in BUSES for to in ("out", "in")))
    outcome = Outcome()
    for parameters, count in VECTORS.items():
        rates = backup_wire.megabytes_per_second(parameters, count)
        # Whatever else the machine does makes some of them slower, and none faster.
        best = {way: max(rates[way]) for way in WAYS}
        shares = {(bus, to): best[f"{bus} {to}"] / best[f"raw {to}"] for bus in BUSES for to in ("out", "in")}
        rates_shown, shares_shown = (f"{best[way]:.0f}" for way in WAYS), (f"{s:.2f}" for s in shares.values())
        table.add_row(f"{parameters / 1e6:g} M", *rates_shown, *shares_shown)
        outcome.figures[str(parameters)] = best
    for (bus, to), share in shares.items():
        outcome.goals[f"{bus} / raw socket, {to}, {parameters / 1e6:g} M"] = goal(share, at_least=BUSES[bus])
    settings.console.print(table)
    return outcome


def simulated(settings: Settings) -> Outcome:
    """Digits on 20 simulated workers, the backups among them."""
    law, seeds = Stragglers(), range(settings.seeds)

    def sync(backups: int, cancel: bool) -> list[Trained]:
        replicas = WORKERS - backups
        rate = LEARNING_RATE * replicas / WORKERS
        clusters = (Cluster(replicas, backups, law, seed, cancel) for seed in seeds)
        return [synchronous(each, batch=BATCH, learning_rate=rate, seconds=SECONDS) for each in clusters]

    runs = {f"b = {b}": sync(b, cancel=True) for b in (0, 1, 2, 4)}
    runs["b = 4, no cancel"] = sync(4, cancel=False)
    rate = LEARNING_RATE / WORKERS
    runs["async"] = [
        asynchronous(WORKERS, law, seed, batch=BATCH, learning_rate=rate, seconds=SECONDS) for seed in seeds
    ]
    table = _table(f"{WORKERS} simulated workers, {SECONDS:g} s", "mode", "steps/s", f"s to {TARGET}", "accuracy")
    outcome = Outcome()
    for name, trained in runs.items():
        # An asynchronous step is one gradient: WORKERS of them do the work of one synchronous step.
        steps = statistics.mean(run.rate for run in trained) / (WORKERS if name == "async" else 1)
        reached, accuracy = _reached(trained, SECONDS), statistics.mean(run.accuracy for run in trained)
        spread = (max(run.accuracy for run in trained) - min(run.accuracy for run in trained)) / 2
        table.add_row(name, f"{steps:.2f}", f"{reached:.1f}", f"{accuracy:.4f} ± {spread:.4f}")
        outcome.figures[name] = {"steps_per_second": steps, "reached": reached, "accuracy": accuracy}
    settings.console.print(table)
    none, four, stale = (outcome.figures[name] for name in ("b = 0", "b = 4", "async"))
    outcome.goals = {
        f"time to {TARGET}, b = 4 / b = 0": goal(four["reached"] / none["reached"], at_most=0.5),
        "the same without cancel": goal(outcome.figures["b = 4, no cancel"]["reached"] / none["reached"], at_most=0.5),
        "accuracy at the end, b = 4 - async": goal(four["accuracy"] - stale["accuracy"], at_least=0.0),
    }
    return outcome


def curve(settings: Settings) -> Outcome:
    """Seconds to the target against the number of backups, N + b = 100."""
    laws = {"1 of 20 is slow": Stragglers(), "1 of 100 is slow": Stragglers(probability=0.01)}
    lines = {(law, cancel): _line(laws[law], cancel) for law in laws for cancel in (True, False)}
    names = [f"{law}{'' if cancel else ', no cancel'}" for law, cancel in lines]
    table = _table(f"seconds to {TARGET}, {MANY} simulated workers", "backups", *names)
    for row, backups in enumerate(BACKUPS):
        table.add_row(str(backups), *(f"{line[row]:.2f}" for line in lines.values()))
    settings.console.print(table)
    outcome = Outcome(figures={name: list(line) for name, line in zip(names, lines.values(), strict=True)})
    outcome.figures["backups"] = list(BACKUPS)
    for name, line in zip(names, lines.values(), strict=True):
        best = min(range(len(line)), key=lambda row: line[row])
        ends = min(line[0], line[-1]) / line[best]
        outcome.goals[f"{name}: least at b = {BACKUPS[best]}; the ends over it"] = goal(ends, at_least=1.5)
    if settings.picture is not None:
        from backup_pictures import chart

        chart(BACKUPS, dict(zip(names, lines.values(), strict=True)), settings.picture)
    return outcome


def _line(law: Stragglers, cancel: bool) -> list[float]:
    """Mean seconds to the target for each number of backups."""
    line = []
    for backups in BACKUPS:
        replicas = MANY - backups
        rate = LEARNING_RATE * replicas / MANY
        clusters = (Cluster(replicas, backups, law, seed, cancel) for seed in range(MANY_SEEDS))
        runs = [synchronous(c, batch=MANY_BATCH, learning_rate=rate, seconds=1e4, until=True) for c in clusters]
        line.append(_reached(runs, 1e4))
    return line


def _reached(runs: Sequence[Trained], most: float) -> float:
    """Mean seconds to the target; a run that never got there counts with all of its seconds."""
    return statistics.mean(run.reached if run.reached is not None else most for run in runs)


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
    seeds, steps = (1, AUTO_STEPS // 2) if settings.quick else (AUTO_SEEDS, AUTO_STEPS)
    outcome = Outcome()
    table = _table(
        f"N = {AUTO_REPLICAS}, milliseconds a step", "law", *map(str, tries[SLOW]), "kept", "predicted", "true"
    )
    with ProcessPoolExecutor(settings.processes, get_context("spawn")) as pool:
        runs = {
            (law, b): [
                pool.submit(seconds_a_step, laws[law], AUTO_REPLICAS, b, steps=steps, seed=seed)
                for seed in range(seeds)
            ]
            for law in laws
            for b in tries[law]
        }
        reports = {key: [run.result() for run in each] for key, each in runs.items()}
    for law, drawn in laws.items():
        tuned = reports[law, "auto"]
        seconds = {b: [report.seconds / report.steps for report in reports[law, b]] for b in tries[law]}
        kept = [report.backups for report in tuned]
        predicted = [report.predictions[report.backups].step_seconds for report in tuned]
        true = [statistics.mean(step.seconds for step in report.log.steps[AUTO_FIRST:]) for report in tuned]
        # Each seed's best b in hindsight.
        over = [chosen / min(row, default=chosen) for chosen, *row in zip(*seconds.values(), strict=True)]
        outcome.figures[law] = {"kept": kept, "predicted": predicted, "true": true, "over_the_best": over} | {
            f"b = {b}": each for b, each in seconds.items()
        }
        means = [f"{1e3 * statistics.mean(each):.1f}" for each in (*seconds.values(), predicted, true)]
        blank = [""] * (len(tries[SLOW]) - len(seconds))
        table.add_row(law, *means[:-2], *blank, " ".join(map(str, kept)), *means[-2:])
        if drawn.probability:
            outcome.goals[f"{law}: seconds / those of the best fixed b, the worst seed"] = goal(max(over), at_most=1.05)
        else:
            off = max(abs(a / b - 1) for a, b in zip(predicted, true, strict=True))
            outcome.goals[f"{law}: backups kept, the most"] = goal(max(kept), at_most=0)
            outcome.goals[f"{law}: error of the predicted step, the worst seed"] = goal(off, at_most=0.1)
    settings.console.print(table)
    return outcome


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


PARTS: Mapping[str, Callable[[Settings], Outcome]] = {
    "1": deaths,
    "2": joiners,
    "3": stragglers,
    "4": replays,
    "5": alone,
    "6": simulated,
    "auto": auto,
    "curve": curve,
    "bus": wire,
}


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="this part; may be given again")
@click.option("--seeds", default=3, show_default=True, help="of the simulated part and the real stragglers")
@click.option("--picture", type=click.Path(path_type=Path), help="draw the curve to this file")
@click.option("--quick", is_flag=True, help="fewer seeds, less exact")
@click.option("--json", "as_json", is_flag=True, help="one JSON object on stdout, the tables on stderr")
def main(only: Sequence[str], seeds: int, picture: Path | None, quick: bool, as_json: bool) -> None:
    torch.set_num_threads(1)
    processes = min(2, os.cpu_count() or 1)
    settings = Settings(console=Console(stderr=as_json), seeds=seeds, quick=quick, processes=processes, picture=picture)
    outcomes: dict[str, Outcome] = {}
    # Ten processes that wake together need the cores for themselves: with others at work, (1) and (3) measure those.
    load = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the start"
    settings.console.print(load, highlight=False)
    for name, part in PARTS.items():
        if only and name not in only:
            continue
        began = time.perf_counter()
        settings.console.rule(f"{name}: {(part.__doc__ or '').splitlines()[0]}", align="left")
        outcomes[name] = part(settings)
        outcomes[name].figures["wall_seconds"] = time.perf_counter() - began
        tell(settings.console, outcomes[name])
    missed = [
        f"({name}) {words}"
        for name, each in outcomes.items()
        for words, row in each.goals.items()
        if not row["reached"]
    ]
    settings.console.rule("all" if not missed else "missed", align="left")
    for line in missed:
        settings.console.print(f"[red]fail[/] {line}")
    if as_json:
        parts = {name: {"figures": each.figures, "goals": each.goals} for name, each in outcomes.items()}
        print(json.dumps({"machine": load, **parts}))
    sys.exit(1 if missed else 0)


def tell(console: Console, outcome: Outcome) -> None:
    """Say of each goal whether it is reached."""
    for words, row in outcome.goals.items():
        verdict = "[green]pass[/]" if row["reached"] else "[red]FAIL[/]"
        console.print(f"{verdict} {words}: {row['value']:.3g} (goal {row['goal']})", highlight=False)
    console.print(f"[dim]{outcome.figures['wall_seconds']:.0f} s[/]", highlight=False)


if __name__ == "__main__":
    main()
