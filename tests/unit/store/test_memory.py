"""A study in memory goes as it would in a database; only the writing is quicker."""

from __future__ import annotations

from pathlib import Path
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
from shadho_celery.session.opening import open_store
from shadho_celery.simulation.executor import Change, SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.store.base import StudyRecord, Turn
from shadho_celery.store.memory import LateStore, MemoryStore
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


def test_reports_come_once_by_trial_attempt_and_step(store: MemoryStore) -> None:
    store.write("k", 1, 0.0, Turn(reported=[report(3), report(1, 0.25)]))
    store.write("k", 1, 1.0, Turn(reported=[report(1, 9.0)]))
    assert store.reports("k") == store.reports("k", [0, 7]) == [report(1, 0.25), report(3)]
    assert store.reports("k", [7]) == []


# Written to a database once it is read by SQL


@pytest.fixture
def late() -> LateStore:
    """A study with three trials, of which the second one is the best."""
    late = LateStore()
    late.create(RECORD, [trial(0, outcome=Outcome(state=S.COMPLETE, loss=5.0), state=S.COMPLETE)])
    assert late.lock("k", "somewhere 1 2", 0.0) == 1
    losses = 0.5, 0.25, 0.25
    ended = [ended_trial(number, loss) for number, loss in enumerate(losses)]
    late.write("k", 1, 1.0, Turn(new=[trial(0), trial(1)], reported=[report(2), report(1)], choices={"all": "tpe"}))
    late.write("k", 1, 2.0, Turn(new=ended[2:], changed=ended[:2], classes=["local"]))
    return late


def ended_trial(number: int, loss: float) -> Trial:
    outcome = Outcome(state=S.COMPLETE, loss=loss, metrics={"a": [1, {"b": None}]})
    return trial(number, outcome=outcome, state=S.COMPLETE, finished_at=3.0)


def test_a_database_gets_all_that_was_written_before_and_after_it_was_needed(late: LateStore) -> None:
    assert [*late.sql.trials("k")] == late.trials("k")
    assert late.sql.reports("k") == late.reports("k") == [report(1), report(2)]
    late.write("k", 1, 4.0, Turn(new=[trial(3)], reported=[report(5)], decade=10.0))
    late.record_settings("k", 1, {"trials": 9}, {"trials": 9})
    late.reshape("k", 1, 5.0, {0: "other"}, space={"y": "uniform(0, 1)"})
    assert [*late.sql.trials("k")] == late.trials("k") == [*late.earlier("k")]
    assert [each.subspace for each in late.trials("k")] == ["other", "all", "all", "all"]
    assert len(late.sql.reports("k")) == len(late.reports("k")) == 3
    found = late.sql.find("s")
    assert (found.choices, found.classes, found.decade) == ({"all": "tpe"}, ("local",), 10.0)
    assert (found.settings, found.space) == ({"trials": 9}, {"y": "uniform(0, 1)"})
    assert [each.outcome.loss for each in late.sql.warm_start("k")] == [5.0]
    assert late.sql.holder("k", 6.0) is not None
    late.unlock("k", 1)
    assert late.sql.holder("k", 6.0) is None


def test_a_database_that_is_needed_late_has_the_changed_record_and_no_lock(late: LateStore) -> None:
    late.record_settings("k", 1, {"trials": 9}, {"trials": 9})
    late.reshape("k", 1, 5.0, {1: "other"}, space={"y": "uniform(0, 1)"})
    late.unlock("k", 1)
    found = late.sql.find("s")
    assert (found.choices, found.classes) == ({"all": "tpe"}, ("local",))
    assert (found.settings, found.space) == ({"trials": 9}, {"y": "uniform(0, 1)"})
    assert [each.subspace for each in late.sql.trials("k")] == ["all", "other", "all"]
    assert late.sql.holder("k", 6.0) is None


def test_counts_and_the_best_trial_are_those_of_the_database(late: LateStore) -> None:
    late.write("k", 1, 4.0, Turn(new=[trial(3), trial(4, outcome=Outcome(state=S.FAILED), state=S.FAILED)]))
    assert late.counts("k") == late.sql.counts("k") == {S.COMPLETE: 3, S.WAITING: 1, S.FAILED: 1}
    assert late.best("k") == late.sql.best("k") == 1
    smaller = Outcome(state=S.COMPLETE, loss=-1.0, constraints={"size": 2.0})
    late.write("k", 1, 4.0, Turn(new=[trial(5, outcome=smaller, state=S.COMPLETE)]))
    assert late.best("k") == late.sql.best("k") == 1
    late.write("k", 1, 4.0, Turn(new=[trial(6, outcome=Outcome(state=S.COMPLETE, loss=0.0), state=S.COMPLETE)]))
    assert late.best("k") == late.sql.best("k") == 6
    assert LateStore().best("k") is None


def test_a_caller_that_changes_a_trials_dicts_changes_nothing_in_the_store(late: LateStore) -> None:
    known = late.trials("k", [1])[0]
    known.params.clear()  # type: ignore[attr-defined]
    known.outcome.metrics["a"][1].clear()
    assert late.trials("k", [1]) == [ended_trial(1, 0.25)]


def test_only_a_store_without_file_and_server_is_late(tmp_path: Path) -> None:
    assert isinstance(open_store("sqlite://"), LateStore)
    assert isinstance(open_store(f"sqlite:///{tmp_path}/studies.db"), SqlStore)


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
