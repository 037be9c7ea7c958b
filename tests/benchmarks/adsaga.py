"""ADSAGA with forty processes over the bus of a gang: ``python tests/benchmarks/adsaga.py``.

Gradient evaluations until the error of a least-squares problem is 1e-8: SAGA on one machine, ADSAGA on forty, simulated
and real, and what asynchronous SGD comes to. A minute, most of it the forty processes'; ``--simulated`` leaves those
out.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import finish, goal

sys.path.insert(0, str(Path(__file__).parents[2]))

from shadho_celery.objective.context import LocalContext
from tasks import adsaga

STEPS = (0.3, 0.35, 0.4)
SGD_STEP = 0.1


def best(machines: int) -> dict[str, Any]:
    """With the best of the steps: the params, and the evaluations until it is solved."""
    tried = []
    for step in STEPS:
        params = {"method": "adsaga", "machines": machines, "step": step}
        found = adsaga.objective(params, LocalContext(budget=20_000))
        tried.append((found.get("evaluations", math.inf), step, params))
    evaluations, _, params = min(tried, key=lambda each: each[:2])
    return {"params": params, "evaluations": evaluations}


def real(params: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return adsaga.with_a_gang(params, LocalContext(budget=20_000, checkpoints=Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="no real processes")
    only_simulated = parser.parse_args().simulated
    logging.disable(logging.WARNING)
    saga, forty = best(1), best(40)
    print(f"condition number {adsaga.problem().condition:.0f}; gradient evaluations to an error of 1e-8:")
    print(f"{'SAGA':34s} {saga['evaluations']:>8.0f}  step {saga['params']['step']}/L")
    print(f"{'ADSAGA, 40 machines, simulated':34s} {forty['evaluations']:>8.0f}  step {forty['params']['step']}/L")
    figures = {"saga": saga["evaluations"], "simulated": forty["evaluations"]}
    ratio = "ADSAGA's evaluations, {}, in SAGA's".format
    goals = {ratio("simulated"): goal(forty["evaluations"] / saga["evaluations"], at_most=1.5)}
    if not only_simulated:
        solved = real(forty["params"]).get("evaluations", math.inf)
        error = 10 ** real({"method": "sgd", "machines": 40, "step": SGD_STEP})["loss"]
        print(f"{'ADSAGA, 40 processes over sockets':34s} {solved:>8.0f}")
        print(f"{'SGD, 40 processes over sockets':34s} stalls at an error of {error:.1e}")
        figures |= {"real": solved, "sgd": error}
        goals[ratio("real")] = goal(solved / saga["evaluations"], at_most=1.5)
        goals["asynchronous SGD's error"] = goal(error, at_least=1e-5)
    finish(figures, goals, {"steps": STEPS, "sgd_step": SGD_STEP})


if __name__ == "__main__":
    main()
