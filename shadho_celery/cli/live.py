"""Views of a running study, in a terminal or as plain lines, and printers of the output of its trials and workers.

Both views show the rate of trials and the remaining time (`Pace`). In embedded mode they also print the output of
trials with `--show-output` (`ShownOutput`), and the workers' log lines with `--verbose` (`WorkerLines`).
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shadho_celery.cli.messages import say
from shadho_celery.cli.tables import (
    BAD,
    NAME,
    WARN,
    best_line,
    best_values,
    choice_lines,
    cut,
    failure_lines,
    last,
    make_table,
    preference_lines,
    rate_text,
    rung_lines,
)
from shadho_celery.core.checks import one_line, unbroken
from shadho_celery.core.files import CHECKPOINTS
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, TrialState, shown_limit, turned_first
from shadho_celery.core.units import counted, duration
from shadho_celery.errors import UsageError
from shadho_celery.fleet.gangs import Seated
from shadho_celery.fleet.registry import Worker, needs
from shadho_celery.results.report import overview_of, placed_by_params
from shadho_celery.results.trial import Values
from shadho_celery.runner.output import log_path, read_log, unstamped
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.space.space import Space
from shadho_celery.study.state import Limits, StudyState, named

#: seconds between two checks of the logs
TAIL_SECONDS = 0.1

#: seconds after the end of an attempt in which its log is still read
LAST_SECONDS = 0.5


class ShownOutput:
    """Prints the output that running attempts add to their logs."""

    def __init__(self, study: StudyState, say: Callable[[str], None]) -> None:
        """`say` prints a text."""
        self._study = study
        self._say = say
        #: by trial and attempt: when the attempt was last seen running, and up to which position its log was printed
        self._seen_at: dict[tuple[int, int], float] = {}
        self._positions: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._looked_at = 0.0

    def update(self) -> None:
        """Print the output since the last call.

        It must be called in every pass of the scheduler's loop. Otherwise it may miss an attempt that ends quickly.
        """
        now = time.monotonic()
        for attempt in self._study.attempts:
            self._seen_at[attempt.number, attempt.attempt] = now
        if now - self._looked_at < TAIL_SECONDS:
            return
        self._looked_at = now
        for key, seen_at in sorted(self._seen_at.items()):
            self._print(*key)
            if now - seen_at > LAST_SECONDS:
                del self._seen_at[key]
                self._positions.pop(key, None)

    def close(self) -> None:
        """Print the rest of the output, when the study has ended."""
        if self._seen_at:
            time.sleep(LAST_SECONDS / 2)
        for key in sorted(self._seen_at):
            self._print(*key)

    def _print(self, number: int, attempt: int) -> None:
        try:
            path = log_path(CHECKPOINTS, self._study.record.key, number, attempt)
            position = self._positions[number, attempt]
            text, self._positions[number, attempt] = read_log(path, position) or ("", position)
        except (OSError, UsageError) as error:
            text = f"its log cannot be read: {error}"
        if text:
            self._say("\n".join(f"[{number}] {line}" for line in unstamped(text).splitlines()))


class WorkerLines:
    """Prints the lines that embedded workers add to their logs, each after the worker's class, such as [cpu]."""

    def __init__(self, logs: Iterable[tuple[str, Path]], say: Callable[[str], None]) -> None:
        """`logs` are pairs of class and log file. Lines of earlier runs are not printed."""
        self._say = say
        self._positions = {(name, path): path.stat().st_size if path.exists() else 0 for name, path in logs}

    def update(self) -> None:
        """Print the lines since the last call."""
        for (name, path), position in self._positions.items():
            with suppress(OSError), path.open("rb") as file:
                # The log is read from its start if it is shorter than before, because the supervisor has truncated it.
                file.seek(position if position <= path.stat().st_size else 0)
                content = file.read()
                lines = content[: content.rfind(b"\n") + 1]
                self._positions[name, path] = file.tell() - len(content) + len(lines)
                for line in lines.decode(errors="replace").splitlines():
                    self._say(f"[{name}] {line}")

    def close(self) -> None:
        """Print the last lines, when the study has ended."""
        self.update()


#: the rate is the mean over a recent period. The period has at least this many seconds, and at least this many trials
#: have ended in it. In a shorter run, the period is the whole run
PACE_SECONDS, PACE_TRIALS = 120.0, 40

#: the remaining time is shown when this many trials of the run, or this part of them, have ended
ENOUGH_ENDED, ENOUGH_PART = 20, 0.1

#: the remaining time is not shown if no trial runs, and none has ended for this many seconds
STILL_SECONDS = 5.0


class Pace:
    """Measures the rate at which trials end in one run, from the start of its first trial."""

    def __init__(self, study: StudyState, limits: Callable[[], Limits]) -> None:
        """`limits` returns the limits of the study, which may change."""
        self._study = study
        self._limits = limits
        #: number of ended trials of earlier runs, without cancelled ones
        self._before = study.counted
        self._ended_at = study.clock.now()
        #: pairs of a time and the number of trials that had ended by then
        self._samples = deque([(self._ended_at, self._before)])

    def note(self) -> None:
        """Record how many trials have ended by now. The view calls this a few times per second."""
        now, counted = self._study.clock.now(), self._study.counted
        if counted == self._before and not self._study.count(TrialState.RUNNING):
            # No trial has started yet. The measurement begins again, so that the rate excludes the start of workers.
            self._samples = deque([(now, counted)])
        elif counted != self._samples[-1][1]:
            self._ended_at = now
            self._samples.append((now, counted))
            while now - self._samples[1][0] > PACE_SECONDS and counted - self._samples[1][1] >= PACE_TRIALS:
                self._samples.popleft()

    @property
    def ended(self) -> int:
        """Number of trials that have ended in this run."""
        return self._study.counted - self._before

    @property
    def since_last(self) -> float:
        """Seconds since the latest end of a trial, or since the start of the run before the first one."""
        return self._study.clock.now() - self._ended_at

    @property
    def a_minute(self) -> float:
        """Recent number of trials per minute; 0 before the first trial has ended."""
        since, before = self._samples[0]
        seconds = self._study.clock.now() - since
        return 60 * (self._study.counted - before) / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """Return the expected seconds until the limit on trials: infinity without a limit, None if they are not known.

        They are the number of remaining trials divided by the recent rate. The run may take longer, because some slots
        are idle at its end.
        """
        left = self._limits().trials_left(self._study.counted)
        if math.isinf(left):
            return math.inf
        is_known = self.ended >= min(ENOUGH_ENDED, ENOUGH_PART * (self.ended + left)) and self.a_minute > 0
        # If nothing runs, for example because a server does not answer, the recent rate predicts nothing.
        is_still = self.since_last > STILL_SECONDS and not self._study.count(TrialState.RUNNING)
        return 60 * left / self.a_minute if left > 0 and is_known and not is_still else None


#: seconds between two lines of `PlainView`, two updates of `LiveView`, and two updates of its lines about placement
PLAIN_SECONDS, REFRESH_SECONDS, LOOK_SECONDS = 5.0, 0.25, 30.0

#: maximum number of seconds after which `PlainView` repeats a line
REPEAT_SECONDS = 60.0

#: maximum number of running trials that `LiveView` lists, and of other studies in the row of a class
RUNNING, STUDIES = 4, 2

_S = TrialState


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The live workers that have announced themselves, including workers that cannot run trials of the study."""

    workers: Callable[[], Mapping[str, Worker]] = dict
    #: study module that a worker needs to run the trials
    module: str = ""
    #: returns by trial and attempt how many slots each gang (trial on several slots) has and wants
    gangs: Callable[[], Mapping[tuple[int, int], Seated]] = dict

    def of(self, compute_class: str) -> list[Worker]:
        """Return the live workers of a class."""
        return [worker for worker in self.workers().values() if worker.compute_class == compute_class]

    def has_module(self, worker: Worker) -> bool:
        """Return whether a worker has the study's module, or accepts shipped code."""
        return self.module in worker.imports or worker.accepts_code

    @property
    def lack(self) -> str:
        """Message that says why no live worker can run trials of the study."""
        live = self.workers().values()
        taking = [worker for worker in live if not worker.draining]
        if not taking:
            state = "drained" if all(worker.drained for worker in live) else "draining"
            return f"all live workers are {state}" if live else "no live worker"
        able = any(map(self.has_module, taking))
        return "no live worker can run this study" if able else f"no live worker {needs(self.module)}"


#: fleet of a study that runs without workers
NO_FLEET = Fleet()


class LostTrials:
    """Trials of this run that were lost or given back by their workers, and have neither restarted nor ended since."""

    def __init__(self, study: StudyState) -> None:
        self._study = study
        #: "lost" or "given back", by the trial's number
        self.how: dict[int, str] = {}

    def news(self) -> Iterator[str]:
        """Yield lines about newly lost or returned trials, and about earlier ones that have restarted or ended."""
        lost: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        while self._study.lost_attempts:
            attempt, reason, is_given_back = self._study.lost_attempts.popleft()
            where = attempt.worker or attempt.host or attempt.compute_class
            how, by = ("given back", "by") if is_given_back else ("lost", "on")
            lost[how, f"{by} worker {where}: {reason}"].append(attempt.number)
        for (how, why), numbers in lost.items():
            self.how |= dict.fromkeys(numbers, how)
            yield f"{'' if how == 'given back' else 'Warning: '}{_were(numbers)} {how} {why}"
        found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for number, how in sorted(self.how.items()):
            trial = self._study.find_open(number)
            if trial is None:
                found[how, f"ended: {self._study.trial(number).state.lower()}"].append(number)
            elif trial.state is _S.RUNNING:
                found[how, f"running again on {trial.host} ({trial.compute_class})"].append(number)
        for (how, now), numbers in found.items():
            for number in numbers:
                del self.how[number]
            yield f"{named(numbers)}, {how} before, {'is' if len(numbers) == 1 else 'are'} {now}"

    @property
    def lines(self) -> list[str]:
        """Up to two lines: about lost trials that wait for a slot, and about returned trials that wait for a slot."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for number, how in self.how.items():
            found[how].append(number)
        return [f"{_were(numbers)} {how}; waiting for a free slot to run again" for how, numbers in found.items()]


def _were(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return f"{named(found)} {'was' if len(found) == 1 else 'were'}"


class _View:
    """Base class of both views: measures the rate, prints lines about lost trials, and calls `show` at intervals."""

    def __init__(self, scheduler: Scheduler, fleet: Fleet = NO_FLEET) -> None:
        self._scheduler, self._fleet = scheduler, fleet
        self._began = scheduler.study.clock.now()
        #: when `show` was last called, and when it last printed a line or updated the lines about placement
        self._looked_at = self._shown_at = self._began
        self._pace = Pace(scheduler.study, lambda: scheduler.limits)
        self._lost = LostTrials(scheduler.study)
        #: printers of output and log lines, which are updated in each pass of the scheduler's loop
        self.also: list[ShownOutput | WorkerLines] = []

    def __exit__(self, *_: object) -> None:
        pass

    def update(self) -> None:
        """Show the current state, and print lines about lost trials. Called in each pass of the scheduler's loop."""
        study = self._scheduler.study
        now = study.clock.now()
        if now - self._looked_at >= REFRESH_SECONDS or study.lost_attempts:
            self._looked_at = now
            self._pace.note()
            for line in self._lost.news():
                self.note(line)
            self.show(now)
        # Lines about lost trials come before the output of their next attempts.
        for each in self.also:
            each.update()
            if self._scheduler.done:
                each.close()

    def note(self, text: str) -> None:
        """Print a line on standard error, because standard output is for results."""
        say(text, err=True)

    def show(self, now: float) -> None:
        """Show the current state. `now` is the time of the study's clock."""


class LiveView(_View):
    """View in a terminal: progress, the best trial so far, the state of each class, running trials and failures."""

    def __init__(self, scheduler: Scheduler, space: Space | None, console: Console, fleet: Fleet = NO_FLEET) -> None:
        super().__init__(scheduler, fleet)
        self._made = Values(scheduler.study.record, space)
        #: lines about the params by which recent trials were placed
        self._preferred: list[str] = []
        #: number of the best trial, and a text with its values
        self._best: tuple[int, str] = (-1, "")
        description = TextColumn("{task.description}", style="bold", markup=False)
        self._progress = Progress(description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._task = self._progress.add_task(scheduler.study.name, total=scheduler.limits.trials)
        self._live = Live(self.picture(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, now: float) -> None:
        """Update the picture."""
        self._live.update(self.picture())

    def note(self, text: str) -> None:
        """Print a message above the view, without line breaks, so that a command in it can be copied."""
        self._live.console.print(Text(text, style=WARN if text.startswith("Warning") else ""), soft_wrap=True)

    def picture(self) -> Group:
        """Return the whole view of the current state."""
        study = self._scheduler.study
        limit = shown_limit(self._scheduler.limits.trials, study.counted)
        self._progress.update(self._task, completed=study.counted, total=limit)
        known = overview_of(study, self._made)
        if known.best is not None and known.best.number != self._best[0]:
            self._best = (known.best.number, f"with {best_values(known.best)}")
        lines = [best_line(known), self._best[1], pace_line(self._scheduler, self._pace, self._began)]
        lines += cheapest_lines(self._scheduler)
        if study.clock.now() - self._shown_at >= LOOK_SECONDS:
            self._shown_at = study.clock.now()
            self._preferred = preference_lines(placed_by_params(study, self._made), len(study.subspaces))
        below = [*self._preferred, *choice_lines(known), *rung_lines(known), *waiting_lines(self._scheduler)]
        below += running_lines(study, self._fleet)
        failed = failure_lines(study.failures.common())
        table = class_table(self._scheduler, self._fleet)
        warnings = [*self._lost.lines, known.still_words]
        return Group(
            self._progress, *_lines(lines), table, *_lines(below), *_lines(warnings, WARN), *_lines(failed, BAD)
        )


def _lines(lines: Iterable[str], style: str = "") -> Iterator[Text]:
    """Yield texts that are cut at the edge of the terminal. Wrapped lines would change the height of the view."""
    yield from (Text(unbroken(line), style=style, no_wrap=True, overflow="ellipsis") for line in lines if line)


class PlainView(_View):
    """View without a terminal: one line every few seconds. The same line is repeated ever more rarely."""

    #: the latest line, when it was last made, and the seconds until it is repeated
    _line, _made_at, _pause = "", -math.inf, PLAIN_SECONDS

    def __enter__(self) -> PlainView:
        return self

    def show(self, now: float) -> None:
        """Print a line if PLAIN_SECONDS have passed since the last one, or more if it is the same."""
        if now - max(self._shown_at, self._made_at) >= PLAIN_SECONDS:
            self._made_at = now
            pace = pace_line(self._scheduler, self._pace, self._began)
            waiting = [*waiting_lines(self._scheduler), *waiting_gangs(self._scheduler.study, self._fleet)]
            cheapest = cheapest_lines(self._scheduler)
            still = filter(None, [overview_of(self._scheduler.study).still_words])
            line = "; ".join([progress_line(self._scheduler, self._fleet), *waiting, pace, *cheapest, *still])
            is_new = line != self._line
            if is_new or now - self._shown_at >= self._pause:
                self._pause = 2 * PLAIN_SECONDS if is_new else min(2 * self._pause, REPEAT_SECONDS)
                self._line, self._shown_at = line, now
                self.note(line)


def progress_line(scheduler: Scheduler, fleet: Fleet = NO_FLEET) -> str:
    """Return the state of the study in one line."""
    study = scheduler.study
    limit = shown_limit(scheduler.limits.trials, study.counted)
    trials = f"{study.counted}/{limit}" if limit else study.counted
    busy = [
        f"{row.name} {row.busy}/{row.slots} busy{''.join(f' ({each})' for each in (*row.others, row.leaving) if each)}"
        if row.is_live
        else f"{row.name}: {'; '.join(filter(None, (row.state, row.wanted)))}"
        for row in class_rows(scheduler, fleet)
        if row.is_live or row.wanted or scheduler.classes
    ]
    pruned = f"; {study.count(_S.PRUNED)} pruned" if study.count(_S.PRUNED) else ""
    failed = study.count(_S.FAILED)
    kinds = study.failures.common()
    worst = "".join(f"{', mostly' if len(kinds) > 1 else ':'} {one_line(each.failure, 120)}" for each in kinds[:1])
    failures = f"; {failed} failed{worst}" if failed else ""
    best = best_line(overview_of(study))
    return f"{trials} trials; {best}; {', '.join(busy) or fleet.lack}{pruned}{failures}"


def pace_line(scheduler: Scheduler, pace: Pace, began: float) -> str:
    """Return text with the trials per minute and, if known, the time until the run reaches a limit.

    `began` is the time at which the run started.
    """
    study, limits = scheduler.study, scheduler.limits
    if not pace.ended:
        rate = "no trial has ended yet" + (" in this run" if study.counted else "")
    else:
        rate = rate_text(pace.a_minute)
    if pace.since_last > PACE_SECONDS and pace.ended:
        rate += f", none for {duration(pace.since_last)}"
    if scheduler.stopping:
        return rate
    if scheduler.paused:
        return f"paused; {rate}"
    at_most = limits.seconds_left(began, study.clock.now())
    left = pace.seconds_left()
    if left is None:
        return rate if math.isinf(at_most) else f"{rate}, at most {duration(max(0.0, at_most))} left"
    shortest = min(left, at_most)
    return rate if math.isinf(shortest) else f"{rate}, about {duration(max(0.0, shortest))} left"


def cheapest_lines(scheduler: Scheduler) -> list[str]:
    """Return a line with the expected money, and how an earlier or later deadline changes it (`--place-by money`)."""
    return [] if scheduler.cheapest is None else [*filter(None, [scheduler.cheapest.words])]


def waiting_lines(scheduler: Scheduler) -> list[str]:
    """Return a line for each trial that waits until enough slots of one class are free."""
    return [
        f"trial {trial.number} waits for {trial.slots} slots of {each.name}{f' on {each.host}' if each.host else ''}; "
        f"{max(0, free)} free"
        for trial, each, free in scheduler.reserved
    ]


def waiting_gangs(study: StudyState, fleet: Fleet) -> list[str]:
    """Return a text about each running trial whose gang waits for slots."""
    gangs = fleet.gangs()
    return [
        f"trial {attempt.number} {gang_text(gang)}"
        for attempt in study.attempts
        if (gang := gangs.get((attempt.number, attempt.attempt))) is not None and gang.waits
    ]


def gang_text(gang: Seated) -> str:
    """Return text with the numbers of slots and backups that a gang has and wants. A gang waits only for slots."""
    has = f"has {gang.taken} of {counted(gang.slots, 'slot')}"
    if gang.waits:
        return f"waits for its gang, which {has}" + (" and is starting" if gang.taken == gang.slots else "")
    return has + (f" and {gang.backups_taken} of {counted(gang.backups, 'backup')}" if gang.backups else "")


def running_lines(study: StudyState, fleet: Fleet = NO_FLEET) -> list[str]:
    """Return a line for each of the first RUNNING running trials, and a line with the number of further ones."""
    running = [attempt for attempt in study.attempts if attempt.state is _S.RUNNING]
    workers, gangs = fleet.workers(), fleet.gangs()
    lines = [_running_line(study, each, workers, gangs.get((each.number, each.attempt))) for each in running[:RUNNING]]
    more = len(running) - RUNNING
    return lines + [f"and {more} more {'runs' if more == 1 else 'run'}"] * (more > 0)


def _running_line(study: StudyState, attempt: Attempt, workers: Mapping[str, Worker], gang: Seated | None) -> str:
    """Return a line about a running trial: machine, duration, gang, last report, and if its worker is silent."""
    now = study.clock.wall()
    seconds = duration(max(0.0, now - (attempt.started_at or now)))
    facts = [f"trial {attempt.number} runs on {attempt.host} ({attempt.compute_class}), {seconds}"]
    if gang is not None:
        facts.append(gang_text(gang))
    report = study.last_report(attempt)
    if report is not None:
        name = one_line(next(iter(study.record.objectives), "loss"), NAME)
        facts.append(f"step {report.step}, {name} {turned_first(report.loss, study.record.objectives):.5g}")
    if workers and attempt.worker:
        worker = workers.get(attempt.worker)
        facts += ["its worker is silent"] if worker is None else ["its worker is draining"] * worker.draining
    return f"{', '.join(facts)}: {attempt.subspace}"


@dataclass(frozen=True, kw_only=True)
class ClassRow:
    """State of a compute class, for a row of `class_table`."""

    name: str
    #: True if live workers of the class take trials of the study
    is_live: bool
    workers: int
    #: number of slots that run trials of the study, and below it the number of all slots
    busy: int
    slots: int
    #: text of `class_state`
    state: str
    #: texts about slots that other studies use, and below it a text about draining workers
    others: tuple[str, ...] = ()
    leaving: str = ""
    #: text about the slots that the study wants, if no worker of the class is live; else ""
    wanted: str = ""

    @property
    def words(self) -> str:
        """State and all further texts. The word idle is left out if other studies use slots of the class."""
        state = "" if self.state == "idle" and self.others else self.state
        return "; ".join(filter(None, (state, *self.others, self.leaving, self.wanted)))

    @property
    def style(self) -> str:
        """Colour of the state."""
        return "" if self.state in ("busy", "idle") else WARN if self.busy or self.state == "draining" else BAD


def class_rows(scheduler: Scheduler, fleet: Fleet) -> list[ClassRow]:
    """Return a row for each compute class that has live workers or trials, or from which the study wants slots.

    The order is always the same: first the study's expected classes, then all others by name.
    """
    study, live = scheduler.study, {c.name: c for c in scheduler.classes}
    busy, rows = busy_slots(study), []
    places = {name: place for place, name in enumerate(scheduler.expected)}
    names = {*live, *study.compute_classes, *scheduler.wanted_slots}
    for name in sorted(names, key=lambda name: (places.get(name, len(places)), name)):
        shown, workers = live.get(name) or ComputeClass(name=name, slots=0, workers=0), fleet.of(name)
        # Slots of silent workers are included until their leases run out. A quarantined or draining worker has no slots
        # here, but its running trials count as busy, so the number is at least that of busy slots.
        slots = max(shown.slots + shown.silent, busy[name])
        draining = sum(worker.draining for worker in workers)
        state = class_state(shown, busy[name], workers, fleet)
        leaving = f"{counted(draining, 'worker is', 'workers are')} draining" if draining else ""
        wanted = 0 if name in live else max(0, scheduler.wanted_slots.get(name, 0) - busy[name])
        row = ClassRow(
            name=name,
            is_live=name in live,
            workers=shown.workers,
            busy=busy[name],
            slots=slots,
            state=state,
            others=tuple(_other_studies(workers, study.record.key, slots - busy[name])),
            leaving="" if state == "draining" else leaving,
            wanted=f"{counted(wanted, 'slot is', 'slots are')} wanted" if wanted else "",
        )
        rows.append(row)
    return rows


def _other_studies(workers: Iterable[Worker], ours: str, most: int) -> list[str]:
    """Return texts with the slots of each of the STUDIES studies, other than `ours`, that use the most slots.

    The numbers of slots are reduced to a sum of at most `most`, the slots that `ours` does not use, because they come
    from announcements that are some seconds old.
    """
    names, slots = dict[str, str](), Counter[str]()
    for worker in workers:
        for key, share in worker.studies.items():
            if key != ours:
                names[key] = one_line(share.name or key, 60)
                slots[key] += share.slots
    parts = []
    for key, count in slots.most_common(STUDIES):
        shown, most = min(count, most), most - count
        parts += [f"study {names[key]} has {counted(shown, 'slot')}"] * (shown > 0)
    return parts + [f"{len(slots) - STUDIES} more"] * (len(slots) > STUDIES)


def class_state(shown: ComputeClass, busy: int, workers: Iterable[Worker] = (), fleet: Fleet = NO_FLEET) -> str:
    """Return the state of a class: `busy` slots run trials of the study, and `workers` are its live workers.

    It is "busy" or "idle" if a worker can take trials. Otherwise it says why no worker can: workers are
    draining, quarantined or silent (their leases run out), they lack the module, or there are none.
    """
    if shown.workers:
        return "busy" if busy else "idle"
    workers = [*workers]
    if any(worker.draining for worker in workers):
        return "draining"
    if any(worker.quarantined for worker in workers):
        return "quarantined"
    if busy:
        return "silent"
    if workers and not any(map(fleet.has_module, workers)):
        return f"no worker {needs(fleet.module)}"
    return "no able worker" if workers else "no worker"


def class_table(scheduler: Scheduler, fleet: Fleet = NO_FLEET) -> Table:
    """Return a table of `class_rows`."""
    study, rows = scheduler.study, []
    for row in class_rows(scheduler, fleet):
        waiting = study.count(_S.QUEUED, compute_class=row.name)
        done = study.count(_S.COMPLETE, _S.PRUNED, compute_class=row.name)
        failed = study.count(_S.FAILED, compute_class=row.name)
        state = cut(row.words)
        state.stylize(row.style, 0, len(row.state) if row.style else 0)
        figures = (row.workers, row.busy, row.slots, waiting, done)
        rows.append([row.name, *figures, Text(str(failed), style=BAD if failed else ""), state])
    return make_table(["class", ">workers", ">busy", ">slots", ">waiting", ">done", ">failed", last("state")], rows)


def busy_slots(study: StudyState) -> Counter[str | None]:
    """Return the number of slots that run trials of the study, by class. One trial may use several slots."""
    busy: Counter[str | None] = Counter()
    for attempt in study.attempts:
        if attempt.state is _S.RUNNING:
            busy[attempt.compute_class] += attempt.slots
    return busy
