"""SHADHO's experiment on its own record: ``python tests/benchmarks/shadho_svm.py svm_trace_dev.csv.gz``.

The paper (arXiv 1707.01428) searched an SVM on MNIST with 50 workers each of 16, 8 and 4 cores, and counted the models
an hour. Here the product's scheduler plays it on simulated slots under `fifo`, `paper`, `cost`, and `cost` with shares
by promise, all with random params, and the last with those of its sampler `tpe`, too. Beside them stands Hyperopt's TPE
as a central scheduler: its own `tpe.suggest`, asked for each free slot, first come, first served. Seconds and losses
are those of recorded runs, see svm_record.py.

Models an hour can be had by training cheap kernels. So three figures stand side by side:
  own mix       all models, whatever their kernels
  even mix      four times the models of the rarest kernel
  even weights  what the fleet would train in an even mix, if each kernel's models took the seconds they took here:
                a scheduler that prefers a kernel does not lose by that, as it does in the even mix
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hyperopt
import numpy as np
from figures import amount, count, finish, goal, make_parser, quartiles, runs_of, show
from playing import play_study
from svm_record import CLASSES, KERNELS, Record, read, space

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Result, Trial
from shadho_celery.simulation.executor import Fleet, SimulatedClass, SimulatedExecutor

HYPEROPT = "Hyperopt"
#: policy, shares and sampler by the name in the table
OURS = {
    "fifo": ("fifo", "uniform", "random"),
    "paper": ("paper", "paper", "random"),
    "cost": ("cost", "uniform", "random"),
    "cost, promise": ("cost", "promise", "random"),
    "cost, promise, tpe": ("cost", "promise", "tpe"),
}
#: the paper's medians of models an hour: SHADHO's and Hyperopt's, read off its plot
PUBLISHED = (466, 269)
#: a loss that is good enough, and the parts of the recorded losses that are as low as the other targets
TARGET, PARTS = 1.0, {"the best decile": 0.1, "the best thousandth": 0.001}


class Model(NamedTuple):
    """A model whose training a search has begun."""

    kernel: str
    #: seconds after the search began; infinite if it has not ended
    began: float
    ended: float
    #: infinite if it has not ended
    loss: float


class Search(NamedTuple):
    """What came of one search."""

    #: models an hour by kernel
    rates: dict[str, float]
    #: slots' seconds for a model by kernel, those of models that were not finished included
    seconds: dict[str, float]
    #: hours to each target; all hours of the search, if it has not been reached
    hours_to: dict[str, float]
    #: the targets that a model reached whose params were chosen before any result
    blindly: set[str]

    @property
    def own(self) -> float:
        """Models an hour at the search's own mix."""
        return sum(self.rates.values())

    @property
    def even(self) -> float:
        """Models an hour at an even mix: what is more of any kernel does not count."""
        return len(KERNELS) * min(self.rates.values())

    def weighted(self, slots: int) -> float:
        """Models an hour at even weights, on so many slots."""
        return slots * 3600 / float(np.mean([self.seconds[kernel] for kernel in KERNELS]))


class TooShort(Exception):
    """A search that cannot be compared."""


@cache
def record_of(path: Path) -> Record:
    """The record, read once by each process."""
    return Record(read(path))


def search(path: Path, scheduler: str, seed: int, workers: int, hours: float, targets: Mapping[str, float]) -> Search:
    """One search of `hours` on `workers` workers of each class. Raises TooShort if it trains no model of a kernel."""
    record, slots = record_of(path), dict.fromkeys(CLASSES, workers)
    if scheduler == HYPEROPT:
        models = search_centrally(record, slots, hours, seed)
    else:
        policy, shares, sampler = OURS[scheduler]
        settings = {"policy": policy, "shares": shares, "sampler": sampler}
        study = play_study(space(), slots, record.play, hours * 3600, seed=seed, **settings)
        models = [_model(trial) for trial in study if trial.started_at is not None]
    try:
        return summary(models, hours * 3600, targets)
    except ZeroDivisionError:
        raise TooShort(f"{scheduler} trains no model of some kernel in {hours:g} h: give more --hours") from None


def summary(models: Sequence[Model], end: float, targets: Mapping[str, float]) -> Search:
    """Return models an hour and their mean seconds by kernel, and the hours to the targets, until `end`."""
    counts, seconds = dict.fromkeys(KERNELS, 0), dict.fromkeys(KERNELS, 0.0)
    for model in models:
        counts[model.kernel] += model.ended <= end
        seconds[model.kernel] += min(model.ended, end) - model.began
    first = {
        name: min((m for m in models if m.loss <= loss), key=lambda m: m.ended, default=Model("", end, end, loss))
        for name, loss in targets.items()
    }
    return Search(
        {kernel: 3600 * count / end for kernel, count in counts.items()},
        {kernel: seconds[kernel] / count for kernel, count in counts.items()},
        {name: min(model.ended, end) / 3600 for name, model in first.items()},
        {name for name, model in first.items() if model.began < min(m.ended for m in models) <= model.ended <= end},
    )


def _model(trial: Trial) -> Model:
    kernel, began = trial.subspace.partition("=")[2], trial.started_at or 0.0
    if trial.outcome.loss is None or trial.finished_at is None:
        return Model(kernel, began, math.inf, math.inf)
    return Model(kernel, began, trial.finished_at, trial.outcome.loss)


def search_centrally(record: Record, slots: Mapping[str, int], hours: float, seed: int) -> list[Model]:
    """Hyperopt's TPE asked for each slot as it becomes free, with all results so far; the running trials are NEW."""
    clock, generator = ManualClock(), np.random.default_rng(seed)
    fleet = Fleet(classes={name: SimulatedClass(workers=number) for name, number in slots.items()})
    executor = SimulatedExecutor(fleet, record.play, clock)
    trials, domain = hyperopt.Trials(), hyperopt.base.Domain(lambda values: 0.0, space())
    models: dict[int, Model] = {}
    while clock.now() < hours * 3600:
        free = [each.name for each in executor.classes() for _ in range(each.slots - each.busy)]
        attempts = [_suggested(trials, domain, generator).evolve(compute_class=name) for name in free]
        for attempt in attempts:
            kernel = KERNELS[attempt.params["kernel"]]
            models[attempt.number] = Model(kernel, clock.now(), math.inf, math.inf)
        executor.submit(attempts)
        for event in executor.poll(hours * 3600 - clock.now()):
            if isinstance(event, Result):
                document = trials.trials[event.number]
                document["state"] = hyperopt.JOB_STATE_DONE
                document["result"] = {"status": hyperopt.STATUS_OK, "loss": event.outcome.loss}
                models[event.number] = models[event.number]._replace(ended=event.at, loss=event.outcome.loss)
    return list(models.values())


def _suggested(trials: hyperopt.Trials, domain: hyperopt.base.Domain, generator: np.random.Generator) -> Attempt:
    """The next trial that Hyperopt suggests, and has noted as begun."""
    number = len(trials.trials)
    seed = int(generator.integers(2**31))
    trials.insert_trial_docs(hyperopt.tpe.suggest([number], domain, trials, seed, verbose=False))
    trials.refresh()
    params = {label: drawn[0] for label, drawn in trials.trials[number]["misc"]["vals"].items() if drawn}
    return Attempt(number=number, attempt=1, subspace=f"kernel={KERNELS[params['kernel']]}", params=params)


# Table, reasons and goals

Found = Mapping[str, Sequence[Search]]


def summarise(runs: Sequence[Search], slots: int) -> dict[str, tuple[float, float, float]]:
    """Quartiles over the seeds of each figure."""
    columns = {
        "own mix": [run.own for run in runs],
        "even mix": [run.even for run in runs],
        "even weights": [run.weighted(slots) for run in runs],
    }
    columns |= {f"hours to {name}": [run.hours_to[name] for run in runs] for name in runs[0].hours_to}
    return {name: quartiles(values) for name, values in columns.items()}


def tell(figures: Mapping[str, Mapping[str, tuple[float, float, float]]], found: Found) -> None:
    """A row for each scheduler: medians, and the quartiles in brackets."""
    rows = {}
    for scheduler, row in figures.items():
        mix = "/".join(f"{100 * part:.0f}" for part in mix_of(found[scheduler]).values())
        rows[scheduler] = {"mix, %": mix}
        for name, (low, middle, high) in row.items():
            digits = 3 if name.startswith("hours") else 0
            rows[scheduler][name] = f"{middle:.{digits}f}\n({low:.{digits}f}-{high:.{digits}f})"
    show(rows, "scheduler", f"models an hour, and hours to a loss: medians (quartiles); mix of {', '.join(KERNELS)}")


def mix_of(runs: Sequence[Search]) -> dict[str, float]:
    """The kernels' parts of the models of all seeds."""
    counts = {kernel: sum(run.rates[kernel] for run in runs) for kernel in KERNELS}
    return {kernel: count / sum(counts.values()) for kernel, count in counts.items()}


def show_luck(found: Found) -> None:
    """Print how often a target needed no search."""
    runs = [run for each in found.values() for run in each]
    counts = {name: sum(name in run.blindly for run in runs) for name in runs[0].hours_to}
    print(
        "reached by params that were chosen before any result, so that the schedulers differ in luck alone, in the "
        f"{len(runs)} searches:\n  " + ", ".join(f"{name} {count} times" for name, count in counts.items())
    )


def usual_seconds(found: Found) -> dict[str, float]:
    """Slots' seconds for a model by kernel under `fifo`, the mean over the seeds."""
    return {kernel: float(np.mean([run.seconds[kernel] for run in found["fifo"]])) for kernel in KERNELS}


def reasons(found: Found) -> dict[str, float]:
    """Split the ratio of models an hour, `paper` to Hyperopt, into what the mix does and the rest.

    The mix's part is the ratio that the two mixes would have, if a kernel's models took both schedulers the seconds
    that they take `fifo`.
    """
    own = {name: float(np.median([run.own for run in found[name]])) for name in ("paper", HYPEROPT)}
    usual = usual_seconds(found)
    cost = {name: sum(part * usual[k] for k, part in mix_of(found[name]).items()) for name in own}
    ratio, by_mix = own["paper"] / own[HYPEROPT], cost[HYPEROPT] / cost["paper"]
    return {"published": PUBLISHED[0] / PUBLISHED[1], "here": ratio, "by mix": by_mix, "by the rest": ratio / by_mix}


def explain(found: Found, parts: Mapping[str, float]) -> None:
    """Print the paper's figure beside ours, and what makes ours."""
    usual = usual_seconds(found)
    dear = max(usual, key=usual.__getitem__)
    theirs, paper = (mix_of(found[name])[dear] for name in (HYPEROPT, "paper"))
    even = {name: float(np.median([run.even for run in found[name]])) for name in ("paper", "fifo")}
    print(
        f"\nSHADHO's models an hour beside Hyperopt's: {parts['published']:.2f} as published "
        f"({PUBLISHED[0]} and {PUBLISHED[1]}), {parts['here']:.2f} here at the own mix of each\n"
        f"  {parts['by mix']:.2f} is the mix: seconds a model are "
        f"{', '.join(f'{kernel} {seconds:.0f}' for kernel, seconds in usual.items())}; "
        f"{dear} is {theirs:.0%} of Hyperopt's, {paper:.0%} of paper's\n"
        f"  {parts['by the rest']:.2f} is all else: Hyperopt's choice of params within a kernel, and the placement\n"
        f"  at an even mix `paper` trains {even['paper'] / even['fifo']:.2f} of the models that `fifo` trains"
    )


def goals(figures: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> dict[str, dict[str, Any]]:
    """Return the goals, on medians of the seeds."""
    cost, promise, fifo, theirs = (figures[name] for name in ("cost", "cost, promise", "fifo", HYPEROPT))
    return {
        "even mix: cost beside fifo": goal(cost["even mix"][1] / fifo["even mix"][1], at_least=0.98),
        "even mix: cost beside Hyperopt": goal(cost["even mix"][1] / theirs["even mix"][1], at_least=1.0),
        f"hours to {TARGET}: cost with promise beside Hyperopt": goal(
            promise[f"hours to {TARGET}"][1] / theirs[f"hours to {TARGET}"][1], at_most=1.0
        ),
    }


def main() -> None:
    """Play everything and print."""
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the record, svm_trace_*.csv.gz")
    parser.add_argument("--seeds", type=count, default=10, help="searches of each scheduler (default: %(default)s)")
    parser.add_argument("--hours", type=amount, default=4.0, help="simulated hours of a search (default: %(default)s)")
    parser.add_argument("--workers", type=count, default=50, help="workers of each class (default: %(default)s)")
    parser.add_argument("--jobs", type=count, help="processes (default: one for each core)")
    given = parser.parse_args()
    try:
        losses = [row.loss for row in read(given.trace)]
        targets = {str(TARGET): TARGET} | {name: float(np.quantile(losses, part)) for name, part in PARTS.items()}
        how = {"workers": given.workers, "hours": given.hours, "targets": targets}
        jobs = {name: partial(search, given.trace, name, **how) for name in (HYPEROPT, *OURS)}
        with ProcessPoolExecutor(given.jobs) as pool:
            found = runs_of(pool, "searches", jobs, range(given.seeds))
    except (ValueError, TooShort) as error:
        parser.error(str(error))
    figures = {name: summarise(runs, given.workers * len(CLASSES)) for name, runs in found.items()}
    tell(figures, found)
    print("losses:", ", ".join(f"{name} is {loss:.4g}" for name, loss in targets.items() if name != str(TARGET)))
    show_luck(found)
    parts = reasons(found)
    explain(found, parts)
    mixes = {name: mix_of(runs) for name, runs in found.items()}
    settings = {"seeds": given.seeds, "hours": given.hours, "workers": given.workers, "trace": given.trace.name}
    finish({"schedulers": figures, "mix": mixes, "paper_beside_hyperopt": parts}, goals(figures), settings)


if __name__ == "__main__":
    main()
