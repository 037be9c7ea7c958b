"""The real stack beside its simulation: ``python tests/benchmarks/twin.py [DATA] [--policy cost] [--broker rabbitmq]``.

DATA is Gavel's table of GPU rates, or the folder that holds its gavel_single_gpu.json, tests/benchmarks/data by
default. Real workers of three classes
run trials that sleep for the seconds of four families on three GPUs, scaled to about half a second, times a
straggler's factor. The simulator plays the same cluster on its own clock, with the same policy, for as long. Compared
are the trials an hour that are complete when the time is up, of each family and of all: the simulator should tell what
the fleet does within 15 %.

Then the same with a flat space, whose seconds depend on one number, on a second fleet: there `cost` should do more than
`fifo` by what the simulator tells, within 10 %.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from figures import finish, goal
from fleets import DATA, FOUR, RATES, describe, rates, seconds_of
from hyperopt import hp
from idle import Fleet, lent_rabbitmq, lent_redis
from services.families import Family, cluster_of, fleet_of, half_normal

from shadho_celery.placement.bound import throughput_bound
from shadho_celery.simulation.cluster_file import Machine
from shadho_celery.simulation.simulation import simulate

#: the queues, the strongest first
CLASSES = ("v100", "p100", "k80")

#: spread of the stragglers: a trial takes 1 + |N(0, STRAGGLING)| times as long as its family and class do, over the
#: mean of that
STRAGGLING = 0.5
STRAGGLER_MEAN = 1.0 + STRAGGLING * math.sqrt(2.0 / math.pi)

STUDY = """
import random, time
from hyperopt import hp
SECONDS = {seconds}
SPACE = hp.choice("family", [{{"family": name, "x": hp.uniform("x of " + name, 0, 1)}} for name in SECONDS])
STUDY = {{"classes": {classes}, "sampler": "random"}}
def objective(params, context):
    factor = (1 + abs(random.Random(context.seed).gauss(0, {straggling}))) / {mean}
    time.sleep(SECONDS[params["family"]][context.compute_class] * factor)
    return params["x"]
"""

#: slots, and seconds of a flat space, at least and by its number; to be scaled as those of the families
FLAT_SLOTS = {"gpu": 4, "cpu": 12}
FLAT_SECONDS = {"gpu": (20, 10), "cpu": (20, 400)}

FLAT_STUDY = """
import random, time
from hyperopt import hp
SPACE = {{"w": hp.uniform("w", 0, 1)}}
STUDY = {{"sampler": "random"}}
def objective(params, context):
    w = params["w"]
    factor = (1 + abs(random.Random(context.seed).gauss(0, {straggling}))) / {mean}
    least, slope = {seconds}[context.compute_class]
    time.sleep({scale} * (least + slope * w) * factor)
    return w
"""

Table = Mapping[str, Mapping[str, float]]


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "data", type=Path, nargs="?", default=DATA, metavar="DATA", help="gavel_single_gpu.json, or its folder"
    )
    parser.add_argument("--policy", action="append", help="policy to run; may be repeated [cost and fifo]")
    parser.add_argument("--seconds", type=float, default=50.0, help="seconds that a study lasts [50]")
    parser.add_argument("--slots", type=int, default=4, help="slots of each of the three classes [4]")
    parser.add_argument(
        "--scale", type=float, default=0.01, help="of the trials' seconds, a minute in the middle [.01]"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--broker", choices=["redis", "rabbitmq"], default="redis")
    redis_url, broker_url = (os.environ.get(f"SHADHO_TEST_{name}_URL") for name in ("REDIS", "AMQP"))
    parser.add_argument("--redis-url", default=redis_url, help="channel [a database lent by tests/services]")
    parser.add_argument(
        "--broker-url", "--amqp-url", default=broker_url, help="RabbitMQ [a virtual host lent by tests/services]"
    )
    given = parser.parse_args()
    policies = given.policy or ["cost", "fifo"]
    margins = {}
    path = given.data / RATES if given.data.is_dir() else given.data
    if not path.is_file():
        parser.error(f"there is no {path}: name a folder such as {DATA}, which has it")
    table = {
        family: {name: given.scale * row[name] for name in CLASSES}
        for family, row in seconds_of(rates(path)).items()
        if family in FOUR
    }

    predicted = {policy: predict(table, given.slots, policy, given.seconds, given.seed) for policy in policies}
    measured = {}
    with lent_redis(given.redis_url) as redis:
        broker = lent_redis(redis) if given.broker == "redis" else lent_rabbitmq(given.broker_url)
        with broker as url:
            with Fleet(dict.fromkeys(CLASSES, given.slots), url, redis, twin=study_text(table)) as fleet:
                for policy in policies:
                    print(f"{policy}: {given.seconds:g} s on real workers", flush=True)
                    measured[policy] = run(fleet, policy, given.seconds, given.seed)
            if {"cost", "fifo"} <= {*policies}:
                margins = flat_margins(url, redis, given.scale, given.seconds, given.seed)
    goals = {}
    best = 3600 * throughput_bound(table, dict.fromkeys(CLASSES, given.slots)).rate
    for policy in policies:
        show(policy, measured[policy], predicted[policy], best)
        goals[f"{policy}_all_off"] = goal(off(measured[policy], predicted[policy]), at_most=0.15)
        worst = max(off(measured[policy], predicted[policy], family) for family in table)
        goals[f"{policy}_worst_family_off"] = goal(worst, at_most=0.15)
    if margins:
        real, told = margins["real"], margins["simulated"]
        print(f"\nflat space: cost does {real:.3f} times as many trials as fifo; simulated: {told:.3f}")
        goals["flat_margin_off"] = goal(abs(real / told - 1.0), at_most=0.10)
    settings = {name: value for name, value in vars(given).items() if name not in {"data", "redis_url", "broker_url"}}
    figures = {"measured_per_hour": measured, "predicted_per_hour": predicted, "bound_per_hour": best}
    finish(figures | {"flat_margins": margins}, goals, settings)


def study_text(table: Table) -> str:
    """The study file of the real side."""
    seconds = {f: {Fleet.queue(name): value for name, value in row.items()} for f, row in table.items()}
    names = [Fleet.queue(name) for name in CLASSES]
    return STUDY.format(seconds=seconds, classes=names, straggling=STRAGGLING, mean=STRAGGLER_MEAN)


def run(fleet: Fleet, policy: str, seconds: float, seed: int) -> dict[str, float]:
    """Trials an hour by family on real workers."""
    words = ("--policy", policy, "--seconds", str(seconds), "--seed", str(seed))
    done = fleet.run("twin", *words, timeout=seconds + 90)
    trials = [trial for trial in done.trials if trial["state"] == "COMPLETE"]
    return per_hour(trials, min(trial["started_at"] for trial in trials), seconds)


def flat_margins(broker: str, redis: str, scale: float, seconds: float, seed: int) -> dict[str, float]:
    """Trials that cost completes in a flat space, over those of fifo: on real workers, and simulated."""

    def seconds_on(params: Mapping[str, Any], machine: Machine) -> float:
        least, slope = FLAT_SECONDS[machine.compute_class]
        return scale * (least + slope * float(params["w"]))

    cluster = cluster_of(
        fleet_of(FLAT_SLOTS),
        {"flat": Family(seconds=seconds_on, params={"w": lambda label: hp.uniform(label, 0, 1)})},
        {"seconds": seconds},
        straggler=partial(half_normal, STRAGGLING),
    )
    by_class = {Fleet.queue(name): each for name, each in FLAT_SECONDS.items()}
    text = FLAT_STUDY.format(seconds=by_class, scale=scale, straggling=STRAGGLING, mean=STRAGGLER_MEAN)
    told = {policy: simulate(cluster, policy=policy, seed=seed).complete["family=flat"] for policy in ("cost", "fifo")}
    real = {}
    with Fleet(FLAT_SLOTS, broker, redis, flat_twin=text) as fleet:
        for policy in ("cost", "fifo"):
            print(f"flat space, {policy}: {seconds:g} s on real workers", flush=True)
            words = ("--policy", policy, "--seconds", str(seconds), "--seed", str(seed))
            trials = fleet.run("flat_twin", *words, timeout=seconds + 90).trials
            ended = [trial["finished_at"] for trial in trials if trial["state"] == "COMPLETE"]
            began = min(trial["started_at"] for trial in trials if trial["state"] == "COMPLETE")
            real[policy] = sum(end - began <= seconds for end in ended)
    return {"real": real["cost"] / real["fifo"], "simulated": told["cost"] / told["fifo"]}


def per_hour(trials: Sequence[Mapping[str, Any]], began: float, seconds: float) -> dict[str, float]:
    """Trials an hour by family, of those that had ended when the time was up."""
    ended = Counter(
        str(trial["subspace"]).partition("=")[2] for trial in trials if trial["finished_at"] - began <= seconds
    )
    return {family: 3600 * ended[family] / seconds for family in FOUR}


def predict(table: Table, slots: int, policy: str, seconds: float, seed: int) -> dict[str, float]:
    """Trials an hour by family, as the simulator has them."""
    cluster = describe(table, dict.fromkeys(CLASSES, slots), (), seconds / 3600, failure_rate=0.0)
    played = simulate(cluster, policy=policy, seed=seed)
    return {name.removeprefix("family="): count / seconds * 3600 for name, count in played.complete.items()}


def off(measured: Mapping[str, float], predicted: Mapping[str, float], family: str | None = None) -> float:
    """By which part of it the prediction misses what was measured, of one family or of all together."""
    families = [family] if family else list(measured)
    real, told = (sum(rates[name] for name in families) for rates in (measured, predicted))
    return abs(told - real) / real if real else math.inf


def show(policy: str, measured: Mapping[str, float], predicted: Mapping[str, float], best: float) -> None:
    """Print the table of one policy."""
    print(f"\n{policy}: trials an hour (a known table's bound: {best:,.0f})")
    print(f"{'':34s}{'real':>10s}{'simulated':>12s}{'off':>8s}")
    for family in measured:
        part = off(measured, predicted, family)
        print(f"{family:34s}{measured[family]:10,.0f}{predicted[family]:12,.0f}{part:8.1%}")
    real, told = sum(measured.values()), sum(predicted.values())
    print(f"{'all':34s}{real:10,.0f}{told:12,.0f}{off(measured, predicted):8.1%}")


if __name__ == "__main__":
    main()
