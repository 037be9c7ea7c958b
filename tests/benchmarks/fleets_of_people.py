"""Fleets as people have them, on simulated machines: ``python tests/benchmarks/fleets_of_people.py [--quick]``.

- width: the fleet of keras-tuner#825 (8 A100, 8 V100, a hundred small cards), where the study chooses the number of
  GPUs of each trial, beside each fixed number. Seconds are Gavel's measurements. The models need 3, 5 and 8 GB, of
  which 2 are on each GPU and the rest is divided. A small card has 4: a trial that needs more takes five times as long
  there. Trials report nothing. The loss is one that two trials in a thousand have: the first trials of these 116 GPUs
  would find one of a hundred. The bound with the best number for each trial stands beside that with the best fixed
  number: what the choice could gain in the long run if all seconds were known. The part of the bound is that of a
  week, and beside it that of the first day: trials take hours, so those that show the seconds, and those that the end
  cuts off, are much of a day.
- spot: machines that are preempted every 20 minutes on average. No trial may fail by that. The time is compared with
  the bound of a fleet whose trials only read their checkpoints again, on the machines that were there. Beside it stands
  the share of the trials that were interrupted three times: where each interruption is a lost attempt, these fail.
- limited: workers that end after four hours. Their idle tail is the time from the end of a worker's last trial to its
  own end. A trial is killed if it still runs then. Seconds depend on params only, so that predictions can hold: of the
  workers that started after the first ones, which nothing was known to predict from, none should kill a trial.
- money: prices of 2.5, 1.0 and .08 an hour, and a deadline of twice the time that the same search takes by time.

Each part has 95 % intervals over its seeds. The last line is one JSON object.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from figures import count, finish, goal, interval, make_parser, runs_of, show
from hyperopt import hp
from services.families import Family, cluster_of, fleet_of, half_normal, uniform

from shadho_celery.core.records import AttemptRecord, End, Leaving
from shadho_celery.core.trial import TrialState
from shadho_celery.placement.bound import cheapest, throughput_bound
from shadho_celery.simulation.simulation import Cluster, Simulation, simulate

#: workers by class, each with one slot
FLEET = {"gpu_large": 8, "gpu_small": 24, "cpu": 40}
CLASSES = tuple(FLEET)
#: classes of the spot machines
SPOT = ("gpu_large", "gpu_small")
#: money that a slot costs an hour
PRICES = {"gpu_large": 2.5, "gpu_small": 1.0, "cpu": 0.08}
#: mean seconds of a trial by family and class
SECONDS = {
    "resnet": {"gpu_large": 300, "gpu_small": 700, "cpu": 9000},
    "lstm": {"gpu_large": 400, "gpu_small": 800, "cpu": 4000},
    "mlp": {"gpu_large": 240, "gpu_small": 270, "cpu": 600},
    "forest": {"gpu_large": 600, "gpu_small": 600, "cpu": 650},
}

#: mean seconds between preemptions of a machine, and from one to the start of the next machine; its start-up
PREEMPTION_SECONDS, RETURN_SECONDS, STARTUP_SECONDS = 1200, 120, 60
#: seconds to read a checkpoint of another machine
HANDOVER_SECONDS = 5
#: number of interruptions of a trial after which it fails where each of them is a lost attempt
LOSSES = 3

#: seconds that a worker stays
FOR_SECONDS = 4 * 3600

#: slots of a worker, and workers, of the fleet of keras-tuner#825: its small cards as four in a machine
CARDS = {"a100": (8, 1), "v100": (8, 1), "small": (4, 25)}
WIDTHS = (1, 2, 4, 8)
#: by model: GB that it needs, and by card the steps a second on 1, 2, 4 and 8 GPUs of one machine (Gavel's V100 and
#: K80, see data/README.md; an A100 is counted as two V100)
MODELS = {
    "lm": (3, {"v100": (81.65, 163.13, 121.48, 615.09), "small": (23.79, 29.98, 42.96, 75.57)}),
    "transformer": (5, {"v100": (8.62, 15.88, 19.66, 49.65), "small": (1.75, 3.06, 5.03, 8.98)}),
    "resnet": (8, {"v100": (4.39, 7.92, 9.45, 17.3), "small": (0.62, 1.26, 2.41, 4.57)}),
}
#: GB that each GPU of a trial holds, and GB of a small card; how much longer a trial takes that needs more
REPLICATED_GB, SMALL_GB, SPILL = 2, 4, 5.0
#: seconds of a trial on one V100; chance that a trial has the loss; days of the search
TRIAL_SECONDS, LOSS_CHANCE, WIDTH_DAYS = 3600.0, 0.002, 7
DAY = 24 * 3600.0

#: the deadline, as a multiple of the seconds that the search takes by time
DEADLINE = 2.0

SPOT_TRIALS, MONEY_TRIALS, LIMITED_SECONDS = 5000, 1000, 12 * 3600
SEEDS, QUICK_SEEDS = 10, 3

Figures = Mapping[str, float]


def cluster(
    per_class: Mapping[str, Any],
    families: Mapping[str, Family] | None = None,
    classes: Sequence[str] = CLASSES,
    **top: Any,
) -> Cluster:
    """The fleet with these further facts of each class and of all, settings, and factors."""
    settings = {name: top.pop(name) for name in ("seconds", "trials") if name in top}
    factors = {name: top.pop(name) for name in ("size", "straggler") if name in top}
    of_class = {name: {"workers": FLEET[name], "price": PRICES[name], **per_class} for name in classes}
    known = families or {name: Family(seconds=by_class) for name, by_class in SECONDS.items()}
    return cluster_of(fleet_of(of_class, **top), known, settings, **factors)


VARIED = {"size": partial(uniform, 0.5, 1.5), "straggler": partial(half_normal, 0.3)}


def attempts_of(found: Simulation) -> list[AttemptRecord]:
    """The attempts that a worker has claimed and that have ended."""
    return [each for each in found.store.attempts() if each.started_at is not None and each.ended_at is not None]


def seconds_on(model: str, card: str, gpus: int) -> float:
    """Seconds of a trial of a model on this many GPUs of one machine."""
    size, steps = MODELS[model]
    speed = {"a100": 2.0}.get(card, 1.0) * steps.get(card, steps["v100"])[WIDTHS.index(gpus)]
    spills = card == "small" and REPLICATED_GB + (size - REPLICATED_GB) / gpus > SMALL_GB
    return TRIAL_SECONDS * steps["v100"][0] / speed * (SPILL if spills else 1.0)


def width_cluster(widths: Sequence[int], days: int = 1) -> Cluster:
    """The fleet of keras-tuner#825, and trials that take one of these numbers of GPUs, as the study chooses."""

    families = {
        model: Family(seconds=lambda _, machine, model=model: seconds_on(model, machine.compute_class, machine.slots))
        for model in MODELS
    }
    fleet = fleet_of({card: {"workers": workers, "slots": slots} for card, (slots, workers) in CARDS.items()})
    gpus = [*widths] if len(widths) > 1 else widths[0]
    return cluster_of(fleet, families, {"seconds": days * DAY, "gpus": gpus}, **VARIED)


def width_rate(widths: Sequence[int]) -> float:
    """Trials a second that the fleet of keras-tuner#825 can complete, each with the best of these numbers of GPUs."""
    slots = {card: number * workers for card, (number, workers) in CARDS.items()}
    needed = {
        model: {
            card: min(gpus * seconds_on(model, card, gpus) for gpus in widths if gpus <= most)
            for card, (most, _) in CARDS.items()
        }
        for model in MODELS
    }
    return throughput_bound(needed, slots).rate


def seconds_to_loss(found: Simulation) -> float:
    """Return the expected seconds until a trial with the loss ends. Each trial has it with probability LOSS_CHANCE.

    The expectation is exact for the ends of the trials, because a single draw of their losses would vary too much.
    """
    ends = np.sort([trial.finished_at or 0.0 for trial in found.study.trials if trial.state is TrialState.COMPLETE])
    chances = LOSS_CHANCE * (1.0 - LOSS_CHANCE) ** np.arange(len(ends))
    return float((ends * chances).sum() / chances.sum())


def width(seed: int, days: int = WIDTH_DAYS) -> Figures:
    """A study that chooses the numbers of GPUs beside each fixed number."""
    found = simulate(width_cluster(WIDTHS, days), seed=seed)
    # No small machine has eight.
    fixed = {gpus: seconds_to_loss(simulate(width_cluster([gpus], days), seed=seed)) for gpus in WIDTHS[:-1]}
    rate = width_rate(WIDTHS)
    ended = [trial for trial in found.study.trials if trial.state is TrialState.COMPLETE]
    first_day = Counter(trial.subspace for trial in ended if (trial.finished_at or 0.0) <= DAY)
    best, searched = min(fixed.values()), seconds_to_loss(found)
    return {
        "times sooner than the best fixed": best / searched,
        "part of the bound": found.balanced_an_hour / 3600 / rate,
        "part of the bound, first day": len(MODELS) * min(first_day.values()) / (rate * DAY),
        "bound beside that of the best fixed": rate / max(width_rate([gpus]) for gpus in fixed),
        "hours to the loss": searched / 3600,
        **{f"hours to the loss with {gpus}": each / 3600 for gpus, each in fixed.items()},
    }


def spot(seed: int) -> Figures:
    """A fleet of spot machines."""
    stay = {
        "preemption_seconds": PREEMPTION_SECONDS,
        "return_seconds": RETURN_SECONDS,
        "startup_seconds": STARTUP_SECONDS,
    }
    kept = {"checkpoints": "shared", "checkpoint_seconds": 60, "handover_seconds": HANDOVER_SECONDS}
    described = cluster(stay, classes=SPOT, trials=SPOT_TRIALS, **kept, **VARIED)
    found = simulate(described, seed=seed)
    there: defaultdict[str, float] = defaultdict(float)
    for session in found.store.sessions():
        there[session.compute_class] += (session.until or found.seconds) - session.since
    slots = {name: seconds / found.seconds for name, seconds in there.items()}
    handover = HANDOVER_SECONDS * found.interrupted / found.trials
    needed = {family: {name: by_class[name] + handover for name in SPOT} for family, by_class in SECONDS.items()}
    bound = SPOT_TRIALS / throughput_bound(needed, slots).rate
    ends = Counter(each.number for each in attempts_of(found) if each.end in {End.RETURNED, End.LOST})
    return {
        "failed": found.study.count(TrialState.FAILED),
        "time beside the bound": found.seconds / bound,
        "interrupted attempts a trial": found.interrupted / found.trials,
        "busy": float(np.mean([*found.utilisation.values()])),
        "would fail by three losses": sum(n >= LOSSES for n in ends.values()) / found.trials,
    }


def limited(seed: int) -> Figures:
    """A fleet of workers with limited time."""
    families = {
        family: Family(
            seconds=lambda params, machine, family=family: SECONDS[family][machine.compute_class] * params["width"],
            params={"width": lambda label: hp.uniform(label, 0.5, 1.5)},
        )
        for family in SECONDS
    }
    described = cluster({"for_seconds": FOR_SECONDS, "return_seconds": 60}, families, seconds=LIMITED_SECONDS)
    found = simulate(described, seed=seed)
    by_worker: defaultdict[str, list[AttemptRecord]] = defaultdict(list)
    for each in attempts_of(found):
        by_worker[str(each.host)].append(each)
    tail = total = 0.0
    for session in found.store.sessions():
        if session.reason is not Leaving.STOPPED or session.until is None:
            continue
        ends = [e.ended_at for e in by_worker[session.worker] if session.since <= (e.started_at or 0) < session.until]
        tail += session.until - max([each for each in ends if each is not None], default=session.since)
        total += session.until - session.since
    killed = [each.ended_at or 0.0 for each in attempts_of(found) if each.end is End.RETURNED]
    return {
        "idle tail": tail / total,
        "killed after the first workers": sum(end > 1.5 * FOR_SECONDS for end in killed),
        "killed": len(killed),
        "busy": float(np.mean([*found.utilisation.values()])),
    }


def money(seed: int) -> Figures:
    """A search by money beside one by time."""
    described = cluster({}, trials=MONEY_TRIALS, **VARIED)
    by_time = simulate(described, seed=seed)
    deadline = DEADLINE * by_time.seconds
    found = simulate(described, seed=seed, place_by="money", deadline=deadline)
    spent = sum(by_time.money.values())
    each = MONEY_TRIALS / len(SECONDS)
    best = cheapest(SECONDS, dict.fromkeys(SECONDS, each), FLEET, PRICES, dict.fromkeys(FLEET, deadline))
    assert best is not None
    return {
        "money beside that by time": sum(found.money.values()) / spent,
        "least money beside that by time": best.money / spent,
        "time beside the deadline": found.seconds / deadline,
    }


PARTS: Mapping[str, Callable[[int], Figures]] = {"width": width, "spot": spot, "limited": limited, "money": money}


def goals(results: Mapping[str, Sequence[Figures]], *, by_mean: bool) -> dict[str, dict[str, Any]]:
    """Return the goals of the parts that ran."""
    wanted: Mapping[str, Mapping[str, dict[str, float]]] = {
        "width": {"times sooner than the best fixed": {"at_least": 1.3}, "part of the bound": {"at_least": 0.93}},
        "spot": {"failed": {"at_most": 0}, "time beside the bound": {"at_most": 1.05}},
        "limited": {"idle tail": {"at_most": 0.03}, "killed after the first workers": {"at_most": 0}},
        "money": {"money beside that by time": {"at_most": 0.75}, "time beside the deadline": {"at_most": 1.0}},
    }
    return {
        f"{part}: {name}": goal([each[name] for each in runs], **bound, by_mean=by_mean)
        for part, runs in results.items()
        for name, bound in wanted[part].items()
    }


def main() -> None:
    """Run the parts in parallel processes, and print figures and goals."""
    parser = make_parser(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--seeds", type=count, default=SEEDS, help="runs of each part (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} runs, judged by their means")
    parser.add_argument("--jobs", type=count, help="processes (default: one for each core)")
    parser.add_argument("--days", type=count, default=WIDTH_DAYS, help="days of the part width (default: %(default)s)")
    given = parser.parse_args()
    seeds = min(given.seeds, QUICK_SEEDS) if given.quick else given.seeds
    parts = {**PARTS, "width": partial(width, days=given.days)}
    with ProcessPoolExecutor(given.jobs) as pool:
        results = runs_of(pool, "fleets", {name: parts[name] for name in given.part or parts}, range(seeds))
    figures = {part: {name: [run[name] for run in runs] for name in runs[0]} for part, runs in results.items()}
    rows = {}
    for part, found in figures.items():
        for name, values in found.items():
            low, high = interval(values)
            rows[f"{part}: {name}"] = {"mean": f"{np.mean(values):.3g}", "95 % interval": f"{low:.3g} to {high:.3g}"}
    show(rows, "figure")
    finish(figures, goals(results, by_mean=given.quick), {"seeds": seeds, "fleet": FLEET})


if __name__ == "__main__":
    main()
