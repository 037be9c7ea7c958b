"""Simulation of a search on the cluster of a file: the real scheduler, study and policies, on a manual clock."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from hyperopt import hp
from msgspec.structs import replace

from shadho_celery.core.clock import ManualClock
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Attempt, Outcome, Params, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.results.records import Records
from shadho_celery.scheduler.plan import DEFAULT_SETTINGS, Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.simulation.cluster_file import LEAST_SECONDS, Cluster, Family
from shadho_celery.simulation.executor import Play, SimulatedExecutor
from shadho_celery.simulation.params import Value
from shadho_celery.space.compile import compile_space
from shadho_celery.space.stored import ValuesRecord, to_json
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.limits import Limits
from shadho_celery.study.state import StudyState

#: number of random factors drawn in advance; a trial's seed picks one, so it is the same under every policy
DRAWS = 2**17

#: distance in the draws between the slowdowns of two successive attempts of a trial
NEXT_ATTEMPT = 65_537

#: fraction of its time after which a trial runs out of memory, if its class has too little
OUT_OF_MEMORY_AT = 0.1

#: value of x in [0, 1] at which a family has its least loss
OPTIMUM = 0.3


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result of a simulated search."""

    policy: str
    shares: str
    seed: int
    #: simulated seconds
    seconds: float
    #: number of completed and of failed trials, by family
    complete: Mapping[str, int]
    failed: Mapping[str, int]
    #: number of completed trials by family and class
    placed: Mapping[str, Mapping[str, int]]
    #: number of attempts lost with their workers
    lost: int
    #: number of attempts that ended with their workers, also those that were given back
    interrupted: int
    #: fraction of the slots' time in which they were busy, by class
    utilisation: Mapping[str, float]
    #: money that the ended attempts have cost, by class; empty without prices
    money: Mapping[str, float]
    #: notices about the choice and placement of trials
    notices: Sequence[str]
    #: least loss, and the simulated seconds until it was found; None without a completed trial
    best: float | None
    best_after: float | None
    #: CPU seconds of the simulation, and the peak resident memory of its process in MiB
    cpu_seconds: float
    peak_mib: float
    #: the simulated study, with all its trials
    study: StudyState
    #: makes the records of its trials' values, see `Trial.given`
    given: Callable[[Params], str | None]
    #: its trials, attempts and workers
    store: MemoryStore

    @property
    def records(self) -> Records:
        """Its attempts and workers as columns."""
        return Records(self.store, self.study.record.key)

    @property
    def trials(self) -> int:
        """Number of completed and failed trials."""
        return sum(self.complete.values()) + sum(self.failed.values())

    def balanced(self, shares: Mapping[str, float]) -> float:
        """Return the rate of completed trials per hour, as far as they have the mix of families in `shares`.

        It is the rate of the family that has completed the fewest trials relative to its share, divided by that share.
        """
        total = sum(shares.values())
        return an_hour(min(self.complete[name] * total / share for name, share in shares.items()), self.seconds)

    def rows(self) -> Iterator[tuple[int, str, str, int, float, float, str]]:
        """Yield number, family, class, slot, start and end (seconds) and state of each ended trial.

        Trials that failed because their worker was lost repeatedly are left out, because they have no end.
        """
        for trial in self.study.trials:
            if trial.outcome.seconds is None:
                continue
            # With several slots a worker, it is the number of the worker.
            slot = int((trial.host or ".-1").rpartition(".")[2])
            started, ended = trial.started_at or 0.0, trial.finished_at or 0.0
            yield trial.number, family_of(trial), str(trial.compute_class), slot, started, ended, str(trial.state)


def an_hour(number: float, seconds: float) -> float:
    """Return the rate per hour of a `number` of trials in this many seconds; 0 if no time has passed."""
    return number / seconds * 3600 if seconds else 0.0


def family_of(trial: Trial | Attempt) -> str:
    """Return the family of a simulated trial."""
    return trial.subspace.removeprefix("family=")


def simulate(
    cluster: Cluster,
    *,
    policy: str = DEFAULT_SETTINGS.policy,
    shares: str | None = DEFAULT_SETTINGS.shares,
    sampler: str = "random",
    pool: int | None = DEFAULT_SETTINGS.pool,
    speculate: bool = True,
    place_by: Literal["time", "money"] = DEFAULT_SETTINGS.place_by,
    deadline: float | str | None = None,
    seed: int | None = None,
    on_turn: Callable[[StudyState], None] = lambda study: None,
) -> Simulation:
    """Simulate a search on `cluster` to its end. The same `seed` gives exactly the same result.

    `on_turn` is called after every turn of the scheduler's loop. Raises UsageError for an unknown name, and for trials
    that are placed by money although their numbers of GPUs are searched.
    """
    if place_by == "money" and cluster.widths:
        raise UsageError("trials that are placed by money need one number of GPUs; give the families one, not a list")
    seed = cluster.seed if seed is None else seed
    choice = StudySettings(
        policy=policy,
        shares=shares,
        sampler=sampler,
        pool=pool,
        speculate=speculate,
        place_by=place_by,
        deadline=deadline,
        gpus=cluster.widths or (make_gpus(cluster) if cluster.takes_gpus else None),
    )
    settings = replace(choice, classes=tuple(cluster.slots), fidelity=cluster.fidelity)
    began = time.process_time()
    limits = Limits(seconds=cluster.seconds, trials=cluster.trials, target=cluster.target)
    plan = Plan.of(compile_space(make_space(cluster)), settings, limits)
    clock = ManualClock()
    record = StudyRecord(
        key="simulated",
        name="simulated",
        module="",
        seed=seed,
        space=plan.space.describe(),
        created_at=0.0,
        in_force=replace(settings, trials=cluster.trials).in_force(),
        tree=to_json(plan.space),
    )
    store = MemoryStore()
    study = StudyState(store, record, 1, clock=clock)
    progress = Progress(cluster)
    executor = SimulatedExecutor(
        cluster.slots,
        make_play(cluster, seed, progress),
        clock,
        changes=cluster.changes,
        memory=cluster.memory,
        prices=cluster.prices,
        per_worker={**dict.fromkeys(cluster.slots, 1), **cluster.per_worker} if cluster.takes_gpus else None,
        lease_seconds=cluster.lease_seconds,
        storage="shared" if cluster.checkpoints == "shared" else "",
        recorder=study.recorder,
        stays=cluster.stays,
        interrupted=progress.interrupt,
        steps=cluster.steps,
        seed=seed,
    )
    scheduler = make_scheduler(plan, study, executor)
    for _ in _turns(scheduler, executor, is_endless=cluster.seconds is None):
        on_turn(study)
    study.close()
    cpu_seconds = time.process_time() - began
    by_name = {name: f"family={name}" for name in cluster.families}
    best = study.best
    return Simulation(
        policy=policy,
        shares=choice.shares_in_force,
        seed=seed,
        seconds=clock.now(),
        complete={name: study.count(TrialState.COMPLETE, subspace=subspace) for name, subspace in by_name.items()},
        failed={name: study.count(TrialState.FAILED, subspace=subspace) for name, subspace in by_name.items()},
        placed=_placed(cluster, study),
        lost=study.lost,
        interrupted=progress.interrupted,
        utilisation=executor.utilisation(),
        money=dict(study.recorder.spent),
        notices=scheduler.notices(),
        best=best.outcome.loss if best else None,
        best_after=best.finished_at if best else None,
        cpu_seconds=cpu_seconds,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
        study=study,
        given=ValuesRecord(plan.space).of,
        store=store,
    )


def _turns(scheduler: Scheduler, executor: SimulatedExecutor, *, is_endless: bool) -> Iterator[None]:
    """Run the scheduler to its end, and yield after each turn. Trials that still run at the end have no result."""
    # All events come from the executor, so a turn need not end before there is an event.
    scheduler.turn_seconds = math.inf
    scheduler.assign()
    scheduler.fill()
    while not scheduler.stopping:
        scheduler.turn()
        yield
        if executor.is_still and not scheduler.classes and is_endless:
            return  # all workers have died, so the trials will never end


def _placed(cluster: Cluster, study: StudyState) -> dict[str, dict[str, int]]:
    """Return the number of completed trials by family and class."""
    placed = {name: dict.fromkeys(cluster.slots, 0) for name in cluster.families}
    for trial in study.trials:
        if trial.state is TrialState.COMPLETE:
            placed[family_of(trial)][str(trial.compute_class)] += 1
    return placed


def make_space(cluster: Cluster) -> Any:
    """Return the search space of a cluster: a choice of families, each with a number x and the params in the file."""
    total = sum(cluster.shares.values())
    options = {
        name: {
            "family": name,
            "x": hp.uniform(f"x {name}", 0, 1),
            "params": {param: law.node(_label(param, name)) for param, law in family.params.items()},
        }
        for name, family in cluster.families.items()
    }
    return hp.pchoice("family", [(share / total, options[name]) for name, share in cluster.shares.items()])


def make_gpus(cluster: Cluster) -> Callable[[Mapping[str, Any]], float]:
    """Return the function of a trial's values that gives its number of slots."""

    def gpus(values: Mapping[str, Any]) -> float:
        return cluster.families[values["family"]].width(values["params"])

    return gpus


def _label(param: str, family: str) -> str:
    """Return the label of a family's param. It differs from the label of the family's number, ``x FAMILY``."""
    return f"{param} of {family}"


def values_shown(cluster: Cluster) -> Callable[[Trial, str], Any]:
    """Return a function (trial, label) that returns the value of a trial's param as expressions see it."""
    laws = {
        _label(param, name): law for name, family in cluster.families.items() for param, law in family.params.items()
    }
    return lambda trial, label: laws[label].value(trial.params[label]) if label in laws else trial.params[label]


def _seconds_of(name: str, family: Family, compute_class: str, values: Mapping[str, Value]) -> float:
    try:
        return family.seconds_on(compute_class, values)
    except ValueError as error:
        raise UsageError(f"families.{name}.seconds.{compute_class}: {error}; change the expression") from None


class Progress:
    """How much of the work of interrupted trials their checkpoints hold."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: by trial: fraction of its work that its checkpoint holds
        self._kept: dict[int, float] = {}
        #: by running attempt: seconds before its work, seconds of its work, and the fraction that was kept before
        self._running: dict[tuple[int, int], tuple[float, float, float]] = {}
        #: number of attempts that have ended with their workers
        self.interrupted = 0

    def kept(self, attempt: Attempt) -> float:
        """Return the fraction of an attempt's work that a checkpoint holds."""
        return self._kept.get(attempt.number, 0.0)

    def begin(self, attempt: Attempt, overhead: float, work: float) -> None:
        """Record the seconds that an attempt takes before its work, and for the rest of its work."""
        if self._cluster.checkpoint_seconds is not None:
            self._running[attempt.number, attempt.attempt] = overhead, work, self.kept(attempt)

    def interrupt(self, attempt: Attempt, seconds: float, told: bool) -> None:
        """Keep what an attempt has done, which its worker ends after these seconds: up to now if it was told."""
        self.interrupted += 1
        key, every = (attempt.number, attempt.attempt), self._cluster.checkpoint_seconds
        if key not in self._running or every is None:
            return
        overhead, work, before = self._running.pop(key)
        done = max(0.0, seconds - overhead)
        if not told and every > 0:
            done = done // every * every
        kept = before + (1.0 - before) * min(1.0, done / work)
        self._kept[attempt.number] = max(self.kept(attempt), kept)


class Checkpoints:
    """Budgets up to which promoted trials have been computed, and the machines that have their checkpoints."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: budget reached and machine of the latest trial with the same params, by number of the first trial with them
        self._kept: dict[int, tuple[float, str | None]] = {}
        #: the same when the first attempt of a promoted trial began, by its number
        self._before: dict[int, tuple[float, str | None]] = {}

    def begin(self, attempt: Attempt) -> tuple[float, float, bool | None]:
        """Return the budget to compute, the seconds to fetch a checkpoint, and whether the attempt continues from it.

        The last is None if the trial was not promoted. Without budgets, an attempt computes a budget of 1.
        """
        if attempt.budget is None:
            return 1.0, 0.0, None
        key = attempt.number if attempt.origin is None else attempt.origin
        behind, host = self._kept.get(key, (0.0, None))
        if attempt.origin is not None:
            behind, host = self._before.setdefault(attempt.number, (behind, host))
        self._kept[key] = max(behind, attempt.budget), attempt.host
        if attempt.origin is None:
            return attempt.budget, 0.0, None
        is_at_home, where = host == attempt.host, self._cluster.checkpoints
        if not 0 < behind < attempt.budget or where == "none" or (where == "machine" and not is_at_home):
            return attempt.budget, 0.0, False
        return attempt.budget - behind, 0.0 if is_at_home else self._cluster.handover_seconds, True


def make_play(cluster: Cluster, seed: int, progress: Progress | None = None) -> Play:
    """Return a function that simulates a cluster's trials. A trial's seed determines its size, failure and slowdown.

    Size and failure are the same in all attempts of a trial. The slowdown differs between attempts. `progress` says
    from where trials continue after their workers have ended.
    """
    generator = np.random.default_rng([seed, 0x51])
    sizes = cluster.size.draw(generator, DRAWS).tolist()
    delays = cluster.straggler.draw(generator, DRAWS).tolist()
    luck = generator.random(DRAWS).tolist()
    checkpoints = Checkpoints(cluster)
    progress = progress or Progress(cluster)

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        name = family_of(attempt)
        family = cluster.families[name]
        draw = attempt.seed % DRAWS
        delay = delays[(draw + (attempt.attempt - 1) * NEXT_ATTEMPT) % DRAWS]
        units, handover, continued = checkpoints.begin(attempt)
        values = {param: law.value(attempt.params[_label(param, name)]) for param, law in family.params.items()}
        if cluster.widths:
            values = {"gpus": float(attempt.slots), **values}
        kept = progress.kept(attempt)
        if kept:
            handover = cluster.handover_seconds
        if attempt.attempt > 1 and attempt.origin is None:
            continued = kept > 0
        seconds = _seconds_of(name, family, compute_class, values) * (sizes[draw] * delay * units) * (1.0 - kept)
        overhead = (cluster.startup.get(compute_class, 0.0) + handover) * delay
        progress.begin(attempt, overhead, max(LEAST_SECONDS, seconds))
        seconds = max(LEAST_SECONDS, seconds + overhead)
        memory = cluster.memory[compute_class]
        if memory and family.memory > memory:
            return Outcome(state=TrialState.FAILED, error="out of memory", seconds=OUT_OF_MEMORY_AT * seconds)
        if luck[draw] < family.failure_rate:
            return Outcome(state=TrialState.FAILED, error="failed by chance", seconds=seconds)
        loss = family.best + family.spread * (float(attempt.params[f"x {name}"]) - OPTIMUM) ** 2
        peak = family.memory or None
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds, memory=peak, continued=continued)

    return play
