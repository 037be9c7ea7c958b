"""A report has what a study has found, whether it is made from the scheduler's state or from the store."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hyperopt import hp
from services.played import S, play, searched

from shadho_celery.core.trial import Attempt, Outcome
from shadho_celery.results.report import overview_of, report_of, run_of, state_at_rest
from shadho_celery.results.study import StudyResults, plain_json, study_json
from shadho_celery.results.trial import Values
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore

SPACE = compile_space({"x": hp.uniform("x", 0, 1), "side": hp.choice("side", ["left", {"y": hp.normal("y", 0, 1)}])})


def two_losses(attempt: Attempt, compute_class: str) -> Outcome:
    x = float(attempt.params["x"])
    losses, over = {"error": x, "accuracy": -math.sqrt(x)}, {"memory": x - 0.9}
    facts = {"losses": losses, "constraints": over, "warning": "a metric was dropped" if attempt.number % 3 else None}
    return Outcome(state=S.COMPLETE, loss=x, seconds=1.0 + x, **facts)


def failing(attempt: Attempt, compute_class: str) -> Outcome:
    return Outcome(state=S.FAILED, error=f"{'AB'[attempt.number % 2]}: no", seconds=1.0 + attempt.number / 100)


def slow_where_large(attempt: Attempt, compute_class: str) -> Outcome:
    x = float(attempt.params["x"])
    return Outcome(state=S.COMPLETE, loss=x, seconds=20 + 10 * x if compute_class == "gpu" else 20 + 400 * x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("played", "trials", "in_force"),
    [
        (play, 12, {"sampler": "auto", "shares": "even"}),
        (two_losses, 30, {"objectives": {"error": "minimize", "accuracy": "maximize"}}),
        (failing, 8, {}),
        (slow_where_large, 200, {}),
        (play, 0, {}),
    ],
    ids=["failures", "several losses", "only failures", "params that decide", "no trial"],
)
def test_of_a_study_that_has_ended_the_reports_from_state_and_store_are_equal(
    played: Callable[..., Outcome], trials: int, in_force: Mapping[str, Any]
) -> None:
    study, scheduler, _ = searched(SPACE, trials or 1, play=played, turns=0)
    assert isinstance(study.store, SqlStore)
    study.store.record_settings(study.record.key, study.fence, {}, in_force)
    study.record = replace(study.record, in_force=in_force)
    if in_force.get("sampler") == "auto":
        for name in scheduler.subspaces:
            study.note_choice(name, "tpe: why")
    while trials and not scheduler.done:
        scheduler.turn()
    study.close()
    ours = report_of(study, study.store, Values(study.record))
    theirs = StudyResults(study.store, study.store.find("s")).read_report()
    assert ours == theirs
    assert plain_json(study_json(ours)) == plain_json(study_json(theirs))
    assert ours.ended == trials == sum(each.complete + each.failed for each in ours.classes.values())
    assert bool(ours.front) == ("objectives" in in_force)
    assert bool(ours.placed_by_params) == (played is slow_where_large)
    assert {each.failure.headline for each in ours.failures} >= ({"A: no", "B: no"} if played is failing else set())


def stalled(state: S, since: int) -> Callable[..., Outcome]:
    """Trials that get better until one, and from then on end in this state without a better loss."""

    def played(attempt: Attempt, compute_class: str) -> Outcome:
        late = attempt.number >= since
        return Outcome(state=state if late else S.COMPLETE, loss=1.0 if late else -float(attempt.number), seconds=1.0)

    return played


def test_a_search_without_progress_in_its_last_half_says_so_with_the_remedy() -> None:
    def said(play: Callable[..., Outcome], trials: int = 80, **in_force: Any) -> str:
        study, _, _ = searched(SPACE, trials, play=play)
        study.record = replace(study.record, in_force=in_force)
        return overview_of(study).still_words

    pruned = said(stalled(S.PRUNED, 20))
    assert re.match("no trial has completed in the last (58|59|60) of 80: all were pruned or failed, as when", pruned)
    assert pruned.endswith("--early-stop 30 (early_stop=30 in Python) ends a search that makes no progress")
    assert re.match(
        "no better loss in the last (58|59|60) of 80 trials; --early-stop 30", said(stalled(S.COMPLETE, 20))
    )
    assert " of 80: all failed; --early-stop" in said(stalled(S.FAILED, 20))
    assert said(stalled(S.COMPLETE, 60)) == "", "the last half has a better loss"
    assert said(stalled(S.COMPLETE, 10), trials=50) == "", "too few trials to say"
    assert said(stalled(S.PRUNED, 20), early_stop=100) == "", "it ends by itself"
    assert said(stalled(S.FAILED, 0)) == "", "no trial has a loss"


def test_a_report_of_a_study_that_runs_names_its_scheduler_and_counts_its_open_trials() -> None:
    study, _, _ = searched(SPACE, 10, turns=2)
    study.commit()
    assert isinstance(study.store, SqlStore)
    report = StudyResults(study.store, study.record).read_report()
    assert report.running_on
    assert report.counts == {state: study.count(state) for state in S}
    assert study.in_flight > 0
    assert not report.notices, "trials in flight wait for nobody"
    told = study_json(report)
    assert (told["state"], told["open"]["running"]) == ("running", study.count(S.RUNNING))
    assert (told["seconds"], {each["slots"] for each in told["classes"].values()} - {None}) == (None, set())


def test_an_overview_for_the_live_view_reads_nothing_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    study, _, _ = searched(SPACE, 30, play=two_losses)
    study.record = replace(study.record, in_force={"objectives": {"error": "minimize", "accuracy": "maximize"}})
    study.commit()

    def refuse(*_: object) -> Any:
        raise AssertionError("the store is read")

    monkeypatch.setattr(SqlStore, "_fetched", refuse)
    known = overview_of(study)
    assert known.best is not None
    assert known.best_words.startswith(f"front of {known.on_front} trials, best error {known.best.loss:.6g}")
    with pytest.raises(AssertionError, match="the store is read"):
        report_of(study, SqlStore("sqlite://"), Values(study.record))


def test_what_only_a_run_knows_is_added_to_the_same_object() -> None:
    study, _, _ = searched(SPACE, 10)
    assert isinstance(study.store, SqlStore)
    study.copied, study.rescued = 2, 1
    report, run = report_of(study, study.store, Values(study.record)), run_of(study, 1.25, {}, {"gpu": 2, "idle": 3}, 4)
    plainly, with_run = study_json(report), study_json(report, run)
    assert plainly.keys() == with_run.keys()
    assert with_run["seconds"] == 1.25
    assert with_run["classes"]["idle"] == {"complete": 0, "pruned": 0, "failed": 0, "slots": 3}
    assert with_run["notices"] == [
        "late trials copied to an idle slot: 2; ended by the copy: 1",
        "results refused, late or of other params; each trial counts once: 4",
    ]
    assert run.failures == study.failures.common()


def test_a_study_that_was_stopped_after_its_last_trial_was_sent_has_ended() -> None:
    """It is stopped if trials are left, or if it has no limit on trials."""
    record = searched(trials=5)[0].record
    found = [
        state_at_rest(replace(record, in_force={"trials": limit}), steered, ended)
        for limit, steered, ended in ((5, ["stop"], 5), (5, ["stop"], 4), (5, [], 4), (None, ["stop"], 5))
    ]
    assert found == ["ended", "stopped", "ended", "stopped"]
