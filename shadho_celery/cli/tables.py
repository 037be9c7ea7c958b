"""Tables and lines of a study's report, for `show` and the end of a run, and the console on which tables are printed.

The console does not interpret markup in texts, and escapes control characters.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from shadho_celery.cli.shared_options import moment
from shadho_celery.core.checks import listed, one_line, printable, unbroken
from shadho_celery.core.failures import FailureCount, read_failure
from shadho_celery.core.names import NO_PRUNER
from shadho_celery.core.records import MAX_NOTE, Action, notes_of
from shadho_celery.core.trial import TrialState
from shadho_celery.core.units import counted, took
from shadho_celery.fidelity.ladder import ladder_of
from shadho_celery.objective.toml_study import resume_words
from shadho_celery.results.report import Overview, Preference, Run, StudyReport
from shadho_celery.results.trial import TrialResult, given
from shadho_celery.space.describe import brief
from shadho_celery.store.base import DEFAULT_STORE
from shadho_celery.study.table import OnClass, RungSummary


class PrintableConsole(Console):
    """Console that does not interpret markup in texts, and escapes control characters in them.

    Styles and control codes that rich itself adds are kept.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False)

    def __exit__(self, *error: object) -> None:
        """Write the buffered text. If a program's stream cannot be written, the error is ignored."""
        try:
            super().__exit__(*error)
        except OSError:
            self.quiet = True

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`, with control characters in their texts escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


#: maximum number of rows of the table of a front
FRONT = 10

#: maximum number of characters of a loss's name in a table
NAME = 14

#: maximum number of rows of the table of subspaces and classes
PLACED = 12

#: maximum number of lines about failures, of lines about subspaces, and of lines about placement
MESSAGES = 3

#: maximum number of machines that the summary names, and of versions of the code
HOSTS = 8

#: maximum number of steps that the line about pruned trials names
STEPS = 8

#: minimum number of characters of a table's last column
LEAST_WIDTH = 12

#: width in characters of results that are not printed in a terminal
PLAIN_WIDTH = 120

#: styles of texts about failures and studies that make no progress, and of warnings
BAD, WARN = "red", "yellow"

#: number of latest users' requests that the report lists
ACTIONS = 5

_S = TrialState
T = TypeVar("T")


def make_console(*, stderr: bool = False) -> Console:
    """Return the console for results: as wide as the terminal, or PLAIN_WIDTH characters without a terminal."""
    is_plain = not (sys.stdout and sys.stdout.isatty()) and "COLUMNS" not in os.environ
    return PrintableConsole(stderr=stderr, width=PLAIN_WIDTH if is_plain else None)


def further_trials(asked: int | None, counted: int) -> int:
    """Return the limit on trials to propose for the next run: `asked`, or if reached, twice the counted trials."""
    return asked if asked and asked > counted else 2 * max(1, counted)


def resume_command(
    module: str, name: str, store: str, trials: int, workers: Mapping[str, int] | None = None, *, ship: bool = False
) -> str:
    """Return the command that continues a study up to `trials` trials.

    `store` is the store's URL without a password. `workers` is the option --workers: the number of slots by class.
    With `ship`, the study's code is shipped again.
    """
    options = [] if store == DEFAULT_STORE else ["--store", store]
    options += [word for name, slots in (workers or {}).items() for word in ("--workers", f"{name}={slots}")]
    options += ["--code", "ship"] if ship else []
    return shlex.join(resume_words(module, name, *options, "--trials", str(trials)))


def rate_text(a_minute: float) -> str:
    """Return text for a rate in trials per minute, with three digits, or as a whole number from 1000 on."""
    return f"{a_minute:{'.3g' if a_minute < 999.5 else '.0f'}} trials a minute"


def best_line(study: Overview) -> str:
    """Return a line with the best loss so far."""
    best = study.best
    if best is None:
        return study.best_words
    nearest = f"the nearest breaks its constraints by {study.violation:.3g}: " if study.violation else ""
    return f"{study.best_words} ({nearest}trial {best.number}, {unbroken(best.subspace)}, {best.compute_class})"


def fact(name: str) -> Column:
    """Return a column that keeps its width in a narrow terminal."""
    return Column(Text(name), no_wrap=True)


def last(name: str) -> Column:
    """Return the last column of a table. Only this column shrinks in a narrow terminal. `cut` makes its cells."""
    return Column(Text(name), min_width=LEAST_WIDTH, overflow="ellipsis")


def cut(text: str) -> Text:
    """Return a cell of the last column. A long text is cut; `trial` and `trials --json` show the whole text."""
    return Text(unbroken(text), no_wrap=True, overflow="ellipsis")


def summary(
    report: StudyReport,
    console: Console,
    resume_command: str | None,
    run: Run | None = None,
) -> None:
    """Print the report of a study: best trials, failures, notices, the store, and the command to continue, if any.

    `run` describes the run, if this process has run the study.
    """
    if front := report.front:
        console.print(trial_table(spread_out(front), *BEST_COLUMNS))
    elif best := report.best_few:
        console.print(trial_table(best, *BEST_COLUMNS))
    if len(report.classes) > 1 and report.counts[_S.COMPLETE]:
        console.print(placement_table(report))
    if rungs := report.rungs:
        console.print(rung_table(rungs))
    failures, wrong = wrong_lines(report, run)
    name = shlex.quote(report.name)
    notices = [*report.notices, *(() if run is None else run.notices), *filter(None, [report.still_words])]
    lines = [
        *preference_lines(report.placed_by_params, len(report.subspaces)),
        *choice_lines(report),
        *pruner_lines(report),
        *budget_lines(report),
        *share_lines(report),
        *wrong,
        *(
            f"traceback: shadho-celery trial {name} {each.first}; all: shadho-celery trials {name} --failed"
            for each in failures[:1]
        ),
        *notices,
        # Drains have no fencing number, because no scheduler carries them out.
        *action_lines([a for a in report.actions if a.action != "note" and a.fence in (None, report.fence)]),
        *note_lines(notes_of(report.actions)),
        *([f"best: {best_values(report.best, report.name)}"] if report.best is not None else []),
        f"study {report.name}: {report.counts_words}; {best_line(report)}",
        *front_lines(report),
        *run_lines(report, run),
        f"store: {report.store}",
    ]
    then = "once it is fixed" if report.best is None and wrong else "more trials of it"
    lines += [f"{then}: {resume_command}"] if resume_command and not report.is_spent else []
    styles = {**dict.fromkeys(wrong, BAD), **dict.fromkeys(notices, WARN)}
    for line in lines:
        # No line feeds are inserted, so that a user can copy commands from these lines.
        console.print(Text(unbroken(line), style=styles.get(line, "")), soft_wrap=True)


def action_lines(actions: Sequence[Action]) -> list[str]:
    """Return a line for each of the last ACTIONS requests in `actions`, and a line with the number of earlier ones."""
    lines = [
        f"{each.action}, asked by {one_line(each.by)} at {moment(each.at)}"
        f"{'' if each.answer.is_done else ', refused'}: {one_line(each.answer.text)}"
        for each in actions[-ACTIONS:]
    ]
    earlier = len(actions) - ACTIONS
    return lines + [f"and {counted(earlier, 'earlier request')}; all: show --json"] * (earlier > 0)


def note_lines(notes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each of the last MESSAGES `notes` (see `notes_of`)."""
    on = [f" on trial {each['trial']}" * (each["trial"] is not None) for each in notes]
    told = [f"{each['by']} at {moment(each['at'])}: {one_line(each['text'], MAX_NOTE)}" for each in notes]
    return [f"note{trial} by {text}" for trial, text in zip(on, told, strict=True)][-MESSAGES:]


def wrong_lines(report: StudyReport, run: Run | None) -> tuple[Sequence[FailureCount], list[str]]:
    """Return the failures whose traceback is of interest, and lines about failures.

    If trials failed in this run, the lines describe only these failures, because the code may have been fixed since
    earlier runs. A line then has the number of earlier failures, whose trials may have been tried again with success.
    """
    ours = () if run is None else run.failures
    before = 0 if run is None else report.counts[_S.FAILED] - sum(each.trials for each in ours)
    if not before:
        return report.failures, failure_lines(report.failures)
    if not ours:
        return (), failure_lines(report.failures, "failed before this run")
    more = f"failed before this run: {counted(before, 'trial')}; all: shadho-celery show {shlex.quote(report.name)}"
    return ours, [*failure_lines(ours, "failed in this run"), more]


def failure_lines(failures: Sequence[FailureCount], when: str = "failed") -> list[str]:
    """Return a line for each of the MESSAGES most frequent kinds of failure, and a line with the number of others."""
    lines = [f"{when}: {one_line(each, 400)}" for each in failures[:MESSAGES]]
    if len(failures) > MESSAGES:
        lines += [f"{when} in other ways: {sum(each.trials for each in failures[MESSAGES:])}"]
    return lines


def run_lines(report: StudyReport, run: Run | None = None) -> list[str]:
    """Return lines with the duration of the search, its machines, and the versions of its software and code."""
    if run is not None:
        time = [time_line(run.seconds, run.counts)]
    else:
        time = [time_line(report.active_seconds, report.counts, has_run=False)] if report.ended else []
    spent = [report.money_words] if report.money else []
    spent += [report.deadline_words] if report.deadline_words else []
    versions = () if run is None else run.versions
    return [*time, *spent, *place_lines(report.hosts, report.codes, versions)]


def time_line(seconds: float, counts: Mapping[TrialState, int], *, has_run: bool = True) -> str:
    """Return a line with a duration, the number of trials that ended in it, their states unless all are complete, and
    their rate.

    `counts` are the numbers of trials by state. `has_run` is True if the duration is that of this run, and False if it
    is that of all runs.
    """
    found = {state: counts[state] for state in (_S.COMPLETE, _S.PRUNED, _S.FAILED) if counts.get(state)}
    trials, kinds = sum(found.values()), f" ({', '.join(map(str.lower, found))})" if {*found} - {_S.COMPLETE} else ""
    rate = f", {rate_text(60 * trials / seconds)}" if trials and seconds > 0 else ""
    words = f"{counted(trials, 'trial')}{kinds}{rate}"
    return f"{'this run took' if has_run else 'ran for about'} {took(seconds)}: {words}"


def place_lines(hosts: Mapping[str, int], codes: Iterable[str], versions: Iterable[str] = ()) -> list[str]:
    """Return lines with the number of trials on each machine, and the versions of code and software."""
    named = [f"{host} ({count})" for host, count in sorted(hosts.items(), key=lambda pair: -pair[1])]
    code = [*codes]
    found = [*versions, *([f"code {', '.join(code[:HOSTS])}"] if code else [])]
    return [
        *([f"trials by host: {listed(named, HOSTS)}"] if named else []),
        *([f"versions: {', '.join(found)}"] if found else []),
    ]


def number(value: float | None) -> str:
    """Return a number as text with six digits, or "-" for None."""
    return "-" if value is None else f"{value:.6g}"


def make_table(columns: Iterable[str | Column], rows: Iterable[Iterable[object]], title: str | None = None) -> Table:
    """Return a table. A column whose name begins with > is aligned to the right, for numbers. None is shown as "-"."""
    shown = (
        Column(Text(each[1:]), justify="right", no_wrap=True)
        if isinstance(each, str) and each.startswith(">")
        else each
        for each in columns
    )
    table = Table(*shown, title=title, title_justify="left")
    for row in rows:
        # Cells are `Text`, because rich takes square brackets in a str for markup.
        table.add_row(*(each if isinstance(each, Text) else Text("-" if each is None else str(each)) for each in row))
    return table


def print_table(columns: Iterable[str | Column], rows: Iterable[Iterable[object]]) -> None:
    """Print a table as `make_table` makes it."""
    make_console().print(make_table(columns, rows))


#: heading of the column with a trial's values; and names of the columns with its result
GOT, RESULT = "what the objective got", ("losses", ">budget", ">step", ">violation")
BEST_COLUMNS = (">trial", "losses", ">budget", ">violation", "class", GOT)
#: functions that return the text of a trial's cell, by column
_TEXTS: Mapping[str, Callable[[TrialResult], str]] = {
    ">trial": lambda trial: str(trial.number),
    "state": lambda trial: trial.state.lower(),
    ">budget": lambda trial: "all" if trial.budget is None else number(trial.budget),
    ">step": lambda trial: "-" if trial.step is None else str(trial.step),
    ">violation": lambda trial: f"{trial.violation:.3g}" if trial.violation else "-",
    ">time": lambda trial: took(trial.seconds),
    "class": lambda trial: trial.compute_class or "-",
    "host": lambda trial: trial.host or "-",
    "code": lambda trial: trial.code or "-",
    "error": lambda trial: one_line(read_failure(trial.error), 1000),
    GOT: given,
}
#: columns that are left out unless this function returns True for a trial
_OPTIONAL: Mapping[str, Callable[[TrialResult], bool]] = {
    ">budget": lambda trial: trial.budget is not None,
    ">step": lambda trial: trial.step is not None,
    ">violation": lambda trial: not trial.is_feasible,
}


def trial_table(trials: Sequence[TrialResult], *facts: str) -> Table:
    """Return a table with a row for each trial, and the columns `facts`. "losses" means a column for each loss."""
    shown = [name for name in facts if name not in _OPTIONAL or any(map(_OPTIONAL[name], trials))]
    place, losses = shown.index("losses"), [*dict.fromkeys(name for each in trials for name in each.losses)]
    before, after = shown[:place], shown[place + 1 :]
    names = [*before, *(f">{one_line(name, NAME)}" for name in losses or ["loss"]), *after[:-1]]
    rows = (
        [
            *(_TEXTS[name](each) for name in before),
            *map(number, [each.losses.get(name) for name in losses] or [each.loss]),
            *(_TEXTS[name](each) for name in after[:-1]),
            cut(_TEXTS[after[-1]](each)),
        ]
        for each in trials
    )
    return make_table([*(name if name.startswith(">") else fact(name) for name in names), last(after[-1])], rows)


def spread_out(front: Sequence[T]) -> list[T]:
    """Return FRONT trials of a front: its ends, and trials evenly spread between them. A smaller front is unchanged."""
    step = (len(front) - 1) / (FRONT - 1)
    return [*front] if len(front) <= FRONT else [front[round(place * step)] for place in range(FRONT)]


def front_lines(report: StudyReport) -> list[str]:
    """Return a line with the hypervolume of a front, and the command that prints the whole front if it is long."""
    covered = report.coverage
    if covered is None:
        return []
    point = ", ".join(f"{name} {loss:.4g}" for name, loss in covered.reference.items())
    more = f"; all: shadho-celery best {shlex.quote(report.name)}" if report.on_front > FRONT else ""
    return [f"front: hypervolume {covered.hypervolume:.6g} against {point}{more}"]


def placement_table(report: StudyReport) -> Table:
    """Return a table of subspaces by class: numbers of complete and of pruned trials, and median seconds of the
    complete ones.

    The best subspaces come first.
    """
    found = report.subspaces
    first, direction = next(iter(report.objectives.items()), ("loss", "minimize"))
    sign = -1.0 if direction == "maximize" else 1.0
    rows = {}
    for name in sorted(found, key=lambda name: (found[name].best is None, sign * (found[name].best or 0.0))):
        placed = {where: each for where, each in found[name].classes.items() if each.complete or each.pruned}
        best = found[name].best
        rows[name] = placed, ["-" if best is None else f"{best:.6g}"]
    return _by_class(rows, [f"best {one_line(first, NAME)}"], PLACED)


def rung_table(rungs: Sequence[RungSummary]) -> Table:
    """Return a table of budgets: complete trials by class, and how well losses agree with those at the next budget."""
    rows = {}
    for rung in rungs:
        failed = sum(each.failed for each in rung.classes.values())
        trust = "-" if rung.agreement is None else f"{rung.agreement:.0%}"
        rows[f"budget {rung.budget:.6g}"] = rung.classes, [str(failed), trust]
    return _by_class(rows, ["failed", "losses agree"])


def _by_class(
    rows: Mapping[str, tuple[Mapping[str, OnClass], Sequence[str]]], more: Sequence[str], most: int | None = None
) -> Table:
    """Return a table of trials by class, with the further columns `more`.

    `rows` has, by the name of each row, the numbers of trials by class and the cells of the further columns.
    """
    classes = sorted({name for placed, _ in rows.values() for name in placed})
    has_pruned = any(each.pruned for placed, _ in rows.values() for each in placed.values())
    title = "complete x median time" + (" + pruned" if has_pruned else "")
    shown = (
        [unbroken(name), *(None if where not in placed else _placed(placed[where]) for where in classes), *cells]
        for name, (placed, cells) in [*rows.items()][:most]
    )
    return make_table([title, *(f">{name}" for name in (*classes, *more))], shown)


def _placed(found: OnClass) -> str:
    """Return a cell such as ``3 x 20.5 s + 4``: three complete trials, their median seconds, and four pruned trials."""
    parts = [f"{found.complete} x {took(found.seconds)}"] if found.seconds is not None else []
    return " ".join([*parts, *([f"+ {found.pruned}"] if found.pruned else [])]) or "-"


def share_lines(report: StudyReport) -> list[str]:
    """Return a line if the subspaces' shares of the trials depend on timing, as with `paper`."""
    if report.in_force.get("shares") != "paper" or len(report.subspaces) < 2:
        return []
    return ["mix of subspaces: by the ranks of policy paper; it depends on timing, not on the seed alone"]


def choice_lines(report: Overview) -> list[str]:
    """Return lines with the last choice of the sampler `auto` and its reason, for the MESSAGES largest subspaces."""
    choices = [*report.record.choices.items()]
    lines = [f"sampler auto{f', {name}' if len(choices) > 1 else ''}: {why}" for name, why in choices[:MESSAGES]]
    left = len(choices) - MESSAGES
    return lines + [f"sampler auto in further subspaces ({left}): see --json"] * (left > 0)


def rung_lines(report: Overview) -> list[str]:
    """Return a line with the number of complete trials of each budget; no line for a study without budgets."""
    shown = ", ".join(f"{count} at {budget:.6g}" for budget, count in sorted(report.budgets.items()))
    return [f"budgets: {shown}"] * bool(shown)


def budget_lines(report: Overview) -> list[str]:
    """Return a line about the budgets of trials, and a second line if no trial has reached the full budget.

    Return no line for a study without budgets.
    """
    ladder, reached = ladder_of(report.in_force), report.budgets
    if ladder is None or not reached:
        return []
    lines = [f"budgets: {ladder.in_words}"]
    if max(reached) < ladder.most:
        lines += [f"no trial has come to the budget of {ladder.most:.6g} yet: with a higher limit on trials some may"]
    return lines


def pruner_lines(report: StudyReport) -> list[str]:
    """Return a line with the number of pruned trials by the step of their last report.

    Return no line for a study that has neither a pruner nor pruned trials.
    """
    given = report.in_force.get("pruner")
    name = (given.get("how") if isinstance(given, Mapping) else given) or NO_PRUNER
    count, steps = report.counts[_S.PRUNED], report.last_steps
    if not count:
        return [] if name == NO_PRUNER else [f"stopped by their reports: no trial; pruner: {name}"]
    shown = ", ".join(f"{each} at step {step}" for step, each in steps[:STEPS])
    more = f", {sum(each for _, each in steps[STEPS:])} at later ones" if len(steps) > STEPS else ""
    # The name of the pruner is that of the last run; earlier runs may have had another one.
    return [f"stopped by their reports: {counted(count, 'trial')}, {shown}{more}; pruner: {name}"]


def preference_lines(found: Sequence[Preference], subspaces: int) -> list[str]:
    """Return a line for each of the first MESSAGES preferences. `subspaces` is the number of all subspaces."""
    return [
        f"placed by {f'params of {each.subspace}' if subspaces > 1 else 'params'}: {each}" for each in found[:MESSAGES]
    ]


def best_values(trial: TrialResult, study: str = "") -> str:
    """Return the values of the best trial as a short text, with a note if they are rounded.

    If `study` is given, the note also appears if the loss is rounded, and names the command that shows all digits.
    """
    try:
        words = "rounded" if _is_rounded(trial.values) else ""
    except Exception:  # a space may call any function, which may fail on these params
        words = ""
    losses = [trial.loss or 0.0, *trial.losses.values()]
    if study and not words and any(float(f"{loss:.6g}") != loss for loss in losses):
        words = "its loss is rounded"
    exact = f"; in full precision: shadho-celery best {shlex.quote(study)}" if study else ""
    return given(trial) + (f" ({words}{exact})" if words else "")


def _is_rounded(value: object) -> bool:
    """Return whether `brief` rounds a number in `value`."""
    if isinstance(value, float):
        return math.isfinite(value) and float(brief(value)) != value
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, (tuple, list)) and any(map(_is_rounded, value))
