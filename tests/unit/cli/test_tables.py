"""What a person sees is true, complete and never in the way."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hyperopt import hp
from rich.console import Console
from services.golden import check
from services.played import console, play, searched

from shadho_celery.cli import tables
from shadho_celery.cli.live import (
    PLAIN_SECONDS,
    LiveView,
    PlainView,
    busy_slots,
    class_state,
    class_table,
    progress_line,
)
from shadho_celery.cli.shared_options import moment
from shadho_celery.core.failures import Failure, FailureCount
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.records import Action, Answer
from shadho_celery.core.trial import Attempt, Lost, Outcome, Report, Result, Started, Trial, TrialState
from shadho_celery.results.report import Overview, Run, StudyReport, overview_of, placed_by_params, report_of, run_of
from shadho_celery.results.study import plain_json, study_json
from shadho_celery.results.trial import TrialResult, Values, given
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.store.base import DEFAULT_STORE
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.state import Limits, StudyState
from shadho_celery.study.table import OnClass

S = TrialState


def result(trial: Trial, study: StudyState, space: Any) -> TrialResult:
    return TrialResult(trial, Values(study.record, space), study.store, study.record)


def made(study: StudyState, space: Any = None, subspaces: Iterable[str] = ()) -> StudyReport:
    assert isinstance(study.store, SqlStore)
    values = Values(study.record, space)
    return report_of(study, study.store, values, subspaces=subspaces)


def show(study: StudyState, space: Any, screen: Console, again: str | None, refused: int = 0) -> None:
    counts = {state: study.count(state) for state in S}
    tables.summary(made(study, space), screen, again, run_of(study, 80.0, counts, {}, refused))


# The table


def two_losses(attempt: Attempt, compute_class: str) -> Outcome:
    x = float(attempt.params["x"])
    losses, over = {"error": x, "accuracy": -math.sqrt(x)}, {"memory": x - 0.9}
    return Outcome(state=S.COMPLETE, loss=x, losses=losses, constraints=over, seconds=1.0)


def flat(w_decides: bool = True) -> tuple[StudyState, Space]:
    """A flat space on two classes, of which the second is slow with a large w."""

    def by_width(attempt: Attempt, compute_class: str) -> Outcome:
        w = float(attempt.params["w"]) if w_decides else 0.5
        return Outcome(state=S.COMPLETE, loss=w, seconds=20 + 10 * w if compute_class == "gpu" else 20 + 400 * w)

    study, _, space = searched(compile_space({"w": hp.uniform("w", 0, 1)}), 300, play=by_width, turns=9999)
    return study, space


@pytest.mark.slow
def test_a_flat_spaces_trials_and_seconds_are_shown_by_class_and_what_went_where_by_params() -> None:
    study, space = flat()
    sink, text = console()
    show(study, space, sink, None)
    [line] = re.findall(r"placed by params: (w .*)", text.getvalue())
    assert re.fullmatch(r"w [\d.e-]+ to 0\.\d+ -> \[/cpu\] \d+ %, 0\.\d+ to [\d.]+ -> gpu \d+ %", line)
    for name in ("gpu", "[/cpu]"):
        assert f"{study.count(S.COMPLETE, compute_class=name)} x " in text.getvalue()


@pytest.mark.slow
def test_nothing_is_said_of_params_that_decide_nothing_or_of_a_policy_that_does_not_look_at_them() -> None:
    study, _ = flat(w_decides=False)
    assert placed_by_params(study, Values(study.record)) == []
    study, _ = flat()
    assert [each.label for each in placed_by_params(study, Values(study.record))] == ["w"]
    study.record = replace(study.record, in_force={"policy": "fifo"})
    assert placed_by_params(study, Values(study.record)) == []


def test_the_command_to_resume_has_the_workers_and_the_limit_that_were_asked_for() -> None:
    command = tables.resume_command("flat", "s", DEFAULT_STORE, tables.further_trials(500, 60), {"gpu": 2, "cpu": 1})
    assert command.endswith("flat --resume s --workers gpu=2 --workers cpu=1 --trials 500")
    # A fleet whose workers have no study files waits for ever without it.
    assert tables.resume_command("m", "s", DEFAULT_STORE, 9, ship=True).endswith("m --resume s --code ship --trials 9")
    assert [tables.further_trials(asked, 60) for asked in (None, 60, 61)] == [120, 120, 61]


def test_the_best_trials_are_shown_with_their_budgets_where_any_has_one() -> None:
    study, _, space = searched()

    def head_and_rows(*budgets: float | None) -> list[list[str]]:
        screen, text = console()
        outcome = Outcome(state=S.COMPLETE, loss=0.5)
        trials = [
            next(iter(study.trials)).evolve(state=S.COMPLETE, outcome=outcome, budget=budget) for budget in budgets
        ]
        screen.print(tables.trial_table([result(trial, study, space) for trial in trials], *tables.BEST_COLUMNS))
        lines = [line for line in text.getvalue().splitlines() if line[:1] in "┃│"]
        return [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:5]] for line in lines]

    assert [row[2] for row in head_and_rows(9, 0.3 / 3, None)] == ["budget", "9", "0.1", "all"]
    assert head_and_rows(None, None)[0][:3] == ["trial", "loss", "class"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"x": 0.123456789, "on": True, "n": None}, "{x: 0.12346, on: True, n: None}"),
        ((1, 2.0, "a"), "(1, 2, a)"),
        ([1e-9], "(1e-09)"),
        (131072.0, "131072"),
        (True, "True"),
    ],
)
def test_what_the_objective_got_is_shown_short(value: Any, shown: str) -> None:
    class Fixed:
        def evaluate(self, params: Any) -> Any:
            return value

    assert given(result(Trial(number=0, subspace="all", params={}), searched(turns=0)[0], Fixed())) == shown  # type: ignore[arg-type]


# While it runs


def test_a_trial_is_busy_in_as_many_slots_as_it_is_wide_and_each_of_its_attempts_is() -> None:
    study, scheduler, _ = searched(turns=1)
    before = busy_slots(study)
    gang = study.send(study.add("model=net", {}, seed=1, slots=3), "[/cpu]")
    copied = study.send(study.add("model=net", {}, seed=1), "gpu")
    waits = study.send(study.add("model=net", {}, seed=1, slots=2), "gpu")
    for attempt in (gang, copied):
        study.tell(Started(number=attempt.number, attempt=1, host="h", at=1e9))
    copy = study.send(study.trial(copied.number), "[/cpu]")
    study.tell(Started(number=copy.number, attempt=copy.attempt, host="h", at=1e9))
    assert waits.state is S.QUEUED
    assert busy_slots(study) - before == {"[/cpu]": 4, "gpu": 1}
    busy = 4 + before["[/cpu]"]
    assert f"[/cpu] {busy}/{busy} busy" in progress_line(scheduler)
    screen, text = console()
    screen.print(class_table(scheduler))
    [row] = [line for line in text.getvalue().splitlines() if "[/cpu]" in line]
    assert row.split("│")[3].strip() == str(busy)


def test_a_dead_workers_slots_leave_the_view_with_its_leases_so_that_no_more_slots_are_busy_than_there_are() -> None:
    study, scheduler, _ = searched(turns=0)
    for _ in range(7):
        attempt = study.send(study.add("model=net", {}, seed=1), "gpu")
        study.tell(Started(number=attempt.number, attempt=1, host="h", at=1e9))

    def shown(**live: int) -> list[str]:
        scheduler.classes = [ComputeClass(name="gpu", **live)] if live else []
        screen, text = console()
        screen.print(class_table(scheduler))
        [row] = [line for line in text.getvalue().splitlines() if "gpu" in line]
        return [cell.strip() for cell in row.split("│")[3:5]]

    assert shown(slots=8, silent=0) == ["7", "8"]
    # One of its workers has died; an attempt of it is not lost yet.
    assert shown(slots=7, silent=1) == ["7", "8"]
    assert "gpu 7/8 busy" in progress_line(scheduler)
    # One is quarantined, and its trial goes on.
    assert shown(slots=6, silent=0) == ["7", "7"]
    assert "gpu 7/7 busy" in progress_line(scheduler)
    assert shown() == ["7", "7"]


def test_without_a_terminal_a_line_comes_now_and_then_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    study, scheduler, _ = searched(turns=0)
    clock = study.clock
    with PlainView(scheduler) as view:
        view.update()
        assert capsys.readouterr() == ("", "")
        clock.sleep(PLAIN_SECONDS)
        view.update()
        view.update()
        view.note("a note")
    out, err = capsys.readouterr()
    assert out == ""
    line, note = err.splitlines()
    assert line.startswith(f"{progress_line(scheduler)}; ")
    assert note == "a note"


def test_the_same_line_is_repeated_ever_more_rarely_and_a_new_one_is_printed_soon() -> None:
    study, scheduler, _ = searched(turns=0)
    view, times = PlainView(scheduler), list[float]()
    view.note = lambda _: times.append(clock.now() - began)  # type: ignore[method-assign]
    clock, began = study.clock, study.clock.now()
    for _ in range(40):
        clock.sleep(PLAIN_SECONDS)
        view.update()
        if clock.now() - began == 140.0:
            scheduler.pause()
    assert times == [5.0, 15.0, 35.0, 75.0, 135.0, 145.0, 155.0, 175.0]


def test_the_table_of_classes_counts_the_pruned_trials_beside_the_complete_ones() -> None:
    def play_pruned(attempt: Attempt, compute_class: str) -> Outcome:
        state = S.PRUNED if attempt.number % 2 else S.COMPLETE
        return Outcome(state=state, loss=1.0 / (1 + attempt.number), seconds=1.0)

    for played, title in ((play_pruned, "complete x median time + pruned"), (play, "complete x median time")):
        study, *_ = searched(play=played)
        table = tables.placement_table(made(study))
        assert table.columns[0].header == title
        cells = [cell for column in table.columns[1:-1] for cell in column.cells]
        counts = [[part.split(" x ")[0] for part in str(cell).split("+") if part] for cell in cells if cell != "-"]
        assert sum(int(count) for parts in counts for count in parts) == study.count(S.COMPLETE, S.PRUNED)
    for complete, seconds, pruned, cell in ((3, 2.0, 4, "3 x 2 s + 4"), (0, None, 4, "+ 4"), (0, None, 0, "-")):
        assert tables._placed(OnClass(complete=complete, pruned=pruned, failed=0, seconds=seconds)) == cell


def test_a_class_that_could_work_differs_from_one_that_nobody_serves() -> None:
    def state(busy: int, **live: int) -> str:
        return class_state(ComputeClass(name="c", **{"slots": 0, "workers": 0, **live}), busy)

    assert state(0, slots=2, workers=1) == "idle"
    assert state(1, slots=2, workers=1) == "busy"
    assert state(1, silent=1) == "silent"
    assert state(0) == "no worker"
    _, scheduler, _ = searched()
    scheduler.classes = [each for each in scheduler.classes if each.name != "gpu"]
    line = progress_line(scheduler)
    assert "[/cpu] 0/2 busy" in line
    assert "gpu: no worker" in line


def test_the_failures_of_a_resumed_run_say_which_ones_they_count() -> None:
    def failed(trials: int, first: int) -> FailureCount:
        return FailureCount(failure=Failure(cause="E", headline="ValueError: no"), first=first, trials=trials)

    def shown(before: int, ours: int) -> tuple[Sequence[FailureCount], list[str]]:
        earlier, later = [failed(before + ours, 2)], [failed(ours, 71)] if ours else []
        report = SimpleNamespace(name="s", failures=earlier, counts={S.FAILED: before + ours})
        return tables.wrong_lines(cast(StudyReport, report), Run(seconds=1.0, counts={}, failures=later))

    assert shown(before=2, ours=2)[1] == [
        "failed in this run: 2 x ValueError: no; the first is trial 71",
        "failed before this run: 2 trials; all: shadho-celery show s",
    ]
    # They may have been tried again with success, so their traceback is not suggested.
    assert shown(before=2, ours=0) == ((), ["failed before this run: 2 x ValueError: no; the first is trial 2"])
    assert shown(before=0, ours=2)[1] == ["failed: 2 x ValueError: no; the first is trial 2"]


def test_what_the_sampler_chose_is_said_for_the_subspaces_with_the_most_trials() -> None:
    study, _, _ = searched()
    study.choices.clear()
    assert tables.choice_lines(overview_of(study)) == []
    study.note_choice("all", "gp: why")
    assert tables.choice_lines(overview_of(study)) == ["sampler auto: gp: why"]
    first, second = study.subspaces
    study.choices = {"never": "tpe: 1", "nor this": "tpe: 2", first: "tpe: 3", second: "gp: 4"}
    lines = tables.choice_lines(overview_of(study))
    assert {*lines[:2]} == {f"sampler auto, {first}: tpe: 3", f"sampler auto, {second}: gp: 4"}
    assert lines[2:] == ["sampler auto, never: tpe: 1", "sampler auto in further subspaces (1): see --json"]


def on_rungs(best_budget: float, pruned: int = 0) -> tuple[StudyState, Any]:
    """A study from budget 1 to 9 whose best trial has that budget, with some pruned trials."""
    study, _, space = searched(turns=0)
    in_force = {"fidelity": {"least": 1, "most": 9}, "pruner": {"how": "median", "startup_trials": 3}}
    study.record = replace(study.record, in_force=in_force)
    subspace, params = "model=net", {"model": 0, "exponent": -3.5}
    for rung in range(3):
        for origin in range(3 - rung):
            if 3.0**rung <= best_budget:
                end(study, study.add(subspace, params, 1, 3.0**rung, rung=rung, origin=origin), S.COMPLETE)
    for step in range(pruned):
        end(study, study.add(subspace, params, 1, 1.0, rung=0), S.PRUNED, step=step % 12)
    return study, space


def end(study: StudyState, trial: Trial, state: TrialState, step: int | None = None) -> None:
    attempt = study.send(trial, "gpu")
    if step is not None:
        study.tell(Report(number=attempt.number, attempt=1, step=step, loss=0.5, at=study.clock.wall()))
    outcome = Outcome(state=state, loss=1.0 / (1 + trial.number), seconds=2.0)
    study.tell(Result(number=attempt.number, attempt=1, outcome=outcome, host="a", at=study.clock.wall()))


def test_the_report_says_how_long_the_search_took_where_and_with_what_and_of_how_many_trials() -> None:
    study, _, _ = searched()
    study.record = replace(study.record, in_force={"trials": 60})
    report = replace(made(study), hosts={"a": 3, "b": 7}, codes={"12ab": 10})
    run = replace(run_of(study, 80.0, {S.COMPLETE: 9, S.PRUNED: 1}, {}), versions=["shadho_celery 1", "Python 3"])
    lines = tables.run_lines(report, run)
    screen, text = console()
    tables.summary(report, screen, None, run)
    assert lines == [
        "this run took 80 s: 10 trials (complete, pruned), 7.5 trials a minute",
        "trials by host: b (7), a (3)",
        "versions: shadho_celery 1, Python 3, code 12ab",
    ]
    assert all(line in text.getvalue() for line in lines)
    assert "study s: 8 complete, 2 failed of 60 trials; best loss" in text.getvalue()
    assert "10 trials (complete, failed)" in tables.run_lines(report)[0]
    assert tables.run_lines(report)[0].startswith("ran for about ")
    assert tables.time_line(0.0, {}) == "this run took 0 s: 0 trials"
    assert tables.time_line(0.531, {S.COMPLETE: 12}).endswith("12 trials, 1356 trials a minute")
    hosts = {f"h{n}": 1 for n in range(tables.HOSTS + 2)}
    assert tables.place_lines(hosts, [])[0].endswith("and 2 more")


def test_a_best_value_that_is_rounded_says_so_with_the_command_that_shows_all_digits() -> None:
    study, _, _ = searched(turns=0)

    def shown(values: Any, loss: float) -> str:
        space: Any = SimpleNamespace(evaluate=lambda params: values)
        outcome = Outcome(state=S.COMPLETE, loss=loss)
        trial = Trial(number=0, subspace="", params={}, outcome=outcome)
        return tables.best_values(result(trial, study, space), "s")

    exact = "in full precision: shadho-celery best s"
    assert shown({"x": [1.5, 2], "y": math.inf}, 0.5) == "{x: (1.5, 2), y: inf}"
    assert shown({"x": [1 / 3]}, 0.5) == f"{{x: (0.33333)}} (rounded; {exact})"
    assert shown({"x": 1.5}, 1 / 3) == f"{{x: 1.5}} (its loss is rounded; {exact})"


def test_the_time_in_which_trials_ran_leaves_out_the_pauses_between_runs() -> None:
    study, _, _ = searched(turns=0)
    clock: Any = study.clock
    assert study.trials.active_seconds() == 0.0
    for pause in (0.0, 5.0, 3600.0):
        clock.sleep(pause + 2.0)
        end(study, study.add("model=net", {}, 1), S.COMPLETE)
    assert study.trials.active_seconds() == pytest.approx(2.0 + 5.0 + 2.0 + 2.0)


def test_failed_trials_that_ran_again_beyond_the_limit_are_counted() -> None:
    counts = {S.COMPLETE: 8, S.PRUNED: 0, S.FAILED: 10}
    overview: Any = SimpleNamespace(counts=counts, asked=10, ended=18)
    assert Overview.counts_words.fget(overview) == "8 complete, 10 failed of 18 trials"
    _, scheduler, _ = searched()
    scheduler.change_limits(Limits(trials=8))
    assert progress_line(scheduler).startswith("10/10 trials; ")


def test_requests_beyond_those_that_are_listed_are_counted() -> None:
    request = Action(
        id="0" * 32, at=0.0, by="me@one", action="pause", arguments={}, answer=Answer(is_done=True, text="paused")
    )
    for count, line in ((5, None), (6, "and 1 earlier request;"), (7, "and 2 earlier requests;")):
        lines = tables.action_lines([request] * count)
        assert lines[0] == f"pause, asked by me@one at {moment(0.0)}: paused"
        assert lines[5:] == ([] if line is None else [f"{line} all: show --json"])


def test_requests_to_earlier_runs_are_not_listed() -> None:
    study, _, _ = searched()
    done = Answer(is_done=True, text="done")
    asked = [
        Action(id=str(fence), at=0.0, by="me@one", action=name, arguments={}, answer=done, fence=fence)
        for fence, name in ((study.fence - 1, "stop"), (study.fence, "pause"), (None, "drain"))
    ]
    screen, text = console()
    tables.summary(replace(made(study), actions=asked), screen, None)
    lines = text.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines if "asked by" in line] == ["pause", "drain"]


# Golden texts


def several_losses() -> tuple[StudyState, Space]:
    """More trials on the front than are shown."""
    study, _, space = searched(compile_space({"x": hp.uniform("x", 0, 1)}), 40, play=two_losses)
    study.record = replace(study.record, in_force={"objectives": {"error": "minimize", "accuracy": "maximize"}})
    return study, space


def nearest() -> tuple[StudyState, Space]:
    """No trial is feasible."""
    study, _, space = searched(trials=1, play=lambda *_: Outcome(state=S.COMPLETE, loss=0.5, constraints={"c": 2.0}))
    return study, space


def failing() -> tuple[StudyState, Space]:
    """No trial succeeds, and three fail alike."""
    errors = ["E: one", "E: two", "E: one", "E: one"]
    study, _, space = searched(
        trials=4, play=lambda attempt, name: Outcome(state=S.FAILED, error=errors[attempt.number], seconds=1.0)
    )
    return study, space


def lossy() -> tuple[StudyState, Space]:
    """Two trials have the same warning, and an attempt was lost."""
    study, _, space = searched()
    for _ in range(2):
        attempt = study.send(study.add("model=net", {}, seed=1), "gpu")
        ended = Outcome(state=S.COMPLETE, loss=1.0, warning="[/a] metric\nout")
        study.tell(Result(number=attempt.number, attempt=1, outcome=ended, at=1e9))
    attempt = study.send(study.add("model=net", {}, seed=1), "gpu")
    study.tell(Lost(number=attempt.number, attempt=1, reason="its worker fell silent"))
    return study, space


def strange() -> tuple[StudyState, Scheduler, Space]:
    """Names, labels and values hold line breaks, and square brackets, which rich would read as styles."""
    space = hp.choice("a\n[/blue]label", [{"x\n[bold]y": hp.uniform("x\ny", 0, 1)}, "[/red] no\nline"])
    return searched(compile_space(space), name="study [red] [bold]")


def broken() -> tuple[StudyState, Any]:
    """The space cannot evaluate the params any more."""

    class Broken:
        def evaluate(self, params: Any) -> Any:
            raise ArithmeticError("1 / 0")

    return searched()[0], Broken()


SUMMARIES: Mapping[str, Callable[[], tuple[StudyState, Any]]] = {
    "plain": lambda: searched()[::2],
    "losses": several_losses,
    "nearest": nearest,
    "failing": failing,
    "lossy": lossy,
    "strange": lambda: strange()[::2],
    "broken": broken,
    "rungs": lambda: on_rungs(9),
    "pruned": lambda: on_rungs(3, pruned=20),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_summary_of_a_study_and_its_json_are_its_golden_texts(name: str) -> None:
    """In 80 columns no line of a table is longer, and nothing that is to be copied is wrapped.

    JSON has subspaces without a trial, and classes without one that were live, too.
    """
    study, space = SUMMARIES[name]()
    report = made(study, space, [*study.subspaces, "never drawn"])
    found = plain_json(study_json(report, run_of(study, 12.34567, {}, {"gpu": 1, "idle": 4})))
    # Digits that another processor may have otherwise are left out.
    rounded = json.loads(json.dumps(found, allow_nan=False), parse_float=lambda digits: float(f"{float(digits):.9g}"))
    check(f"json_{name}", "".join(f"{key}: {json.dumps(value)}\n" for key, value in rounded.items()))
    text = io.StringIO()
    again = "shadho-celery run " + "long_name " * 10 + "[/go on]"
    show(study, space, Console(file=text, width=80, force_terminal=False), again, refused=2 * (name == "lossy"))
    check(f"summary_{name}", text.getvalue())


def pictured(study: StudyState, scheduler: Scheduler, space: Space, turns: int = 0) -> str:
    """The live view after some turns, and the line that is printed without a terminal."""
    screen, text = console()
    with LiveView(scheduler, space, screen) as view:
        for _ in range(turns):
            scheduler.turn()
        view.note("[/a] note")
    assert "[/a] note" in text.getvalue()
    screen, text = console()
    screen.print(view.picture())
    # How long the view was open is the real time.
    return re.sub(r"\d:\d\d:\d\d", "", f"{text.getvalue()}{progress_line(scheduler)}\n")


def test_the_live_view_of_a_study_is_its_golden_text() -> None:
    """A study at work, and one whose classes are gone, with strange names."""
    slow = Outcome(state=S.COMPLETE, loss=0.5, seconds=600.0)
    played = searched(turns=0, play=lambda attempt, name: slow if attempt.number >= 6 else play(attempt, name))
    check("live_working", pictured(*played, turns=12))
    played = strange()
    played[1].classes = []
    check("live_gone", pictured(*played))
    assert tables.rung_lines(overview_of(on_rungs(9)[0])) == ["budgets: 3 at 1, 2 at 3, 1 at 9"]
    assert tables.rung_lines(overview_of(searched(trials=1)[0])) == []
