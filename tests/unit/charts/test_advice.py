"""What to try next: each rule speaks where it applies, and is silent elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from services import columns

from shadho_celery.charts.params import importances
from shadho_celery.charts.report import advice, another_worker, best_at_an_end, many_failures, progress
from shadho_celery.charts.study import StudyData


class Given(StudyData):
    """A study of these trials, without a store."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], space: Mapping[str, str] = MappingProxyType({}), **more: Any
    ) -> None:
        super().__init__(SimpleNamespace(is_simulated=False, name="mine", space=space))  # type: ignore[arg-type]
        self._given = columns.trials(rows, **more)
        self.report = SimpleNamespace(still_words="")  # type: ignore[assignment]

    def trials(self, *, whole: bool = True) -> Any:
        return self._given

    def attempts(self) -> Any:
        return columns.attempts([], [columns.session("cpu", until=1e6), columns.session("gpu", until=1e6, host="two")])


def searched(count: int = 100, **more: Any) -> list[dict[str, Any]]:
    """Trials whose loss is least at the upper end of `x`; `noise` does not matter."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        x, noise = rng.uniform(size=2)
        rows.append({"loss": 1 - x, "seconds": 1 + x, "params": {"x": x, "noise": noise}, **more})
    return rows


def test_a_best_trial_at_the_end_of_a_range_asks_for_a_larger_range() -> None:
    found = [*best_at_an_end(Given(searched()))]
    assert len(found) == 1
    assert found[0].startswith("The best trials have x at the upper end of its range (0.99")
    assert found[0].endswith("): a wider range may have better ones.")


def test_a_label_without_ends_needs_no_larger_range() -> None:
    assert [*best_at_an_end(Given(searched(), {"x": "lognormal(0, 1)"}))] == []
    assert len([*best_at_an_end(Given(searched(), {"x": "loguniform(-9, 0)"}))]) == 1


def test_no_range_is_too_small_in_a_short_study_or_for_a_label_with_few_values() -> None:
    assert [*best_at_an_end(Given(searched(19)))] == []
    rows = [{"loss": float(5 - place % 5), "params": {"layers": float(place % 5)}} for place in range(50)]
    assert [*best_at_an_end(Given(rows))] == []
    choices = [{"loss": 1.0 / (1 + place), "params": {"kind": float(place)}} for place in range(50)]
    assert [*best_at_an_end(Given(choices, options={"kind": [str(each) for each in range(50)]}))] == []


def test_a_maximised_loss_is_best_at_the_other_end() -> None:
    rows = [{**row, "gain": row["loss"]} for row in searched()]
    found = [*best_at_an_end(Given(rows, objectives={"gain": "maximize"}))]
    assert "x at the lower end" in found[0]


def test_many_failures_are_named_with_their_place_in_the_space() -> None:
    rows = searched(60)
    for row in rows:
        if row["params"]["x"] > 0.8:
            row |= {"state": "FAILED", "failure": "ValueError: singular", "loss": np.nan}
    found = [*many_failures(Given(rows))]
    assert "of them like trial" in found[0]
    assert "of the trials with x " in found[1]
    assert found[1].endswith(" fail: fix the cause, or exclude such params from the space.")
    assert [*many_failures(Given(searched(60)))] == []


def test_failures_that_were_fixed_are_no_advice() -> None:
    rows = searched(30, code="old", state="FAILED", failure="ValueError: singular") + searched(30, code="new")
    assert [*many_failures(Given(rows))] == []


def test_failures_that_no_label_explains_exclude_no_params() -> None:
    rows = searched(60)
    for row in rows[::9]:
        row |= {"state": "FAILED", "failure": "OSError: disk full", "loss": np.nan}
    assert [*many_failures(Given(rows))][1:] == ["Fix the cause of the failures."]


def test_progress_depends_on_when_the_best_trial_was() -> None:
    rows = [{"loss": 100.0 - place} for place in range(40)]
    assert [*progress(Given(rows))] == [
        "The best trial, 39, is one of the latest: more trials may find a better one (shadho-celery resume mine "
        "--trials 80)."
    ]
    assert [*progress(Given(rows[::-1]))] == []
    stalled = Given([{"loss": float(place)} for place in range(100)])
    stalled.report = SimpleNamespace(still_words="no better loss in the last 99")  # type: ignore[assignment]
    assert [*progress(stalled)] == ["No better loss in the last 99."]
    assert [*progress(Given(rows[:10]))] == []


def converged(count: int = 200) -> list[dict[str, Any]]:
    """Trials of trees and nets that share `rate`, of which a pruner left only those near the best rate of each."""
    rng = np.random.default_rng(0)
    rows = []
    for place in range(count):
        is_net = place % 4 > 0
        log_rate = (-2 if is_net else -1) + (rng.normal(0, 0.05) if place > 20 else rng.uniform(-2, 1))
        loss = abs(log_rate + (2 if is_net else 1)) + 0.1 * rng.normal()
        params = {"model": float(is_net), "rate": 10.0**log_rate}
        state = {"state": "COMPLETE" if loss < 0.1 else "PRUNED"}
        rows.append({"loss": loss, "params": params, "subspace": f"model={is_net}", **state})
    return rows


def test_no_label_is_said_to_be_without_effect() -> None:
    """The rate explains little of the losses that are left, although the losses of the pruned trials depend on it."""
    trials = Given(converged(), log=["rate"]).trials()
    assert {each.label: each.loss or 0.0 for each in importances(trials)}["rate"] < 0.02
    said = " ".join(advice(Given(converged(), log=["rate"])) + advice(Given(searched(1000))))
    assert "noise" not in said
    assert "rate" not in said


def test_one_more_worker_is_proposed_where_classes_differ() -> None:
    on_two = [("cpu", "one"), ("gpu", "two")] * 40
    rows = [
        {**row, "compute_class": name, "host": host} for row, (name, host) in zip(searched(80), on_two, strict=True)
    ]
    assert next(another_worker(Given(rows))).startswith("One more ")
    assert [*another_worker(Given(rows[:40]))] == [], "40 seconds are mostly the start of workers"
    assert [*another_worker(Given([{**row, "host": "one"} for row in rows]))] == []
    assert [*another_worker(Given([{**row, "seconds": 0.01} for row in rows]))] == [], "sending them takes longer"
    assert [*another_worker(Given(searched(40)))] == []


def test_a_study_of_nothing_has_no_advice() -> None:
    assert advice(Given([])) == []
