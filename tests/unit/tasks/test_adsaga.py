"""ADSAGA on late gradients: about as many evaluations as SAGA, where asynchronous SGD gets nowhere near."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shadho_celery.objective.context import LocalContext
from shadho_celery.training.wire.vectors import Vector
from tasks import adsaga as task

#: units of 1/L; each method takes the best of them
STEPS = (0.2, 0.3, 0.4)
SGD_STEPS = (0.05, 0.1)


def run(method: str, machines: int, step: float, *, evaluations: float | None = None) -> dict[str, Any]:
    params = {"method": method, "machines": machines, "step": step}
    return task.objective(params, LocalContext(budget=evaluations))


def evaluations(machines: int) -> float:
    """Return the number of gradients until the problem is solved with the best step."""
    return min(run("adsaga", machines, step, evaluations=20_000).get("evaluations", np.inf) for step in STEPS)


def test_the_problem_has_the_condition_number_it_claims() -> None:
    problem = task.problem()
    assert problem.a.shape == (600, 120)
    assert problem.condition == pytest.approx(583, abs=1)
    gradient = problem.a.T @ (problem.a @ problem.solution - problem.b)
    assert np.abs(gradient).max() < 1e-9
    assert problem.error(np.zeros(120)) == 1


@pytest.mark.slow
def test_forty_machines_take_at_most_half_as_many_evaluations_again_as_one() -> None:
    one, forty = evaluations(1), evaluations(40)
    assert one < 16_000
    assert forty <= 1.5 * one


@pytest.mark.slow
def test_asynchronous_sgd_stalls_far_from_the_solution() -> None:
    """Four orders of magnitude are not even halfway; with twice as many evaluations it is no nearer."""
    shorter, longer = (
        min(run("sgd", 40, step, evaluations=count)["loss"] for step in SGD_STEPS) for count in (15_000, 30_000)
    )
    assert -5 < longer < -2.5
    assert longer > shorter - 0.5


def test_a_table_without_delay_is_saga() -> None:
    """Against SAGA as its paper has it: x - step * (new - old + mean of the table)."""
    problem = task.problem()
    machine = task.Machine(problem.a, problem.b, table=True)
    step = 0.3 / problem.steepest
    server = task.Server(120, 600, step=step, table=True)
    x, table, rng = np.zeros(120), np.zeros((600, 120)), np.random.default_rng(5)
    for _ in range(1000):
        row = rng.integers(600)
        gradient = problem.a[row] * (problem.a[row] @ x - problem.b[row])
        x = x - step * (gradient - table[row] + table.mean(axis=0))
        table[row] = gradient
    rng = np.random.default_rng(5)
    for _ in range(1000):
        server.take(machine.work(server.x, rng))
    np.testing.assert_allclose(server.x, x, rtol=0, atol=1e-9)
    assert problem.error(x) < 0.9


def test_the_servers_mean_is_that_of_the_machines_tables_however_late_they_are() -> None:
    problem, rng = task.problem(), np.random.default_rng(1)
    machines = task.machines(7, table=True)
    server = task.Server(120, 600, step=0.3 / problem.steepest, table=True)
    points = [server.x] * 7
    for _ in range(500):
        done = rng.integers(7)
        points[done] = server.take(machines[done].work(points[done], rng))
    whole = sum(machine.last @ machine.a for machine in machines) / 600
    np.testing.assert_allclose(server.mean, whole, atol=1e-9)


def test_a_step_too_long_ends_the_trial_with_a_loss_that_is_a_number() -> None:
    reports: list[int] = []
    params = {"method": "sgd", "machines": 40, "step": 5.0}
    with np.errstate(over="raise", invalid="raise"):
        found = task.objective(params, LocalContext(on_report=lambda step, loss: reports.append(step)))
    assert found == {"loss": 9.0}
    assert reports[-1] < task.SETTINGS.evaluations


def test_its_budget_is_a_number_of_evaluations_its_seed_decides_and_it_stops_when_told_to() -> None:
    reports: list[int] = []
    params = {"method": "adsaga", "machines": 10, "step": 0.3}
    first = task.objective(params, LocalContext(budget=250, seed=1, on_report=lambda step, loss: reports.append(step)))
    assert reports == [100, 200, 250]
    assert first == task.objective(params, LocalContext(budget=250, seed=1))
    assert first != task.objective(params, LocalContext(budget=250, seed=2))
    assert task.objective(params, LocalContext(seed=1, stopped=lambda: True)) == task.objective(
        params, LocalContext(budget=100, seed=1)
    )


class Over(BaseException):
    """The last step has been taken."""


class Point:
    """The coordinator's parameters, and how many steps made them."""

    size = 120

    def __init__(self) -> None:
        self.x, self.steps = np.zeros(120, dtype=np.float32), 0

    def write(self, vector: Vector) -> None:
        self.x = vector

    def read(self, out: Vector) -> None:
        raise NotImplementedError

    descend = read


class Line:
    """A replica's line to it, on which a vector arrives only when the replica's turn comes."""

    size = 120

    def __init__(self, strategy: task.OverTheBus, centre: Point, place: int) -> None:
        self.strategy, self.centre, self.place = strategy, centre, place
        self.go, self.done, self.over = threading.Semaphore(0), threading.Semaphore(0), False
        self.heard, self.step = centre.x, 0

    def wait(self, after: int) -> int:
        assert self.step > after
        return self.step

    def received(self, out: Vector) -> int:
        out[:] = self.heard
        return self.step

    def send(self, step: int, vector: Vector, loss: float) -> None:
        self.done.release()
        self.go.acquire()
        if self.over:
            raise Over
        assert step == self.step
        assert vector.dtype == np.float32
        assert loss >= 0
        self.strategy.apply(self.centre, vector.copy())
        self.centre.steps += 1
        self.heard, self.step = self.centre.x.copy(), self.centre.steps

    def newest(self) -> int:
        raise NotImplementedError

    load = read = write = gradient = descend = newest


def train(strategy: task.OverTheBus, line: Line) -> None:
    with pytest.raises(Over):
        strategy.train(line)


@pytest.mark.slow
def test_over_a_gangs_bus_forty_replicas_solve_it_too() -> None:
    """Each on a thread of its own; whose vector arrives next is drawn, so every run is the same."""
    strategy = task.OverTheBus(replicas=40, step=0.35 / task.problem().steepest, seed=0)
    centre, rng = Point(), np.random.default_rng(0)
    lines = [Line(strategy, centre, place) for place in range(40)]
    threads = [threading.Thread(target=train, args=(strategy, line), daemon=True) for line in lines]
    for thread, line in zip(threads, lines, strict=True):
        thread.start()
        line.done.acquire()
    for _ in range(task.SETTINGS.evaluations):
        line = lines[rng.integers(40)]
        line.go.release()
        line.done.acquire()
    for thread, line in zip(threads, lines, strict=True):
        line.over = True
        line.go.release()
        thread.join()
    assert centre.steps == task.SETTINGS.evaluations
    assert task.problem().error(centre.x.astype(np.float64)) < task.SETTINGS.solved


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_of_a_gang_get_nearer_too(tmp_path: Path) -> None:
    """A short way, which takes a second; tests/benchmarks/backup_sgd.py goes all of it with forty."""
    params = {"method": "adsaga", "machines": 4, "step": 0.35}
    found = task.with_a_gang(params, LocalContext(budget=1000, checkpoints=tmp_path))
    assert found["loss"] < -0.5
    assert not multiprocessing.active_children()
