"""History of losses, best so far."""

from __future__ import annotations

import math

import numpy as np
import pytest
from services.columns import trials

from shadho_celery.charts.chart import FAR, MOST, Mark, Scale
from shadho_celery.charts.losses import SECONDS, best_so_far, comparison, comparisons, history

ROWS = [
    {"loss": 3.0, "compute_class": "gpu"},
    {"state": "FAILED", "failure": "ValueError: no"},
    {"loss": 1.0},
    {"loss": 2.0, "state": "PRUNED"},
    {"loss": 2.5},
    {"state": "RUNNING", "finished_at": math.nan},
    # It does not count against the limit.
    {"state": "CANCELLED"},
]


def test_the_history_has_each_class_the_pruned_the_failed_and_the_best_so_far() -> None:
    chart = history(trials(ROWS, asked=40))
    assert chart.title == "The best loss is 1 after 5 of 40 trials"
    assert history(trials(ROWS, asked=4)).title.endswith(" after 5 of 5 trials"), "failed trials have run again"
    found = {series.name: series for series in chart.series}
    assert {*found} == {"gpu, complete", "cpu, complete", "cpu, pruned", "failed", "best so far"}
    assert found["cpu, complete"].columns["y"] == [1.0, 2.5]
    assert found["cpu, complete"].columns["number"] == [2, 4]
    assert found["cpu, pruned"].form == "hollow"
    assert found["failed"].columns["y"] == [None]
    assert found["best so far"].mark is Mark.STEPS
    assert found["best so far"].columns == {"x": [0.0, 2.0, 4.0], "y": [3.0, 1.0, 1.0]}


def test_a_loss_that_is_maximised_has_its_greatest_value_as_the_best() -> None:
    rows = [{"accuracy": value, "loss": value} for value in (0.2, 0.9, 0.5)]
    found = trials(rows, objectives={"accuracy": "maximize"})
    assert best_so_far(found, np.arange(3.0))[1].tolist() == [0.2, 0.9, 0.9]
    assert history(found).title == "The best accuracy is 0.9 after 3 trials"


@pytest.mark.parametrize(("direction", "ends"), [("minimize", (0.9, 5.725)), ("maximize", (5.275, 10.225))])
def test_the_axis_of_the_losses_is_fitted_to_the_better_half(direction: str, ends: tuple[float, float]) -> None:
    rows = [{"loss": float(loss)} for loss in range(1, 11)]
    axis = history(trials(rows, objectives={"accuracy": direction})).axes[1]
    assert axis.name == {"minimize": "accuracy", "maximize": "accuracy (maximize)"}[direction]
    assert axis.focus == pytest.approx(ends)
    assert not history(trials(rows[:9])).axes[1].focus
    assert not history(trials([{"loss": 1.0}] * 20)).axes[1].focus


def test_the_best_so_far_is_feasible_and_of_the_greatest_budget() -> None:
    rows = [
        {"loss": 0.1, "budget": 1.0},
        {"loss": 0.2, "budget": 9.0, "violation": 1.0},
        {"loss": 0.5, "budget": 9.0},
        {"loss": math.inf, "budget": 9.0},
    ]
    assert best_so_far(trials(rows), np.arange(4.0))[1].tolist() == [0.5]


def test_along_seconds_a_trial_stands_at_its_end() -> None:
    chart = history(trials([{"loss": 1.0, "started_at": 100.0, "finished_at": 103.5}]), SECONDS)
    assert chart.axes[0].unit == "s"
    assert chart.series[0].columns["x"] == [3.5]


def test_losses_that_are_not_finite_are_left_out_and_said_so() -> None:
    chart = history(trials([{"loss": 1.0}, {"loss": math.inf}, {"loss": 1e300}]))
    assert [series.columns["y"] for series in chart.series if series.mark is Mark.POINTS] == [[1.0, FAR]]
    assert chart.axes[1].scale is Scale.LOG


def test_a_history_of_many_trials_keeps_its_outliers_within_the_limit() -> None:
    rng = np.random.default_rng(0)
    rows = [{"loss": float(value)} for value in rng.normal(size=20_000)]
    rows[7_777]["loss"] = 50.0
    rows[100] = {"state": "FAILED"}
    chart = history(trials(rows))
    assert len(chart) <= MOST
    points = next(series for series in chart.series if series.name == "cpu, complete")
    assert 50.0 in points.columns["y"]
    assert "Of 19,999 points" in chart.note


def test_without_an_ended_trial_the_chart_says_what_will_be_here() -> None:
    for rows in ([], [{"state": "RUNNING"}]):
        chart = history(trials(rows))
        assert chart.empty
        assert not len(chart)


def test_studies_are_compared_by_their_best_loss_so_far() -> None:
    chart = comparison({"one": trials(ROWS), "other": trials([{"loss": 5.0}, {"loss": 0.5}]), "none": trials([])})
    assert chart.title == "The best loss is 1 in one, 0.5 in other"
    assert [series.columns["y"] for series in chart.series] == [[3.0, 1.0, 1.0], [5.0, 0.5]]
    assert comparison({"none": trials([])}).empty
    rows = [{"loss": 2.0}, {"loss": 1.0}, {"loss": 3.0}, {"state": "FAILED"}, {"state": "PRUNED"}, {"state": "RUNNING"}]
    columns = comparison({"one": trials(rows)}).series[0].columns
    assert columns["x"][-1] == 4, "the line goes on to the last trial that has ended"
    assert columns["y"][-1] == 1.0


def test_studies_that_maximise_are_not_compared_with_those_that_minimise() -> None:
    best = trials([{"loss": 0.2}, {"loss": 0.9}], objectives={"accuracy": "maximize"})
    charts = comparisons({"one": trials(ROWS), "best": best, "other": trials(ROWS)})
    assert [chart.axes[1].name for chart in charts] == [
        "best loss so far (minimize)",
        "best accuracy so far (maximize)",
    ]
    assert [[series.name for series in chart.series] for chart in charts] == [["one", "other"], ["best"]]
    assert [chart.axes[1].name for chart in comparisons({"best": best})] == ["best accuracy so far (maximize)"]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_infeasible_trials_look_different_and_are_never_the_best(direction: str) -> None:
    sign = -1.0 if direction == "maximize" else 1.0
    rows = [
        {"loss": sign * loss, "violation": away, "budget": 1.0} for loss, away in ((3.0, 0.0), (1.0, 0.5), (2.0, 0.0))
    ]
    found = trials(rows, objectives={"f": direction})
    shown = {series.name: series for series in history(found).series}
    assert shown["cpu, infeasible"].form == "dash"
    assert shown["cpu, infeasible"].columns["number"] == [1]
    assert shown["cpu, complete"].columns["number"] == [0, 2]
    assert shown["best so far"].columns["y"] == [sign * 3.0, sign * 2.0]
    assert history(trials(rows[1:2])).title == "No feasible trial has a loss after 1 trial"


def test_without_a_loss_the_history_says_how_many_trials_have_failed() -> None:
    failed = {"state": "FAILED", "loss": None}
    assert history(trials([failed])).empty == "1 trial has failed, and none has a loss yet."
    assert history(trials([failed, failed])).empty.startswith("2 trials have failed")
    assert history(trials([])).empty == "No trial has ended yet."
