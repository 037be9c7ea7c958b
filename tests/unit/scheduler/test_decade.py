"""A study records the decade of its trials once, on a played clock, and `auto` goes by it in every later run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp
from services.families import fleet_of

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.samplers.auto import FIRST
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.simulation.executor import SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits

TREE = hp.choice("kind", [{"u": hp.normal("u", 0, 2)}, {"v": hp.uniform("v", 0, 1), "w": hp.uniform("w", 0, 3)}])
FIDELITY = {"least": 1, "most": 9, "eta": 3, "how": "asha"}


def run(
    folder: Path, trials: int, seconds: float, *, resume: bool = False, **settings: Any
) -> tuple[StudyRecord, list[Any]]:
    """Run a study to its number of trials, each of so many seconds. Return its record and its trials."""
    # A later run begins later: samplers learn in the order of the results.
    space, clock = compile_space(TREE), ManualClock(1e5 * trials)
    plan = Plan.of(space, StudySettings(sampler="auto", **settings), Limits(trials=trials))

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        loss = sum((value - 0.3) ** 2 for value in attempt.params.values())
        took = seconds * (1 + attempt.number % 3)
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=took)

    store = SqlStore(f"sqlite:///{folder}/trials.db")
    try:
        study = open_study(store, space.describe(), name="study", seed=4, resume=resume, clock=clock)
        make_scheduler(plan, study, SimulatedExecutor(fleet_of({"cpu": 1}), play, clock)).run()
        found = [(trial.number, trial.subspace, trial.params, trial.budget) for trial in study]
        study.close()
        return store.find("study"), found
    finally:
        store.close()


def folder_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


@pytest.mark.slow
def test_the_decade_is_recorded_after_the_first_trials_of_all_subspaces_and_only_once(tmp_path: Path) -> None:
    record, _ = run(tmp_path, FIRST - 1, 0.2)
    assert record.decade is None
    record, _ = run(tmp_path, FIRST, 0.2, resume=True)
    assert record.decade == 0.1
    record, _ = run(tmp_path, 4 * FIRST, 60.0, resume=True)
    assert record.decade == 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "fidelity"), [(0.002, None), (0.2, FIDELITY), (60.0, None)])
def test_a_study_that_is_resumed_has_the_trials_of_one_that_was_not(
    tmp_path: Path, seconds: float, fidelity: dict[str, Any] | None
) -> None:
    _, at_once = run(folder_of(tmp_path, "once"), 50, seconds, fidelity=fidelity)
    twice = folder_of(tmp_path, "twice")
    for trials in (15, 30, 50):
        _, resumed = run(twice, trials, seconds, resume=trials > 15, fidelity=fidelity)
    assert resumed == at_once


@pytest.mark.slow
def test_equal_seeds_and_decades_give_equal_studies_and_other_decades_do_not(tmp_path: Path) -> None:
    found = {seconds: run(folder_of(tmp_path, str(seconds)), 45, seconds)[1] for seconds in (0.002, 0.02, 0.2, 60.0)}
    assert found[0.002] == found[0.02]
    assert found[0.02] != found[0.2]
    assert found[0.2] != found[60.0]


@pytest.mark.slow
def test_samplers_of_all_budgets_share_the_decade(tmp_path: Path) -> None:
    record, _ = run(tmp_path, 40, 0.2, fidelity=FIDELITY)
    assert record.decade == 0.1
    record, _ = run(folder_of(tmp_path, "long"), 40, 30.0, fidelity=FIDELITY)
    assert record.decade == 10.0
