"""Search spaces where some settings always raise, written once for hyperopt's language and for Optuna's.

A space is a dict by label of a law and its arguments: ``("uniform", 0, 1)``; ``("choice", a, b)`` takes one of the
values; ``("branch", {name: space})`` one of the spaces, whose params come with ``is``: the name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hyperopt import hp

Tree = Mapping[str, tuple[Any, ...]]
Params = Mapping[str, Any]


class Raised(Exception):
    """A setting that cannot be tried."""


@dataclass(frozen=True)
class Task:
    """A space, which of its settings raise, and the loss of the others."""

    tree: Tree
    fails: Callable[[Params], bool]
    loss: Callable[[Params], float]

    def __call__(self, params: Params) -> float:
        if self.fails(params):
            raise Raised
        return float(self.loss(params))


def for_hyperopt(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """The tree in hyperopt's language."""
    space: dict[str, Any] = {}
    for name, (law, *arguments) in tree.items():
        label = prefix + name
        if law == "choice":
            space[name] = hp.choice(label, arguments)
        elif law == "branch":
            options = [{"is": k, **for_hyperopt(t, f"{label}.{k}.")} for k, t in arguments[0].items()]
            space[name] = hp.choice(label, options)
        elif "log" in law:
            low, high, *step = arguments
            space[name] = getattr(hp, law)(label, math.log(low), math.log(high), *step)
        else:
            space[name] = getattr(hp, law)(label, *arguments)
    return space


def from_optuna(tree: Tree, trial: Any, prefix: str = "") -> dict[str, Any]:
    """Params of the tree as an Optuna trial suggests them."""
    params: dict[str, Any] = {}
    for name, (law, *arguments) in tree.items():
        label = prefix + name
        if law == "choice":
            params[name] = trial.suggest_categorical(label, arguments)
        elif law == "branch":
            taken = trial.suggest_categorical(label, list(arguments[0]))
            params[name] = {"is": taken, **from_optuna(arguments[0][taken], trial, f"{label}.{taken}.")}
        elif law == "randint":
            params[name] = trial.suggest_int(label, arguments[0], arguments[1] - 1)
        elif law == "quniform":
            params[name] = trial.suggest_float(label, arguments[0], arguments[1], step=arguments[2])
        elif law == "qloguniform":  # Optuna has no steps on a log scale: rounded as hyperopt rounds
            drawn = trial.suggest_float(label, arguments[0], arguments[1], log=True)
            params[name] = round(drawn / arguments[2]) * arguments[2]
        else:
            params[name] = trial.suggest_float(label, arguments[0], arguments[1], log=law == "loguniform")
    return params


def bowl(*distances: float) -> float:
    return sum(distance**2 for distance in distances)


def log10(value: float) -> float:
    return math.log10(max(value, 1e-12))


UNIT = ("uniform", 0, 1)
RATE = ("loguniform", 1e-5, 1.0)
TASKS: Mapping[str, Task] = {
    "one option of four": Task(
        {"optimiser": ("choice", "sgd", "adam", "rms", "broken"), "x": UNIT, "y": UNIT},
        lambda p: p["optimiser"] == "broken",
        lambda p: bowl(p["x"] - 0.3, p["y"] - 0.6) + 0.1 * (p["optimiser"] == "sgd"),
    ),
    "one branch of four": Task(
        {"model": ("branch", {"a": {"x": UNIT}, "b": {"x": UNIT, "y": UNIT}, "c": {"z": RATE}, "broken": {"x": UNIT}})},
        lambda p: p["model"]["is"] == "broken",
        lambda p: (
            {"a": 0.3, "b": 0.0, "c": 0.2}[p["model"]["is"]]
            + bowl(p["model"].get("x", 0.5) - 0.7, p["model"].get("y", 0.2) - 0.2)
        ),
    ),
    "edge beside the optimum": Task(
        {"x": UNIT, "y": UNIT}, lambda p: p["x"] > 0.85, lambda p: bowl(p["x"] - 0.8, p["y"] - 0.5)
    ),
    "slope into the edge": Task({"x": UNIT}, lambda p: p["x"] > 0.85, lambda p: -p["x"]),
    "slope into the edge, 3": Task(
        {"x": UNIT, "y": UNIT, "z": UNIT},
        lambda p: p["x"] > 0.85,
        lambda p: -p["x"] + bowl(p["y"] - 0.5, p["z"] - 0.2),
    ),
    "hole at the optimum": Task(
        {"x": UNIT, "y": UNIT},
        lambda p: bowl(p["x"] - 0.6, p["y"] - 0.4) < 0.04,
        lambda p: bowl(p["x"] - 0.6, p["y"] - 0.4),
    ),
    "ring about the optimum": Task(
        {"x": UNIT, "y": UNIT},
        lambda p: 0.01 < bowl(p["x"] - 0.6, p["y"] - 0.4) < 0.06,
        lambda p: bowl(p["x"] - 0.6, p["y"] - 0.4),
    ),
    "product too large": Task(
        {"batch": ("qloguniform", 8, 512, 8), "width": ("qloguniform", 16, 1024, 16), "rate": RATE},
        lambda p: p["batch"] * p["width"] > 2**15,
        lambda p: (
            0.1 * (log10(p["rate"]) + 2.5) ** 2 - 0.1 * math.log2(max(p["width"], 1)) - 0.03 * math.log2(p["batch"] + 1)
        ),
    ),
    "corner in log scale": Task(
        {"rate": RATE, "momentum": UNIT, "decay": ("loguniform", 1e-6, 1e-1)},
        lambda p: p["rate"] > 0.03 and p["momentum"] > 0.5,
        lambda p: bowl(log10(p["rate"]) + 1.7, p["momentum"] - 0.9, 0.3 * (log10(p["decay"]) + 4)),
    ),
    "two options together": Task(
        {"loss": ("choice", "a", "b", "c"), "head": ("choice", "a", "b", "c"), "x": UNIT},
        lambda p: p["loss"] == "b" and p["head"] == "c",
        lambda p: bowl(p["x"] - 0.4) + 0.1 * (p["loss"] == "a") + 0.1 * (p["head"] == "a"),
    ),
    "ten labels": Task(
        {"option": ("choice", "a", "b", "broken"), **{f"x{i}": UNIT for i in range(9)}},
        lambda p: p["option"] == "broken",
        lambda p: bowl(*(p[f"x{i}"] - 0.1 * (i + 1) for i in range(9))),
    ),
    "tiny": Task(
        {"a": ("choice", 0, 1, 2), "b": ("randint", 0, 4)},
        lambda p: p["a"] == 1 or (p["a"] == 2 and p["b"] == 3),
        lambda p: abs(p["b"] - 2) + p["a"],
    ),
    "nested": Task(
        {
            "x": UNIT,
            "top": (
                "branch",
                {
                    "deep": {"body": ("branch", {"wide": {"n": ("randint", 1, 9)}, "thin": {"r": RATE}}), "d": UNIT},
                    "flat": {"c": UNIT},
                },
            ),
        },
        lambda p: p["top"]["is"] == "deep" and p["top"]["body"]["is"] == "wide" and p["top"]["body"]["n"] > 4,
        lambda p: (
            bowl(p["x"] - 0.3)
            + (bowl(p["top"]["d"] - 0.5) if p["top"]["is"] == "deep" else 0.1 + bowl(p["top"]["c"] - 0.5))
        ),
    ),
    "randint": Task(
        {"layers": ("randint", 0, 20), "x": UNIT},
        lambda p: p["layers"] >= 14,
        lambda p: 0.1 * (13 - p["layers"]) + bowl(p["x"] - 0.5),
    ),
    "steps": Task(
        {"depth": ("quniform", 1, 20, 1), "leaves": ("quniform", 10, 200, 10)},
        lambda p: p["leaves"] > 25 * (p["depth"] - 1),
        lambda p: 0.01 * (p["depth"] - 6) ** 2 + 1e-4 * (p["leaves"] - 120) ** 2,
    ),
    "half of it": Task(
        {"x": UNIT, "y": UNIT}, lambda p: p["x"] + p["y"] > 1, lambda p: bowl(p["x"] - 0.7, p["y"] - 0.4)
    ),
    "all but an island": Task(
        {"x": UNIT, "y": UNIT},
        lambda p: not (0.3 < p["x"] < 0.55 and 0.2 < p["y"] < 0.6),
        lambda p: bowl(p["x"] - 0.5, p["y"] - 0.5),
    ),
    "width times layers": Task(
        {
            "rate": RATE,
            "width": ("qloguniform", 16, 1024, 16),
            "layers": ("randint", 1, 8),
            "dropout": ("uniform", 0, 0.7),
            "activation": ("choice", 0, 1, 2, 3),
        },
        lambda p: p["rate"] > 0.1 or p["width"] * p["layers"] > 1600,
        lambda p: (
            0.1 * (log10(p["rate"]) + 1.8) ** 2
            + 0.002 * (math.log2(max(p["width"], 1)) * p["layers"] - 24) ** 2
            + 0.05 * p["activation"]
        ),
    ),
}
