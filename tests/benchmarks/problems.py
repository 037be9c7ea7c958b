"""Problems of the samplers' benchmark: search spaces with their losses, and the least loss where it is known.

The closed forms are the usual test functions (Surjanovic, Bingham, "Virtual Library of Simulation Experiments"); the
small ones below are after hyperopt's own test domains, written by hand.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hyperopt import hp
from hyperopt.pyll.base import Literal, as_apply, clone, dfs

from shadho_celery.space.compile import compile_space

#: greatest part of its width by which a box is moved
SHIFT = 0.15
#: laws between two ends, of which the step comes third
BOXES = ("uniform", "loguniform", "quniform", "qloguniform")
#: draws from a space by which the range of a loss is estimated, and the part of it below which regrets are equal
DRAWS, EQUAL = 2000, 1e-3


class Unlucky(Exception):
    """A setting that cannot be trained."""


@dataclass(frozen=True)
class Problem:
    """A search space and its loss."""

    space: Any
    objective: Callable[[Any], float]
    #: the least loss; None where nobody knows it
    optimum: float | None = None
    #: whether some settings raise
    fails: bool = False

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
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: Problem(*parts) for name, parts in module.PROBLEMS.items()}


# Closed forms


def branin(p: Mapping[str, float]) -> float:
    x, y = p["x"], p["y"]
    trough = (y - 5.1 / (4 * math.pi**2) * x**2 + 5 * x / math.pi - 6) ** 2
    return trough + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


def camel(p: Mapping[str, float]) -> float:
    x, y = p["x"], p["y"]
    return (4 - 2.1 * x**2 + x**4 / 3) * x**2 + x * y + (4 * y**2 - 4) * y**2


HEIGHTS = np.array([1.0, 1.2, 3.0, 3.2])
HARTMANN_3 = (
    np.array([[3, 10, 30], [0.1, 10, 35], [3, 10, 30], [0.1, 10, 35]]),
    1e-4 * np.array([[3689, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]]),
)
HARTMANN_6 = (
    np.array(
        [
            [10, 3, 17, 3.5, 1.7, 8],
            [0.05, 10, 17, 0.1, 8, 14],
            [3, 3.5, 1.7, 10, 17, 8],
            [17, 8, 0.05, 10, 0.1, 14],
        ]
    ),
    1e-4
    * np.array(
        [
            [1312, 1696, 5569, 124, 8283, 5886],
            [2329, 4135, 8307, 3736, 1004, 9991],
            [2348, 1451, 3522, 2883, 3047, 6650],
            [4047, 8828, 8732, 5743, 1091, 381],
        ]
    ),
)


def _hartmann(p: Sequence[float], steepness: Any, centres: Any) -> float:
    return -float(HEIGHTS @ np.exp(-(steepness * (np.array(p) - centres) ** 2).sum(axis=1)))


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


# Small ones


def distractor(x: float) -> float:
    """A spike near -10, and a slope that leads away from it."""
    return -1 / (1 + math.exp(-x)) - 2 * math.exp(-((x + 10) ** 2))


def gauss_wave(t: float) -> float:
    return -(math.sin(t) + 2 * math.exp(-((t / 5) ** 2)))


def many_wells(p: Mapping[str, float]) -> float:
    """A bowl of two dimensions full of small wells (Rastrigin's function, a gentle one)."""
    return sum(p[k] ** 2 + 3 * (1 - math.cos(2 * math.pi * p[k])) for k in ("x", "y"))


def svm(p: Mapping[str, Any]) -> float:
    """Four kernels; the best losses lie in a narrow valley of one of them, the others are easier to do fairly in."""
    log_c, coef0 = math.log10(p["C"]), float(p.get("coef0", 0.0))
    if p["kernel"] == "linear":
        return 0.20 + 0.01 * (log_c - 1) ** 2
    if p["kernel"] == "sigmoid":
        return 0.35 + 0.02 * (log_c + 1) ** 2 + 0.01 * coef0**2
    if p["kernel"] == "poly":
        degree = float(p["degree"])
        return 0.18 + 0.02 * (degree - 3) ** 2 + 0.01 * (log_c - 0.5) ** 2 + 0.01 * (coef0 - 0.5) ** 2
    log_gamma = math.log10(p["gamma"])
    return 0.40 - 0.35 * math.exp(-((log_c - 2) ** 2) / 2 - (log_gamma + 3) ** 2 / 0.5)


SVM = hp.choice(
    "kernel",
    [
        {"kernel": "linear", "C": hp.loguniform("linear_C", math.log(1e-3), math.log(1e4))},
        {
            "kernel": "rbf",
            "C": hp.loguniform("rbf_C", math.log(1e-3), math.log(1e4)),
            "gamma": hp.loguniform("gamma", math.log(1e-6), math.log(1e2)),
        },
        {
            "kernel": "poly",
            "C": hp.loguniform("poly_C", math.log(1e-3), math.log(1e4)),
            "degree": hp.quniform("degree", 1, 8, 1),
            "coef0": hp.uniform("poly_coef0", -1, 1),
        },
        {
            "kernel": "sigmoid",
            "C": hp.loguniform("sigmoid_C", math.log(1e-3), math.log(1e4)),
            "coef0": hp.uniform("sigmoid_coef0", -1, 1),
        },
    ],
)


def network(p: Mapping[str, Any]) -> float:
    """A small network's loss by its settings; large steps diverge, and what does not fit in memory raises."""
    log_rate = math.log10(p["rate"])
    if log_rate > -1.0 or p["width"] * p["layers"] > 1600:
        raise Unlucky("diverged, or out of memory")
    size = math.log2(p["width"]) * p["layers"]
    loss = 0.3 + 0.1 * (log_rate + 1.8) ** 2 + 0.002 * (size - 24) ** 2 + 0.4 * (p["dropout"] - 0.2) ** 2
    return float(loss + (0.0, 0.05, 0.15, 0.2)[p["activation"]])


NETWORK = {
    "rate": hp.loguniform("rate", math.log(1e-5), math.log(1.0)),
    "width": hp.qloguniform("width", math.log(16), math.log(1024), 16),
    "layers": hp.randint("layers", 1, 8),
    "dropout": hp.uniform("dropout", 0, 0.7),
    "activation": hp.choice("activation", [0, 1, 2, 3]),
}


def many_dists(z: Sequence[float]) -> float:
    return math.log(1e-2 + sum(z) ** 2)


MANY_DISTS = [
    hp.choice("a", [0, 1, 2]),
    hp.randint("b", 10),
    hp.uniform("c", 4, 7),
    hp.loguniform("d", -2, 0),
    hp.quniform("e", 0, 10, 3),
    hp.qloguniform("f", 0, 3, 2),
    hp.normal("g", 4, 7),
    hp.lognormal("h", -2, 2),
    hp.qnormal("i", 0, 10, 2),
    hp.pchoice("k", [(0.1, 0), (0.9, 1)]),
]
_X = hp.uniform("x", -20, 20)
SMALL: Mapping[str, Problem] = {
    "quadratic1": Problem(hp.uniform("x", -5, 5), lambda x: (x - 3) ** 2),
    "distractor": Problem(hp.uniform("x", -15, 15), distractor),
    "gauss_wave": Problem(hp.choice("curve", [_X, _X + math.pi]), gauss_wave),
    "branin": Problem({"x": hp.uniform("x", -5, 10), "y": hp.uniform("y", 0, 15)}, branin),
    "many_wells": Problem({"x": hp.uniform("x", -5, 5), "y": hp.uniform("y", -5, 5)}, many_wells),
    "many_dists": Problem(MANY_DISTS, many_dists),
    "hartmann6": Problem([hp.uniform(f"x{i}", 0, 1) for i in range(6)], hartmann6),
    "svm": Problem(SVM, svm),
    "network": Problem(NETWORK, network, fails=True),
}
