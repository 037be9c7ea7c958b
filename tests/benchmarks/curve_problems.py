"""Learning curves that were recorded: LCBench by YAHPO Gym's surrogate, and TaskSet.

The folder of the data has `lcbench/model.onnx` with `encoding.json` (YAHPO Gym's data, Apache 2.0; LCBench: Zimmer,
Lindauer, Hutter, "Auto-PyTorch Tabular", 2021), and `taskset/*.json.gz` (a list of ``{"hp": {...}, "loss": [...]}``, as
in DPL's data, Apache 2.0; TaskSet: Metz et al., 2020). LCBench needs `onnxruntime`.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shadho_celery import hp
from shadho_celery.space.compile import compile_space

#: instances of LCBench that were used to develop `auto`; others may be named
LCBENCH = ("167168", "126026", "189866")
#: epochs of a full evaluation of LCBench
EPOCHS = 52
#: draws that give the median and the optimum of a surrogate
DRAWS = 20_000
#: numbers that the surrogate gets, in this order; and the search space, whose bounds are those of YAHPO Gym
INPUTS = ("epoch", "batch_size", "learning_rate", "momentum", "weight_decay", "num_layers", "max_units", "max_dropout")
LCBENCH_SPACE = {
    "batch_size": hp.qloguniform("batch_size", math.log(16), math.log(512), 1),
    "learning_rate": hp.loguniform("learning_rate", math.log(1e-4), math.log(0.1)),
    "momentum": hp.uniform("momentum", 0.1, 0.99),
    "weight_decay": hp.uniform("weight_decay", 1e-5, 0.1),
    "num_layers": hp.quniform("num_layers", 1, 5, 1),
    "max_units": hp.qloguniform("max_units", math.log(64), math.log(1024), 1),
    "max_dropout": hp.uniform("max_dropout", 0, 1),
}
#: labels of TaskSet's space `Adam8p`, with the logarithms of their bounds
TASKSET = {
    "learning_rate": (math.log(1e-8), math.log(10)),
    "1 - beta1": (math.log(1e-4), math.log(1)),
    "1 - beta2": (math.log(1e-6), math.log(1)),
    "epsilon": (math.log(1e-10), math.log(1e3)),
    "l1": (math.log(1e-8), math.log(10)),
    "l2": (math.log(1e-8), math.log(10)),
    "linear_decay": (math.log(1e-7), math.log(1e-4)),
    "exponential_decay": (math.log(1e-6), math.log(1e-3)),
}


@dataclass(frozen=True, kw_only=True)
class CurveProblem:
    """A search space, and for each params the loss and the seconds of each budget."""

    space: Any
    #: values and a budget -> loss, NaN if it diverged; and cost from the start, where a typical full evaluation costs 1
    look: Callable[[Mapping[str, Any], float], tuple[float, float]]
    #: least and median loss at the full budget
    optimum: float
    median: float
    least: float
    most: float

    def regret(self, values: Mapping[str, Any]) -> float:
        """Return the regret at the full budget, where the median of random params has 1."""
        loss, _ = self.look(values, self.most)
        return 1.0 if math.isnan(loss) else min(1.0, (loss - self.optimum) / (self.median - self.optimum))


def curve_names(data: Path, instances: Sequence[str] = LCBENCH) -> list[str]:
    """Return the names of the problems in a folder."""
    files = sorted(path.name.removesuffix(".json.gz") for path in (data / "taskset").glob("*.json.gz"))
    return [*(f"lcbench {each}" for each in instances), *(f"taskset {each}" for each in files)]


@cache
def read_curves(data: Path, name: str) -> CurveProblem:
    """Return the problem of this name."""
    kind, _, instance = name.partition(" ")
    return (_lcbench if kind == "lcbench" else _taskset)(data / kind, instance)


def _lcbench(data: Path, instance: str) -> CurveProblem:
    import onnxruntime  # only this problem needs it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(data / "model.onnx"), options)
    code = json.loads((data / "encoding.json").read_text())["OpenML_task_id"][instance]

    def run(rows: Sequence[Mapping[str, Any]]) -> Any:
        numbers = [[float(row[name]) for name in INPUTS] for row in rows]
        codes = np.full((len(rows), 1), code, dtype=np.int32)
        return session.run(None, {"x_cat": codes, "x_cont": np.array(numbers, dtype=np.float32)})[0][:, :2]

    draw = np.random.default_rng(0)
    space = compile_space(LCBENCH_SPACE)
    rows = [{**space.evaluate(params), "epoch": EPOCHS} for params in space.sample(draw, DRAWS)]
    seconds, accuracies = run(rows).T
    typical = float(np.median(seconds))

    @lru_cache(maxsize=10_000)
    def curve(values: tuple[tuple[str, Any], ...]) -> Any:
        return run([{**dict(values), "epoch": epoch} for epoch in range(1, EPOCHS + 1)])

    def look(values: Mapping[str, Any], budget: float) -> tuple[float, float]:
        time, accuracy = curve(tuple(sorted(values.items())))[round(budget) - 1].tolist()
        return 100.0 - accuracy, max(time, 1e-3 * typical) / typical

    return CurveProblem(
        space=LCBENCH_SPACE,
        look=look,
        optimum=100.0 - float(accuracies.max()),
        median=100.0 - float(np.median(accuracies)),
        least=1,
        most=EPOCHS,
    )


def _taskset(data: Path, instance: str) -> CurveProblem:
    with gzip.open(data / f"{instance}.json.gz", "rt") as file:
        records = json.load(file)
    hps = [{**each["hp"], **{f"1 - {beta}": 1 - each["hp"][beta] for beta in ("beta1", "beta2")}} for each in records]
    units = np.array([[_to_unit(name, each[name]) for name in TASKSET] for each in hps])
    losses = np.array([[math.nan if loss is None else loss for loss in each["loss"]] for each in records])
    full = np.nan_to_num(losses[:, -1], nan=math.inf)

    def look(values: Mapping[str, Any], budget: float) -> tuple[float, float]:
        unit = np.array([_to_unit(name, values[name]) for name in TASKSET])
        nearest = int(np.square(units - unit).sum(axis=1).argmin())
        return float(losses[nearest, round(budget)]), budget / 50

    return CurveProblem(
        space={name: hp.loguniform(name, *bounds) for name, bounds in TASKSET.items()},
        look=look,
        optimum=float(full.min()),
        median=float(np.median(full)),
        least=1,
        most=50,
    )


def _to_unit(name: str, value: float) -> float:
    low, high = TASKSET[name]
    return (math.log(value) - low) / (high - low)
