"""CPU of the scheduler by trial as a study grows: ``python tests/benchmarks/growth.py [--sampler NAME] [--trials N]``.

One study whose trials take no time: the scheduler, its sampler and its store have the process to themselves. The CPU of
a trial is measured over blocks of trials, each divided by the CPU that the same loop took within the block, because a
machine may become slower or faster meanwhile. The goal compares the later blocks with the first.

Examples:
  python tests/benchmarks/growth.py                               # five minutes
  python tests/benchmarks/growth.py --sampler gp --trials 10000
"""

from __future__ import annotations

import argparse
import json
import time

from figures import goal

from shadho_celery import hp, minimize

#: the last trials of the blocks that are compared, as far as the study has so many, and the trials of a block
ENDS, BLOCK = (1_500, 28_000, 100_000), 1_000
#: trials between two passes of the loop for calibration
PASSES = 20

SPACE = {
    "rate": hp.loguniform("rate", -7, 0),
    "decay": hp.loguniform("decay", -10, -2),
    "depth": hp.randint("depth", 2, 20),
    "solver": hp.choice("solver", ["adam", "sgd", "lion"]),
}


def loop() -> None:
    """Make some work for the interpreter, of always the same length."""
    found = 0
    for number in range(2_000):
        found += number * number % 7


def main() -> None:
    """Run the study and print a line for each block, then one JSON object with the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", default="tpe")
    parser.add_argument("--trials", type=int, default=ENDS[-1])
    options = parser.parse_args()
    ends = [end for end in ENDS if end < options.trials] + [options.trials]
    block = min(BLOCK, ends[0] // 2)
    seconds = dict.fromkeys(ends, 0.0)
    loops = dict.fromkeys(ends, 0.0)
    trials, last = 0, time.process_time()

    def objective(params: dict[str, float]) -> float:
        nonlocal trials, last
        trials += 1
        end = next(end for end in ends if trials <= end)
        if trials <= end - block:
            return (params["rate"] - 0.01) ** 2 + params["decay"]
        now = time.process_time()
        if trials > end - block + 1:
            seconds[end] += now - last
        if trials % PASSES == 0:
            loop()
            loops[end] += time.process_time() - now
        last = time.process_time()
        return (params["rate"] - 0.01) ** 2 + params["decay"]

    minimize(objective, SPACE, trials=options.trials, sampler=options.sampler, seed=0)
    rows = {}
    for end in ends:
        milliseconds, passes = seconds[end] / block * 1e3, loops[end] / (block / PASSES) * 1e3
        rows[end] = milliseconds / passes
        print(f"trials {end - block:>7,} to {end:>7,}: {milliseconds:6.2f} ms of CPU each; a loop {passes:.3f} ms")
    first, *later = ends
    print(json.dumps({f"{end} beside {first}": goal(rows[end] / rows[first], at_most=1.2) for end in later}))


if __name__ == "__main__":
    main()
