"""Simulation of a search on a cluster: the real scheduler, study and policies, on a manual clock.

The cluster is a Python file with a search space, a fleet, and functions that simulate trials (`load`). `simulate` runs
the search. `keep` copies the simulated study to a store, so that the dashboard and reports can show it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as with_
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, structs
from msgspec.structs import replace
from numpy.typing import NDArray

from shadho_celery.core.checks import as_record, short
from shadho_celery.core.failures import user_code
from shadho_celery.core.files import new_key, parse, read_classes
from shadho_celery.core.settings import read_settings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, Trial, TrialState
from shadho_celery.errors import StoreError, UsageError
from shadho_celery.objective.study_file import import_file
from shadho_celery.placement.widths import widest
from shadho_celery.results.trial import Records
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.simulation.executor import GIB, LARGEST, Fleet, Play, SimulatedClass, SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.space.space import Space
from shadho_celery.space.stored import ValuesRecord, to_json
from shadho_celery.store.base import StudyRecord, Turn, holder_name
from shadho_celery.store.memory import MemoryStore
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.state import Limits, StudyState

V = TypeVar("V")

#: minimum seconds of a trial; with 0 seconds, the simulated time would not advance
LEAST_SECONDS = 1e-3

#: by name of a function that returns a number: the bounds of the number
BOUNDS: Mapping[str, tuple[float, float]] = {
    "seconds": (LEAST_SECONDS, LARGEST),
    "overhead_seconds": (0.0, LARGEST),
    "memory_gib": (0.0, LARGEST),
    "failure_rate": (0.0, 1.0),
    "loss": (-LARGEST, LARGEST),
}
#: functions that draw random factors
DRAWN = ("size", "straggler")

#: names of the settings in STUDY that a simulation supports
PLAYED = "trials seconds target sampler policy place_by deadline shares pool fidelity speculate gpus"

_FORM = "--example prints a cluster file"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about the machine of a trial: the second argument of `seconds` and `overhead_seconds`."""

    compute_class: str
    #: number of its slots that the trial takes
    slots: int
    #: memory of the machine; 0 if it is not limited
    memory_gib: float = 0.0


def _zero(*_: object) -> float:
    return 0.0


def _ones(_: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.ones(count)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The content of a cluster file: a simulated fleet, and functions that simulate the trials of a study.

    `values` are the values that an objective would get for a trial's params.
    """

    #: SPACE, the search space
    space: Any
    #: CLUSTER, the simulated fleet
    fleet: Fleet
    #: (values, machine) -> mean seconds of a trial's work on the machine; for trials with budgets, the seconds for one
    #: unit
    seconds: Callable[[Any, Machine], float]
    #: (values, machine) -> seconds that a trial takes in addition to its work, for any budget
    overhead_seconds: Callable[[Any, Machine], float] = _zero
    #: (values) -> loss of a trial
    loss: Callable[[Any], float] = _zero
    #: (values) -> memory that a trial needs; it fails on a machine that has less
    memory_gib: Callable[[Any], float] = _zero
    #: (values) -> probability that a trial fails at its end
    failure_rate: Callable[[Any], float] = _zero
    #: (generator, count) -> random factors of the seconds of trials, with a mean of 1; all attempts of a trial have the
    #: same factor
    size: Callable[[np.random.Generator, int], Any] = _ones
    #: (generator, count) -> further random factors, which differ between the attempts of a trial
    straggler: Callable[[np.random.Generator, int], Any] = _ones
    #: STUDY, the settings of the study
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: name of the file's module
    name: str = "the cluster"

    def ask(self, function: str, *given: Any) -> float:
        """Call one of the functions in BOUNDS and return its number. Raises UsageError if it fails or the number is
        invalid.
        """
        least, most = BOUNDS[function]
        value = self._called(function, float, *given)
        if not least <= value <= most:
            raise UsageError(
                f"{function} of {self.name} gives {value:g} for {short(given[0])}, but must give {least:g} to {most:g}"
            )
        return value

    def draw(self, function: str, generator: np.random.Generator, count: int) -> list[float]:
        """Call one of the functions in DRAWN and return its random factors. Raises UsageError if it fails or they are
        invalid.
        """
        drawn = self._called(function, partial(np.asarray, dtype=float), generator, count)
        if drawn.shape != (count,) or not (np.isfinite(drawn) & (drawn >= 0)).all():
            raise UsageError(f"{function} of {self.name} must give {count} finite numbers from 0, as an array")
        found: list[float] = drawn.tolist()
        return found

    def _called(self, function: str, convert: Callable[[Any], V], *given: Any) -> V:
        with user_code(f"{function} of {self.name} failed", given[0]):
            return convert(getattr(self, function)(*given))


def load(module: str) -> Cluster:
    """Return the cluster that a file defines. Raises UsageError, with the invalid name and the remedy, if it is not
    valid.
    """
    if module.endswith(".toml"):
        raise UsageError(f"{short(module)} is not a Python file, but a cluster is described by one; {_FORM}")
    found = import_file(module, ("SPACE", "CLUSTER", "seconds"), "cluster file", _FORM)
    functions = {name: found.names[name] for name in (*BOUNDS, *DRAWN) if name in found.names}
    if wrong := [name for name, given in functions.items() if not callable(given)]:
        raise UsageError(f"{wrong[0]} of {found.module} is not a function; {_FORM}")
    if unplayed := [name for name in found.stated if name not in PLAYED.split()]:
        raise UsageError(f'STUDY["{unplayed[0]}"] of {found.module} is not simulated; leave it out')
    try:
        fleet = read_fleet(found.names["CLUSTER"])
    except UsageError as error:
        raise UsageError(f"CLUSTER of {found.module}: {error}") from None
    space, settings = found.names["SPACE"], found.stated
    return Cluster(space=space, fleet=fleet, settings=settings, name=found.module, **functions)


def read_fleet(described: object) -> Fleet:
    """Return the fleet that CLUSTER describes. Its `classes` may be the path of a TOML file.

    Raises UsageError, which names the invalid key.
    """
    if not isinstance(described, Mapping):
        raise UsageError(f"it is not a dict; {_FORM}")
    fleet = as_record({**described, "classes": {}}, Fleet, form=_FORM)
    given = described.get("classes", {})
    if isinstance(given, str):
        classes = read_classes(Path(given), SimulatedClass)
    else:
        classes = parse({"classes": given}, SimulatedClass, _FORM)
    for place, change in enumerate(fleet.changes):
        if change.compute_class not in classes:
            name, known = short(change.compute_class, 60), ", ".join(classes)
            raise UsageError(f"changes.{place}.class: there is no class {name}; there are {known}")
    workers = [each.workers for each in classes.values()] + [change.workers for change in fleet.changes]
    if max(workers) <= 0:
        raise UsageError("classes: there are no workers; give a class workers of 1 or more")
    return replace(fleet, classes=classes)


#: number of random factors that are drawn in advance. The seed of a trial selects its factor, which therefore does not
#: depend on the policy
DRAWS = 2**17

#: distance between the slowdowns of two successive attempts of a trial in the list of random factors
NEXT_ATTEMPT = 65_537

#: a trial on a class with too little memory fails after this fraction of its seconds
OUT_OF_MEMORY_AT = 0.1


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Result of a simulated search."""

    policy: str
    shares: str
    seed: int
    #: simulated seconds
    seconds: float
    #: by subspace: number of completed trials; number of failed trials
    complete: Mapping[str, int]
    failed: Mapping[str, int]
    #: number of completed trials by subspace and class
    placed: Mapping[str, Mapping[str, int]]
    #: number of attempts that were lost with their workers
    lost: int
    #: number of attempts that ended because their workers ended: lost ones, and those that were given back
    interrupted: int
    #: by class: fraction of the slot seconds in which trials ran
    utilisation: Mapping[str, float]
    #: by class: money that ended attempts have cost; empty without prices
    money: Mapping[str, float]
    #: notices about the choice and placement of trials
    notices: Sequence[str]
    #: least loss; simulated seconds until it was found. None if no trial has completed
    best: float | None
    best_after: float | None
    #: CPU seconds of the simulation; peak resident memory of its process in MiB
    cpu_seconds: float
    peak_mib: float
    #: the simulated study, with all its trials
    study: StudyState
    #: plan of the study, from its settings and its space
    plan: Plan
    #: store with the trials, attempts and workers of the study
    store: MemoryStore

    @property
    def records(self) -> Records:
        """Its attempts and workers as columns."""
        return Records(self.store, self.study.record.key)

    @property
    def trials(self) -> int:
        """Number of completed and failed trials."""
        return sum(self.complete.values()) + sum(self.failed.values())

    @property
    def balanced_an_hour(self) -> float:
        """Completed trials per hour in the mix of the space's probabilities; trials beyond this mix do not count.

        For each subspace, the number of completed trials is divided by its probability. The least of these numbers is
        the number of trials that count.
        """
        least = min(self.complete[each.name] / each.probability for each in self.plan.subspaces)
        return an_hour(least, self.seconds)

    def rows(self) -> Iterator[tuple[int, str, str, int, float, float, str]]:
        """Yield the number, subspace, class, slot, start, end and state of each ended trial.

        Start and end are in seconds. Trials without a result, whose workers were lost repeatedly, are left out.
        """
        for trial in self.study.trials:
            if trial.outcome.seconds is None:
                continue
            # If workers have several slots, this is the number of the worker.
            slot = int((trial.host or ".-1").rpartition(".")[2])
            started, ended = trial.started_at or 0.0, trial.finished_at or 0.0
            yield trial.number, trial.subspace, str(trial.compute_class), slot, started, ended, str(trial.state)


def an_hour(number: float, seconds: float) -> float:
    """Return the rate per hour for a `number` of trials in this many seconds; 0 if no time has passed."""
    return number / seconds * 3600 if seconds else 0.0


def simulate(
    cluster: Cluster,
    *,
    seed: int | None = None,
    on_turn: Callable[[StudyState], None] = lambda study: None,
    **settings: Any,
) -> Simulation:
    """Simulate a search on `cluster` until its end. The same `seed`, by default that of the cluster, gives the same
    result.

    `settings` replace settings of the cluster file. `on_turn` is called after each turn of the scheduler's loop. Raises
    UsageError for invalid settings, and for functions of the cluster that fail.
    """
    fleet = cluster.fleet if seed is None else replace(cluster.fleet, seed=seed)
    began = time.process_time()
    plan, clock, store = make_plan(cluster, settings), ManualClock(), MemoryStore()
    study = StudyState(store, _record(plan, fleet.seed), 1, clock=clock)
    progress = Progress(fleet)
    play = make_play(with_(cluster, fleet=fleet), plan.space, progress)
    executor = SimulatedExecutor(fleet, play, clock, recorder=study.recorder, interrupted=progress.interrupt)
    scheduler = make_scheduler(plan, study, executor)
    for _ in _turns(scheduler, executor, is_endless=plan.limits.seconds is None):
        on_turn(study)
    study.close()
    names, best = [subspace.name for subspace in plan.subspaces], study.best
    done = (each for each in study.trials if each.state is TrialState.COMPLETE)
    placed = Counter((each.subspace, each.compute_class) for each in done)
    return Simulation(
        policy=plan.settings.policy,
        shares=plan.settings.shares_in_force,
        seed=fleet.seed,
        seconds=clock.now(),
        complete={name: study.count(TrialState.COMPLETE, subspace=name) for name in names},
        failed={name: study.count(TrialState.FAILED, subspace=name) for name in names},
        placed={name: {each: placed[name, each] for each in fleet.classes} for name in names},
        lost=study.lost,
        interrupted=progress.interrupted,
        utilisation=executor.utilisation(),
        money=dict(study.recorder.spent),
        notices=scheduler.notices(),
        best=best.outcome.loss if best else None,
        best_after=best.finished_at if best else None,
        cpu_seconds=time.process_time() - began,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
        study=study,
        plan=plan,
        store=store,
    )


def make_plan(cluster: Cluster, given: Mapping[str, Any]) -> Plan:
    """Return the plan of the study. `given` replaces settings of the cluster file. Raises UsageError for invalid
    settings.
    """
    slots = max(each.slots for each in cluster.fleet.classes.values())
    own: dict[str, Any] = {"gpus": 1} if slots > 1 else {}
    own |= {"sampler": "random", **cluster.settings, **given, "classes": [*cluster.fleet.classes]}
    settings = read_settings(own)
    if settings.seconds is None and settings.trials is None:
        raise UsageError("a simulation needs an end; give seconds or trials")
    limits = Limits(seconds=settings.seconds, trials=settings.trials, target=settings.target, at_once=settings.at_once)
    plan = Plan.of(compile_space(cluster.space), settings, limits)
    needed = max(settings.widths or [widest(plan.width, plan.subspaces)])
    if needed > slots:
        raise UsageError(f"a trial takes {needed} slots, but the largest worker has {slots}; see gpus")
    return plan


def _record(plan: Plan, seed: int) -> StudyRecord:
    return StudyRecord(
        key="simulated",
        name="simulated",
        module="",
        seed=seed,
        space=plan.space.describe(),
        created_at=0.0,
        in_force=plan.settings.in_force(),
        tree=to_json(plan.space),
    )


def _turns(scheduler: Scheduler, executor: SimulatedExecutor, *, is_endless: bool) -> Iterator[None]:
    """Run the scheduler until its end, and yield after each turn. Trials that still run then get no result."""
    # A turn may wait for any time, because only events of the executor change anything.
    scheduler.turn_seconds = math.inf
    scheduler.update_classes()
    scheduler.fill()
    while not scheduler.stopping:
        scheduler.turn()
        yield
        if executor.is_still and not scheduler.classes and is_endless:
            return  # all workers have died, so the trials will never end


class Progress:
    """Keeps how much of the work of interrupted trials is saved in checkpoints."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        #: by number of a trial: fraction of its work that is saved
        self._kept: dict[int, float] = {}
        #: by running attempt: seconds before its work, seconds of its work, and the fraction that was saved before it
        self._running: dict[tuple[int, int], tuple[float, float, float]] = {}
        #: number of attempts that have ended because their workers ended
        self.interrupted = 0

    def kept(self, attempt: Attempt) -> float:
        """Return the fraction of the work of an attempt's trial that is saved in a checkpoint."""
        return self._kept.get(attempt.number, 0.0)

    def begin(self, attempt: Attempt, overhead: float, work: float) -> None:
        """Record the seconds that an attempt takes before its work, and for its remaining work."""
        if self._fleet.checkpoint_seconds is not None:
            self._running[attempt.number, attempt.attempt] = overhead, work, self.kept(attempt)

    def interrupt(self, attempt: Attempt, seconds: float, told: bool) -> None:
        """Save the work of an attempt whose worker ends after these seconds.

        If the worker had notice (`told`), all of its work is saved, otherwise the work up to the last checkpoint.
        """
        self.interrupted += 1
        key, every = (attempt.number, attempt.attempt), self._fleet.checkpoint_seconds
        if key not in self._running or every is None:
            return
        overhead, work, before = self._running.pop(key)
        done = max(0.0, seconds - overhead)
        if not told and every > 0:
            done = done // every * every
        kept = before + (1.0 - before) * min(1.0, done / work)
        self._kept[attempt.number] = max(self.kept(attempt), kept)


class Checkpoints:
    """Keeps the budgets that trials have reached, and the machines that have their checkpoints, for promoted trials."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        #: by number of the first trial with the same params: the greatest budget reached, and the machine of the latest
        #: trial
        self._kept: dict[int, tuple[float, str | None]] = {}
        #: by number of a promoted trial: this budget and machine at the time when its first attempt began
        self._before: dict[int, tuple[float, str | None]] = {}

    def begin(self, attempt: Attempt) -> tuple[float, float, bool | None]:
        """Return the budget to compute, the seconds to fetch a checkpoint, and whether the attempt continues from it.

        The third value is None if the trial was not promoted. In a study without budgets, the budget is 1.
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
        is_at_home, where = host == attempt.host, self._fleet.checkpoints
        if not 0 < behind < attempt.budget or where == "none" or (where == "machine" and not is_at_home):
            return attempt.budget, 0.0, False
        return attempt.budget - behind, 0.0 if is_at_home else self._fleet.handover_seconds, True


def make_play(cluster: Cluster, space: Space, progress: Progress | None = None) -> Play:
    """Return a function that simulates trials. The seed of a trial determines its size, its failure and its slowdowns.

    Size and failure are the same for all attempts of a trial; the slowdown differs between attempts. `progress` has the
    saved work of trials whose workers have ended.
    """
    fleet = cluster.fleet
    generator = np.random.default_rng([fleet.seed, 0x51])
    sizes = cluster.draw("size", generator, DRAWS)
    delays = cluster.draw("straggler", generator, DRAWS)
    luck = generator.random(DRAWS).tolist()
    checkpoints = Checkpoints(fleet)
    progress = progress or Progress(fleet)

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        values, memory_gib = space.evaluate(attempt.params), fleet.classes[compute_class].memory_gib
        machine = Machine(compute_class=compute_class, slots=attempt.slots, memory_gib=memory_gib)
        draw = attempt.seed % DRAWS
        delay = delays[(draw + (attempt.attempt - 1) * NEXT_ATTEMPT) % DRAWS]
        units, handover, continued = checkpoints.begin(attempt)
        kept = progress.kept(attempt)
        if kept:
            handover = fleet.handover_seconds
        if attempt.attempt > 1 and attempt.origin is None:
            continued = kept > 0
        seconds = cluster.ask("seconds", values, machine) * (sizes[draw] * delay * units) * (1.0 - kept)
        overhead = (cluster.ask("overhead_seconds", values, machine) + handover) * delay
        progress.begin(attempt, overhead, max(LEAST_SECONDS, seconds))
        seconds = max(LEAST_SECONDS, seconds + overhead)
        needed = cluster.ask("memory_gib", values)
        if 0 < memory_gib < needed:
            return Outcome(state=TrialState.FAILED, error="out of memory", seconds=OUT_OF_MEMORY_AT * seconds)
        if luck[draw] < cluster.ask("failure_rate", values):
            return Outcome(state=TrialState.FAILED, error="failed by chance", seconds=seconds)
        loss, memory = cluster.ask("loss", values), int(needed * GIB) or None
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds, memory=memory, continued=continued)

    return play


S = TypeVar("S", bound=Struct)

#: number of trials or attempts that are written in one transaction
PAGE = 5000

#: in the name of a study that `keep` writes: maximum number of characters of the title; number of characters of the key
MAX_TITLE, KEY_LENGTH = 40, 6

#: characters that are replaced in the title
_UNUSUAL = re.compile(r"[^\w.-]")

#: fields of records that are times
MOMENTS = ("asked_at", "queued_at", "started_at", "ended_at", "finished_at", "since", "until")


def keep(found: Simulation, store: SqlStore, title: str, ended_at: float) -> StudyRecord:
    """Write a simulated study to a store, and return its record there.

    Its name is ``simulated-TITLE-POLICY-`` with the first KEY_LENGTH characters of its key. Characters of `title` that
    names of studies should not have are replaced. `ended_at`, in seconds since the epoch, is the time at which the
    simulation ends in the records. It must not be in the future, because readers assume that records are from the past.
    Raises StoreError.
    """
    began_at, given = ended_at - found.seconds, ValuesRecord(found.plan.space)
    key = new_key()
    name = f"simulated-{_UNUSUAL.sub('-', title)[:MAX_TITLE]}-{found.policy}-{key[:KEY_LENGTH]}"
    kept = found.study.record
    plan = kept.money_plan and structs.replace(kept.money_plan, deadline=kept.money_plan.deadline + began_at)
    in_force = {**kept.in_force, "simulated": True}
    record = dataclasses.replace(kept, key=key, name=name, created_at=began_at, in_force=in_force, money_plan=plan)
    store.create(record)
    fence = store.lock(key, holder_name(), ended_at)
    try:
        sessions = [_shifted(each, began_at) for each in found.store.sessions()]
        store.write(key, fence, ended_at, Turn(seen=[*sessions, *found.store.machines()]))
        for trials in _pages(found.store.trials()):
            store.write(key, fence, ended_at, Turn(new=[_shifted_trial(given, each, began_at) for each in trials]))
        for attempts in _pages(found.store.attempts()):
            store.write(key, fence, ended_at, Turn(attempted=[_shifted(each, began_at) for each in attempts]))
    except BaseException:
        # The written part is deleted, because it would look like a complete study.
        with suppress(StoreError):
            store.delete(key, fence)
        raise
    store.unlock(key, fence)
    return record


def _pages(records: Iterable[S]) -> Iterator[list[S]]:
    left = iter(records)
    while page := [*islice(left, PAGE)]:
        yield page


def _shifted(record: S, by: float) -> S:
    """Return a record whose times are later by this number of seconds."""
    moments = {name: at + by for name in MOMENTS if (at := getattr(record, name, None)) is not None}
    return structs.replace(record, **moments)


def _shifted_trial(given: ValuesRecord, trial: Trial, by: float) -> Trial:
    live = trial.live and tuple(_shifted(each, by) for each in trial.live)
    return structs.replace(_shifted(trial, by), live=live, given=given.of(trial.params))
