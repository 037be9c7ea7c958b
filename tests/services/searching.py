"""A study and its scheduler on simulated machines, whose loop a test turns itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

from services.families import fleet_of
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.scheduler.executors import Executor
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.simulation.executor import Play, SimulatedExecutor
from shadho_celery.space.compile import Space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits, StudyState

#: turns after which a loop is taken to be endless
PATIENCE = 100_000

Self = TypeVar("Self", bound="SimulatedSearch")


class SimulatedSearch:
    """A study, its scheduler, and the machines; `facts` are those of the simulated fleet."""

    def __init__(
        self,
        space: Space,
        play: Play,
        slots: Mapping[str, int | Mapping[str, Any]],
        *,
        settings: StudySettings,
        limits: Limits,
        clock: ManualClock,
        seed: int | None,
        name: str = "s",
        store: SqlStore | None = None,
        resume: bool = False,
        code: str = "",
        ahead: int = 0,
        wrap: Callable[[SimulatedExecutor], Executor] = lambda executor: executor,
        **facts: Any,
    ) -> None:
        self.space, self.clock, self.store = space, clock, store or SqlStore("sqlite://")
        seed = None if resume else seed
        self.study: StudyState = open_study(
            self.store, space.describe(), name=name, seed=seed, clock=clock, resume=resume
        )
        self.study.use_code(code)
        self.simulated = SimulatedExecutor(fleet_of(slots, **facts), play, clock, ahead, recorder=self.study.recorder)
        plan = Plan.of(space, settings, limits)
        self.scheduler: Scheduler = make_scheduler(plan, self.study, wrap(self.simulated))

    def run(self: Self, until: Callable[[Self], bool] = lambda _: False) -> Self:
        """Turn the loop to its end, or until that holds."""
        for _ in range(PATIENCE):
            if self.scheduler.done or until(self):
                return self
            self.scheduler.turn()
        pytest.fail("the loop does not come to an end")

    def close(self: Self) -> Self:
        self.simulated.close()
        self.study.close()
        return self
