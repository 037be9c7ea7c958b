"""The table of a trial's facts says of every fact all that other modules take from it."""

from __future__ import annotations

from operator import attrgetter

import pytest
from services.cases import cases

from shadho_celery.core.columns import FACTS, HINTS, KEPT, PACKED, Shown, TrialFacts, names, of_trial
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.results.frame import FACTS as FRONT
from shadho_celery.results.trial import TrialResult
from shadho_celery.store.rows import BRIEF, FULL, trials
from shadho_celery.study.table import FinishedTrials

#: fields that are no facts of a trial: `outcome` holds facts, the others are for the scheduler
OTHERS = {"outcome", "failed_on", "out_of_memory", "rank_lost", "asked"}

#: a value of each kind of field that a study keeps
OUTCOME = {"loss": 0.5, "losses": {"a": 0.5}, "constraints": {"c": -1.0}, "seconds": 2.0, "memory": 3, "gpu_memory": 4}
OWN = {"compute_class": "gpu", "asked_at": 5.0, "finished_at": 6.0, "budget": 7.0, "rung": 8, "step": -9, "origin": 1}
OUTCOME |= {"code": "0" * 12}
OWN |= {"outgrown": "cpu", "outgrown_memory": "host", "lost": 2}

FULL_TRIAL = Trial(
    number=10,
    subspace="all",
    params={"x": 1},
    state=TrialState.COMPLETE,
    outcome=Outcome(state=TrialState.COMPLETE, continued=False, warning="w", **OUTCOME),  # type: ignore[arg-type]
    **OWN,  # type: ignore[arg-type]
)
NO_FACTS = Outcome(state=TrialState.FAILED)
BARE_TRIAL = Trial(number=11, subspace="all", params={}, state=NO_FACTS.state, outcome=NO_FACTS, finished_at=0.0)


def test_every_field_of_a_trial_and_its_outcome_is_in_the_table() -> None:
    fields = {*Trial.__struct_fields__, *Outcome.__struct_fields__}
    assert {*FACTS} - {"violation"} == fields - OTHERS


def test_a_store_has_a_column_for_each_fact() -> None:
    assert [column.name for column in trials.columns] == ["study", *FACTS, "change"]
    assert list(FULL.columns) == [*FACTS]
    assert {*KEPT} <= {*BRIEF.columns}


@cases("trial", [FULL_TRIAL, BARE_TRIAL])
@cases("column", [*PACKED, "losses", "constraints"])
def test_a_finished_trial_is_recalled_with_every_packed_fact(column: str, trial: Trial) -> None:
    read = attrgetter(of_trial(column))
    kept = FinishedTrials([trial], lambda _: [trial])
    [[recalled]] = [block for block, _ in kept.recall()]
    assert read(recalled) == read(trial)
    assert type(read(recalled)) is type(read(trial))


def test_the_example_has_another_value_than_none_for_every_packed_fact() -> None:
    assert None not in {column: attrgetter(of_trial(column))(FULL_TRIAL) for column in PACKED}.values()


@cases("fact", FACTS.values())
def test_a_fact_is_described_and_cannot_be_set(fact: object) -> None:
    name = fact.name  # type: ignore[attr-defined]
    assert getattr(TrialFacts, name) is fact
    assert str(fact.__doc__).endswith(".")
    with pytest.raises(AttributeError, match=name):
        setattr(TrialFacts(FULL_TRIAL), name, None)


def test_what_is_shown_is_a_property_of_a_result() -> None:
    assert {*names()} <= {*dir(TrialResult)}
    assert {*HINTS} - OTHERS == {*FACTS}


def test_the_columns_of_exported_tables_keep_their_order() -> None:
    assert [
        *("number", "state", "loss", "subspace", "budget", "origin", "step", "seconds", "compute_class", "host"),
        *("attempts", "sampler"),
    ] == FRONT
    assert names(Shown.DATE) == ["asked_at", "started_at", "finished_at"]
    assert names(Shown.END) == ["error", "warning"]
