"""CPU seconds of small searches, from start to end of their processes: ``python tests/benchmarks/light.py``.

Each contestant is a new process, and its CPU seconds are those of all its threads:

- the import alone;
- 1, 200 and 1,000 trials of a cheap function of two numbers with TPE, in memory, whose best trial is then read;
- the command that lists the studies of a SQLite file with one study.

Beside this package: Optuna, and Rustuna if it is installed (`pip install rustuna`). All of them alternate within one
run, and the goals are ratios of medians.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from figures import ROOT, count, finish, goal, make_parser, quartiles, show

#: by contestant: its import, and its search with the number of trials as the first argument
IMPORTS = {
    "shadho_celery": "from shadho_celery import hp, minimize",
    "optuna": "import optuna",
    "rustuna": "import rustuna",
}
SEARCHES = {
    "shadho_celery": """
import sys
from shadho_celery import hp, minimize
space = {"x": hp.uniform("x", -5, 5), "y": hp.loguniform("y", -5, 0)}
study = minimize(lambda v: (v["x"] - 1) ** 2 + v["y"], space, trials=int(sys.argv[1]), seed=0, sampler="tpe")
assert len(study.trials) == int(sys.argv[1]) and study.best.loss < 30
""",
    "optuna": """
import sys, optuna
optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
def objective(trial):
    return (trial.suggest_float("x", -5, 5) - 1) ** 2 + trial.suggest_float("y", 0.0067, 1, log=True)
study.optimize(objective, n_trials=int(sys.argv[1]))
assert len(study.trials) == int(sys.argv[1]) and study.best_value < 30
""",
    "rustuna": """
import sys, rustuna
study = rustuna.create_study(sampler=rustuna.samplers.TPESampler(seed=0))
def objective(trial):
    return (trial.suggest_float("x", -5, 5) - 1) ** 2 + trial.suggest_float("y", 0.0067, 1, log=True)
study.optimize(objective, n_trials=int(sys.argv[1]))
assert len(study.trials) == int(sys.argv[1]) and study.best_trial.value < 30
""",
}
#: by contestant: makes a store with one study; and the arguments of Python with which its command lists studies
STORES = {
    "shadho_celery": """
from shadho_celery import hp, minimize
minimize(abs, hp.uniform("x", -1, 1), trials=20, store="sqlite:///ours.db", study="one")
""",
    "optuna": """
import optuna
study = optuna.create_study(storage="sqlite:///theirs.db", study_name="one")
study.optimize(lambda trial: trial.suggest_float("x", -1, 1), n_trials=20)
""",
}
COMMANDS = {
    "shadho_celery": ["-m", "shadho_celery", "studies", "--store", "sqlite:///ours.db"],
    "optuna": ["-c", "from optuna.cli import main; main()", "studies", "--storage", "sqlite:///theirs.db"],
}
TRIALS = (1, 200, 1000)

#: largest ratio of our CPU seconds to Optuna's
MOST = {"200 trials": 1.0, "1000 trials": 0.4, "studies": 0.7}


def cpu_seconds(folder: Path, *arguments: str) -> float:
    """Return the CPU seconds of a Python process. The bytecode of modules is cached, as in any installation."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> bool:
    """Measure and print; return whether all goals are reached."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=count, default=7, help="alternating repeats [7]")
    given = parser.parse_args()
    contestants = [name for name in SEARCHES if find_spec(name)]
    runs: dict[tuple[str, str], list[str]] = {}
    for name in contestants:
        runs["import", name] = ["-c", IMPORTS[name]]
        runs |= {(f"{trials} trials", name): ["-c", SEARCHES[name], str(trials)] for trials in TRIALS}
    runs |= {("studies", name): command for name, command in COMMANDS.items() if name in contestants}
    measured: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in STORES.keys() & {*contestants}:
            cpu_seconds(folder, "-c", STORES[name])
        for repeat in range(given.repeats + 1):
            for run, arguments in runs.items():
                seconds = cpu_seconds(folder, *arguments)
                if repeat:  # the first run of each one compiles its modules
                    measured[run].append(seconds)
    medians = {run: quartiles(values)[1] for run, values in measured.items()}
    rows = {
        what: {name: f"{medians[what, name]:.2f}" for name in contestants if (what, name) in medians}
        for what, _ in runs
    }
    show(rows, title="CPU seconds of a process, medians")
    goals = {
        f"{what.replace(' ', '_')}_vs_optuna": goal(
            medians[what, "shadho_celery"] / medians[what, "optuna"], at_most=most
        )
        for what, most in MOST.items()
        if (what, "optuna") in medians
    }
    figures = {f"{what}, {name}": quartiles(values) for (what, name), values in measured.items()}
    return finish(figures, goals, vars(given))


if __name__ == "__main__":
    sys.exit(not main())
