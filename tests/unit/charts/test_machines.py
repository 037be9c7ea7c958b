"""Throughput and its bound, predictions, placement, timeline."""

from __future__ import annotations

import math

import numpy as np
import pytest
from services.columns import attempts, session, trials

from shadho_celery.charts.chart import MOST, Chart
from shadho_celery.charts.machines import (
    costs,
    free_slots,
    live_slots,
    mean_seconds,
    one_more_worker,
    predictions,
    reasons,
    throughput,
)
from shadho_celery.charts.timeline import MOST_BARS, PARTS, Use, make_rows, timeline
from shadho_celery.core.records import Placed
from shadho_celery.placement.bound import throughput_bound


def busy(seconds: float = 10.0, count: int = 20) -> list[dict[str, object]]:
    """Trials that one slot ran without a pause."""
    return [
        {"loss": 1.0, "seconds": seconds, "started_at": seconds * n, "finished_at": seconds * (n + 1)}
        for n in range(count)
    ]


def test_a_slot_that_never_waits_reaches_the_bound() -> None:
    chart = throughput(trials(busy()), attempts([], [session("cpu", until=200.0)]))
    assert chart.title == "100 % of the trials that this fleet could have completed"
    assert [series.name for series in chart.series] == ["cpu", "bound"]


def test_a_second_slot_that_stays_idle_halves_the_share() -> None:
    chart = throughput(trials(busy()), attempts([], [session("cpu", 2, until=200.0)]))
    assert chart.title == "50 % of the trials that this fleet could have completed"


def test_a_trial_of_two_slots_uses_both() -> None:
    wide = trials([{**row, "slots": 2.0} for row in busy()])
    assert throughput(wide, attempts([], [session("cpu", 2, until=200.0)])).title.startswith("100 %")
    chart = one_more_worker(wide, attempts([], [session("cpu", 2, until=200.0)]))
    assert chart.series[0].columns["x"] == pytest.approx([360.0]), "as many as both slots complete"


def test_a_worker_counts_only_while_it_lives() -> None:
    found = live_slots(
        trials(busy()),
        attempts([], [session("cpu", 4, until=50.0), session("cpu", 1, since=150.0)], 200.0),
        np.array([0.0, 200.0]),
    )
    assert found["cpu"].tolist() == pytest.approx([4 * 0.25 + 0.25])


def test_a_store_without_sessions_has_no_bound() -> None:
    assert "times show which slots there were" in throughput(trials(busy()), attempts([])).empty


def test_a_class_whose_workers_got_no_trial_counts_in_the_bound() -> None:
    """It could have run some: at the speed of a mean class, because nothing is known of it."""
    found = attempts([], [session("cpu", until=200.0), session("gpu", 3, until=100.0, host="two")])
    slots = live_slots(trials(busy()), found, np.array([0.0, 100.0, 200.0]))
    assert {name: each.tolist() for name, each in slots.items()} == {"cpu": [1.0, 1.0], "gpu": [3.0, 0.0]}
    chart = throughput(trials(busy()), found)
    assert chart.title == "40 % of the trials that this fleet could have completed"
    assert "No trial has completed on gpu" in chart.note
    assert "gpu" in one_more_worker(trials(busy()), found).axes[1].categories
    assert "gpu" not in throughput(trials(busy()), attempts([], [session("cpu", until=200.0)])).note


def test_one_more_worker_adds_what_the_bound_gains() -> None:
    rows = [
        {"loss": 1.0, "seconds": seconds, "subspace": name, "compute_class": where}
        for name, where, seconds in [
            ("net", "gpu", 1.0),
            ("net", "cpu", 50.0),
            ("tree", "gpu", 1.0),
            ("tree", "cpu", 1.0),
        ]
        * 20
    ]
    found = attempts([], [session("gpu", 1), session("cpu", 8)], now=100.0)
    chart = one_more_worker(trials(rows), found)
    seconds = mean_seconds(trials(rows), found)
    bound = throughput_bound(seconds, {"gpu": 1, "cpu": 8})
    shown = dict(zip(chart.axes[1].categories, chart.series[0].columns["x"], strict=True))
    slots = dict(zip(chart.axes[1].categories, chart.series[0].columns["first slot"], strict=True))
    for name, size in (("gpu", 1), ("cpu", 8)):
        assert slots[name] == pytest.approx(3600 * bound.per_slot[name])
        more = throughput_bound(seconds, {"gpu": 1, "cpu": 8, name: 2 * size})
        assert shown[name] == pytest.approx(3600 * (more.rate - bound.rate))
        assert shown[name] <= size * slots[name] * (1 + 1e-9)
    assert chart.title.startswith("One more gpu worker")


def test_a_pause_between_two_runs_does_not_count_in_what_a_worker_adds() -> None:
    resumed = busy() + [{**each, "started_at": 1e4, "finished_at": 1e4 + 10} for each in busy(count=1)]
    found = attempts([], [session("cpu", until=200.0), session("cpu", since=1e4, until=1e4 + 10.0)])
    title = "One more cpu worker adds 360 completed trials an hour to the 360 of this fleet at full use"
    assert one_more_worker(trials(resumed), found).title == title
    assert throughput(trials(resumed), found).title == "100 % of the trials that this fleet could have completed"


def test_slots_that_ran_trials_of_other_studies_are_neither_idle_nor_free() -> None:
    """Two studies share a slot in turns of ten seconds. To each, it was busy, and half of it was theirs."""
    rows = [{**row, "started_at": 20.0 * n, "finished_at": 20.0 * n + 10} for n, row in enumerate(busy())]
    own = [{"started_at": row["started_at"], "ended_at": row["finished_at"]} for row in rows]
    turns = [(10.0 * n, float(n % 2)) for n in range(40)]
    found = attempts(own, [session("cpu", until=400.0, others=turns)], now=400.0)
    title = throughput(trials(rows), found).title
    assert title == "100 % of the trials that this fleet could have completed beside those of other studies"
    chart = one_more_worker(trials(rows), found)
    assert chart.series[0].columns["x"] == pytest.approx([180.0], rel=0.03)
    assert chart.title.endswith("; its slots were busy for 51 % of the time, and for 49 % with trials of other studies")
    assert "Other studies take as large a part of one more worker" in chart.how
    shown = timeline(found)
    assert shown.title.endswith("were busy for 51 % of the time, and for 49 % with trials of other studies")
    strips = {series.name: series for series in shown.series}["other studies"]
    starts, ends, shares = (np.array(strips.columns[name], float) for name in ("start", "end", "busy"))
    assert float(((ends - starts) * shares).sum()) == pytest.approx(190.0, rel=0.02)
    assert shown.series[-1].columns["idle"] == pytest.approx([0.0], abs=0.01)


def test_slots_of_other_studies_are_those_that_the_study_did_not_use() -> None:
    rows = [{"started_at": 0.0, "ended_at": 100.0, "slot": 1}, {"started_at": 0.0, "ended_at": 50.0, "slot": 2}]
    shared = session("cpu", 4, until=100.0, others=[(0.0, 2.0), (50.0, 1.0)])
    later = session("cpu", 2, since=60.0, until=100.0, worker="v", others=[(80.0, 5.0)])
    found = attempts(rows, [shared, later], now=100.0)
    use = Use.of(found, make_rows(found), np.linspace(0.0, 100.0, 101))
    assert use.others.sum(axis=1).tolist() == pytest.approx(
        [20.0, 20.0, 50 + 50 / 3, 0.0, 50 / 3, 50 + 50 / 3], abs=0.01
    )
    assert use.idle.tolist() == pytest.approx([0.5, 0.5, 1 / 3, 0.0, 1 / 3, 1 / 3], abs=0.01)
    assert free_slots(attempts([{"queued_at": 30.0}], [shared, later]), 0, 1) == {"cpu": 2}


def test_times_without_a_worker_are_marked_in_the_timeline() -> None:
    """One that came late, one that was away for a while, and one that left early."""
    rows = [
        {"started_at": 0.0, "ended_at": 10.0, "worker": "away"},
        {"started_at": 90.0, "ended_at": 100.0, "worker": "away"},
    ]
    found = attempts(
        rows,
        [
            session("cpu", until=30.0, worker="away", reason="lost"),
            session("cpu", since=70.0, worker="away"),
            session("cpu", since=40.0, worker="late"),
            session("cpu", until=60.0, worker="early", reason="stopped"),
        ],
    )
    chart = timeline(found)
    [marks] = [series for series in chart.series if series.name == "no worker"]
    rows_of = [chart.axes[1].categories[place].split(", ")[2] for place in map(int, marks.columns["y"])]  # type: ignore[arg-type]
    assert sorted(zip(rows_of, marks.columns["start"], marks.columns["end"], strict=True)) == [
        ("away", 30.0, 70.0),
        ("early", 60.0, 100.0),
        ("late", 0.0, 40.0),
    ]
    assert "no worker that could run the study" in chart.how


def test_the_rates_of_one_more_worker_are_at_full_use_beside_the_share_of_busy_slots() -> None:
    began = [{"started_at": each["started_at"], "ended_at": each["finished_at"]} for each in busy()]
    found = attempts(began, [session("cpu", 2, until=200.0)])
    title = one_more_worker(trials(busy()), found).title
    assert title.endswith("of this fleet at full use; its slots were busy for 50 % of the time")
    assert timeline(found).title == "20 attempts; the slots were busy for 50 % of the time"


def test_bars_above_the_bound_are_explained() -> None:
    rows = [
        {"loss": 1.0, "seconds": 5.0 + 10.0 * (n >= 20), "started_at": start, "finished_at": start + 5.0}
        for n, start in enumerate(5.0 * np.arange(40))
    ]
    found = attempts([], [session("cpu", until=200.0)])
    note = throughput(trials(rows), found).how
    assert "The dashed line is the bound." in note
    assert "Bars are higher than the bound where" in note
    idle = attempts([], [session("cpu", 2, until=200.0)])
    assert "higher than the bound" not in throughput(trials(busy()), idle).how


def test_trials_that_take_longer_to_send_than_to_run_are_said_to_be_short() -> None:
    found = attempts([], [session("cpu", until=200.0)])
    assert "short trials" in throughput(trials(busy(0.01)), found).note
    assert "short trials" not in throughput(trials(busy()), found).note


def test_a_short_study_rates_neither_machines_nor_predictions() -> None:
    """Most of its time is the start of its processes, and the first predictions are guesses."""

    def titles(seconds: float, count: int) -> list[str]:
        rows = trials(busy(seconds, count))
        found = attempts([{"predicted": 1.0}] * count, [session("cpu", until=2000.0)], now=2000.0)
        charts = [throughput(rows, found), predictions(rows, found), one_more_worker(rows, found)]
        return [chart.empty or chart.title for chart in charts]

    few = "This takes 20 completed trials, most of which take 100 ms, and 60 s in which trials run."
    assert titles(10.0, 1) == ["1 trial completed in 10 s", few, few]
    assert titles(10.0, 19) == ["19 trials completed in 3 min 10 s", few, few]
    assert titles(1.0, 59) == ["59 trials completed in 59 s", few, few]
    assert titles(0.002, 59) == ["59 trials completed in 118 ms", few, few]
    assert few not in titles(10.0, 20)
    assert titles(10.0, 20)[0] == "100 % of the trials that this fleet could have completed"
    resumed = [*busy(1.0, 20), *({**row, "started_at": 1e3, "finished_at": 1e3 + 1} for row in busy(1.0, 1))]
    lived = attempts([], [session("cpu", until=20.0), session("cpu", since=1e3, until=1e3 + 1)])
    assert throughput(trials(resumed), lived).title == "21 trials completed in 21 s", "without the pause"


def test_predictions_stand_beside_actual_seconds() -> None:
    rows = [{"predicted": 5.0 * 4 ** (n % 2)} for n in range(20)]
    many, twice = busy(), attempts(rows, [session("cpu", until=200.0)])
    title = "Half of 20 trials took their predicted seconds, to within"
    chart = predictions(trials(many), twice)
    assert chart.title == f"{title} a factor of 2.00"
    assert chart.series[0].columns["x"] == [5.0] * 10 + [20.0] * 10
    assert chart.series[0].columns["y"] == [10.0] * 20
    failed = attempts([*rows, {"predicted": 1.0, "end": "failed"}], twice.sessions)
    assert len(predictions(trials([*many, {"state": "FAILED"}]), failed).series[0]) == 20
    assert predictions(trials(many), attempts([{"predicted": 10.01}] * 20, twice.sessions)).title == f"{title} 1 %"
    assert predictions(trials(many), attempts([{}] * 20, twice.sessions)).empty


def test_why_here_shows_each_class_and_the_one_that_was_chosen() -> None:
    chart = costs({"cpu": Placed(90.0, 5.0, 0.5), "gpu": Placed(10.0, 30.0, 2.0)}, "gpu", (0, 1), 12.5, {})
    expected = "expected to take 10 s, because no class was expected to be faster"
    assert chart.title == f"Trial 0, attempt 1, went to gpu, where it was {expected}"
    assert chart.axes[1].categories == ["gpu", "cpu"]
    first, backlog, actual = chart.series
    assert first.columns == {"x": [10.0, 90.0], "y": [0, 1], "shadow price": [2.0, 0.5], "chosen": [1, 0]}
    assert backlog.columns["x"] == [30.0, 5.0]
    assert actual.columns == {"x": [12.5], "y": [0]}
    assert costs({}, "cpu", (0, 1), None, {}).empty
    alone = costs({"gpu": Placed(10.0, 30.0, 2.0)}, "gpu", (0, 1), 12.5, {})
    assert alone.title.endswith("because no other class was live")
    assert alone.empty == "There was no choice of a class."


def test_a_faster_class_without_a_free_slot_is_named_as_the_reason() -> None:
    rows = [
        {"number": 0, "compute_class": "gpu", "queued_at": 1.0, "started_at": 1.0, "ended_at": 9.0},
        {"number": 1, "compute_class": "gpu", "queued_at": 2.0, "started_at": 2.0, "ended_at": 3.0},
        {"number": 2, "compute_class": "cpu", "queued_at": 4.0},
        {"number": 3, "compute_class": "cpu", "queued_at": 10.0},
    ]
    found = attempts(rows, [session("gpu"), session("cpu", 2), session("cpu", 8, since=20.0)])
    placed = {"cpu": Placed(90.0, 0.0, None), "gpu": Placed(10.0, 0.0, None)}
    free = free_slots(found, 2, 1)
    assert free == {"gpu": 0, "cpu": 2}
    chart = costs(placed, "cpu", (2, 1), None, free)
    assert chart.title.endswith("expected to take 90 s, because no slot was free on gpu")
    assert chart.note == ""
    later = free_slots(found, 3, 1)
    assert later == {"gpu": 1, "cpu": 1}
    assert costs(placed, "cpu", (3, 1), None, later).title.endswith("expected to take 90 s")
    priced = {"cpu": Placed(90.0, 0.0, 1.0), "gpu": Placed(10.0, 0.0, 2.0)}
    assert "a class with a high shadow price is kept" in costs(priced, "cpu", (3, 1), None, later).title
    assert costs(priced, "cpu", (2, 1), None, free).note.startswith("A class with a high shadow price is kept")
    assert [*reasons({"cpu": Placed(9.0, 0.0, None)}, "cpu", {})] == ["no other class was live"]
    assert free_slots(found, 4, 1) == free_slots(attempts(rows), 2, 1) == {}, "not recorded"


def test_the_timeline_has_a_row_for_each_slot_and_tells_ends_apart() -> None:
    rows = [
        {"started_at": 0.0, "ended_at": 10.0},
        {"started_at": 10.0, "ended_at": 15.0, "end": "lost", "slot": 1},
        {"started_at": 12.0, "end": None, "compute_class": "gpu", "host": "two", "worker": "v"},
        {"started_at": 14.0, "ended_at": 18.0, "copy": True, "slot": 1},
        {"queued_at": 17.0, "end": None},
    ]
    chart = timeline(attempts(rows, now=20.0))
    assert list(chart.axes[1].categories) == ["cpu, one, w, slot 0", "cpu, one, w, slot 1", "gpu, two, v, slot 0"]
    found = {series.name: series for series in chart.series}
    assert {*found} == {"cpu, complete", "cpu, complete, copy", "cpu, lost", "gpu, running", "idle"}
    assert found["cpu, lost"].form == "hatched"
    assert found["cpu, complete, copy"].form == "outlined"
    assert found["gpu, running"].columns["end"] == [20.0]
    assert found["gpu, running"].form != found["cpu, complete"].form
    assert chart.how == (
        "Bars: filled: complete; with a point: running; hatched: lost with its worker; "
        "outlined: a copy of a late trial, or replaced by another attempt; empty: idle. "
        "Lost attempts do not count as busy time."
    )
    rows_of = found["idle"].columns
    assert rows_of["idle"] == [0.5, pytest.approx(1 - 4 / 20), pytest.approx(1 - 8 / 20)]
    assert [rows_of[name] for name in PARTS] == [
        ["cpu", "cpu", "gpu"],
        ["one", "one", "two"],
        ["w", "w", "v"],
        ["0", "1", "0"],
    ]


def test_idle_time_counts_only_while_the_worker_lives() -> None:
    found = attempts([{"started_at": 0.0, "ended_at": 10.0}], [session("cpu", since=0.0, until=10.0)], now=100.0)
    assert Use.of(found, make_rows(found), np.array([0.0, 100.0])).idle.tolist() == [0.0]


def test_the_timeline_has_the_preempted_and_lost_workers_of_each_class() -> None:
    """Beside them is the time to the next one, from the hours of the workers and an hour without one."""
    sessions = [
        session("spot", until=3600.0, reason="preempted"),
        session("spot", since=3600.0, until=7200.0, reason="lost"),
        session("cpu", until=7200.0, reason="stopped"),
    ]
    rows = [{"started_at": 0.0, "ended_at": 50.0, "compute_class": name} for name in ("spot", "cpu")]
    assert timeline(attempts(rows, sessions)).note.endswith(
        "Workers that left early: spot 1 preempted and 1 lost (placement expects one in 1 h 30 min of a worker)."
    )
    assert timeline(attempts(rows, sessions[1:])).note.endswith(
        ": spot 1 lost (placement expects one in 2 h of a worker)."
    )
    assert "left early" not in timeline(attempts(rows, sessions[2:])).note


def test_time_of_lost_attempts_is_not_busy_time() -> None:
    rows = [{"started_at": 0.0, "ended_at": 5.0}, {"started_at": 5.0, "ended_at": 20.0, "end": "lost"}]
    found = attempts(rows, [session("cpu", until=10.0, reason="lost")], now=20.0)
    assert Use.of(found, make_rows(found), np.array([0.0, 20.0])).idle.tolist() == [0.5]
    assert "Lost attempts do not count as busy time." in timeline(found).how
    assert "Lost attempts" not in timeline(attempts(rows[:1])).how


def test_a_large_fleet_has_a_row_for_each_machine_and_a_larger_one_for_each_class() -> None:
    def fleet(hosts: int) -> list[dict[str, object]]:
        return [
            {"started_at": 0.0, "ended_at": 1.0 + host % 2, "host": f"h{host}", "worker": f"w{host}", "slot": slot}
            for host in range(hosts)
            for slot in range(2)
        ]

    assert timeline(attempts(fleet(30))).axes[1].name == "slot"
    assert timeline(attempts(fleet(31))).axes[1].name == "machine"
    assert timeline(attempts(fleet(601))).axes[1].name == "class"
    chart = timeline(attempts(fleet(601), now=2.0))
    assert list(chart.axes[1].categories) == ["cpu"]
    strips = chart.series[0].columns
    assert strips["busy"][0] == 1.0
    assert strips["busy"][-1] == pytest.approx(300 / 601)


def test_short_attempts_are_joined_so_that_a_long_timeline_stays_within_the_limit() -> None:
    rng = np.random.default_rng(0)
    starts = np.sort(rng.uniform(0, 50_000, size=30_000))
    rows = [{"started_at": float(at), "ended_at": float(at) + 0.5, "slot": int(n % 8)} for n, at in enumerate(starts)]
    chart = timeline(attempts(rows, now=50_001.0))
    assert len(chart) <= MOST + 8
    assert "30,000 attempts are joined" in chart.how
    seconds = sum(
        float(end) - float(start) if busy is None else (float(end) - float(start)) * float(busy)  # type: ignore[arg-type]
        for series in chart.series[:-1]
        for start, end, busy in zip(
            series.columns["start"],
            series.columns["end"],
            series.columns.get("busy", [None] * len(series)),
            strict=True,
        )
    )
    assert seconds == pytest.approx(15_000, rel=0.05)


def test_as_many_attempts_as_the_limit_have_a_bar_each_however_short_they_are() -> None:
    def long(count: int) -> Chart:
        rows = [{"started_at": 100.0 * n, "ended_at": 100.0 * n + 0.01, "slot": n % 8} for n in range(count)]
        return timeline(attempts(rows))

    chart = long(MOST_BARS)
    assert sum(len(series) for series in chart.series[:-1] if series.form == "filled") == MOST_BARS
    assert "joined" not in chart.how
    assert f"{MOST_BARS + 1:,} attempts are joined" in long(MOST_BARS + 1).how


def test_a_machine_with_one_slot_has_bars_and_one_with_several_has_strips() -> None:
    rows = [{"started_at": 0.0, "ended_at": 1.0, "host": f"h{host:02}", "worker": f"w{host}"} for host in range(99)]
    rows.append({**rows[-1], "slot": 1})
    chart = timeline(attempts(rows))
    found = {series.form: series.columns for series in chart.series[:-1]}
    assert found["filled"]["y"] == [*range(98)]
    assert {*found["strip"]["y"]} == {98}
    assert chart.axes[1].name == "machine"


def test_an_attempt_without_a_slot_is_in_the_row_of_the_only_slot() -> None:
    rows = make_rows(attempts([{"started_at": 0.0, "ended_at": 1.0, "slot": -1}], [session("cpu")]))
    assert rows.names == ["cpu, one, w, slot 0"]


def test_machines_are_in_the_order_of_their_numbers() -> None:
    rows = [{"started_at": 0.0, "ended_at": 1.0, "host": f"node-{n}", "worker": f"node-{n}.1"} for n in (10, 2, 1)]
    assert make_rows(attempts(rows)).parts["machine"] == ["node-1", "node-2", "node-10"]


def test_without_an_attempt_the_timeline_says_what_will_be_here() -> None:
    assert timeline(attempts([])).empty
    assert predictions(trials([]), attempts([])).empty
    assert throughput(trials([]), attempts([])).empty
    assert one_more_worker(trials([]), attempts([])).empty


def test_without_the_times_of_trials_there_is_no_throughput() -> None:
    rows = [{"loss": 1.0, "started_at": math.nan, "finished_at": math.nan}] * 20
    found = attempts([], [session("cpu", until=200.0)])
    assert "recorded times show which slots" in str(throughput(trials(rows), found).empty).lower()
    assert "recorded times show which slots" in str(one_more_worker(trials(rows), found).empty).lower()
    assert throughput(trials([]), found).empty
