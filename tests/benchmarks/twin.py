"""The real stack beside its simulation: ``python tests/benchmarks/twin.py [--policy cost]``.

Real workers of three classes run trials that sleep for the seconds of four families on three GPUs, as Gavel measured
them, scaled to about half a second, times a straggler's factor. The simulator plays the same cluster on its own clock,
with the same policy, for as long. Compared are the trials an hour that are complete when the time is up, of each family
and of all: the simulator should tell what the fleet does within 15 %.

Then the same with a flat space, whose seconds depend on one number, on a second fleet: there `cost` should do more than
`fifo` by what the simulator tells, within 10 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from figures import finish, goal, make_parser, show
from fleets import DATA, FOUR, RATES, describe, rates, seconds_of
from hyperopt import hp
from services.families import Family, cluster_of, fleet_of, half_normal
from workers import Fleet, lent_redis

from shadho_celery.placement.bound import throughput_bound
from shadho_celery.simulation.simulation import Machine, simulate

#: the queues, the strongest first
CLASSES = ("v100", "p100", "k80")

#: spread of the stragglers: a trial takes 1 + |N(0, STRAGGLING)| times as long as its family and class do, over the
#: mean of that
STRAGGLING = 0.5
STRAGGLER_MEAN = 1.0 + STRAGGLING * math.sqrt(2.0 / math.pi)

#: begin of both study files: how long a trial takes that should take so many seconds
SLEEP = f"""
import random, time
from hyperopt import hp
def sleep(seconds, context):
    time.sleep(seconds * (1 + abs(random.Random(context.seed).gauss(0, {STRAGGLING}))) / {STRAGGLER_MEAN})
"""

STUDY = """
SPACE = hp.choice("family", [{{"family": name, "x": hp.uniform("x of " + name, 0, 1)}} for name in {seconds}])
STUDY = {{"classes": {classes}, "sampler": "random"}}
def objective(params, context):
    sleep({seconds}[params["family"]][context.compute_class], context)
    return params["x"]
"""

#: slots, and seconds of a flat space, at least and by its number; to be scaled as those of the families
FLAT_SLOTS = {"gpu": 4, "cpu": 12}
FLAT_SECONDS = {"gpu": (20, 10), "cpu": (20, 400)}

FLAT_STUDY = """
SPACE = {{"w": hp.uniform("w", 0, 1)}}
STUDY = {{"sampler": "random"}}
def objective(params, context):
    least, slope = {seconds}[context.compute_class]
    sleep({scale} * (least + slope * params["w"]), context)
    return params["w"]
"""

Table = Mapping[str, Mapping[str, float]]


def main() -> None:
    """Measure, simulate and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--policy", action="append", help="policy to run; may be repeated [cost and fifo]")
    parser.add_argument("--seconds", type=float, default=50.0, help="seconds that a study lasts [50]")
    parser.add_argument("--slots", type=int, default=4, help="slots of each of the three classes [4]")
    parser.add_argument(
        "--scale", type=float, default=0.01, help="of the trials' seconds, a minute in the middle [.01]"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--redis-url", help="broker and channel [a database lent by tests/services]")
    given = parser.parse_args()
    policies = given.policy or ["cost", "fifo"]
    known = seconds_of(rates(DATA / RATES))
    table = {family: {name: given.scale * known[family][name] for name in CLASSES} for family in FOUR}

    told = {policy: predict(table, given.slots, policy, given.seconds, given.seed) for policy in policies}
    measured, margins = {}, {}
    with lent_redis(given.redis_url) as url:
        with Fleet(dict.fromkeys(CLASSES, given.slots), url, url, twin=study_text(table)) as fleet:
            for policy in policies:
                ended = run(fleet, "twin", policy, given.seconds, given.seed)
                measured[policy] = {family: 3600 * ended[family] / given.seconds for family in FOUR}
        if {"cost", "fifo"} <= {*policies}:
            margins = flat_margins(url, given.scale, given.seconds, given.seed)
    goals = {}
    best = 3600 * throughput_bound(table, dict.fromkeys(CLASSES, given.slots)).rate
    for policy, real in measured.items():
        rows = {family: (real[family], told[policy][family]) for family in real}
        rows["all"] = (sum(real.values()), sum(told[policy].values()))
        off = {name: abs(simulated - each) / each if each else math.inf for name, (each, simulated) in rows.items()}
        texts = {
            name: {"real": f"{each:,.0f}", "simulated": f"{simulated:,.0f}", "off": f"{off[name]:.1%}"}
            for name, (each, simulated) in rows.items()
        }
        show(texts, "family", f"{policy}: trials an hour (a known table's bound: {best:,.0f})")
        goals[f"{policy}_all_off"] = goal(off.pop("all"), at_most=0.15)
        goals[f"{policy}_worst_family_off"] = goal(max(off.values()), at_most=0.15)
    if margins:
        print(f"flat space: cost does {margins['real']:.3f} times as many trials as fifo; simulated: ", end="")
        print(f"{margins['simulated']:.3f}")
        goals["flat_margin_off"] = goal(abs(margins["real"] / margins["simulated"] - 1.0), at_most=0.10)
    figures = {"measured_per_hour": measured, "predicted_per_hour": told, "bound_per_hour": best}
    finish(figures | {"flat_margins": margins}, goals, vars(given))


def study_text(table: Table) -> str:
    """The study file of the real side."""
    seconds = {f: {Fleet.queue(name): value for name, value in row.items()} for f, row in table.items()}
    return SLEEP + STUDY.format(seconds=seconds, classes=[Fleet.queue(name) for name in CLASSES])


def run(fleet: Fleet, study: str, policy: str, seconds: float, seed: int) -> Counter[str]:
    """Trials by family on real workers, of those that had ended when the time was up."""
    print(f"{study}, {policy}: {seconds:g} s on real workers", flush=True)
    words = ("--policy", policy, "--seconds", str(seconds), "--seed", str(seed))
    trials = [trial for trial in fleet.run(study, *words).trials if trial["state"] == "COMPLETE"]
    began = min(trial["started_at"] for trial in trials)
    ended = [trial for trial in trials if trial["finished_at"] - began <= seconds]
    return Counter(str(trial["subspace"]).partition("=")[2] for trial in ended)


def flat_margins(url: str, scale: float, seconds: float, seed: int) -> dict[str, float]:
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
    text = SLEEP + FLAT_STUDY.format(seconds=by_class, scale=scale)
    told = {policy: simulate(cluster, policy=policy, seed=seed).complete["family=flat"] for policy in ("cost", "fifo")}
    with Fleet(FLAT_SLOTS, url, url, flat_twin=text) as fleet:
        real = {policy: run(fleet, "flat_twin", policy, seconds, seed).total() for policy in ("cost", "fifo")}
    return {"real": real["cost"] / real["fifo"], "simulated": told["cost"] / told["fifo"]}


def predict(table: Table, slots: int, policy: str, seconds: float, seed: int) -> dict[str, float]:
    """Trials an hour by family, as the simulator has them."""
    cluster = describe(table, dict.fromkeys(CLASSES, slots), (), seconds / 3600, failure_rate=0.0)
    played = simulate(cluster, policy=policy, seed=seed)
    return {name.removeprefix("family="): count / seconds * 3600 for name, count in played.complete.items()}


if __name__ == "__main__":
    main()
