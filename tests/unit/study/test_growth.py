"""A study of many finished trials is small in memory, and its lock is kept while it is loaded."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

import shadho_celery
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Outcome, Result, TrialState
from shadho_celery.store.rows import studies
from shadho_celery.store.sql import LOCK_SECONDS, SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState

NOW = 1_700_000_000.0
METRICS = 30
#: bytes that a trial may take in the scheduler, whatever its metrics
BYTES = 200


def run(study: StudyState, trials: int) -> None:
    """Let so many trials end, a hundred a turn."""
    for _ in range(trials // 100):
        for _ in range(100):
            sent = study.send(study.add("all", {"rate": 0.5, "width": 128}, seed=1), "cpu")
            metrics = {f"metric {each}": sent.number / 7 for each in range(METRICS)}
            outcome = Outcome(state=TrialState.COMPLETE, loss=1.0, metrics=metrics, seconds=1.0)
            study.tell(Result(number=sent.number, attempt=1, outcome=outcome, at=NOW))
        study.commit()


@pytest.mark.slow
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_finished_trial_takes_little_memory_however_many_metrics_it_has(tmp_path: Path, is_resumed: bool) -> None:
    with closing(SqlStore(f"sqlite:///{tmp_path}/s.db")) as store:
        study = open_study(store, {}, name="s", seed=0)
        run(study, 1000)
        if is_resumed:
            # What the first queries leave with SQLAlchemy, compiled, comes once.
            study.close()
            study = open_study(store, {}, name="s", resume=True)
        # Python keeps up to 2,000 freed tuples of each size to 20, such as the arguments of a row.
        freed = [tuple(range(size)) for size in range(1, 21) for _ in range(2000)]
        del freed
        tracemalloc.start()
        if is_resumed:
            study.close()
            del study
            study = open_study(store, {}, name="s", resume=True)
        else:
            run(study, 1000)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        finished = len(study.trials)
        assert grown < 150_000 + 1000 * BYTES
        assert finished == (1000 if is_resumed else 2000)
        assert study.trial(7).outcome.metrics["metric 3"] == 1.0
        study.close()


class Hasty(ManualClock):
    """A clock on which whatever is done takes a second."""

    def now(self) -> float:
        self.sleep(1.0)
        return super().now()


@pytest.mark.slow
def test_the_lock_is_renewed_while_a_long_study_is_loaded() -> None:
    store = SqlStore("sqlite://")
    study = open_study(store, {}, name="s", seed=0, clock=ManualClock(NOW))
    run(study, 20_000)
    study.close()
    study = open_study(store, {}, name="s", resume=True, clock=Hasty(NOW))
    with store._engine.connect() as connection:
        expires = connection.execute(sa.select(studies.c.lock_expires)).scalar_one()
    assert expires > NOW + LOCK_SECONDS + 10
    study.close()


@pytest.mark.parametrize("store", ["sqlite://", "sqlite:///s.db"])
def test_the_trials_of_a_search_can_be_read_after_it_was_closed(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    from hyperopt import hp

    def objective(x: float) -> dict[str, float]:
        return {"loss": x**2, "half": x / 2}

    study = shadho_celery.minimize(objective, hp.uniform("x", -1, 1), trials=5, seed=0, store=store)
    assert [trial.metrics["half"] for trial in study.trials] == [trial.params["x"] / 2 for trial in study.trials]
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 5
    assert study.best is not None
    assert study.best.metrics == {"half": study.best.params["x"] / 2}
