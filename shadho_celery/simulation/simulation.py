"""Plays a search on a described cluster: the real scheduler, study, policy and cost model, on a manual clock."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hyperopt import hp

from shadho_celery.core.clock import ManualClock
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Attempt, Outcome, Trial, TrialState
from shadho_celery.executors.simulated import Play, SimulatedExecutor
from shadho_celery.scheduler.build import DEFAULT_SETTINGS, make_scheduler
from shadho_celery.simulation.cluster_file import LEAST_SECONDS, Cluster
from shadho_celery.space.compile import compile_space
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.limits import Limits
from shadho_celery.study.study import Study

#: factors drawn beforehand; a trial's own seed picks one, so it is the same under every policy
DRAWS = 2**17

#: a trial's next attempt is as lucky as the first one of the trial whose seed is greater by this
NEXT_ATTEMPT = 65_537

#: a trial that runs out of memory does so after this part of its time
OUT_OF_MEMORY_AT = 0.1

#: where in [0, 1] a family's loss is least
OPTIMUM = 0.3


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of a simulated search."""

    policy: str
    shares: str
    seed: int
    #: simulated seconds
    seconds: float
    #: trials that ended, by family
    complete: Mapping[str, int]
    failed: Mapping[str, int]
    #: completed trials by family and class
    placed: Mapping[str, Mapping[str, int]]
    #: attempts lost with their workers
    lost: int
    #: by class, the part of its slots' time in which they ran something
    utilisation: Mapping[str, float]
    #: least loss, and the simulated seconds until it was found
    best: float | None
    best_after: float | None
    #: CPU seconds that the simulation took, and the peak resident memory of its process in MiB
    cpu_seconds: float
    peak_mib: float
    #: all trials, for those who want to look closer
    study: Study

    @property
    def trials(self) -> int:
        """Trials that ended."""
        return sum(self.complete.values()) + sum(self.failed.values())

    def balanced(self, shares: Mapping[str, float]) -> float:
        """Trials completed an hour at the mix of `shares`: the least of count / share over the families."""
        total = sum(shares.values())
        return an_hour(min(self.complete[name] * total / share for name, share in shares.items()), self.seconds)

    def rows(self) -> Iterator[tuple[int, str, str, int, float, float, str]]:
        """Number, family, class, slot, start and end (seconds) and state of the trials that ended.

        Without those that failed because their workers died again and again: nobody saw their end.
        """
        for trial in self.study.trials:
            if trial.seconds is None:
                continue
            slot = int((trial.host or ".-1").rpartition(".")[2])
            started, ended = trial.started_at or 0.0, trial.finished_at or 0.0
            yield trial.number, family_of(trial), str(trial.compute_class), slot, started, ended, str(trial.state)


def an_hour(number: float, seconds: float) -> float:
    """What `number` in so many seconds is an hour; 0 where no time has passed."""
    return number / seconds * 3600 if seconds else 0.0


def family_of(trial: Trial | Attempt) -> str:
    """The family that a simulated trial belongs to."""
    return trial.subspace.removeprefix("family=")


def simulate(
    cluster: Cluster,
    *,
    policy: str = DEFAULT_SETTINGS.policy,
    shares: str = DEFAULT_SETTINGS.shares,
    sampler: str = DEFAULT_SETTINGS.sampler,
    rungs: Mapping[str, Any] | None = None,
    speculate: bool = True,
    seed: int | None = None,
    on_turn: Callable[[Study], None] = lambda study: None,
) -> Simulation:
    """Play a search on `cluster` to its end; the same `seed` gives the same to the bit.

    `on_turn` is called after every turn of the scheduler's loop. Raises UsageError for a name that does not exist.
    """
    seed = cluster.seed if seed is None else seed
    settings = StudySettings(
        policy=policy,
        shares=shares,
        sampler=sampler,
        rungs=rungs,
        speculate=speculate,
        classes=tuple(cluster.slots),
    )
    began = time.process_time()
    clock = ManualClock()
    record = StudyRecord(key="simulated", name="simulated", module="", seed=seed, space={}, created_at=0.0)
    study = Study(MemoryStore(), record, 1, clock=clock)
    executor = SimulatedExecutor(
        cluster.slots,
        make_play(cluster, seed),
        clock,
        changes=cluster.changes,
        memory=cluster.memory,
        lease_seconds=cluster.lease_seconds,
    )
    scheduler = make_scheduler(
        compile_space(make_space(cluster)),
        study,
        executor,
        Limits(seconds=cluster.seconds, trials=cluster.trials, target=cluster.target),
        settings,
    )
    # Nothing happens but what the executor says: there is no reason to look in between, once it has something to do.
    scheduler.turn_seconds = math.inf
    scheduler.assign()
    scheduler.fill()
    # At the end of its time a search is looked at as it stands; trials that still run have given nothing.
    while not scheduler.stopping:
        scheduler.turn()
        on_turn(study)
        if executor.is_still and not scheduler.classes and cluster.seconds is None:
            break  # all workers have died, and the trials will never be done
    cpu_seconds = time.process_time() - began
    return _summary(cluster, study, policy, shares, utilisation=executor.utilisation(), cpu_seconds=cpu_seconds)


def make_space(cluster: Cluster) -> Any:
    """The search space of a cluster: a choice of families, and one number within each."""
    total = sum(family.share for family in cluster.families.values())
    options = [{"family": name, "x": hp.uniform(f"x {name}", 0, 1)} for name in cluster.families]
    return hp.pchoice(
        "family",
        [(family.share / total, option) for family, option in zip(cluster.families.values(), options, strict=True)],
    )


def make_play(cluster: Cluster, seed: int) -> Play:
    """What the trials of a cluster do: their own seeds pick how large they are, whether they fail, and how slow.

    All of it is a trial's own but for that it is slowed down by chance: then another attempt may not be.
    """
    generator = np.random.default_rng([seed, 0x51])
    sizes = cluster.size.draw(generator, DRAWS).tolist()
    delays = cluster.straggler.draw(generator, DRAWS).tolist()
    luck = generator.random(DRAWS).tolist()

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        name = family_of(attempt)
        family = cluster.families[name]
        draw = attempt.seed % DRAWS
        factor = sizes[draw] * delays[(draw + (attempt.attempt - 1) * NEXT_ATTEMPT) % DRAWS] * (attempt.budget or 1.0)
        seconds = max(LEAST_SECONDS, family.seconds[compute_class] * factor)
        memory = cluster.memory[compute_class]
        if memory and family.memory > memory:
            return Outcome(state=TrialState.FAILED, error="out of memory", seconds=OUT_OF_MEMORY_AT * seconds)
        if luck[draw] < family.failure_rate:
            return Outcome(state=TrialState.FAILED, error="failed by chance", seconds=seconds)
        loss = family.best + family.spread * (float(attempt.params[f"x {name}"]) - OPTIMUM) ** 2
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds, memory=family.memory or None)

    return play


def _summary(
    cluster: Cluster,
    study: Study,
    policy: str,
    shares: str,
    *,
    utilisation: Mapping[str, float],
    cpu_seconds: float,
) -> Simulation:
    ended = {state: dict.fromkeys(cluster.families, 0) for state in (TrialState.COMPLETE, TrialState.FAILED)}
    placed = {name: dict.fromkeys(cluster.slots, 0) for name in cluster.families}
    for trial in study:
        name = family_of(trial)
        if trial.state in ended:
            ended[trial.state][name] += 1
        if trial.state is TrialState.COMPLETE:
            placed[name][str(trial.compute_class)] += 1
    best = study.best
    return Simulation(
        policy=policy,
        shares=shares,
        seed=study.record.seed,
        seconds=study.clock.now(),
        complete=ended[TrialState.COMPLETE],
        failed=ended[TrialState.FAILED],
        placed=placed,
        lost=sum(trial.lost for trial in study),
        utilisation=utilisation,
        best=best.loss if best else None,
        best_after=best.finished_at if best else None,
        cpu_seconds=cpu_seconds,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
        study=study,
    )
