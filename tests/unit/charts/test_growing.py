"""Columns that grow: rows in any order, of any type, and again when they have changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services.cases import cases

import shadho_celery
from shadho_celery import hp
from shadho_celery.charts.columns import (
    ATTEMPTS,
    MOST_MOMENT,
    Codes,
    Depth,
    GrowingAttempts,
    GrowingTrials,
    Grown,
    Keys,
    Names,
    integers,
    names_of,
    read_trials,
    reals,
)
from shadho_celery.charts.losses import hypervolume, rungs
from shadho_celery.core.records import AttemptRecord, Placed, pack
from shadho_celery.core.trial import MAX_COUNT
from shadho_celery.program.recorded import load_study
from shadho_celery.results.study import StudyResults
from shadho_celery.store.base import Turn
from shadho_celery.store.sql import SqlStore


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    """A study of 20 trials."""
    store = f"sqlite:///{tmp_path_factory.mktemp('grown')}/shadho.db"
    options = {"trials": 20, "seed": 0, "store": store, "study": "first", "sampler": "random"}
    shadho_celery.minimize(lambda values: values["x"], {"x": hp.uniform("x", 0, 1)}, **options)
    return load_study(store, "first")


def texts(column: Codes) -> list[str | None]:
    return [column[place] for place in range(len(column))]


@pytest.mark.parametrize("seed", range(5))
def test_a_key_keeps_its_place_whatever_the_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys, known = Keys(), {}
    for start in (*range(0, 1000, 100), *rng.integers(0, 1000, 20)):
        asked = np.unique(rng.integers(start, start + 150, 60)) if start % 3 else np.arange(start, start + 50)
        rng.shuffle(asked)
        for key, place in zip(asked.tolist(), keys.places(asked).tolist(), strict=True):
            assert known.setdefault(key, place) == place
    assert sorted(known.values()) == [*range(len(keys))]
    assert keys.values[keys.order].tolist() == sorted(known)
    assert keys.known(np.array([max(known), max(known) + 1])).tolist() == [known[max(known)], -1]


def test_without_keys_nothing_is_known() -> None:
    assert Keys().known(np.array([3])).tolist() == [-1]
    assert Keys().places(np.array([], np.int64)).tolist() == []


def test_an_array_without_values_is_missing_everywhere_and_grows_from_there() -> None:
    grown = Grown(math.nan, np.float64)
    assert np.isnan(grown.first(3)).all()
    grown.put(np.array([1]), np.array([5.0]), 2)
    assert np.isnan(grown.first(3000)).sum() == 2999
    assert grown.first(3000)[1] == 5.0


def test_names_are_sorted_and_texts_of_any_type_stay_data() -> None:
    names = Names()
    names.put(np.arange(4), [b"b", "a", None, b"\xff"], 4)
    names.put(np.arange(4, 8), [b"a", 7, bytearray(b"b"), 2.5], 8)
    found = names.first(9, slice(0, 9))
    assert found.names == ["\\xff", "a", "b"]
    assert [found[place] for place in range(9)] == ["b", "a", None, "\\xff", "a", None, None, None, None]


def test_numbers_of_a_wrong_type_or_size_are_missing() -> None:
    assert reals([1, 2.5, None, "x", b"y", math.inf]).tolist()[:2] == [1.0, 2.5]
    assert np.isnan(reals([1, 2.5, None, "x", b"y", math.inf])[2:]).all()
    assert reals([math.inf], math.inf).tolist() == [math.inf]
    assert np.isnan(reals([2 * MOST_MOMENT, -2 * MOST_MOMENT], most=MOST_MOMENT)).all()
    assert integers([0, 5, -1, 2.0, "3", None, True, 2**62], 0, 100).tolist() == [0, 5, -1, -1, -1, -1, -1, -1]


def test_what_is_read_later_fits_what_was_read_before(study: StudyResults) -> None:
    growing = GrowingTrials(study)
    for depth, before in ((Depth.LOSSES, None), (Depth.FACTS, Depth.LOSSES), (Depth.PARAMS, Depth.FACTS)):
        names = names_of(depth, before)
        growing.put(study.rows_of_trials(names), names, are_new=before is None)
    made, whole = growing.columns(), read_trials(study)
    for name in ("number", "loss", "seconds", "finished_at", "rung", "violation"):
        np.testing.assert_array_equal(getattr(made, name), getattr(whole, name))
    for name in ("state", "host", "subspace", "failure"):
        assert texts(getattr(made, name)) == texts(getattr(whole, name))
    np.testing.assert_array_equal(made.labels["x"].values, whole.labels["x"].values)
    assert {*names_of(Depth.PARAMS)} == {name for depth in Depth for name in names_of(depth)}


def test_a_trial_that_is_not_known_yet_is_left_out_of_what_is_read_later(study: StudyResults) -> None:
    growing, names = GrowingTrials(study), names_of(Depth.FACTS, Depth.LOSSES)
    growing.put(study.rows_of_trials(names_of(Depth.LOSSES)), names_of(Depth.LOSSES))
    row = (99, *(1.0,) * 4, b"all", b"here")
    growing.put([[row, (3, *row[1:])]], names, are_new=False)
    assert len(growing) == 20
    assert growing.columns().seconds[3] == 1.0


#: params that are not, or not only, numbers by name
DAMAGED = {
    "joined with a neighbour": [b'{"x": 1.0', b'"y": 2.0}'],
    "two in one": [b'{"x": 1.0}, {"x": 2.0}', b'{"x": 3.0}'],
    "a text and bytes": ['{"x": "1"}', b'{"x": 3.0}'],
    "a number and none": [5, None],
    "nested": [b'{"x": {"y": 1}}', b"[" * 10_000],
    "a null": [b'{"x": null}', b"null"],
}


@cases("texts", [*DAMAGED.values()])
def test_params_of_a_wrong_form_are_left_out_alone(study: StudyResults, texts: Sequence[Any]) -> None:
    growing = GrowingTrials(study)
    growing.put(
        [[(0, b'{"x": 0.5}'), *((n, text) for n, text in enumerate(texts, 1)), (9, b'{"x": 0.7}')]],
        ["number", "params"],
    )
    values = growing.columns().labels["x"].values
    assert (values[0], values[-1]) == (0.5, 0.7)
    assert len(values) == 4


def attempt_row(number: object, attempt: object = 1, **facts: Any) -> tuple[Any, ...]:
    return (number, attempt, *(facts.get(name) for name in ATTEMPTS[2:]))


def test_attempts_are_the_records_of_the_store(study: StudyResults) -> None:
    growing = GrowingAttempts(study)
    growing.put(study.rows_of_attempts(ATTEMPTS))
    found, records = growing.columns(0.0, is_running=True), study.records.attempts()
    assert found.slot.tolist() == [-1 if slot is None else slot for slot in records["slot"]]
    for name in ("number", "attempt", "queued_at", "started_at", "ended_at"):
        assert getattr(found, name).tolist() == records[name]
    for name in ("compute_class", "host", "worker", "end"):
        assert texts(getattr(found, name)) == records[name]
    own = [placed.get(name) for placed, name in zip(records["placed"], records["compute_class"], strict=True)]
    expected = [math.nan if each is None or each.seconds is None else each.seconds for each in own]
    np.testing.assert_array_equal(found.predicted, expected)
    assert len(found.sessions) == len(study.records.sessions()["worker"])


def test_attempts_that_change_replace_what_was_known(study: StudyResults) -> None:
    growing = GrowingAttempts(study)
    growing.put([[attempt_row(1), attempt_row(1, 2, started_at=5.0)], [attempt_row(0, started_at=1.0)]])
    growing.put([[attempt_row(1, 2, started_at=5.0, ended_at=7.0, end="complete", copy=1)]])
    found = growing.columns(9.0, is_running=True)
    assert [*zip(found.number.tolist(), found.attempt.tolist(), strict=True)] == [(0, 1), (1, 1), (1, 2)]
    assert found.ended_at.tolist()[2] == 7.0
    assert found.is_copy.tolist() == [False, False, True]
    assert found.end[2] == "complete"
    assert found.until.tolist()[0] == 9.0


def test_the_prediction_is_that_of_the_attempts_own_class(tmp_path: Path) -> None:
    with closing(SqlStore(f"sqlite:///{tmp_path}/shadho.db")) as store:
        study = shadho_celery.Study({"x": hp.uniform("x", 0, 1)}, store=store.url, study="first")
        study.close()
        [record] = store.records()
        fence = store.lock(record.key, "test", 0.0)
        packed = pack({"cpu": Placed(4.0, 0.0, None), "gpu": Placed(2.0, 0.0, None)}, ["cpu", "gpu"])
        rows = [
            AttemptRecord(number=n, attempt=1, compute_class=name, placed=packed)
            for n, name in enumerate(["gpu", "cpu", "new"])
        ]
        store.write(record.key, fence, 0.0, Turn(attempted=rows, classes=["cpu", "gpu"]))
        growing = GrowingAttempts(load_study(store.url, "first"))
        growing.put(store.rows_of_attempts(record.key, ATTEMPTS))
        found = growing.columns(0.0, is_running=True)
        np.testing.assert_array_equal(found.predicted, [2.0, 4.0, math.nan])


@cases(
    "row",
    [
        attempt_row("x"),
        attempt_row(-1),
        attempt_row(MAX_COUNT + 1),
        attempt_row(0, 0),
        attempt_row(0, 10**6),
        attempt_row(0, None),
        attempt_row(0, slot="two", host=b"\xff", queued_at=1e300, started_at=b"x", end=7, copy="x", placed="abc"),
        attempt_row(0, compute_class=5, placed=b"12345"),
        attempt_row(0, compute_class="cpu", placed=b"1" * 12),
    ],
)
def test_a_damaged_attempt_hides_no_other(study: StudyResults, row: tuple[Any, ...]) -> None:
    growing = GrowingAttempts(study)
    growing.put([[row, attempt_row(3, started_at=1.0, ended_at=2.0, end="complete", compute_class="cpu")]])
    found = growing.columns(9.0, is_running=False)
    assert (found.number[-1], found.started_at[-1], found.end[len(found) - 1]) == (3, 1.0, "complete")
    assert not np.isinf(found.predicted).any()


def test_a_block_without_a_row_that_can_be_shown_changes_nothing(study: StudyResults) -> None:
    growing, attempts, names = GrowingTrials(study), GrowingAttempts(study), names_of(Depth.PARAMS)
    growing.put(study.rows_of_trials(names), names)
    # Deeper facts of trials that were added while others were read; damaged numbers; no rows.
    for number, are_new in ((100, False), (-1, True), (None, True), ("x", True), (2**63 - 1, True)):
        growing.put([[(number, *["x"] * (len(names) - 1))] * 2], names, are_new=are_new)
        attempts.put([[attempt_row(number if are_new else -1)] * 2])
    growing.put([[]], names)
    attempts.put([[]])
    assert growing.columns().number.tolist() == [*range(20)]
    assert len(attempts.columns(9.0, is_running=False)) == 0


def test_the_hypervolume_and_the_rungs_are_those_of_the_studys_report() -> None:
    def objective(values: dict[str, float], context: Any) -> dict[str, Any]:
        return {"losses": {"a": values["x"], "b": (values["x"] - 1) ** 2 + values["y"]}}

    space = {"x": hp.uniform("x", 0, 1), "y": hp.uniform("y", 0, 1)}
    options: dict[str, Any] = {"trials": 60, "seed": 0, "store": "sqlite:///:memory:", "sampler": "random"}
    several = shadho_celery.minimize(objective, space, objectives={"a": "minimize", "b": "maximize"}, **options)
    report, columns = several.read_report(), read_trials(several)
    assert report.coverage is not None
    series = hypervolume(columns).series[0].columns
    assert [*zip(series["x"], series["y"], strict=True)] == [
        (float(n), volume) for n, volume in report.coverage.history
    ]
    assert rungs(columns).empty


def test_slots_are_read_and_missing_ones_count_as_one(study: StudyResults) -> None:
    growing, names = GrowingTrials(study), names_of(Depth.FACTS)
    growing.put(study.rows_of_trials(names), names)
    assert growing.columns().slots.tolist() == [1.0] * 20
    growing.put([[(0, 4), (1, None), (2, "many")]], ("number", "slots"))
    assert growing.columns().slots[:3].tolist() == [4.0, 1.0, 1.0]
