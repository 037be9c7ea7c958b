"""Parallel coordinates, slices and importance; failures; fronts; rungs and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from services.columns import trials

from shadho_celery.charts.chart import MOST, Mark, Scale
from shadho_celery.charts.columns import TrialColumns
from shadho_celery.charts.losses import (
    MOST_CURVES,
    candidates,
    curves,
    failures,
    failures_by_label,
    front,
    hypervolume,
    learning_curve,
    rungs,
)
from shadho_celery.charts.params import (
    CELLS,
    LEAST,
    MOST_MEANS,
    contour,
    explained,
    importance,
    importances,
    mean_losses,
    parallel,
    slice_of,
)
from shadho_celery.core.trial import Report
from shadho_celery.errors import UsageError

#: a study with the labels of `searched`
STUDY: Any = SimpleNamespace(space=dict.fromkeys(["x", "size", "noise", "kind", "depth"], ""))


def reported(reports: Sequence[Report]) -> Any:
    """A study with these reports."""
    return SimpleNamespace(reports=lambda numbers: [each for each in reports if each.number in numbers])


def searched(count: int = 200, seed: int = 0) -> list[dict[str, object]]:
    """Trials whose loss depends on `x`, whose seconds depend on `size`, and to which `noise` does not matter."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        x, size, noise = rng.uniform(size=3)
        kind = int(rng.integers(2))
        params = {"x": x, "size": 1 + 99 * size, "noise": noise, "kind": float(kind)}
        if kind:
            params["depth"] = float(rng.integers(1, 5))
        subspace = f"kind={'net' if kind else 'tree'}"
        loss = (x - 0.3) ** 2 + 0.02 * rng.normal()
        rows.append({"loss": loss, "seconds": np.exp(3 * size), "params": params, "subspace": subspace})
    return rows


def test_importance_finds_what_matters_for_the_loss_and_for_the_seconds() -> None:
    found = trials(searched(), options={"kind": ["tree", "net"]})
    by_label = {each.label: each for each in importances(found)}
    assert importances(found)[0].label == "x"
    assert (by_label["x"].loss or 0) > 0.6
    assert (by_label["size"].seconds or 0) > 0.9
    for label in ("noise", "kind"):
        assert (by_label[label].loss or 0) < 0.1
        assert (by_label[label].seconds or 0) < 0.1
    assert by_label["depth"].trials < 200
    chart = importance(found)
    assert chart.title == "x matters most for the loss; size matters most for the seconds"
    assert chart.axes[1].categories[0] == "x"


def test_a_share_whose_interval_holds_0_is_not_clearly_above_0() -> None:
    by_label = {each.label: each for each in importances(trials(searched()))}
    x, noise = by_label["x"], by_label["noise"]
    assert (x.loss or 0) > 4 * (x.loss_error or 1)
    assert (noise.loss or 0) <= (noise.loss_error or 0)
    bars = importance(trials(searched())).series[0]
    assert bars.columns["error"][0] == x.loss_error
    assert importances(trials(searched(10)))[0].loss is not None
    assert importances(trials(searched(9)))[0].loss is None


def test_the_mean_of_the_model_follows_the_loss_and_few_very_bad_losses_do_not_decide_it() -> None:
    rows = searched()
    for row in rows[::20]:
        row["loss"] = 1e6
    found = trials(rows, options={"kind": ["tree", "net"]})
    x, mean = mean_losses(found, found.labels["x"])
    assert abs(x[mean.argmin()] - 0.3) < 0.1
    assert mean[0] > mean.min() + 0.03
    assert mean.max() < 1.0
    line = slice_of(found, STUDY, "x").series[-1]
    assert (line.name, line.mark, len(line)) == ("mean of the model", Mark.LINE, MOST_MEANS)
    assert slice_of(found, STUDY, "kind").series[-1].mark is Mark.POINTS
    assert not len(mean_losses(trials(rows[:5]), found.labels["x"])[0])


def test_the_contour_has_the_interaction_of_the_two_params_that_matter_most() -> None:
    """The loss x y is least where either is 0 and greatest where both are 1, which no sum of two functions says."""
    rng = np.random.default_rng(0)
    rows = [{"loss": x * 10**y, "params": {"x": x, "10^y": 10**y, "z": z}} for x, y, z in rng.uniform(size=(80, 3))]
    rows[0]["violation"] = 1.0
    chart = contour(trials(rows, log=["10^y"]))
    assert {axis.name: axis.scale for axis in chart.axes} == {"x": Scale.LINEAR, "10^y": Scale.LOG}
    cells, points, infeasible = chart.series
    assert (cells.mark, len(cells), len(points), infeasible.columns["number"]) == (Mark.CELLS, CELLS**2, 79, [0])
    x, y = (np.array(cells.columns["xy"[[axis.name for axis in chart.axes].index(name)]]) for name in ("x", "10^y"))
    mean = np.array(cells.columns["loss"])
    assert mean == pytest.approx(x * y, abs=1.0)
    assert (np.diff(mean) <= 0).all(), "the best cells come last"
    worst = contour(trials(rows, log=["10^y"], objectives={"loss": "maximize"})).series[0].columns["loss"]
    assert (np.diff(np.array(worst)) >= 0).all()


def test_without_two_numeric_params_that_matter_in_the_same_trials_there_is_no_contour() -> None:
    assert contour(trials(searched(), options={"kind": ["tree", "net"]})).empty, "only x matters"
    rng = np.random.default_rng(1)
    rows = [{"loss": u, "params": {"ab"[place % 2]: u}} for place, u in enumerate(rng.uniform(size=60).tolist())]
    assert contour(trials(rows)).empty
    joint = [{"loss": a + b, "params": {"a": a, "b": b}} for a, b in rng.uniform(size=(LEAST, 2)).tolist()]
    assert contour(trials(joint[1:])).empty


def test_the_axis_of_a_choice_has_the_options_that_were_drawn() -> None:
    rows = [{"loss": float(place), "params": {"kind": float(20 + 70 * (place % 2))}} for place in range(20)]
    options = [f"option {place}" for place in range(100)]
    chart = slice_of(trials(rows, options={"kind": options}), STUDY, "kind")
    assert chart.axes[0].categories == ["option 20", "option 90"]
    assert {*chart.series[0].columns["x"]} == {*chart.series[-1].columns["x"]} == {0.0, 1.0}
    assert parallel(trials(rows, options={"kind": options})).axes[0].categories == options


def test_axes_of_labels_follow_the_choice_that_decides_whether_they_are_active() -> None:
    rng = np.random.default_rng(4)
    rows = []
    for place in range(60):
        kind, inner = float(place % 3), float(place // 3 % 2)
        params = {"kind": kind, "x": rng.uniform()} | ({"a": rng.uniform()} if kind == 1 else {})
        params |= {"inner": inner} if kind == 2 else {}
        params |= {"deep": rng.uniform()} if kind == 2 and inner else {}
        rows.append({"loss": 3 * params["x"] + rng.normal(), "params": params})
    chart = parallel(trials(rows, options={"kind": ["t", "u", "v"], "inner": ["p", "q"]}))
    names = [axis.name for axis in chart.axes]
    assert names[-1] == "loss"
    at = names.index("kind")
    assert names[at : at + 4] == ["kind", "a", "inner", "deep"]


def test_importance_says_what_is_missing() -> None:
    rows = searched(30, seed=1)
    for place, row in enumerate(rows):
        row["seconds"] = 1.0
        if place >= 5:
            row["params"].pop("depth", None)  # type: ignore[attr-defined]
    chart = importance(trials(rows))
    assert chart.title == "x matters most for the loss"
    assert chart.note == "Missing bars need 10 completed trials with the label."
    assert "10 completed trials" in importance(trials(rows[:9])).empty


def test_labels_of_two_subspaces_that_both_decide_the_seconds_are_named_together() -> None:
    rng = np.random.default_rng(8)
    rows: list[dict[str, object]] = []
    for place in range(160):
        u, x = rng.uniform(size=2).tolist()
        kind = place % 2
        params = {"kind": float(kind), "x": x, ("depth" if kind else "width"): u}
        rows.append({"loss": x, "seconds": float(np.exp(2 * u)), "params": params, "subspace": f"kind={kind}"})
    title = importance(trials(rows, options={"kind": ["tree", "net"]})).title
    assert title.startswith("x matters most for the loss")
    assert title.endswith(
        ("depth and width matter most for the seconds", "width and depth matter most for the seconds")
    )


def test_labels_that_the_trials_cannot_tell_apart_are_named_together() -> None:
    rng = np.random.default_rng(5)
    points = rng.uniform(size=(80, 3))
    rows = [{"loss": a + b, "params": {"a": a, "b": b, "c": c}, "seconds": 1 + c} for a, b, c in points.tolist()]
    title = importance(trials(rows)).title
    assert "a and b matter most" in title or "b and a matter most" in title
    assert title.endswith("for the loss; c matters most for the seconds")
    rows = [{**row, "loss": float(rng.normal())} for row in rows]
    assert importance(trials(rows)).title.startswith("No param clearly explains the loss by itself so far")


def test_a_class_that_is_slow_does_not_make_a_param_matter_for_the_seconds() -> None:
    rows = searched()
    for place, row in enumerate(rows):
        is_slow = place % 2 == 0
        row |= {"compute_class": "slow" if is_slow else "fast", "seconds": 100.0 if is_slow else 1.0}
    assert all(not each.seconds for each in importances(trials(rows)))


def timed(count: int, law: Callable[..., float], seed: int = 3, **draws: Callable[..., float]) -> TrialColumns:
    """Trials of two classes. `law` gives the log seconds from the class and the values that `draws` give by label."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        params: dict[str, float] = {}
        for label, draw in draws.items():
            params[label] = float(draw(rng, params))
        where = ("cpu", "gpu")[int(rng.integers(2))]
        seconds = float(np.exp(law(where, **params) + 0.3 * rng.normal()))
        rows.append({"loss": 1.0, "seconds": seconds, "compute_class": where, "params": params})
    return trials(rows)


def shares(found: TrialColumns) -> dict[str, float]:
    return {each.label: each.seconds or 0.0 for each in importances(found)}


def uniform(rng: np.random.Generator, params: object) -> float:
    return float(rng.uniform())


def test_a_label_that_goes_along_with_one_that_costs_seconds_does_not_cost_them() -> None:
    """As when a sampler prefers both large: the model has both."""

    def along(rng: np.random.Generator, params: Mapping[str, float]) -> float:
        return float(np.clip(params["width"] + 0.1 * rng.normal(), 0, 1))

    found = shares(timed(400, lambda where, width, follower: 2 * width, width=uniform, follower=along))
    assert found["width"] > 0.5
    assert found["follower"] < 0.05


def test_an_effect_on_one_class_alone_counts_for_less_than_one_on_all() -> None:
    found = shares(timed(400, lambda where, width, noise: 3 * width * (where == "cpu"), width=uniform, noise=uniform))
    assert 0.3 < found["width"] < 0.7
    assert found["noise"] < 0.05


def test_without_an_effect_few_trials_show_next_to_none() -> None:
    found = [shares(timed(30, lambda where, a, b: 0.0, seed, a=uniform, b=uniform)) for seed in range(10)]
    assert float(np.mean([each["a"] for each in found])) < 0.1


def test_of_very_many_labels_the_one_that_matters_is_found() -> None:
    labels = {f"u{place:03}": uniform for place in range(120)}
    found = shares(timed(300, lambda where, **params: 2 * params["u077"], **labels))
    assert max(found, key=lambda label: found[label]) == "u077"
    assert found["u077"] > 0.4


def test_the_label_that_decides_between_subspaces_has_what_they_differ_by() -> None:
    rows = searched(300)
    for row in rows:
        is_net = row["subspace"] == "kind=net"
        row["seconds"] = float(row["seconds"]) * (20.0 if is_net else 1.0)  # type: ignore[arg-type]
    found = shares(trials(rows, options={"kind": ["tree", "net"]}))
    assert found["kind"] > 0.5
    assert 0.1 < found["size"] < 0.5
    assert found["noise"] < 0.05


def test_extreme_values_spoil_nothing() -> None:
    rows = [
        {
            "loss": 1.0,
            "seconds": [1e-300, 1.0, 1e300, math.inf][n % 4],
            "params": {"x": 1e308 * (-1) ** n, "y": float(n)},
        }
        for n in range(60)
    ]
    found = shares(trials(rows))
    assert all(0 <= share <= 1 for share in found.values())


def test_the_seconds_of_a_greater_budget_are_not_those_of_a_param() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(200):
        x = rng.uniform()
        budget = 27.0 if x > 0.5 else 1.0
        params = {"x": x, "size": rng.uniform()}
        rows.append({"loss": 1.0, "seconds": budget * np.exp(params["size"]), "budget": budget, "params": params})
    found = shares(trials(rows))
    assert found["size"] > 0.9
    assert found["x"] < 0.05


@pytest.mark.parametrize(
    ("group", "values", "share"),
    [
        ([0, 1] * 5, [0.0, 1.0] * 5, 1.0),
        ([0] * 10, [0.0, 1.0] * 5, 0.0),
        ([0, 1] * 5, [2.0] * 10, 0.0),
        ([0], [1.0], None),
    ],
)
def test_explained_variance(group: list[int], values: list[float], share: float | None) -> None:
    assert explained(np.array(group), np.array(values)) == share


def test_groups_that_explain_nothing_explain_nothing_on_average() -> None:
    rng = np.random.default_rng(1)
    shares = [explained(rng.integers(8, size=60), rng.normal(size=60)) or 0.0 for _ in range(200)]
    assert float(np.mean(shares)) < 0.05


def test_parallel_coordinates_keep_the_best_trials_within_the_limit() -> None:
    rows = searched(5000)
    chart = parallel(trials(rows, options={"kind": ["tree", "net"]}))
    assert len(chart) * len(chart.axes) <= MOST
    assert next(axis.name for axis in chart.axes) == "x"
    assert chart.axes[-1].name == "loss"
    best = min(range(5000), key=lambda place: float(rows[place]["loss"]))  # type: ignore[arg-type]
    assert best in [*chart.series[0].columns["number"]]
    lines = chart.series[0].columns
    depth = [axis.name for axis in chart.axes].index("depth")
    assert None in lines[f"axis {depth}"], "a label that is inactive is a gap"


def test_labels_with_the_names_of_other_columns_keep_their_values() -> None:
    chart = parallel(trials([{"loss": 0.5, "params": {"loss": 1.0, "number": 2.0, "7": 3.0}}]))
    columns = chart.series[0].columns
    values = {axis.name: columns[f"axis {place}"] for place, axis in enumerate(chart.axes[:-1])}
    assert values == {"loss": [1.0], "number": [2.0], "7": [3.0]}
    assert columns["axis 3"] == [0.5]
    assert columns["number"] == [0]


def test_a_slice_has_the_trials_in_which_the_label_is_active() -> None:
    rows = searched()
    found = trials(rows, options={"kind": ["tree", "net"]}, log=["size"])
    chart = slice_of(found, STUDY, "depth")
    assert chart.title == "The loss over depth, in kind=net"
    for row in rows[:150]:
        row["state"] = "PRUNED"
    left = trials(rows, options={"kind": ["tree", "net"]})
    assert slice_of(left, STUDY, "x").title == "The loss over x"
    assert slice_of(left, STUDY, "x").how.startswith("50 of 200 ended trials are complete. ")
    assert slice_of(left, STUDY, "depth").title == "The loss over depth, in kind=net"
    assert parallel(left).title == "The params of 50 complete trials"
    assert len(chart.series[0]) == int(found.labels["depth"].is_active.sum())
    assert slice_of(found, STUDY, "size").axes[0].scale is Scale.LOG
    assert slice_of(found, STUDY, "kind").axes[0].categories == ["tree", "net"]
    with pytest.raises(UsageError, match="no param 'nothing'"):
        slice_of(found, STUDY, "nothing")


def test_failures_are_counted_by_kind_and_shown_where_they_occur() -> None:
    rows, large = searched(), "ValueError: … is too large (a.py:3)"
    for row in rows:
        if row["params"]["x"] > 0.8:  # type: ignore[index]
            said = f"ValueError: {row['params']['x']} is too large (a.py:3)"  # type: ignore[index]
            row |= {"state": "FAILED", "loss": float("nan"), "failure": said, "failure_kind": large}
    rows[0] |= {"state": "FAILED", "failure": "OSError: disk 1", "failure_kind": "OSError: disk …"}
    chart = failures(trials(rows))
    first = next(n for n, row in enumerate(rows[1:], 1) if row.get("failure"))
    assert chart.axes[1].categories == [large, "OSError: disk 1"]
    counts = [*chart.series[0].columns["x"]]
    assert chart.series[0].columns["number"] == [first, 0]
    assert chart.title == f"{counts[0] + 1} of 200 trials failed, {counts[0]} of them like trial {first}: {large}"  # type: ignore[operator]
    where = failures_by_label(trials(rows))
    assert where.axes[1].name == "x"
    assert max(where.series[0].columns["x"]) == 1.0  # type: ignore[type-var]
    for row in rows:
        row["state"] = "FAILED" if row.get("state") == "FAILED" else "PRUNED"
    pruned = failures_by_label(trials(rows))
    assert pruned.title == where.title, "a pruned trial has not failed"
    assert failures(trials(searched(3))).empty == "No trial has failed."
    assert failures_by_label(trials(searched(3))).empty


def test_failures_under_earlier_code_do_not_count() -> None:
    """Neither for their kinds nor for where they occur: they may be fixed."""
    rows = searched(60)
    for place, row in enumerate(rows):
        row["code"] = "old" if place < 30 else "new"
        if place < 30 and row["params"]["x"] > 0.5:  # type: ignore[index]
            row |= {"state": "FAILED", "failure": "OSError: disk"}
    earlier = sum("failure" in row for row in rows)
    none = "No trial has failed under the present code."
    assert failures(trials(rows)).empty == f"{none} {earlier} trials failed under earlier code."
    assert failures_by_label(trials(rows)).empty == none
    rows[40] |= {"state": "FAILED", "failure": "ValueError: no"}
    next(row for row in rows if "failure" not in row)["code"] = None
    chart = failures(trials(rows))
    assert chart.title == "1 of 31 trials failed: ValueError: no", "unknown code may be that of now"
    assert chart.empty == f"Trial 40 has the traceback. {earlier} trials failed under earlier code."
    assert failures_by_label(trials(rows)).empty == "No param clearly explains the failures so far."
    rows[5]["finished_at"] = 1e3
    assert failures(trials(rows)).title.endswith("OSError: disk"), "the code of the trial that ended last"


def test_a_few_failures_are_blamed_on_no_label() -> None:
    """Two failures of 90 trials may well have a value in common by chance."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for place in range(90):
        x, y = rng.uniform(size=2)
        filters = 8.0 if place % 20 == 0 else float(rng.integers(9, 17))
        params = {"x": x, "y": y, "filters": filters}
        rows.append({"params": params, "loss": x, "state": "FAILED" if place in (20, 40) else "COMPLETE"})
    assert failures_by_label(trials(rows)).empty == "No param clearly explains the failures so far."
    claims = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows = [{**row, "state": "FAILED" if rng.uniform() < 0.05 else "COMPLETE"} for row in rows]
        claims += not failures_by_label(trials(rows)).empty
    assert claims <= 2


def test_drift_of_the_sampler_gives_failures_no_cause() -> None:
    """The late trials avoid the failures above 0.5 of `x` and share the values of `useless`."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        rows: list[dict[str, object]] = []
        for place in range(120):
            x, useless = rng.normal([0.2, 0.7], 0.05) if place >= 60 else rng.uniform(size=2)
            rows.append(
                {"loss": x, "params": {"useless": useless, "x": x}, "state": "FAILED" if x > 0.5 else "COMPLETE"}
            )
        assert failures_by_label(trials(rows)).axes[1].name == "x"


def test_the_front_is_told_apart_and_a_study_of_one_loss_has_none() -> None:
    rows = [{"loss": a, "a": a, "b": b} for a, b in ((1.0, 5.0), (2.0, 2.0), (3.0, 3.0))]
    chart = front(trials(rows, objectives={"a": "minimize", "b": "minimize"}))
    assert chart.title == "2 of 3 trials are on the front"
    assert [series.columns["number"] for series in chart.series] == [[2], [0, 1]]
    assert front(trials([{"loss": 1.0}])).empty


def test_the_hypervolume_grows_when_the_front_changes() -> None:
    rows = [
        {"a": 0.0, "b": 10.0},
        {"a": 10.0, "b": 0.0},
        {"state": "FAILED"},
        {"a": 9.0, "b": 9.0},
        {"a": 0.0, "b": 0.0},
    ]
    chart = hypervolume(trials(rows, objectives={"a": "minimize", "b": "minimize"}))
    assert chart.series[0].columns == {"x": [1.0, 2.0, 4.0, 5.0], "y": [11.0, 21.0, 22.0, 121.0]}
    assert "a 11, b 11" in chart.how
    assert "once a feasible trial has completed" in hypervolume(trials([{"loss": 1.0}])).empty


def test_rungs_show_the_losses_of_each_budget() -> None:
    rows: list[dict[str, object]] = [{"loss": loss, "budget": 1.0, "rung": 0} for loss in (1.0, 2.0, 3.0)]
    rows += [{"loss": 1 + n % 2, "budget": 3.0, "rung": 1, "origin": n} for n in range(3)]
    chart = rungs(trials([*rows, {"budget": 9.0, "rung": 2, "state": "RUNNING"}]))
    assert chart.title == "The loss of 6 trials by budget"
    assert chart.series[0].columns["x"] == [1.0] * 3 + [3.0] * 3
    assert rungs(trials([{"loss": 1.0}])).empty


def test_curves_are_those_of_the_last_attempt_and_say_which_trials_were_pruned() -> None:
    rows = [{"loss": 1.0}, {"loss": 2.0, "state": "PRUNED"}]
    reports = [
        Report(number=number, attempt=attempt, step=step, loss=loss, at=0.0)
        for number, attempt, step, loss in [(0, 1, 1, 9.0), (0, 2, 1, 3.0), (0, 2, 2, 1.0), (1, 1, 1, 2.0)]
    ]
    chart = curves(trials(rows), reported(reports))
    assert {series.name: series.columns["y"] for series in chart.series} == {
        "trial 0": [3.0, 1.0],
        "trial 1, pruned": [2.0],
    }
    assert [series.mark for series in chart.series] == [Mark.LINE, Mark.POINTS], "a line of one point is not seen"
    assert curves(trials(rows), reported([])).empty


def test_a_learning_curve_is_beside_those_of_the_best_trial_and_of_the_median() -> None:
    rows = [{"loss": loss} for loss in (3.0, 1.0, 2.0)]
    reports = [
        Report(number=number, attempt=1, step=step, loss=rows[number]["loss"] + step, at=0.0)
        for number, steps in enumerate((2, 3, 3))
        for step in range(steps)
    ]
    study = reported(reports)
    study.trial = lambda number: rows[number]
    chart = learning_curve(trials(rows), study, 2)
    assert {series.name: series.columns["y"] for series in chart.series} == {
        "median of 2 other trials": [2.0, 3.0, 3.0],
        "best, trial 1": [1.0, 2.0, 3.0],
        "trial 2": [2.0, 3.0, 4.0],
    }
    assert chart.title == "Trial 2 reported 4 at step 2; the median of the others is 3"
    study.reports = lambda numbers: []
    assert learning_curve(trials(rows), study, 0).empty


def test_the_axis_of_curves_fits_maximised_losses_as_they_are_shown() -> None:
    reports = [Report(number=0, attempt=1, step=n, loss=10.0**n, at=0.0) for n in range(6)]
    chart = curves(trials([{"loss": 1.0}], objectives={"likelihood": "maximize"}), reported(reports))
    assert chart.axes[1].scale is Scale.LINEAR
    assert chart.series[0].columns["y"][-1] == -(10.0**5)


def test_only_the_reports_of_the_best_and_the_latest_trials_are_drawn() -> None:
    rows = [{"loss": abs(n - 500.0)} for n in range(1000)] + [{"state": "WAITING", "started_at": math.nan}] * 100
    found = candidates(trials(rows))
    assert len(found) <= MOST_CURVES
    assert {500, 999} <= {*found}
    assert max(found) == 999
    reports = [Report(number=number, attempt=1, step=1, loss=1.0, at=0.0) for number in found]
    assert "900 other trials are left out" in curves(trials(rows), reported(reports)).note
