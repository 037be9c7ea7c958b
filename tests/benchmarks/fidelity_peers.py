"""Peers of the fidelity benchmark: each returns the true regret of its incumbent as cost passes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from fidelity_problems import FidelityProblem

from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import undivided

#: (cost in full evaluations, true regret) whenever the incumbent changes
Path_ = list[tuple[float, float]]


class Ledger:
    """Evaluates a problem until a cost is spent; keeps the path of the incumbent, the best at the highest budget."""

    def __init__(self, problem: FidelityProblem, seed: int, full_evaluations: float) -> None:
        self.problem = problem
        self.subspace = undivided(compile_space(problem.space))
        self.left = full_evaluations * problem.cost(problem.most)
        self.path: Path_ = []
        self._seed = seed
        self._count = 0
        self._spent = 0.0
        self._best = (math.inf, math.inf)

    def evaluate(self, masses: np.ndarray, budget: float) -> float:
        """Return the loss of the params at these masses of their laws. Raises StopIteration once all is spent."""
        cost = self.problem.cost(budget)
        if self._spent + cost > self.left * (1 + 1e-9):
            raise StopIteration
        values = self.subspace.space.evaluate(self.subspace.at(np.clip(masses, 0.0, 1.0)))
        loss = self.problem.loss(values, budget, np.random.default_rng([self._seed, self._count]))
        self._count += 1
        self._spent += cost
        if (-budget, loss) < self._best:
            self._best = (-budget, loss)
            regret = self.problem.truth(values) - self.problem.optimum
            self.path.append((self._spent / self.problem.cost(self.problem.most), regret))
        return loss


def search(name: str, problem: FidelityProblem, seed: int, full_evaluations: float, python: str = "") -> Path_:
    """Return the path of a peer's incumbent."""
    if name == "dehb":
        return _dehb(problem, seed, full_evaluations, python)
    ledger = Ledger(problem, seed, full_evaluations)
    with suppress(StopIteration):
        {"random": _random, "optuna tpe, hyperband": _optuna}[name](ledger, seed)
    return ledger.path


def _random(ledger: Ledger, seed: int) -> None:
    draws = np.random.default_rng(seed)
    while True:
        ledger.evaluate(draws.random(len(ledger.subspace.domains)), ledger.problem.most)


def _optuna(ledger: Ledger, seed: int) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    budgets = Ladder.of({"least": ledger.problem.least, "most": ledger.problem.most, "eta": 3}).budgets
    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=3 ** (len(budgets) - 1), reduction_factor=3)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
    while True:
        trial = study.ask()
        masses = np.array([_asked(trial, label, domain) for label, domain in ledger.subspace.domains.items()])
        loss, is_pruned = math.inf, False
        for rung, budget in enumerate(budgets):
            loss = ledger.evaluate(masses, budget)
            trial.report(loss, 3**rung)
            if rung + 1 < len(budgets) and trial.should_prune():
                is_pruned = True
                break
        state = optuna.trial.TrialState.PRUNED if is_pruned else optuna.trial.TrialState.COMPLETE
        study.tell(trial, None if is_pruned else loss, state=state)


def _asked(trial: Any, label: str, domain: Any) -> float:
    """Return the mass that Optuna suggests for a label: of a category the middle of its share."""
    count = getattr(domain, "count", None)
    if isinstance(count, int):
        return (trial.suggest_categorical(label, [*range(count)]) + 0.5) / count
    return float(trial.suggest_float(label, 0.0, 1.0))


def _dehb(problem: FidelityProblem, seed: int, full_evaluations: float, python: str) -> Path_:
    """Run dehb in the interpreter that has it; it asks by lines on its output, and is answered on its input."""
    ledger = Ledger(problem, seed, full_evaluations)
    size = len(ledger.subspace.domains)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).with_name("fidelity_dehb.py")
        words = [python, str(script), str(size), str(problem.least), str(problem.most), str(seed), folder]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    vector, budget = json.loads(line)
                    process.stdin.write(f"{ledger.evaluate(np.array(vector), budget)}\n")
                    process.stdin.flush()
            except StopIteration:
                process.kill()
    if not ledger.path:
        sys.exit(f"{python} has no dehb, or it has failed; give --dehb an interpreter that has it")
    return ledger.path


PEERS: tuple[str, ...] = ("random", "optuna tpe, hyperband", "dehb")
Search = Callable[[str, FidelityProblem, int, float, str], Path_]
