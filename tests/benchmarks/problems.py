"""Problems of the samplers' benchmark: search spaces with their losses, and the least loss.

The closed forms are the usual test functions (Surjanovic, Bingham, "Virtual Library of Simulation Experiments").
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fidelity_problems import HARTMANN_3, HARTMANN_6, HARTMANN_WEIGHTS
from hyperopt import hp
from hyperopt.pyll.base import Literal, as_apply, clone, dfs

from shadho_celery.space.compile import compile_space

#: greatest part of its width by which a box is moved
SHIFT = 0.15
#: laws between two ends, of which the step comes third
BOXES = ("uniform", "loguniform", "quniform", "qloguniform")
#: draws from a space by which the range of a loss is estimated, and the part of it below which regrets are equal
DRAWS, EQUAL = 2000, 1e-3


@dataclass(frozen=True)
class Problem:
    """A search space and its loss."""

    space: Any
    objective: Callable[[Any], float]
    #: the least loss
    optimum: float

    def shifted(self, seed: int) -> Problem:
        """The same function over boxes that are moved by up to SHIFT of their widths."""
        generator = np.random.default_rng(seed)
        space = clone(as_apply(self.space))
        for node in dfs(space):
            if node.name in BOXES:
                low, high = (float(argument.obj) for argument in node.pos_args[:2])
                by = generator.uniform(-SHIFT, SHIFT) * (high - low)
                if node.name == "quniform":
                    step = float(node.pos_args[2].obj)
                    by = step * round(by / step)
                node.pos_args[:2] = Literal(low + by), Literal(high + by)
        return replace(self, space=space)

    def equal(self) -> float:
        """Regret below which there is no difference: a thousandth of the range over the space."""
        space = compile_space(self.space)
        draws = space.sample(np.random.default_rng(0), DRAWS)
        losses = [self.objective(space.evaluate(params)) for params in draws]
        return EQUAL * (max(losses) - min(losses))


def problems_of(path: Path) -> dict[str, Problem]:
    """Return those of a Python file with ``PROBLEMS = {name: (space, function, optimum)}``."""
    return {name: Problem(*parts) for name, parts in runpy.run_path(str(path))["PROBLEMS"].items()}


# Closed forms


def branin(p: Mapping[str, float]) -> float:
    x, y = p["x"], p["y"]
    trough = (y - 5.1 / (4 * math.pi**2) * x**2 + 5 * x / math.pi - 6) ** 2
    return trough + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


def camel(p: Mapping[str, float]) -> float:
    x, y = p["x"], p["y"]
    return (4 - 2.1 * x**2 + x**4 / 3) * x**2 + x * y + (4 * y**2 - 4) * y**2


def _hartmann(p: Sequence[float], steepness: Any, centres: Any) -> float:
    return -float(HARTMANN_WEIGHTS @ np.exp(-(steepness * (np.array(p) - centres) ** 2).sum(axis=1)))


def hartmann3(p: Sequence[float]) -> float:
    return _hartmann(p, *HARTMANN_3)


def hartmann6(p: Sequence[float]) -> float:
    return _hartmann(p, *HARTMANN_6)


def ackley(p: Sequence[float]) -> float:
    x = np.array(p)
    hole = -20 * math.exp(-0.2 * math.sqrt(float((x**2).mean())))
    return hole - math.exp(float(np.cos(2 * math.pi * x).mean())) + 20 + math.e


def rosenbrock(p: Sequence[float]) -> float:
    x = np.array(p)
    return float((100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum())


def rastrigin(p: Sequence[float]) -> float:
    x = np.array(p)
    return float((x**2 - 10 * np.cos(2 * math.pi * x) + 10).sum())


def levy(p: Sequence[float]) -> float:
    w = 1 + (np.array(p) - 1) / 4
    middle = float(((w[:-1] - 1) ** 2 * (1 + 10 * np.sin(math.pi * w[:-1] + 1) ** 2)).sum())
    end = float((w[-1] - 1) ** 2 * (1 + math.sin(2 * math.pi * w[-1]) ** 2))
    return math.sin(math.pi * w[0]) ** 2 + middle + end


def mixed(p: Mapping[str, Any]) -> float:
    """Rosenbrock's valley of two numbers, a logarithm and a whole number, times a factor by the category."""
    valley = rosenbrock([p["a"], p["b"], math.log10(p["c"]) + 3, p["k"] / 4])
    factor, more = {"u": (1.0, 0.0), "v": (1.5, 0.5), "w": (3.0, 0.5)}[p["category"]]
    return factor * valley + more


def tree(p: Mapping[str, Any]) -> float:
    """Three branches, of which the deepest is the best, and worse than the others almost everywhere."""
    if p["branch"] == "lin":
        return 1 + abs(float(p["x"]))
    if p["branch"] == "quad":
        return 0.5 + (p["u"] - 0.3) ** 2 + (p["v"] + 0.7) ** 2
    rate = (math.log10(p["lr"]) + 3) ** 2
    return float(rate + 0.5 * abs(p["n"] - 5) + (0 if p["act"] == "relu" else 1.5))


TREE = hp.choice(
    "branch",
    [
        {"branch": "lin", "x": hp.normal("x", 0, 3)},
        {"branch": "quad", "u": hp.uniform("u", -2, 2), "v": hp.uniform("v", -2, 2)},
        {
            "branch": "deep",
            "lr": hp.loguniform("lr", math.log(1e-7), 0.0),
            "n": hp.quniform("n", 1, 30, 1),
            "act": hp.choice("act", ["tanh", "relu", "elu"]),
        },
    ],
)
FIVE = np.array([0.1, -0.3, 0.5, 0.7, -0.9])


def five_of_many(p: Sequence[float]) -> float:
    return float(((np.array(p[:5]) - FIVE) ** 2).sum())


def box(labels: int, low: float, high: float) -> list[Any]:
    return [hp.uniform(f"x{place}", low, high) for place in range(labels)]


CLOSED_FORMS: Mapping[str, Problem] = {
    "branin": Problem({"x": hp.uniform("x", -5, 10), "y": hp.uniform("y", 0, 15)}, branin, 0.39788735772973816),
    "camel": Problem({"x": hp.uniform("x", -3, 3), "y": hp.uniform("y", -2, 2)}, camel, -1.0316284534898774),
    "hartmann3": Problem(box(3, 0, 1), hartmann3, -3.86278214782076),
    "hartmann6": Problem(box(6, 0, 1), hartmann6, -3.32236801141551),
    "ackley5": Problem(box(5, -10, 30), ackley, 0.0),
    "rosenbrock4": Problem(box(4, -2, 2), rosenbrock, 0.0),
    "rastrigin5": Problem(box(5, -5.12, 5.12), rastrigin, 0.0),
    "levy4": Problem(box(4, -10, 10), levy, 0.0),
    "mixed": Problem(
        {
            "a": hp.uniform("a", -2, 2),
            "b": hp.uniform("b", -2, 2),
            "c": hp.loguniform("c", math.log(1e-5), math.log(1e-1)),
            "k": hp.quniform("k", 0, 8, 1),
            "category": hp.choice("category", ["u", "v", "w"]),
        },
        mixed,
        0.0,
    ),
    "tree": Problem(TREE, tree, 0.0),
    "five_of_25": Problem(box(25, -1, 1), five_of_many, 0.0),
}
