"""A fleet and a study to simulate: ``python -m shadho_celery.simulate cluster.py``."""

import math

from hyperopt import hp

# The search space, as in a study file. Each option with params is a subspace, and here a family of similar trials.
NETWORK = {"family": "network", "x": hp.uniform("x network", 0, 1)}
FOREST = {"family": "forest", "x": hp.uniform("x forest", 0, 1)}
FLAT = {"family": "flat", "x": hp.uniform("x flat", 0, 1), "width": hp.uniform("width", 0, 1)}
SPACE = hp.pchoice("family", [(0.5, NETWORK), (0.25, FOREST), (0.25, FLAT)])

# Settings as in a study file. The end: after this many simulated seconds or trials (at least one of the two), or at a
# loss.
STUDY = {
    "seconds": 10800,
    # "trials": 1000,
    # "target": 0.001,
    # "fidelity": {"least": 1, "most": 81},  # seconds() is then for one unit of budget
    # "gpus": [1, 2, 4],                     # slots of one worker that a trial takes; seconds() sees machine.slots
}

CLUSTER = {
    "classes": {  # the strongest first; or the path of a TOML file with [classes.gpu_large] and the like
        "gpu_large": {
            "workers": 4,  # each is a machine of its own
            "memory_gib": 40,
            # "slots": 8,                    # of each worker, such as its GPUs
            # "price": 2.40,                 # money that a slot costs an hour
            # "startup_seconds": 90,         # from the start of a worker until it takes trials
            # "preemption_seconds": 1200,    # until it is preempted, on average (exponential)
            # "notice": True,                # its trials are given back (worker --grace); False: its machine vanishes
            # "for_seconds": 14400,          # until it ends (worker --for); it declines trials predicted to end later
            # "return_seconds": 120,         # from the end of a worker until one starts in its place
        },
        "gpu_small": {"workers": 8, "memory_gib": 11},
        "cpu": {"workers": 20},
    },
    # Workers that start, or that die with their trials.
    "changes": [{"at": 3600, "class": "cpu", "workers": -10}, {"at": 5400, "class": "cpu", "workers": 15}],
    "seed": 0,
    "lease_seconds": 30,  # after which a dead worker's trial is known to be lost
    # "checkpoints": "shared",               # where trials find checkpoints: none, machine (their own) or shared
    # "handover_seconds": 5,                 # to read the checkpoint of another machine
    # "checkpoint_seconds": 60,              # between two checkpoints, from which a trial continues on another worker;
    #                                        # with notice it continues from its last moment
    # "steps": 20,                           # after each of which a trial reports
}


def seconds(params, machine):
    """Return the mean seconds of a trial; a machine has `compute_class`, `slots` of the trial, and `memory_gib`."""
    if params["family"] == "network":
        return {"gpu_large": 40, "gpu_small": 90, "cpu": 1200}[machine.compute_class]
    if params["family"] == "forest":
        return {"gpu_large": 60, "gpu_small": 70, "cpu": 90}[machine.compute_class]
    least, slope = {"gpu_large": (20, 10), "gpu_small": (30, 90), "cpu": (20, 400)}[machine.compute_class]
    return least + slope * params["width"]


# The other functions are optional.


def overhead_seconds(params, machine):
    """Return the seconds of a trial besides its work, whatever its budget."""
    return 0


def loss(params):
    """Return the loss of a trial."""
    return (params["x"] - 0.3) ** 2


def memory_gib(params):
    """Return the memory that a trial needs; it fails on a machine that has less."""
    return 6 if params["family"] == "network" else 0


def failure_rate(params):
    """Return the probability with which a trial fails, after all its time."""
    return 0.1 if params["family"] == "forest" else 0.02


def size(generator, count):
    """Return factors by which similar trials differ, drawn from a numpy generator; their mean should be 1."""
    return generator.lognormal(-0.125, 0.5, count)


def straggler(generator, count):
    """Return factors by which chance slows trials down, which also differ between attempts of a trial."""
    return (1 + abs(generator.normal(0, 0.5, count))) / (1 + 0.5 * math.sqrt(2 / math.pi))
