"""Least squares on forty asynchronous machines, each with its own rows.

    shadho-celery run tasks.adsaga --trials 30        # embedded, or on the fleet
    python -m tasks.adsaga                                         # alone, in this process

A machine gets a point and computes the gradient of one of its rows there. It sends the difference from the row's last
gradient. Meanwhile the server's point has changed; the server takes a step. With tables of the last gradients the noise
decreases and the point converges. Without them (asynchronous SGD) it keeps fluctuating. With one machine nothing is
late, and this is SAGA. Glasgow and Wootters, "Asynchronous Distributed Optimization with Stochastic Delays" (ADSAGA),
arXiv 2009.10717. The machines of a trial are simulated in less than a second. `with_a_gang` does the same with
processes and sockets.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from hyperopt import hp

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shadho_celery.context import Context
    from shadho_celery.training import strategies

    Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: rows, of standard normal numbers, and unknowns: a condition number (largest row over least curvature) of 583
    rows: int = 600
    unknowns: int = 120
    #: standard deviation of what the unknowns do not explain; without noise, SGD would converge too
    noise: float = 1.0
    #: seed of the rows: the same for every trial, because losses could not be compared otherwise
    data_seed: int = 0
    #: gradients of single rows, unless the trial's budget says otherwise
    evaluations: int = 16_000
    #: error, relative to the one at the start, at which the problem counts as solved
    solved: float = 1e-8
    #: evaluations between two measurements of the error
    look: int = 100


SETTINGS = Settings()

SPACE = {
    "machines": hp.choice("machines", [1, 10, 40]),
    "method": hp.choice("method", ["adsaga", "sgd"]),
    # In units of 1/L, L being the curvature along the longest row.
    "step": hp.loguniform("step", np.log(0.03), np.log(1.0)),
}

STUDY = {"trials": 30}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Minimise the mean of (a.x - b)^2 / 2 over the rows a of a matrix."""

    #: (rows, unknowns)
    a: Vector
    #: (rows,)
    b: Vector
    #: the solution
    solution: Vector

    @property
    def steepest(self) -> float:
        """L: the largest curvature of a single row."""
        return float((self.a**2).sum(axis=1).max())

    @property
    def condition(self) -> float:
        """L over the least curvature of the mean."""
        return self.steepest / float(np.linalg.eigvalsh(self.a.T @ self.a / len(self.a))[0])

    def error(self, x: Vector) -> float:
        """Squared distance from the solution, relative to that of the origin."""
        return float(((x - self.solution) ** 2).sum() / (self.solution**2).sum())


@cache
def problem() -> Problem:
    """Draw the problem of `Settings`."""
    rng = np.random.default_rng(SETTINGS.data_seed)
    a = rng.standard_normal((SETTINGS.rows, SETTINGS.unknowns))
    b = a @ rng.standard_normal(SETTINGS.unknowns) + SETTINGS.noise * rng.standard_normal(SETTINGS.rows)
    solution = np.linalg.lstsq(a, b, rcond=None)[0].astype(np.float64)
    return Problem(a=a, b=b, solution=solution)


class Machine:
    """Holds a part of the rows and, for each, the gradient that it sent last. No other machine needs them."""

    def __init__(self, a: Vector, b: Vector, *, table: bool) -> None:
        self.a, self.b = a, b
        # A gradient of a row is a multiple of the row, so only the factor is stored.
        self.last = np.zeros(len(b))
        self.table = table
        #: of the last row it worked on
        self.loss = 0.0

    def work(self, x: Vector, rng: np.random.Generator) -> Vector:
        """The gradient of one of its rows at `x`, minus the last one that it sent if it keeps a table."""
        row = rng.integers(len(self.b))
        now = float(self.a[row] @ x - self.b[row])
        self.loss = now**2 / 2
        change = now - self.last[row]
        if self.table:
            self.last[row] = now
        along: Vector = self.a[row] * change
        return along


class Server:
    """Holds the point and the mean of all gradients that the machines have in their tables."""

    def __init__(self, unknowns: int, rows: int, *, step: float, table: bool) -> None:
        self.x = np.zeros(unknowns)
        self.mean = np.zeros(unknowns)
        self.rows, self.step, self.table = rows, step, table

    def take(self, change: Vector) -> Vector:
        """Take a step along what a machine sent and the previous mean. Returns the new point, a new array."""
        self.x = self.x - self.step * (change + self.mean)
        if self.table:
            self.mean = self.mean + change / self.rows
        return self.x


def machines(count: int, *, table: bool) -> list[Machine]:
    """This many machines, among which the rows of the problem are divided."""
    goal = problem()
    parts = np.array_split(np.arange(SETTINGS.rows), count)
    return [Machine(goal.a[part], goal.b[part], table=table) for part in parts]


@dataclass(frozen=True, kw_only=True)
class OverTheBus:
    """Machines and server as the strategy of a gang, with one replica per machine: ``gang(context, strategy=...)``.

    Vectors are sent as float32. The tables end with their replicas, so this is for gangs whose replicas do not change.
    """

    replicas: int
    #: the step's length
    step: float
    seed: int
    table: bool = True
    #: mean seconds of the work on a row, exponential and played by waiting; 0 for none
    seconds: float = 0.0
    backups: Literal[0] = 0
    lockstep: bool = False
    #: the coordinator's
    server: Server = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        server = Server(SETTINGS.unknowns, SETTINGS.rows, step=self.step, table=self.table)
        object.__setattr__(self, "server", server)

    def apply(self, centre: strategies.Centre, mean: strategies.Vector) -> None:
        centre.write(self.server.take(mean.astype(np.float64)).astype(np.float32))

    def train(self, replica: strategies.Replica) -> None:
        machine = machines(self.replicas, table=self.table)[replica.place]
        rng = np.random.default_rng([self.seed, replica.place])
        point, step = np.empty(replica.size, dtype=np.float32), -1
        while True:
            replica.wait(after=step)
            step = replica.received(point)
            change = machine.work(point.astype(np.float64), rng)
            if self.seconds:
                time.sleep(rng.exponential(self.seconds))
            replica.send(step, change.astype(np.float32), machine.loss)


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """The base-10 logarithm of the error after the last evaluation, and `evaluations` until it was solved, if it was.

    The machines' working times are exponential, so each machine is the next to finish with the same probability.
    """
    rng = np.random.default_rng(context.seed)
    goal = problem()
    table = params["method"] == "adsaga"
    crew = machines(params["machines"], table=table)
    server = Server(SETTINGS.unknowns, SETTINGS.rows, step=params["step"] / goal.steepest, table=table)
    #: the point at which each machine works
    points = [server.x] * len(crew)
    result: dict[str, float] = {}
    last = int(context.budget or SETTINGS.evaluations)
    for evaluation in range(1, last + 1):
        done = rng.integers(len(crew))
        points[done] = server.take(crew[done].work(points[done], rng))
        if evaluation % SETTINGS.look == 0 or evaluation == last:
            error = min(goal.error(server.x), 1e9)  # with too long a step, the error grows without limit
            result["loss"] = float(np.log10(error))
            if error <= SETTINGS.solved:
                result.setdefault("evaluations", evaluation)
            context.report(evaluation, result["loss"])
            if error >= 1e9 or context.should_stop():
                break
    return result


def with_a_gang(params: dict[str, Any], context: Context) -> dict[str, float]:
    """Return the result of `objective`, with one replica for each of `machines`, in the order in which they finish.

    The work on a row takes `seconds` of the params on average, by default none. If the problem was solved, the result
    has the seconds until then. Two cores exchange a few hundred vectors a second.
    """
    import torch

    from shadho_celery.training.gang import gang

    goal = problem()
    strategy = OverTheBus(
        replicas=params["machines"],
        step=params["step"] / goal.steepest,
        seed=context.seed,
        table=params["method"] == "adsaga",
        seconds=params.get("seconds", 0.0),
    )
    result: dict[str, float] = {}

    def look(evaluation: int, loss: float) -> None:
        if evaluation % SETTINGS.look == 0 and goal.error(strategy.server.x) <= SETTINGS.solved:
            result.setdefault("evaluations", evaluation)

    def mean_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        half: torch.Tensor = (model(batch[0])[:, 0] - batch[1]).square().mean() / 2
        return half

    model = torch.nn.Linear(SETTINGS.unknowns, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    data = (torch.as_tensor(goal.a, dtype=torch.float32), torch.as_tensor(goal.b, dtype=torch.float32))
    with gang(context, strategy=strategy) as crew:
        steps = int(context.budget or SETTINGS.evaluations)
        # The strategy takes its own steps, without optimizer and loss. No checkpoints: they would lack its tables.
        sgd = torch.optim.SGD(model.parameters())
        report = crew.fit(model, sgd, data, mean_loss, steps=steps, batch=1, on_step=look, checkpoint_every=steps + 1)
    if "evaluations" in result:
        result["seconds"] = sum(step.seconds for step in report.log.steps[: int(result["evaluations"])])
    return {"loss": float(np.log10(goal.error(strategy.server.x))), **result}


if __name__ == "__main__":
    import shadho_celery

    best = shadho_celery.minimize(objective, SPACE, trials=STUDY["trials"], seed=0).best_or_none
    print(f"loss {best.loss:.4f} with {best.params}" if best else "no trial succeeded")
