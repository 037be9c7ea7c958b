"""Views of a study: in tables at its end, and as JSON for scripts."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import to_builtins
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from shadho_celery.cli.console import PrintableConsole
from shadho_celery.core.checks import one_line
from shadho_celery.core.names import NO_PRUNER
from shadho_celery.core.objectives import turned, turned_first
from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.fidelity.ladder import ladder_of
from shadho_celery.placement.shares import only_fails
from shadho_celery.results.coverage import coverage
from shadho_celery.results.preferences import Preference, preferences
from shadho_celery.results.values import Values
from shadho_celery.store.base import DEFAULT_STORE, StudyRecord
from shadho_celery.study.failures import Failures
from shadho_celery.study.rungs import RungSummary

if TYPE_CHECKING:
    from shadho_celery.study.state import StudyState

#: rows of the table of the best trials, and of that of a front
BEST, FRONT = 5, 10

#: characters of a loss's name in a table
NAME = 14

#: rows of the table of subspaces and classes
PLACED = 12

#: failures and warnings that the summary shows
MESSAGES = 3

#: machines that the summary names, and versions of the code
HOSTS = 8

#: steps at which trials were pruned that a line names
STEPS = 8

#: latest trials whose placement is looked at
LATEST = 2000

#: least characters of a table's last column
LEAST_WIDTH = 12

#: columns of a result without a terminal
PLAIN_WIDTH = 120

#: styles of what is wrong: it has failed or stands still, or needs attention
BAD, WARN = "red", "yellow"

_S = TrialState
T = TypeVar("T")


class Evaluator(Protocol):
    """Makes values from params: a space does."""

    def evaluate(self, params: Params, /) -> Any:
        """Return what the objective gets for these params."""


def make_console(*, stderr: bool = False) -> Console:
    """Return the console for results: as wide as the terminal, and without one as wide as a file can be read."""
    is_plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return PrintableConsole(stderr=stderr, width=PLAIN_WIDTH if is_plain else None)


def asked_trials(record: StudyRecord) -> int | None:
    """Return the limit on trials of a study's latest run; None without one, and where it was not recorded."""
    limit: int | None = (record.in_force or {}).get("trials") or record.settings.get("trials")
    return limit


def further_trials(asked: int | None, counted: int) -> int:
    """Return the limit of a study's next run: the trials that were asked for, or twice as many as there are."""
    return asked if asked and asked > counted else 2 * max(1, counted)


def resume_command(module: str, name: str, store: str, trials: int, workers: Mapping[str, int] | None = None) -> str:
    """Return the command that continues a study up to so many trials.

    `store` is its URL without a password; `workers` are the slots by class that were asked for.
    """
    words = ["python", "-m", "shadho_celery.launch", module, "--resume", name]
    if store != DEFAULT_STORE:
        words += ["--store", store]
    words += [word for name, slots in (workers or {}).items() for word in ("--workers", f"{name}={slots}")]
    return shlex.join([*words, "--trials", str(trials)])


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [*dropwhile(lambda part: not part[0], ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")))]
    return " ".join(f"{count} {unit}" for count, unit in parts[:2] if count) or "0 s"


def took(seconds: float | None) -> str:
    """Return the time that something took: to three digits in s or ms, a longer one in its two largest units."""
    if not seconds:
        return "-" if seconds is None else "0 s"
    if seconds >= 99.95:
        return duration(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def rate_text(a_minute: float) -> str:
    """Return a number of trials a minute: to three digits, a large one as a whole number."""
    return f"{a_minute:{'.3g' if a_minute < 999.5 else '.0f'}} trials a minute"


def best_line(study: StudyState) -> str:
    """Return the best loss so far in one line."""
    best = study.best
    if best is None:
        return study.best_words
    nearest = f"the nearest breaks its constraints by {best.violation:.3g}: " if best.violation else ""
    return f"{study.best_words} ({nearest}trial {best.number}, {best.subspace}, {best.compute_class})"


def right(name: str) -> Column:
    """Return a column of numbers."""
    return Column(Text(name), justify="right", no_wrap=True)


def fact(name: str) -> Column:
    """Return a column that keeps its width: without the facts the last column could not be understood."""
    return Column(Text(name), no_wrap=True)


def last(name: str) -> Column:
    """Return the last column, the only one to become narrower where a terminal is; see `cut`."""
    return Column(Text(name), min_width=LEAST_WIDTH, overflow="ellipsis")


def cut(text: str) -> Text:
    """Return a cell of the last column: cut, not wrapped. All values stand in `trial`, and in `trials --json`."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def summary(
    study: StudyState,
    space: Evaluator,
    console: Console,
    resume_command: str | None,
    refused: int = 0,
    *,
    has_run: bool = True,
    run_lines: Sequence[str] = (),
) -> None:
    """Print the best trials, failures and warnings, the store, and the command to continue, if there is one.

    `refused` is the number of results that were refused: late ones, and those of other params. Without `has_run` the
    study is only looked at. `run_lines` tell how long the search took, and where.
    """
    if front := study.trials.front:
        console.print(best_table(spread_out(front), space, study.objectives))
    elif best := study.trials.best_few(BEST):
        console.print(best_table(best, space, study.objectives))
    if len(study.compute_classes) > 1 and study.count(_S.COMPLETE):
        console.print(placement_table(study))
    if rungs := study.trials.rungs():
        console.print(rung_table(rungs))
    preferred = preference_lines(study)
    # Those of this run first: its code may have been fixed since.
    ours = study.failures.common()
    failures = ours or Failures(study.trials.of_state(_S.FAILED)).common()
    when = "failed" if ours or not has_run else "failed before this run"
    lines = [*preferred, *choice_lines(study), *pruner_lines(study), *budget_lines(study), *share_lines(study)]
    wrong = [f"{when}: {one_line(each, 400)}" for each in failures[:MESSAGES]]
    if len(failures) > MESSAGES:
        wrong += [f"{when} in other ways: {sum(each.trials for each in failures[MESSAGES:])}"]
    lines += wrong
    if failures:
        name = shlex.quote(study.name)
        lines += [
            f"traceback: shadho-celery trial {name} {failures[0].first}; all: shadho-celery trials {name} --failed"
        ]
    warned = [*_warnings(study.trials.warned()), *_faults(study, refused, has_ended=resume_command is not None)]
    lines += warned
    if study.best is not None:
        lines += [f"best: {best_values(space, study.best, study.name)}"]
    lines += [f"study {study.name}: {counts_line(study)}; {best_line(study)}", *front_lines(study)]
    lines += [*run_lines, f"store: {study.store.safe_url}"]
    then = "once it is fixed" if study.best is None and failures else "more trials of it"
    lines += [f"{then}: {resume_command}"] if resume_command else []
    styles = {**dict.fromkeys(wrong, BAD), **dict.fromkeys(warned, WARN)}
    for line in lines:
        # Soft: lines to copy from must not be wrapped at the width of a file.
        console.print(Text(line, style=styles.get(line, "")), soft_wrap=True)


def counts_line(study: StudyState) -> str:
    """Return how many trials have ended, of how many, and how."""
    limit = asked_trials(study.record)
    pruned = f", {study.count(_S.PRUNED)} pruned" if study.count(_S.PRUNED) else ""
    counts = f"{study.count(_S.COMPLETE)} complete{pruned}, {study.count(_S.FAILED)} failed"
    return f"{counts} of {limit} trials" if limit else counts


def time_line(seconds: float, trials: int, *, has_run: bool = True) -> str:
    """Return how long so many trials took together, in this run or in all of them, and their rate."""
    rate = f", {rate_text(60 * trials / seconds)}" if trials and seconds > 0 else ""
    words = f"{trials} {'trial' if trials == 1 else 'trials'}{rate}"
    return f"{'this run took' if has_run else 'ran for about'} {took(seconds)}: {words}"


def place_lines(hosts: Mapping[str, int], codes: Iterable[str], versions: Iterable[str] = ()) -> list[str]:
    """Return lines on the machines, with the trials of each, and on the versions of the code that ran there."""
    named = [f"{host} ({count})" for host, count in sorted(hosts.items(), key=lambda pair: -pair[1])]
    more = f" and {len(named) - HOSTS} more" if len(named) > HOSTS else ""
    code = [*codes]
    found = [*versions, *([f"code {', '.join(code[:HOSTS])}"] if code else [])]
    return [
        *([f"trials by host: {', '.join(named[:HOSTS])}{more}"] if named else []),
        *([f"versions: {', '.join(found)}"] if found else []),
    ]


def best_table(trials: Sequence[Trial], space: Evaluator, objectives: Mapping[str, str] | None = None) -> Table:
    """Return one row for each trial: its losses, and budget and violated constraints if any of them has such ones."""
    has_budgets = any(trial.budget is not None for trial in trials)
    violates = any(trial.violation for trial in trials)
    names = [one_line(name, NAME) for name in objectives or ()] or ["loss"]
    names += ["budget"] * has_budgets + ["violation"] * violates
    table = Table(*map(right, ("trial", *names)), fact("class"), last("what the objective got"))
    for trial in trials:
        figures = [f"{loss:.6g}" for loss in turned(trial.losses or {"": trial.loss or 0.0}, objectives).values()]
        figures += ["all" if trial.budget is None else f"{trial.budget:.6g}"] * has_budgets
        figures += [f"{trial.violation:.3g}" if trial.violation else "-"] * violates
        # Text: rich would read square brackets in a str as its markup.
        table.add_row(str(trial.number), *figures, Text(str(trial.compute_class)), cut(given(space, trial)))
    return table


def spread_out(front: Sequence[T]) -> list[T]:
    """Return FRONT trials of a front, its ends and some evenly between them; all of a smaller one."""
    step = (len(front) - 1) / (FRONT - 1)
    return [*front] if len(front) <= FRONT else [front[round(place * step)] for place in range(FRONT)]


def front_lines(study: StudyState) -> list[str]:
    """Return a line on the front of several losses: what it covers, and where it stands whole."""
    covered = coverage(study.trials, study.objectives)
    if covered is None:
        return []
    point = ", ".join(f"{name} {loss:.4g}" for name, loss in covered.reference.items())
    more = f"; all: shadho-celery best {shlex.quote(study.name)}" if study.trials.on_front > FRONT else ""
    return [f"front: hypervolume {covered.hypervolume:.6g} against {point}{more}"]


def placement_table(study: StudyState) -> Table:
    """Return how many trials of each subspace were complete, with their median seconds, and pruned, by class.

    The best subspaces come first.
    """
    seconds, pruned = study.trials.seconds(_S.COMPLETE), study.trials.seconds(_S.PRUNED)
    classes = sorted({compute_class for _, compute_class in [*seconds, *pruned]})
    best = {name: study.best_of(name) for name in study.subspaces}
    name = one_line(next(iter(study.objectives), "loss"), NAME)
    title = "complete x median time" + (" + pruned" if pruned else "")
    table = Table(title, *map(right, [*classes, f"best {name}"]))
    for subspace in sorted(best, key=lambda name: (best[name] is None, best[name] or 0.0))[:PLACED]:
        done = [seconds.get((subspace, name), []) for name in classes]
        stopped = [len(pruned.get((subspace, name), ())) for name in classes]
        medians = [statistics.median(each) if each else None for each in done]
        cells = [*map(_placed, map(len, done), medians, stopped)]
        loss = _own(study, best[subspace])
        table.add_row(Text(subspace), *cells, "-" if loss is None else f"{loss:.6g}")
    return table


def rung_table(rungs: Sequence[RungSummary]) -> Table:
    """Return how many trials of each budget were complete, by class, and how far ranks agree with the next one's.

    The agreement is Kendall's rank correlation, 0 where it is negative: `auto` trusts a budget so far.
    """
    classes = sorted({name for rung in rungs for name in rung.classes})
    has_pruned = any(each.pruned for rung in rungs for each in rung.classes.values())
    title = "complete x median time" + (" + pruned" if has_pruned else "")
    table = Table(title, *map(right, [*classes, "failed", "ranks agree"]))
    for rung in rungs:
        placed = [rung.classes.get(name) for name in classes]
        cells = ["-" if each is None else _placed(each.complete, each.seconds, each.pruned) for each in placed]
        failed = sum(each.failed for each in rung.classes.values())
        trust = "-" if rung.agreement is None else f"{rung.agreement:.0%}"
        table.add_row(f"budget {rung.budget:.6g}", *cells, str(failed), trust)
    return table


def _placed(complete: int, seconds: float | None, pruned: int) -> str:
    """Return a cell of complete trials with their median time, and of pruned ones, such as ``3 x 20.5 s + 4``."""
    parts = [f"{complete} x {took(seconds)}"] if seconds is not None else []
    return " ".join([*parts, *([f"+ {pruned}"] if pruned else [])]) or "-"


def first_loss(study: StudyState, loss: float) -> tuple[str, float]:
    """Return the name of the first loss, and that of a report as the objective reported it."""
    return one_line(next(iter(study.objectives), "loss"), NAME), turned_first(loss, study.objectives)


def _own(study: StudyState, loss: float | None) -> float | None:
    """Return a loss, of several the first one, as the objective returned it; None without one."""
    return None if loss is None else turned_first(loss, study.objectives)


def share_lines(study: StudyState) -> list[str]:
    """Return lines on shares that are not what the space's own law makes of them."""
    shares = (study.record.in_force or {}).get("shares")
    if shares == "paper" and len(study.subspaces) > 1:
        return ["mix of subspaces: by the ranks of policy paper; it depends on timing, not on the seed alone"]
    failing = [
        name
        for name in study.subspaces
        if only_fails(study.count(_S.FAILED, subspace=name), study.count(_S.COMPLETE, _S.PRUNED, subspace=name))
    ]
    if shares not in ("even", "promise") or not failing or len(study.subspaces) < 2:
        return []
    more = f" and {len(failing) - MESSAGES} more" if len(failing) > MESSAGES else ""
    named = ", ".join(f"{name} ({study.count(_S.FAILED, subspace=name)})" for name in failing[:MESSAGES])
    return [f"all trials failed, so it gets a tenth of its share until one succeeds: {named}{more}"]


def choice_lines(study: StudyState) -> list[str]:
    """Return a line for each of the subspaces with the most trials: what the sampler `auto` chose last, and why."""
    choices = study.choices
    most = sorted(choices, key=lambda name: -study.asked(name))
    lines = [f"sampler auto{f', {name}' if len(most) > 1 else ''}: {choices[name]}" for name in most[:MESSAGES]]
    return lines + [f"sampler auto in further subspaces ({len(most) - MESSAGES}): see --json"] * (len(most) > MESSAGES)


def rung_lines(study: StudyState) -> list[str]:
    """Return a line on the complete trials of each budget; none in a study without budgets."""
    shown = ", ".join(f"{count} at {budget:.6g}" for budget, count in sorted(study.trials.by_budget.items()))
    return [f"budgets: {shown}"] * bool(shown)


def budget_lines(study: StudyState) -> list[str]:
    """Return a line on the budgets of trials, and one if none has come to the full one; none without budgets."""
    ladder, reached = ladder_of(study.record.in_force or {}), study.trials.by_budget
    if ladder is None or not reached:
        return []
    lines = [f"budgets: {ladder.in_words}"]
    if max(reached) < ladder.most:
        lines += [f"no trial has come to the budget of {ladder.most:.6g} yet: with a higher limit on trials some may"]
    return lines


def pruner_lines(study: StudyState) -> list[str]:
    """Return a line on the pruned trials: their number by the step of their last report; none without a pruner."""
    given = (study.record.in_force or {}).get("pruner")
    name = (given.get("how") if isinstance(given, Mapping) else given) or NO_PRUNER
    count = study.count(_S.PRUNED)
    if not count:
        return [] if name == NO_PRUNER else [f"stopped by their reports: no trial; pruner: {name}"]
    steps = study.trials.last_steps()
    shown = ", ".join(f"{each} at step {step}" for step, each in steps[:STEPS])
    more = f", {sum(each for _, each in steps[STEPS:])} at later ones" if len(steps) > STEPS else ""
    words = "trial" if count == 1 else "trials"
    # Earlier runs may have had another one.
    return [f"stopped by their reports: {count} {words}, {shown}{more}; pruner: {name}"]


def preference_lines(study: StudyState) -> list[str]:
    """Return a line for each of the first few subspaces whose latest trials went to classes by a param."""
    has_names = len(study.subspaces) > 1
    found = placed_by_params(study)[:MESSAGES]
    return [f"placed by {f'params of {each.subspace}' if has_names else 'params'}: {each}" for each in found]


def placed_by_params(study: StudyState) -> list[Preference]:
    """Return the params by which the latest trials went to classes; none under a policy that does not look at them."""
    if len(study.compute_classes) < 2 or (study.record.in_force or {}).get("policy", "cost") != "cost":
        return []
    return preferences(study.trials[-LATEST:], Values(study.record).shown)


def _warnings(trials: Iterable[Trial]) -> list[str]:
    """Return a line for each of the first few different warnings, with its first trial and the number of others."""
    numbers: dict[str, list[int]] = {}
    for trial in trials:
        text = one_line(trial.warning or "", 300)
        if text and (text in numbers or len(numbers) < MESSAGES):
            numbers.setdefault(text, []).append(trial.number)
    return [
        f"trial {first}{f' and {len(others)} more' if others else ''}: {text}"
        for text, (first, *others) in numbers.items()
    ]


def _faults(study: StudyState, refused: int, *, has_ended: bool) -> list[str]:
    """Return a line for each count of lost attempts, copies, refused results and waiting trials above 0."""
    # Where the study was stopped at once, those that ran wait, too.
    waiting = study.count(_S.WAITING) + (study.in_flight if has_ended else 0)
    counts = {
        f"attempts lost with their workers, and run again: {study.lost}": study.lost,
        f"late trials copied to an idle slot: {study.copied}; ended by the copy: {study.rescued}": study.copied,
        f"results refused, late or of other params; each trial counts once: {refused}": refused,
        f"trials that wait to be run by --resume: {waiting}": waiting,
    }
    return [line for line, count in counts.items() if count]


def best_values(space: Evaluator, trial: Trial, study: str = "") -> str:
    """Return what the objective got in the best trial in short form, and whether that is rounded.

    With the name of its `study` also whether its loss is, and by which command both are shown in full precision.
    """
    try:
        words = "rounded" if _is_rounded(space.evaluate(trial.params)) else ""
    except Exception:  # as in `given`
        words = ""
    losses = [trial.loss or 0.0, *trial.losses.values()]
    if study and not words and any(float(f"{loss:.6g}") != loss for loss in losses):
        words = "its loss is rounded"
    exact = f"; in full precision: shadho-celery best {shlex.quote(study)}" if study else ""
    return given(space, trial) + (f" ({words}{exact})" if words else "")


def _is_rounded(value: object) -> bool:
    """Return whether `brief` does not show all digits of a number in a value."""
    if isinstance(value, float):
        return math.isfinite(value) and float(brief(value)) != value
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, (tuple, list)) and any(map(_is_rounded, value))


def given(space: Evaluator, trial: Trial) -> str:
    """Return the objective's values in short form."""
    try:
        return brief(space.evaluate(trial.params))
    except Exception as error:  # a space may call any function, which may fail on these params
        return f"({type(error).__name__})"


def brief(value: object) -> str:
    """Return values in short form."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {brief(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(brief, value)) + ")"
    return str(value)


def as_json(
    study: StudyState,
    seconds: float,
    subspaces: Iterable[str],
    slots: Mapping[str, int],
) -> dict[str, object]:
    """Return the study as one JSON object.

    `slots` are the live slots by class, `subspaces` all that exist.
    """

    def counts(*states: TrialState, **where: str) -> dict[str, object]:
        return {state.lower(): study.count(state, **where) for state in states}

    ended = (_S.COMPLETE, _S.FAILED)
    classes = sorted({*slots, *study.compute_classes})
    best, covered = study.best, coverage(study.trials, study.objectives)
    return {
        "study": study.name,
        "store": study.store.safe_url,
        "seconds": round(seconds, 3),
        "objectives": dict(study.objectives),
        "trials": {"total": study.counted, **counts(*ended, _S.PRUNED, _S.CANCELLED)},
        "best": best and _trial_json(best, study),
        "front": [_trial_json(trial, study) for trial in study.trials.front],
        "hypervolume": covered and to_builtins(covered),
        "warm_start": len(study.warm_start),
        "classes": {name: counts(*ended, compute_class=name) | {"slots": slots.get(name, 0)} for name in classes},
        "sampler": {"name": (study.record.in_force or {}).get("sampler"), "choices": dict(study.choices)},
        "pruner": (study.record.in_force or {}).get("pruner"),
        "rungs": [*map(to_builtins, study.trials.rungs())],
        "placed_by_params": [to_builtins(each) for each in placed_by_params(study)],
        "subspaces": {
            name: counts(*ended, subspace=name) | {"best": _own(study, study.best_of(name))}
            for name in dict.fromkeys([*subspaces, *study.subspaces])
        },
    }


def _trial_json(trial: Trial, study: StudyState) -> dict[str, object]:
    """Return a trial of the result: its loss, the first of several, all by name, and constraints as returned."""
    found: dict[str, object] = {"loss": _own(study, trial.loss)}
    found |= {"losses": turned(trial.losses, study.objectives)} if trial.losses else {}
    found |= {"constraints": dict(trial.constraints)} if trial.constraints else {}
    found |= {} if trial.budget is None else {"budget": trial.budget}
    return found | {"params": dict(trial.params), "compute_class": trial.compute_class, "trial": trial.number}
