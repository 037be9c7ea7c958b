"""How long a slot idles between two trials: ``python tests/benchmarks/idle.py [--seconds 0 0.05]``.

Two workers of two classes, two slots each, run a study on one local Redis (broker and channel) whose objective notes
its own start and end. The gap is what lies between one trial's end and the next one's start in the same slot: the
result's way to the scheduler's stream, and the next claim's; where nothing waited in the class's queue, a whole turn of
the loop too. The wall clock of one machine measures both ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from figures import finish, goal, make_parser, quartiles, show
from workers import Fleet, lent_redis

CLASSES = ("idle-large", "idle-small")
SLOTS = 2

#: a study file whose trials sleep, or do nothing, and tell when
STUDY = """
import time
from hyperopt import hp
SPACE = hp.choice("side", [{{"x": hp.uniform("x", 0, 1)}}, {{"y": hp.uniform("y", 0, 1)}}])
STUDY = {{"sampler": "random"}}
def objective(params, context):
    began = time.time()
    if {seconds}:
        time.sleep({seconds})
    return {{"loss": 0.0, "slot": context.slot, "began": began, "ended": time.time()}}
"""


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=int, default=600, help="trials of a study [600]")
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[0.0, 0.05], help="a study for each: what its trials take [0 0.05]"
    )
    parser.add_argument("--repeats", type=int, default=3, help="studies of each kind, by turns [3]")
    parser.add_argument("--redis-url", help="broker and channel [a database lent by tests/services]")
    given = parser.parse_args()

    studies = {f"sleeps_{place}": STUDY.format(seconds=seconds) for place, seconds in enumerate(given.seconds)}
    found: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with lent_redis(given.redis_url) as url, Fleet(dict.fromkeys(CLASSES, SLOTS), url, url, **studies) as fleet:
        for _ in range(given.repeats):
            for name, seconds in zip(studies, given.seconds, strict=True):
                for slot, gap in gaps(fleet.run(name, "--trials", str(given.trials)).trials):
                    found[seconds][slot].append(gap)

    figures, goals = {}, {}
    for seconds, by_slot in found.items():
        label = f"{seconds * 1000:g}_ms" if seconds else "noop"
        worst = max(quartiles(values)[1] for values in by_slot.values())
        by_slot["all"] = [gap for values in by_slot.values() for gap in values]
        rows = figures[label] = {slot: told(values) for slot, values in sorted(by_slot.items())}
        texts = {slot: {name: f"{value:.4g}" for name, value in row.items()} for slot, row in rows.items()}
        show(texts, "slot", f"{label}: milliseconds a slot idles between two trials")
        goals[f"{label}_idle_ms_median_of_worst_slot"] = goal(worst * 1000, at_most=20)
    finish(figures, goals, vars(given))


def gaps(trials: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """By slot, the seconds between one trial's end and the next one's start."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for trial in trials:
        metrics = trial["metrics"]
        slot = f"{trial['compute_class'].rpartition('-')[0]}/{metrics['slot']}"
        spans[slot].append((metrics["began"], metrics["ended"]))
    return [(slot, began - ended) for slot, each in spans.items() for (_, ended), (began, _) in pairwise(sorted(each))]


def told(seconds: Sequence[float]) -> dict[str, float]:
    """Return the figures of some gaps, in milliseconds."""
    low, middle, high = (1000 * value for value in quartiles(seconds))
    late = 1000 * sorted(seconds)[int(0.95 * len(seconds))]
    return {"gaps": len(seconds), "lower": low, "median": middle, "upper": high, "p95": late}


if __name__ == "__main__":
    main()
