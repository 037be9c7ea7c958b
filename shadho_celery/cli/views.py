"""Views of a study: live while it runs, in tables when it has ended, and as JSON for scripts."""

from __future__ import annotations

import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import headline
from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.space.compile import Space
from shadho_celery.study.study import Study
from shadho_celery.study.trials import merit

#: rows of the table of the best trials
BEST = 5

#: rows of the table of what ran where
PLACED = 12

#: seconds between two lines of the plain view
PLAIN_SECONDS = 5.0

_S = TrialState


class LiveView:
    """A terminal's view: progress, the best so far, and what every class is doing."""

    def __init__(self, scheduler: Scheduler, console: Console) -> None:
        self._scheduler = scheduler
        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task(scheduler.study.name, total=scheduler.limits.trials)
        self._live = Live(self.picture(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self) -> None:
        """Show how things are now."""
        self._live.update(self.picture())

    def note(self, text: str) -> None:
        """Say something once, above the view."""
        self._live.console.print(Text(text))

    def picture(self) -> Group:
        """What the view shows now."""
        self._progress.update(self._task, completed=self._scheduler.study.counted)
        return Group(self._progress, Text(best_line(self._scheduler.study)), class_table(self._scheduler))


class PlainView:
    """The view where there is no terminal: a line now and then."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._shown_at = scheduler.study.clock.now()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self) -> None:
        """Print a line if the last one is old enough."""
        now = self._scheduler.study.clock.now()
        if now - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = now
            self.note(progress_line(self._scheduler))

    def note(self, text: str) -> None:
        """Print a line on standard error: standard output is for results."""
        print(text, file=sys.stderr, flush=True)


def progress_line(scheduler: Scheduler) -> str:
    """The state of the study in one line."""
    study = scheduler.study
    limit = f"/{scheduler.limits.trials}" if scheduler.limits.trials else ""
    taken = busy_slots(study)
    busy = ", ".join(f"{c.name} {taken[c.name]}/{c.slots} busy" for c in scheduler.classes)
    return f"{study.counted}{limit} trials; {best_line(study)}; {busy or 'no live worker'}"


def busy_slots(study: Study) -> Counter[str | None]:
    """By compute class, the slots that something runs in: a trial takes as many as it is wide, in each attempt."""
    busy: Counter[str | None] = Counter()
    for attempt in study.attempts:
        if attempt.state is _S.RUNNING:
            busy[attempt.compute_class] += attempt.slots
    return busy


def best_line(study: Study) -> str:
    """The best loss so far."""
    best = study.best
    if best is None:
        return "no loss yet"
    return f"best loss {best.loss:.6g} (trial {best.number}, {best.subspace}, {best.compute_class})"


def class_table(scheduler: Scheduler) -> Table:
    """One row a compute class: the live ones, and others that trials were sent to."""
    study = scheduler.study
    live = {c.name: c for c in scheduler.classes}
    busy = busy_slots(study)
    table = Table("class", *(_right(name) for name in ("workers", "busy", "slots", "waiting", "done", "failed")))
    for name in [*live, *(name for name in study.compute_classes if name not in live)]:
        known = live.get(name)
        counts = (
            known.workers if known else 0,
            busy[name],
            known.slots if known else 0,
            study.count(_S.QUEUED, compute_class=name),
            study.count(_S.COMPLETE, _S.PRUNED, compute_class=name),
            study.count(_S.FAILED, compute_class=name),
        )
        table.add_row(Text(name), *map(str, counts))
    return table


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(Text(name), justify="right")


def summary(study: Study, space: Space, console: Console, resume_command: str, refused: int = 0) -> None:
    """The best trials, what went wrong, where the store lies, and how to go on; `refused` are late results."""
    complete = sorted((t for t in study.trials if t.state is _S.COMPLETE), key=lambda t: (merit(t), t.number))
    if complete:
        console.print(best_table(complete[:BEST], space))
    if len(study.subspaces) > 1 and len(study.compute_classes) > 1:
        console.print(placement_table(study))
    # Lines to be copied from: without a terminal they would be wrapped at a width that nobody has chosen.
    say = partial(console.print, soft_wrap=True)
    for trial in _failures(study):
        say(Text(f"trial {trial.number} failed: {headline(trial.error)[:300]}"))
    for trial in _warned(study):
        say(Text(f"trial {trial.number}: {one_line(trial.outcome.warning if trial.outcome else '', 300)}"))
    for line in _faults(study, refused):
        say(Text(line))
    counts = f"{study.count(_S.COMPLETE)} complete, {study.count(_S.FAILED)} failed"
    say(Text(f"study {study.name}: {counts}; {best_line(study)}"))
    say(Text(f"store: {study.store.safe_url}"))
    say(Text(f"more trials of it: {resume_command}"))


def best_table(trials: Sequence[Trial], space: Space) -> Table:
    """One row a trial, with its budget where any of them has one."""
    has_budgets = any(trial.budget is not None for trial in trials)
    numbers = ("trial", "loss", "budget") if has_budgets else ("trial", "loss")
    table = Table(*map(_right, numbers), "class", "params as drawn", "what the objective got")
    for trial in trials:
        budget = "all" if trial.budget is None else f"{trial.budget:.6g}"
        # Text: rich would read square brackets in a str as its markup.
        words = (str(trial.compute_class), drawn(trial.params), given(space, trial))
        figures = (str(trial.number), f"{trial.loss:.6g}", budget)
        table.add_row(*figures[: len(numbers)], *map(Text, words))
    return table


def placement_table(study: Study) -> Table:
    """What ran where: by subspace and class the trials that finished, and the median of their seconds."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for trial in study.trials:
        if trial.state is _S.COMPLETE and trial.compute_class is not None and trial.seconds is not None:
            seconds[trial.subspace, trial.compute_class].append(trial.seconds)
    classes = sorted({compute_class for _, compute_class in seconds})
    subspaces = list(dict.fromkeys(subspace for subspace, _ in seconds))
    table = Table("trials x median seconds", *(_right(name) for name in classes), _right("best loss"))
    for subspace in sorted(subspaces, key=lambda name: study.best_of(name) or 0.0)[:PLACED]:
        cells = [
            f"{len(times)} x {statistics.median(times):.3g}" if times else "-"
            for times in (seconds.get((subspace, name), []) for name in classes)
        ]
        table.add_row(Text(subspace), *cells, f"{study.best_of(subspace):.6g}")
    return table


def _failures(study: Study, most: int = 3) -> list[Trial]:
    """One failed trial for each of the last few different errors."""
    seen: dict[str, Trial] = {}
    for trial in reversed(study.trials):
        if trial.state is _S.FAILED and trial.error and len(seen) < most:
            seen.setdefault(headline(trial.error), trial)
    return list(seen.values())


def _warned(study: Study, most: int = 3) -> list[Trial]:
    """The first trial with each of the first few different warnings."""
    seen: dict[str, Trial] = {}
    for trial in study.trials:
        if trial.outcome and trial.outcome.warning and len(seen) < most:
            seen.setdefault(trial.outcome.warning, trial)
    return list(seen.values())


def _faults(study: Study, refused: int) -> list[str]:
    """What was lost, refused or left, where anything was."""
    lost = sum(trial.lost for trial in study)
    waiting = study.count(_S.WAITING)
    copies = f"late trials started once more where a slot was idle: {study.copied}; ended by that: {study.rescued}"
    said = {
        f"attempts lost with their workers, and run again: {lost}": lost,
        copies: study.copied,
        f"late results refused, each trial counts once: {refused}": refused,
        f"trials that wait to be run by --resume: {waiting}": waiting,
    }
    return [line for line, count in said.items() if count]


def drawn(params: Params) -> str:
    """Params by label, short."""
    return ", ".join(f"{label}={_text(value)}" for label, value in params.items())


def given(space: Space, trial: Trial) -> str:
    """What the objective got, short."""
    try:
        return _text(space.evaluate(trial.params))
    except Exception as error:  # a space may call any function, which may fail on these params
        return f"({type(error).__name__})"


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (float, dict, tuple, list)):
        return str(value)
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    return "(" + ", ".join(map(_text, value)) + ")"


def as_json(study: Study, seconds: float, subspaces: Iterable[str], slots: Mapping[str, int]) -> dict[str, Any]:
    """The study as one JSON object; `slots` are the live slots by class, `subspaces` all that there are."""
    best = study.best
    return {
        "study": study.name,
        "store": study.store.safe_url,
        "seconds": round(seconds, 3),
        "trials": {
            "total": study.counted,
            "complete": study.count(_S.COMPLETE),
            "failed": study.count(_S.FAILED),
            "pruned": study.count(_S.PRUNED),
            "cancelled": study.count(_S.CANCELLED),
        },
        "best": best
        and {
            "loss": best.loss,
            "params": dict(best.params),
            "compute_class": best.compute_class,
            "trial": best.number,
        },
        "classes": {
            name: {
                "complete": study.count(_S.COMPLETE, compute_class=name),
                "failed": study.count(_S.FAILED, compute_class=name),
                "slots": slots.get(name, 0),
            }
            for name in sorted({*slots, *study.compute_classes})
        },
        "subspaces": {
            name: {
                "complete": study.count(_S.COMPLETE, subspace=name),
                "failed": study.count(_S.FAILED, subspace=name),
                "best": study.best_of(name),
            }
            for name in dict.fromkeys([*subspaces, *study.subspaces])
        },
    }
