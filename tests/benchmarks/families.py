"""How much sooner a study ends under ``cost`` than under ``fifo``: ``python tests/benchmarks/families.py``.

Three workers of three classes, one slot each, on one local Redis; trials sleep for the seconds that a table has for
their family and class, more or less by a part that is drawn with the params. The same seed gives both policies the same
trials, and cost learns the seconds from nothing in every study. Measured is the command's wall time, Python's start
included. On tables where families differ cost should win; where classes differ only in speed it cannot, and must not
lose.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from figures import finish, goal, quartiles
from idle import Fleet, lent_redis

from shadho_celery.placement.bound import throughput_bound

#: the classes, in the order in which a study expects them; their queues have names of this run's own
CLASSES = ("v100", "p100", "k80")

#: seconds by table, family and class
TABLES: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    # Each class is three times as fast at one of the families.
    "diagonal": {"a": (0.3, 0.1, 0.3), "b": (0.3, 0.3, 0.1), "c": (0.1, 0.3, 0.3)},
    # ResNet-50, LM, recommendation and A3C in the proportions that Gavel measured on three GPUs, a quarter of a second
    # in their middle. Source: Narayanan et al., OSDI 2020.
    "gavel": {
        "a3c": (0.18, 0.23, 0.38),
        "lm": (0.155, 0.17, 0.585),
        "recommendation": (0.365, 0.165, 0.26),
        "resnet": (0.11, 0.185, 0.78),
    },
    # A class is as fast beside the others whatever the family.
    "speed-only": {"a": (0.05, 0.1, 0.2), "b": (0.1, 0.2, 0.4), "c": (0.15, 0.3, 0.6)},
}

#: what the ratio fifo / cost should reach
GOALS = {"diagonal": 1.2, "gavel": 1.2, "speed-only": 0.95}

STUDY = """
import time
from hyperopt import hp
SECONDS = {seconds}
SPACE = hp.choice("family", [
    {{"family": name, "size": hp.uniform("size of " + name, {low}, {high})}} for name in sorted(SECONDS)
])
STUDY = {{"classes": {classes}, "sampler": "random"}}
def objective(params, context):
    time.sleep(SECONDS[params["family"]][context.compute_class] * params["size"])
    return params["size"]
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES], help="tables to run [all]")
    parser.add_argument("--trials", type=int, default=100, help="trials of a study [100]")
    parser.add_argument(
        "--repeats", type=int, default=3, help="studies of each policy, with the same seeds, by turns [3]"
    )
    parser.add_argument("--policies", nargs="+", default=["fifo", "cost"], help="policies, the baseline first")
    parser.add_argument("--jitter", type=float, default=0.5, help="part by which trials of a family differ [0.5]")
    redis_url = os.environ.get("SHADHO_TEST_REDIS_URL")
    parser.add_argument("--redis-url", default=redis_url, help="broker and channel [a database lent by tests/services]")
    given = parser.parse_args()

    studies = {module(name): study_text(TABLES[name], given.jitter) for name in given.tables}
    ratios: dict[str, dict[str, list[float]]] = {name: {"wall": [], "span": []} for name in given.tables}
    print(f"{given.trials} trials on 3 workers; of each family on {', '.join(CLASSES)}")
    with lent_redis(given.redis_url) as url, Fleet(dict.fromkeys(CLASSES, 1), url, url, **studies) as fleet:
        for repeat in range(given.repeats):
            for name in given.tables:
                measured = [measure(fleet, name, policy, given.trials, repeat) for policy in given.policies]
                for what, found in ratios[name].items():
                    found.append(measured[0][what] / measured[-1][what])

    print(f"\n{given.policies[0]} / {given.policies[-1]}")
    print(f"{'':12s}{'wall: lower':>14s}{'median':>8s}{'upper':>8s}{'span: median':>14s}{'bound':>8s}")
    goals = {}
    for name, values in ratios.items():
        low, middle, high = quartiles(values["wall"])
        span = quartiles(values["span"])[1]
        print(f"{name:12s}{low:14.2f}{middle:8.2f}{high:8.2f}{span:14.2f}{gain(TABLES[name]):8.2f}")
        goals[f"{name}_wall_ratio"] = goal(middle, at_least=GOALS[name])
    settings = {"trials": given.trials, "repeats": given.repeats, "jitter": given.jitter, "policies": given.policies}
    finish(ratios, goals, settings)


def measure(fleet: Fleet, table: str, policy: str, trials: int, seed: int) -> dict[str, float]:
    """Seconds of one study: `wall`, of the command, and `span`, from its first trial's start to its last one's end."""
    run = fleet.run(module(table), "--policy", policy, "--trials", str(trials), "--seed", str(seed))
    assert run.report["trials"]["complete"] == trials, run.report
    span = max(trial["finished_at"] for trial in run.trials) - min(trial["started_at"] for trial in run.trials)
    print(f"{table:12s}{policy:7s}{run.wall:6.2f} s, {span:5.2f} s of trials: {by_class(run.trials)}", flush=True)
    return {"wall": run.wall, "span": span}


def module(table: str) -> str:
    """The name of a table's study file."""
    return table.replace("-", "_")


def study_text(table: Mapping[str, tuple[float, float, float]], jitter: float) -> str:
    """The study file whose trials take the seconds of `table`."""
    names = [Fleet.queue(name) for name in CLASSES]
    seconds = {family: dict(zip(names, row, strict=True)) for family, row in table.items()}
    # A uniform of no width is none.
    width = max(jitter, 1e-6)
    return STUDY.format(seconds=seconds, classes=names, low=1 - width, high=1 + width)


def by_class(trials: Sequence[Mapping[str, Any]]) -> str:
    """``a 20/5/5``: a family's trials by class."""
    names = [Fleet.queue(name) for name in CLASSES]
    counts: dict[str, list[int]] = {}
    for trial in trials:
        row = counts.setdefault(trial["subspace"].partition("=")[2], [0] * len(names))
        row[names.index(trial["compute_class"])] += 1
    return "  ".join(f"{family} {'/'.join(map(str, row))}" for family, row in sorted(counts.items()))


def gain(table: Mapping[str, Sequence[float]]) -> float:
    """By how much the best placement's throughput exceeds that of classes which take the families in turn."""
    seconds = {family: dict(zip(CLASSES, row, strict=True)) for family, row in table.items()}
    in_turn = sum(len(table) / sum(row[name] for row in seconds.values()) for name in CLASSES)
    return throughput_bound(seconds, dict.fromkeys(CLASSES, 1)).rate / in_turn


if __name__ == "__main__":
    main()
