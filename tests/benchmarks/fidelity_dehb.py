"""Runs dehb, in an interpreter of its own: a line [vector, budget] for each evaluation, answered by its loss.

Arguments: number of dimensions, least and greatest budget, seed, a folder for its output. It imports nothing of ours.
"""

import json
import sys

import ConfigSpace
from dehb import DEHB


def main() -> None:
    size, seed = int(sys.argv[1]), int(sys.argv[4])
    space = ConfigSpace.ConfigurationSpace(seed=seed)
    names = [f"d{place:03d}" for place in range(size)]
    space.add([ConfigSpace.UniformFloatHyperparameter(name, 0.0, 1.0) for name in names])

    def evaluate(config, fidelity, **_):
        print(json.dumps([[float(config[name]) for name in names], float(fidelity)]), flush=True)
        return {"fitness": float(sys.stdin.readline()), "cost": 1.0}

    optimizer = DEHB(
        f=evaluate,
        cs=space,
        dimensions=size,
        min_fidelity=float(sys.argv[2]),
        max_fidelity=float(sys.argv[3]),
        eta=3,
        n_workers=1,
        seed=seed,
        output_path=sys.argv[5],
        log_level="ERROR",
    )
    optimizer.run(fevals=1_000_000)


if __name__ == "__main__":
    main()
