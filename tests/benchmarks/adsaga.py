"""ADSAGA with forty processes over the bus of a gang: ``python tests/benchmarks/adsaga.py``.

Gradient evaluations and seconds until the error of a least-squares problem is 1e-8: SAGA on one machine, ADSAGA on
forty, simulated and in real processes, and the error at which asynchronous SGD stalls. The work on a row takes .2 s on
average, exponential. Forty processes wait for it; the seconds of one machine and of forty simulated ones are played:
the evaluations of a machine times .2 s. Three minutes on two cores; ``--simulated`` leaves the processes out.
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
MACHINES = 40
#: mean seconds of the work on a row
SECONDS = 0.2


def best(machines: int) -> dict[str, Any]:
    """With the best of the steps: the params, and the evaluations and seconds until it is solved."""
    tried = []
    for step in STEPS:
        params = {"method": "adsaga", "machines": machines, "step": step}
        found = adsaga.objective(params, LocalContext(budget=20_000))
        tried.append((found.get("evaluations", math.inf), step, params))
    evaluations, _, params = min(tried, key=lambda each: each[:2])
    return {"params": params, "evaluations": evaluations, "seconds": evaluations / machines * SECONDS}


def real(params: dict[str, Any], evaluations: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        context = LocalContext(budget=evaluations, checkpoints=Path(folder))
        return adsaga.with_a_gang(params, context)


def show(name: str, evaluations: float, seconds: float, note: str = "") -> None:
    print(f"{name:34s} {evaluations:>11.0f} {seconds:>9.0f}  {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="no real processes")
    only_simulated = parser.parse_args().simulated
    logging.disable(logging.WARNING)
    saga, forty = best(1), best(MACHINES)
    print(f"condition number {adsaga.problem().condition:.0f}; until the error is 1e-8, with {SECONDS} s a gradient:")
    print(f"{'':34s} {'evaluations':>11s} {'seconds':>9s}")
    show("SAGA, played", saga["evaluations"], saga["seconds"], f"step {saga['params']['step']}/L")
    show("ADSAGA, 40 machines, played", forty["evaluations"], forty["seconds"], f"step {forty['params']['step']}/L")
    figures = {"saga": saga, "simulated": forty}
    ratio = "ADSAGA's {}, {}, in SAGA's".format
    goals = {
        ratio("evaluations", "simulated"): goal(forty["evaluations"] / saga["evaluations"], at_most=1.5),
    }
    if not only_simulated:
        # The evaluations end a little later than those of the simulation.
        found = real({**forty["params"], "seconds": SECONDS}, int(1.3 * forty["evaluations"]))
        evaluations, seconds = (found.get(name, math.inf) for name in ("evaluations", "seconds"))
        show("ADSAGA, 40 processes", evaluations, seconds)
        error = 10 ** real({"method": "sgd", "machines": MACHINES, "step": SGD_STEP}, 20_000)["loss"]
        print(f"{'asynchronous SGD, 40 processes':34s} stalls at an error of {error:.1e}")
        figures |= {"real": {"evaluations": evaluations, "seconds": seconds}, "sgd": error}
        goals |= {
            ratio("evaluations", "real"): goal(evaluations / saga["evaluations"], at_most=1.5),
            ratio("seconds", "real"): goal(seconds / saga["seconds"], at_most=0.05),
            "asynchronous SGD's error": goal(error, at_least=1e-5),
        }
    finish(figures, goals, {"steps": STEPS, "sgd_step": SGD_STEP, "machines": MACHINES, "seconds": SECONDS})


if __name__ == "__main__":
    main()
