"""A study in memory goes as it would in a database; only the writing is quicker."""

from __future__ import annotations

from typing import Any

import pytest
from hyperopt import hp
from services.families import fleet_of

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, Report, Trial, TrialState
from shadho_celery.errors import LockLost
from shadho_celery.placement.policies import POLICIES
from shadho_celery.placement.shares import SHARES
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.simulation.executor import Change, SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.store.base import StudyRecord, Turn
from shadho_celery.store.memory import MemoryStore
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits, StudyState

S = TrialState
RECORD = StudyRecord(key="k", name="s", module="", seed=6, space={}, created_at=0.0)


def trial(number: int, **changes: Any) -> Trial:
    return Trial(number=number, subspace="all", params={"x": number / 7}, **changes)


def report(step: int, loss: float = 0.5) -> Report:
    return Report(number=0, attempt=1, step=step, loss=loss, at=1.0)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


# What is written


def test_trials_come_back_as_they_were_last_written_in_the_order_of_their_numbers(store: MemoryStore) -> None:
    store.write("k", 1, 0.0, Turn(new=[trial(10), trial(2)]))
    ended = trial(10, outcome=Outcome(state=S.COMPLETE, loss=0.5, metrics={"a": [1, {"b": None}]}))
    store.write("k", 1, 1.0, Turn(new=[trial(0)], changed=[ended]))
    assert store.trials() == [trial(0), trial(2), ended]


def test_an_old_fence_writes_nothing() -> None:
    store = MemoryStore(fence=2)
    store.write("k", 2, 0.0, Turn(new=[trial(0)]))
    with pytest.raises(LockLost):
        store.write("k", 1, 0.0, Turn(new=[trial(1)], changed=[trial(0, lost=1)], reported=[report(1)]))
    assert store.trials() == [trial(0)]


def test_a_study_closed_and_opened_on_what_was_kept_is_the_same_study(store: MemoryStore) -> None:
    study = played(StudyState(store, RECORD, 1, clock=ManualClock()), trials=30)
    study.close()
    again = StudyState(store, RECORD, 1, store.trials(), clock=ManualClock())
    assert list(again) == list(study)
    assert (again.best, again.counted, len(again.trials)) == (study.best, 30, 30)


# Beside a database


def played(study: StudyState, policy: str = "cost", shares: str = "uniform", trials: int = 150) -> StudyState:
    """The study after a search on machines of which some die, with trials of which some fail."""
    assert isinstance(study.clock, ManualClock)

    def play(trial: Attempt, compute_class: str) -> Outcome:
        seconds = (1 + trial.seed % 7) * (3 if compute_class == "cpu" else 1)
        if trial.seed % 10 == 0:
            return Outcome(state=S.FAILED, error="it had to fail", seconds=seconds)
        return Outcome(
            state=S.COMPLETE, loss=trial.seed % 1000 / 7, metrics={"a": {"b": 0.1}}, seconds=seconds, memory=7
        )

    space = hp.choice(
        "model", [{"x": hp.uniform("x", 0, 1)}, {"y": hp.loguniform("y", -9, 0), "n": hp.randint("n", 9)}]
    )
    changes = [Change(at=20, compute_class="cpu", workers=-2), Change(at=60, compute_class="cpu", workers=2)]
    executor = SimulatedExecutor(fleet_of({"gpu": 2, "cpu": 3}, changes=changes), play, study.clock, 1)
    limits = Limits(trials=trials)
    settings = StudySettings(sampler="random", policy=policy, shares=shares)
    make_scheduler(Plan.of(compile_space(space), settings, limits), study, executor).run()
    study.commit()
    return study


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "shares"),
    [(policy, shares) for policy in POLICIES for shares in SHARES if shares != "paper" or policy == "paper"],
)
def test_a_study_goes_as_it_would_in_a_database(policy: str, shares: str, store: MemoryStore) -> None:
    database = SqlStore("sqlite://")
    stored = open_study(database, {}, name="s", seed=6, clock=ManualClock())
    in_database = played(stored, policy, shares)
    in_memory = played(StudyState(store, RECORD, 1, clock=ManualClock()), policy, shares)
    assert sum(each.lost for each in in_memory) == 2
    assert in_memory.count(S.FAILED) > 0
    assert list(in_memory) == list(in_database)
    assert [*in_memory.trials] == [*in_database.trials]
    assert in_memory.best == in_database.best
    # And so does what was written of it.
    assert store.trials() == list(database.trials(stored.record.key)) == list(in_memory)
    in_database.close()
    database.close()
