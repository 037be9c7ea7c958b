"""Search spaces with choices, for the structural part of `samplers.py`: their subspaces share labels, or share none.

Each loss is smooth, 0 at its optimum and mostly between .05 and 3. It adds up bowls of the labels, in logarithms where
the law has one, a gap for each option other than the best one, and small interactions. Some of the sums are bent, so
that they rise more slowly far from the optimum. An optimum lies within .17 to .3 or .7 to .83 of its label's box, so it
is off the centre and stays in the box when `Problem.shifted` moves it. No best option is the first one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hyperopt import hp
from problems import Problem

Params = Mapping[str, Any]


def power_of_ten(label: str, low: float, high: float) -> Any:
    """Return a loguniform label between two powers of ten."""
    return hp.loguniform(label, low * math.log(10), high * math.log(10))


def off(value: float, best: float, scale: float) -> float:
    """Return a signed distance from the optimum, in a scale on which 1 matters."""
    return (value - best) / scale


def off_power(value: float, best: float, scale: float = 1.0) -> float:
    """Return the distance of a value from the power of ten `best`, in `scale` decades."""
    return off(math.log10(value), best, scale)


def bent(total: float) -> float:
    """Return a sum of bowls as a smooth function that is linear far from the optimum."""
    return 2 * (math.sqrt(1 + total) - 1)


def saturating(total: float) -> float:
    """Return a sum of bowls as a loss that has an upper bound, like that of an untrained network."""
    return 3 * (1 - math.exp(-total / 3))


def solvers() -> Any:
    """Return a choice of two solvers with a label each. The optima are `solver_loss`'s."""
    return hp.choice(
        "solver",
        [
            {"name": "sgd", "momentum": hp.uniform("momentum", 0.5, 0.99)},
            {"name": "adam", "beta": hp.uniform("beta", 0.8, 0.99)},
        ],
    )


def solver_loss(solver: Params, rate: float) -> float:
    """Return a solver's part of the loss. `rate` is the learning rate's distance from its optimum in decades."""
    if solver["name"] == "sgd":
        momentum = off(solver["momentum"], 0.86, 0.2)
        return 0.15 + 0.3 * momentum**2 + 0.1 * rate * momentum
    return 0.2 * off(solver["beta"], 0.84, 0.08) ** 2


# Shared labels that behave alike


def fine_tuning(p: Params) -> float:
    """Three shared labels and two solvers: rate, decay and dropout have the same optimum for both."""
    rate, decay, dropout = off_power(p["rate"], -2.5), off_power(p["decay"], -6.6, 2), off(p["dropout"], 0.2, 0.3)
    shared = 0.2 * rate**2 + 0.3 * decay**2 + 0.25 * dropout**2 + 0.06 * rate * dropout
    return shared + solver_loss(p["solver"], rate)


FINE_TUNING = {
    "rate": power_of_ten("rate", -6, -1),
    "decay": power_of_ten("decay", -8, -2),
    "dropout": hp.uniform("dropout", 0.0, 0.8),
    "solver": solvers(),
}


def layers_by_solvers(depths: int) -> Any:
    """Return the space of a network: rate and decay shared, units for each layer of each depth, two solvers."""
    networks = [
        [hp.quniform(f"units_{depth}_{layer}", 16, 256, 16) for layer in range(1, depth + 1)]
        for depth in range(1, depths + 1)
    ]
    return {
        "rate": power_of_ten("rate", -6, -1),
        "decay": power_of_ten("decay", -8, -2),
        "units": hp.choice("depth", networks),
        "solver": solvers(),
    }


def network(p: Params, gaps: Sequence[float]) -> float:
    """Add up rate, decay, a gap by depth, and units: wide layers and narrow ones in turn."""
    rate, decay = off_power(p["rate"], -2.5), off_power(p["decay"], -3.5)
    units = [off(width, 208 if place % 2 == 0 else 64, 100) for place, width in enumerate(p["units"])]
    layers = 0.5 * math.fsum(width**2 for width in units) / len(units) + 0.05 * rate * units[0]
    shared = 0.25 * rate**2 + 0.1 * decay**2 + 0.08 * rate * decay
    return bent(shared + layers + gaps[len(units) - 1] + solver_loss(p["solver"], rate))


#: augmentations, encoders and solvers of `vision`, with the gap of each option
AUGMENTATIONS: Mapping[str, float] = {"none": 0.5, "flip": 0.25, "crop": 0.1, "mixup": 0.0, "cutout": 0.2}
ENCODERS: Mapping[str, float] = {"plain": 0.6, "dense": 0.2, "residual": 0.0, "wide": 0.15, "mobile": 0.4}
SOLVERS: Mapping[str, float] = {"sgd": 0.3, "rmsprop": 0.2, "adagrad": 0.4, "adam": 0.0}


def vision(p: Params) -> float:
    """Augmentation, encoder and solver with a label each, in 100 combinations; rate, decay and dropout are shared."""
    rate, decay, dropout = off_power(p["rate"], -4.6), off_power(p["decay"], -3.6, 2), off(p["dropout"], 0.6, 0.3)
    shared = 0.25 * rate**2 + 0.3 * decay**2 + 0.2 * dropout**2 + 0.05 * rate * dropout
    augmentation, encoder, solver = p["augmentation"], p["encoder"], p["solver"]
    gaps = AUGMENTATIONS[augmentation["name"]] + ENCODERS[encoder["name"]] + SOLVERS[solver["name"]]
    strength = off(augmentation["strength"], 0.25, 0.5)
    own = strength**2 + off(encoder["width"], 96, 60) ** 2 + off(solver["memory"], 0.78, 0.4) ** 2
    return saturating(shared + gaps + 0.15 * own + 0.03 * dropout * strength)


def options_with(choice: str, names: Mapping[str, float], label: str, make: Any) -> Any:
    """Return a choice whose options have a name and one label of their own."""
    return hp.choice(choice, [{"name": name, label: make(f"{name}_{label}")} for name in names])


#: More combinations than the default limit: only augmentation and encoder are split, into 25 subspaces with a choice of
#: solvers in each.
VISION = {
    "rate": power_of_ten("rate", -6, -1),
    "decay": power_of_ten("decay", -8, -2),
    "dropout": hp.uniform("dropout", 0.0, 0.8),
    "augmentation": options_with("augmentation", AUGMENTATIONS, "strength", lambda label: hp.uniform(label, 0, 1)),
    "encoder": options_with("encoder", ENCODERS, "width", lambda label: hp.quniform(label, 48, 256, 8)),
    "solver": options_with("solver", SOLVERS, "memory", lambda label: hp.uniform(label, 0, 1)),
}

# Shared labels whose optimum depends on the branch

#: model -> gap, power of ten of the best penalty, and the best place of the label of its own
MODELS: Mapping[str, tuple[float, float, float]] = {
    "ridge": (0.5, 1.1, 0.25),
    "lasso": (0.35, 0.5, 0.75),
    "hinge": (0.2, -0.4, 0.2),
    "kernel": (0.0, -1.6, 0.8),
    "logistic": (0.3, -1.0, 0.3),
    "huber": (0.6, 1.4, 0.72),
}


def six_models(p: Params) -> float:
    """Six models share a penalty, whose best value is another one for each; each has one more label."""
    gap, best, place = MODELS[p["model"]]
    penalty, own = off_power(p["penalty"], best), off(p["own"], place, 0.4)
    return gap + 0.2 * penalty**2 + 0.3 * own**2 + 0.05 * penalty * own


_PENALTY = power_of_ten("penalty", -3, 3)
SIX_MODELS = hp.choice(
    "model",
    [{"model": name, "penalty": _PENALTY, "own": hp.uniform(f"{name}_own", 0, 1)} for name in MODELS],
)

#: encoder of `text` -> gap, and decades by which the best rate is below the greatest
TEXT_ENCODERS: Mapping[str, tuple[float, float]] = {
    "bag": (0.6, 0.0),
    "recurrent": (0.25, 0.4),
    "convolution": (0.35, 0.2),
    "attention": (0.0, 1.8),
}
#: head of `text` -> gap, and addend to the best dropout
HEADS: Mapping[str, tuple[float, float]] = {
    "mean": (0.3, 0.0),
    "max": (0.15, 0.05),
    "gated": (0.0, 0.4),
    "mix": (0.2, 0.3),
}


def text(p: Params) -> float:
    """Four encoders, four heads and two solvers: encoder and solver move the best rate, heads the best dropout."""
    gap, down = TEXT_ENCODERS[p["encoder"]["name"]]
    head_gap, up = HEADS[p["head"]["name"]]
    rate = off_power(p["rate"], -2.2 - down - (0.5 if p["solver"]["name"] == "adam" else 0.0))
    dropout, decay = off(p["dropout"], 0.18 + up, 0.3), off_power(p["decay"], -3.4, 2)
    shared = 0.25 * rate**2 + 0.25 * dropout**2 + 0.3 * decay**2 + 0.05 * rate * decay
    own = 0.2 * off(p["encoder"]["width"], 416, 200) ** 2 + 0.15 * off(p["head"]["scale"], 0.28, 0.4) ** 2
    return bent(shared + own + gap + head_gap + solver_loss(p["solver"], rate))


TEXT = {
    "rate": power_of_ten("rate", -6, -1),
    "decay": power_of_ten("decay", -8, -2),
    "dropout": hp.uniform("dropout", 0.0, 0.8),
    "encoder": options_with("encoder", TEXT_ENCODERS, "width", lambda label: hp.quniform(label, 32, 512, 16)),
    "head": options_with("head", HEADS, "scale", lambda label: hp.uniform(label, 0, 1)),
    "solver": solvers(),
}


def opposed(p: Params) -> float:
    """Two models share three labels; where one has the optimum of a label, the other is at its worst."""
    if p["model"] == "shallow":
        rate, penalty, part = off_power(p["rate"], -0.9), off_power(p["penalty"], 1.6), off(p["part"], 0.34, 0.3)
        return 0.25 + 0.2 * rate**2 + 0.1 * penalty**2 + 0.2 * part**2 + 0.05 * rate * penalty
    rate, penalty, part = off_power(p["rate"], -3.1), off_power(p["penalty"], -1.6), off(p["part"], 0.84, 0.3)
    own = off(p["leaves"], 24, 30)
    return 0.2 * rate**2 + 0.1 * penalty**2 + 0.2 * part**2 + 0.2 * own**2 + 0.05 * penalty * part


_COMMON = {
    "rate": power_of_ten("rate", -4, 0),
    "penalty": power_of_ten("penalty", -3, 3),
    "part": hp.uniform("part", 0.2, 1.0),
}
OPPOSED = hp.choice(
    "model",
    [
        {"model": "shallow", **_COMMON},
        {"model": "deep", **_COMMON, "leaves": hp.quniform("leaves", 8, 88, 4)},
    ],
)

# Nothing shared

#: gaps of ten models without a shared label
GAPS = (0.6, 0.35, 0.8, 0.2, 0.5, 0.1, 0.0, 0.45, 0.3, 0.7)


def own_labels(p: Params) -> float:
    """Ten models with two or three labels of their own each, whose optima differ."""
    number = p["model"]
    low, high = 0.2 + 0.01 * number, 0.81 - 0.01 * number
    first, second = (low, high) if number % 2 == 0 else (high, low)
    power, part = off(math.log10(p["power"]) / 6 + 0.5, first, 0.3), off(p["part"], second, 0.35)
    loss = GAPS[number] + 0.3 * power**2 + 0.35 * part**2 + 0.06 * power * part
    return loss + (0.15 * off(p["size"], 5 if number % 4 == 0 else 16, 5) ** 2 if "size" in p else 0.0)


def _own(number: int) -> Any:
    labels = {"power": power_of_ten(f"power_{number}", -3, 3), "part": hp.uniform(f"part_{number}", 0, 1)}
    more = {"size": hp.quniform(f"size_{number}", 1, 20, 1)} if number % 2 == 0 else {}
    return {"model": number, **labels, **more}


OWN_LABELS = hp.choice("model", [_own(number) for number in range(len(GAPS))])

#: name -> problem; the number in a name is that of its combinations
STRUCTURES: Mapping[str, Problem] = {
    "alike_2": Problem(FINE_TUNING, fine_tuning, 0.0),
    "opposed_2": Problem(OPPOSED, opposed, 0.0),
    "alike_6": Problem(layers_by_solvers(3), partial(network, gaps=(0.35, 0.0, 0.2)), 0.0),
    "shifted_6": Problem(SIX_MODELS, six_models, 0.0),
    "alike_10": Problem(layers_by_solvers(5), partial(network, gaps=(0.6, 0.3, 0.15, 0.0, 0.25)), 0.0),
    "own_10": Problem(OWN_LABELS, own_labels, 0.0),
    "shifted_32": Problem(TEXT, text, 0.0),
    "alike_100": Problem(VISION, vision, 0.0),
}
#: those in which subspaces have nothing to learn from one another
APART = ("opposed_2", "own_10")
