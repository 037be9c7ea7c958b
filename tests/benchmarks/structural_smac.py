"""Runs SMAC3, in an interpreter of its own: one line of params for each evaluation, answered by its loss.

Arguments: number of evaluations, seed, a folder for its output. The first line of the input describes the labels: their
law, and the options under which they are active. It imports nothing of ours.
"""

import json
import logging
import sys
import warnings

from ConfigSpace import Categorical, ConfigurationSpace, Float, InCondition, Integer, OrConjunction
from smac import HyperparameterOptimizationFacade, Scenario


def make(label, law):
    """Return the hyperparameter of a label."""
    if "options" in law:
        return Categorical(label, list(range(law["options"])))
    kind = Integer if law["whole"] else Float
    return kind(label, (law["low"], law["high"]), log=law["log"])


def make_space(labels, seed):
    """Return the space of all labels, with a condition for each one that is not always active."""
    space = ConfigurationSpace(seed=seed)
    found = {label: make(label, law) for label, law in labels.items()}
    space.add(list(found.values()))
    conditions = []
    for label, law in labels.items():
        under = [InCondition(found[label], found[choice], places) for choice, places in law["under"].items()]
        if under:
            conditions.append(under[0] if len(under) == 1 else OrConjunction(*under))
    space.add(conditions)
    return space


def main() -> None:
    trials, seed, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    space = make_space(json.loads(sys.stdin.readline()), seed)

    def evaluate(config, seed=0):
        print(json.dumps(dict(config), default=lambda value: value.item()), flush=True)
        return float(sys.stdin.readline())

    scenario = Scenario(space, n_trials=trials, deterministic=True, seed=seed, output_directory=folder)
    HyperparameterOptimizationFacade(scenario, evaluate, overwrite=True, logging_level=False).optimize()


if __name__ == "__main__":
    main()
