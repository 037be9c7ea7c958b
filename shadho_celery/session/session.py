"""A run of one study, on embedded workers or on a fleet (`Session`), and the warnings that it shows (`Watch`).

A warning about a condition that may end by itself, such as a missing worker, is shown once, and so is its end.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, fields
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from shadho_celery.core import hardware
from shadho_celery.core.checks import listed, mask
from shadho_celery.core.code import CodeVersion, Sources
from shadho_celery.core.files import CHECKPOINTS, EMBEDDED, below, read_class_spec
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Outage
from shadho_celery.core.trial import COUNTED, Params, TrialState
from shadho_celery.core.units import counted, money
from shadho_celery.embedded.embedded import CONTROL_KEY, Embedded
from shadho_celery.errors import NestedStart, NoSuccessfulTrial, ServiceError, UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.broker import Publisher
from shadho_celery.fleet.celery_settings import file_of_folder
from shadho_celery.fleet.control import Sweep
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.fleet.policy import Guard, UserKey, study_text
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import MAX_SLOTS, Progress, able, start_command, unable
from shadho_celery.fleet.signing import Signer, read_keys
from shadho_celery.fleet.workers import FleetStudy, Servers
from shadho_celery.node.logs import answered
from shadho_celery.objective.command import Command
from shadho_celery.objective.sources import DiskWatch, contents
from shadho_celery.objective.study_file import StudyFile
from shadho_celery.placement.widths import widest
from shadho_celery.results.study import EndCallback, OnEnd, OnTrial, StudyResults, check_callbacks
from shadho_celery.runner.protocol import HARD_SECONDS
from shadho_celery.runner.starting import start_method
from shadho_celery.scheduler import known_points
from shadho_celery.scheduler.plan import Plan
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.scheduler.wishes import Demand
from shadho_celery.session.opening import Given, Opening, OpenStudy, Request
from shadho_celery.session.steering import Steering
from shadho_celery.session.tracking import Trackers
from shadho_celery.session.workers import Signals, default_workers, visible_gpus
from shadho_celery.study.state import StudyState, named

#: the end of a condition is shown once it has not been true for this many seconds
OVER_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A warning to the user about a condition, such as a missing worker."""

    text: str
    #: subject, such as a class; notices with the same subject end together
    about: str
    #: text that is shown when the condition has ended
    over: str = ""

    def __str__(self) -> str:
        return f"Warning: {self.text}"


class Conditions:
    """Shows notices of conditions that may end by themselves, when they begin and when they have ended."""

    def __init__(self) -> None:
        #: by subject: the notices about it that were shown; then the times at which a notice about it was first and
        #: last true
        self._said: dict[str, list[Notice]] = {}
        self._seen: dict[str, tuple[float, float]] = {}

    def see(self, found: Iterable[Notice], now: float) -> Iterator[str]:
        """Yield the lines to show: each notice in `found` (true at the time `now`) that is new, and each end of a
        condition.
        """
        for notice in found:
            about = notice.about
            self._seen[about] = self._seen.get(about, (now, now))[0], now
            if notice not in (said := self._said.setdefault(about, [])):
                said.append(notice)
                yield str(notice)
        for about in [about for about, (_, until) in self._seen.items() if now - until >= OVER_SECONDS]:
            since, until = self._seen.pop(about)
            yield f"{self._said.pop(about)[-1].over}, after {until - since:.0f} s"


#: seconds for which a stopping study waits for a server that does not answer
GIVE_UP_SECONDS = 60.0

#: warnings about missing workers are shown only if all workers have been able to announce themselves for this many
#: seconds
MISSING_SECONDS = 10.0

#: seconds between two checks for notices; a check examines every worker
LOOK_SECONDS = 1.0

#: shows a line to the user
Say = Callable[[str], None]


class View(AbstractContextManager["View"], Protocol):
    """Shows the state of a run to the user."""

    def note(self, text: str) -> None:
        """Show a line."""

    def update(self) -> None:
        """Show the current state. It is called after each turn of the scheduler's loop."""


@dataclass(frozen=True, kw_only=True)
class Options(Given):
    """Options that a user gives for a run on workers."""

    #: module or path of the study file
    study: str
    #: number of slots of the embedded workers, by class; empty for the default
    workers: Mapping[str, int] = field(default_factory=dict)
    #: True if each default class gets an embedded worker, as a demonstration
    demo: bool = False
    #: True if the study's sources are shipped to the workers that accept code
    ship: bool = False
    #: file that describes classes whose workers are started on demand; None for no such classes
    class_spec: Path | None = None
    #: function that is called after each trial, instead of the function in the study file
    on_trial: OnTrial | None = None
    #: function that is called after the run, instead of the function in the study file
    on_end: OnEnd | None = None
    #: True if the params of failed trials of earlier runs are to run again
    retry_failed: bool = False
    #: True if a broker or Redis is named, so that the study runs on a fleet
    fleet: bool = False
    #: True if no progress is shown
    silent: bool = False
    #: environment variable with the URL of the fleet's broker; "" if the URL comes from an option or a file
    broker_from: str = ""
    #: embedded fleet that was started before the study file was read; None if it must still be started
    early: Embedded | None = None


def request_of(options: Options, file: StudyFile) -> Request:
    """Return the request to open the study of a file with these options."""
    given = {each.name: getattr(options, each.name) for each in fields(Given)}
    key = None if options.early is None else options.early.directory.name
    return Request(space=file.space, module=file.recorded_module, stated=file.stated, key=key, **given)


def check_command(file: StudyFile, plan: Plan, *, is_fleet: bool) -> None:
    """Raise UsageError if the command of the study, if any, cannot run. On a fleet, the program is not looked for."""
    if isinstance(file.objective, Command):
        file.objective.check(plan.space, has_budgets=plan.settings.fidelity is not None)
        if not is_fleet:
            file.objective.check_program()


class _StopNow(Exception):
    """Raised to leave the scheduler's loop because the run must stop at once."""


class Session:
    """One run of a study on workers. As a context manager it opens and closes the study; `run` runs it.

    Raises ShadhoError.
    """

    opened: OpenStudy
    #: state and plan of the study
    study: StudyState
    plan: Plan
    executor: QueueExecutor
    scheduler: Scheduler
    watch: Watch
    steering: Steering

    def __init__(self, options: Options, file: StudyFile, say: Say) -> None:
        """Check the settings before anything is opened. Settings of an earlier run are read later, from the store.

        `say` shows a line to the user.
        """
        if not options.fleet:
            # Raise an error for an invalid SHADHO_START now, because it would end all embedded workers.
            start_method()
        self.options, self.file = options, file
        #: time at which the run began, by the monotonic clock
        self.began = time.monotonic()
        self._say = say
        #: classes that are started on demand, by the option --class-spec
        self.class_spec = {} if options.class_spec is None else read_class_spec(options.class_spec)
        self._opening = Opening(request_of(options, file))
        check_command(file, self._opening.plan, is_fleet=options.fleet)
        self._on_trial = options.on_trial or file.on_trial
        self._at_end = EndCallback(options.on_end or file.on_end, lambda text: say(f"Warning: {text}"))
        check_callbacks(on_trial=options.on_trial, on_end=options.on_end)
        check_callbacks(f" of {file.module}", on_trial=file.on_trial, on_end=file.on_end)
        #: version of the study's code; and an object that finds files that were edited after it was read
        self.code = file.code.with_space(self._opening.plan.space.describe())
        self.disk = DiskWatch()
        self._sources: Sources | None = None
        self._inputs: dict[str, bytes] = {}
        if options.ship:
            self._sources, self._inputs = _shipped(self.code, file)
        self.code = replace(self.code, is_shipped=options.ship)
        #: number of trials of this run that were too wide for the embedded workers
        self._too_wide = 0
        #: embedded servers and workers of this machine; None on a fleet
        self.embedded: Embedded | None = None
        #: maximum number of slots of each class so far
        self.slots: dict[str, int] = {}
        #: computes the slots that the study wants of the classes of --class-spec; None without such classes
        self._demand: Demand | None = None
        self._signals = Signals()
        #: state of the study, as announced: running, paused or stopping
        self._state = "running"
        #: sum of the slots of all trials that are still to be sent, at most MAX_SLOTS
        self._sendable_slots = 0
        #: trials whose folders are not needed, see `core.files`
        self._unneeded = b""
        #: False while the loop runs, because an exception may then leave a turn incomplete
        self._is_whole = True
        #: last time at which all servers answered, or the study was not stopping yet
        self._stuck_since = self.began
        #: time at which the last turn of the loop ended
        self.turned_at = self.began
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            # `on_end` is called when the study is recorded and closed. Ctrl-C interrupts it.
            stack.enter_context(self._at_end)
            # No signal interrupts opening and closing.
            stack.enter_context(self._signals)
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._at_end.why = self.scheduler.ending.why
        self._stack.__exit__(*raised)

    @property
    def widest(self) -> int:
        """Number of slots of the widest trial among random draws and the waiting trials.

        Waiting trials do not count if the scheduler chooses their number of slots.
        """
        waiting = [] if self.plan.settings.widths else self.study.wider(self._widest)
        return max([self._widest, *(trial.slots for trial in waiting)])

    @property
    def coming(self) -> dict[str, int]:
        """Maximum number of slots that a trial can take in each class of the option --class-spec."""
        is_on_one = self.plan.settings.gpus is not None
        return {name: spec.slots if is_on_one else spec.most for name, spec in self.class_spec.items()}

    def _open(self, stack: ExitStack) -> None:
        """Open servers, store, study and scheduler. `stack` closes them in reverse order."""
        # Connect to the servers first: if one is down, no empty study should be left in the store.
        servers = self._fleet() if self.options.fleet else None
        guard = None if servers is None else servers.guard
        self.opened = stack.enter_context(closing(self._opening.open(None if guard is None else guard.refuse_self)))
        self.study, self.plan = self.opened.study, self.opened.plan
        self._at_end.study = StudyResults(self.opened.store, self.study.record, self.opened.space)
        #: number of slots of the widest trial among random draws
        self._widest = widest(self.plan.width, self.plan.subspaces)
        self.study.use_code(self.code.digest)
        if self.opened.warm_start is not None:
            self._say(self.opened.warm_start.words)
        self._trackers = Trackers(self.plan.settings, self.study.name, self.opened.store.url)
        stack.callback(self._close_trackers)
        #: number of trials that had ended before this run, by state
        self.counts_before = Counter({state: self.study.count(state) for state in COUNTED})
        if servers is None:
            # Delete folders of trials that the embedded workers, which use this folder, had not deleted before they
            # ended.
            stack.callback(self._sweep)
            self.embedded = embedded = stack.enter_context(closing(self._embed()))
            embedded.await_redis()
            os.environ.update(embedded.urls)
            servers = Servers(
                client=connect(embedded.urls[urls.REDIS]),
                publisher=Publisher.configured(),
                signer=Signer.configured(),
                control=Signer(*read_keys(embedded.directory / CONTROL_KEY)),
            )
        self.study.recorder.class_prices = {name: spec.price for name, spec in self.class_spec.items()}
        settings, (owner, proof) = self.plan.settings, self._proof()
        self.executor = QueueExecutor(
            servers,
            FleetStudy(
                template=Payload(
                    study=self.study.record.key,
                    name=self.study.name,
                    module=self.file.module,
                    code=self.code.digest,
                    is_shipped=self.code.is_shipped,
                    attempts=[],
                    timeout=settings.trial_timeout,
                    one_worker=settings.gpus is not None,
                    objectives=settings.objectives,
                    owner=owner,
                    proof=proof,
                ),
                code=self.code,
                sources=self._sources,
                inputs=self._inputs,
                owner=self.study.recorder.owner or "",
                begun_by=self.study.record.owner or "",
                fence=self.study.fence,
                weight=settings.weight,
                takes_over=self.options.fleet,
                gang_wait_seconds=settings.gang_wait_seconds,
            ),
            self.study.live,
            progress=self._progress,
            wanted=lambda: {} if self._demand is None else self._demand.wanted,
            recorder=self.study.recorder,
        )
        stack.callback(self._close_executor)
        # The known points come before the scheduler, which counts them when it is created, and sends them first.
        known_points.enqueue(self.study, self.plan, [*self.options.points, *self._to_retry()])
        self.scheduler = self.opened.scheduler(self.executor)
        self._demand_slots()
        self.watch = Watch(self)
        self.steering = Steering(self)

    def _demand_slots(self) -> None:
        """Announce which slots the study wants, if workers are started on demand."""
        if self.options.fleet and self.class_spec:
            scheduler = self.scheduler
            self._demand = Demand(
                self.class_spec, self.study, scheduler.cost_model, scheduler.proposals, widest=self.coming
            )
            scheduler.demand = self._demand

    def _grow(self) -> None:
        """Continue in the space of the labels for which trials have asked so far."""
        # The limits of the plan may have changed since the study was opened.
        self.opened = dataclasses.replace(self.opened, plan=self.plan).grown()
        self.plan = self.opened.plan
        if not self.study.has_grown:
            self.scheduler.become(self.opened.scheduler(self.executor, is_known=True))
            self._demand_slots()

    def _to_retry(self) -> list[Params]:
        """Return the params of failed trials that are to run again. The limit on trials is raised if it is too low."""
        if not self.options.retry_failed:
            return []
        ended = (trial for block, _ in self.study.history() for trial in block)
        found = known_points.failed(chain(ended, self.study.pending()), self.study.schema)
        numbers = named([trial.number for trial in found])
        waiting = len(self.study.pending())
        also = f", beside {counted(waiting, 'waiting trial')}" if waiting else ""
        self._say(f"running the params of {numbers} again" if found else f"no failed trial is left to run again{also}")
        settings = self.plan.settings
        least = self.study.counted + waiting + len(found) + len(self.options.points)
        if "trials" not in self.options.given and settings.trials is not None and settings.trials < least:
            self.plan = self.plan.with_settings(replace(settings, trials=least))
            self.opened = dataclasses.replace(self.opened, plan=self.plan)
        return known_points.as_given([trial.params for trial in found], self.study.schema)

    def _fleet(self) -> Servers:
        """Return the connections to the servers of a fleet."""
        client = connect(urls.url(urls.REDIS))
        if (guard := Guard.configured(client)) is not None:
            guard.refuse_self()
        servers = Servers(
            client=client,
            publisher=Publisher.configured(),
            signer=Signer.configured(),
            control=Signer.for_control(),
            guard=guard,
        )
        unset = "" if os.environ.get(urls.REDIS) else f" ({urls.REDIS} is not set)"
        origin = self.options.broker_from
        named = f" (of {origin}; --local runs on this machine alone)" if origin else ""
        self._say(f"fleet: broker {mask(urls.url(urls.BROKER))}{named}, Redis {mask(urls.url(urls.REDIS))}{unset}")
        return servers

    def _proof(self) -> tuple[str, str]:
        """Return the owner and his signature for the study's messages, or empty texts if he has no key."""
        owner, key = self.study.recorder.owner or "", UserKey.configured() if self.options.fleet else None
        return ("", "") if key is None else (owner, key.sign(study_text(self.study.record.key, owner)))

    def _embed(self) -> Embedded:
        """Return the embedded fleet of the study. Its slots by class are given, or chosen for this machine.

        A fleet that was started early is ended if the study needs other slots. Raises UsageError if no class has the
        slots of the widest trial.
        """
        if file := file_of_folder():
            self._say(f"{file} is not read: on this machine alone a study has a broker and workers of its own")
        options, most, machine = self.options, self._widest, hardware.detect()
        workers = options.workers or default_workers(
            machine, self.plan.settings, most, is_demo=options.demo, say=self._say
        )
        if max(workers.values()) < most:
            name, _ = self.plan.settings.width
            raise UsageError(
                f"STUDY['{name}'] gives a trial {most} slots of one class, and no class has that many here; "
                f"give --workers {next(iter(workers))}={most}"
            )
        if (early := options.early) is not None:
            if early.serves(workers):
                early.keep()
                return early
            early.end()
        directory = below(EMBEDDED, self.study.record.key)
        return Embedded(
            directory,
            workers,
            [self.file.module],
            machine.cores,
            gpus=visible_gpus(machine, workers),
            secret_urls=options.secret_urls,
        )

    def _progress(self) -> Progress:
        """Return the study's progress, which the executor announces."""
        count = self.study.count
        return Progress(
            state=self._state,
            ended=self.study.counted,
            limit=self.plan.limits.trials,
            running=count(TrialState.RUNNING),
            waiting=count(TrialState.WAITING, TrialState.QUEUED),
            sendable_slots=self._sendable_slots,
        )

    @property
    def declared(self) -> list[str]:
        """Classes that the study or --class-spec names, the strongest first, whether or not they have a live worker."""
        return [*dict.fromkeys([*self.plan.settings.classes, *self.class_spec])]

    def _close_executor(self) -> None:
        """Record the remaining results in the store, and close the executor, which deletes them from Redis.

        If they cannot be recorded, they stay in Redis for the next scheduler.
        """
        close = self.executor.abandon
        try:
            if self._is_whole and self.study.commit():
                close = self.executor.close
        finally:
            close()

    def _close_trackers(self) -> None:
        """Let trackers show the last trials, which are recorded, until the next signal."""
        signals, before = self._signals, len(self._signals.noted)
        self._trackers.close(self._say, lambda: signals.are_urgent or len(signals.noted) > before)

    def run(self, view: View) -> int:
        """Run the scheduler's loop to its end, and show it in `view`. Return the exit code."""
        if self._on_trial is not None:
            self.opened.call(self._on_trial, self.scheduler, lambda text: view.note(f"Warning: {text}"))
        self._announce()
        self._is_whole = False
        with view:
            try:
                self.scheduler.run(partial(self._after_turn, view))
            except _StopNow:
                # Embedded workers end with this process. Their trials are not cancelled but lost, so that --resume
                # repeats them.
                self.scheduler.stop(running=self.options.fleet)
                self._is_whole = True
                return self._signals.exit_code
        self._is_whole = True
        self._forget(at_end=True)
        self.executor.look()
        self.steering.turn(self._say)
        if self.embedded is not None and self.study.best is not None and self.opened.store.is_in_memory:
            self.embedded.remove()
        is_wanted = self._signals.noted or self.steering.has_stopped
        return 0 if self.study.best is not None or is_wanted else NoSuccessfulTrial.exit_code

    def _announce(self) -> None:
        """Show which study runs, and what differs from its previous run."""
        self._say(f"study {self.study.name} (seed {self.study.record.seed}) in {self.opened.store.safe_url}")
        for line in self.opened.changes:
            self._say(line)
        if self.plan.warning is not None:
            self._say(f"Warning: {self.plan.warning}")
        if (other := self.opened.other_code()) is not None:
            self._say(f"Warning: {other}")
        if self.scheduler.keeper is not None and self.options.fleet and Signer.for_control() is None:
            self._say('Warning: STUDY["keep"] deletes nothing, because workers obey control only with a signing key')
        if self.scheduler.done:
            ending, spent = self.scheduler.ending, self.scheduler.spent
            more = f"--max-cost {2 * spent:.3g}" if ending.of == "max_cost" else f"--trials {2 * self.study.counted}"
            self._say(f"nothing is left to run: {ending.why}; {more} runs more")

    def _forget(self, *, at_end: bool = False) -> None:
        """Let workers delete the folders that the study does not need any more. Its results must be recorded."""
        if (keeper := self.scheduler.keeper) is None or self.study.trouble is not None:
            return
        now = math.inf if at_end else self.study.clock.now()
        if (found := keeper.news(self.study, self.scheduler.proposals.rounds.promotable, now)) is not None:
            self._unneeded = found
            self.executor.forget(found)

    def _sweep(self) -> None:
        """Delete the folders in this folder that the study does not need. A failure is logged."""
        answered(CHECKPOINTS, Sweep(studies={self.study.record.key: self._unneeded}, is_sure=True))

    def _after_turn(self, view: View) -> None:
        self.turned_at = time.monotonic()
        if self.study.has_grown:
            self._grow()
        self._forget()
        if self._signals.noted:
            self._handle_signals(view.note)
        if not self.scheduler.stopping and (reason := self.executor.unwelcome) is not None:
            self.steering.expel(reason)
            view.note(f"stopping: {reason}; running trials finish first")
        if self.executor.has_news or self.steering.pending_answers:
            self.steering.turn(view.note)
        self._state = self.scheduler.state
        self._sendable_slots = int(min(MAX_SLOTS, self.scheduler.sendable * self._widest))
        if self.embedded is not None:
            self.embedded.raise_if_dead()
        if self.study.trouble is None and self.executor.silence is None:
            self._stuck_since = time.monotonic()
        else:
            self._give_up_at_limit()
        self._refuse_nested_trials()
        if self.embedded is not None:
            self._fail_too_wide(self.embedded.workers)
            self._refuse_other_code()
        self.slots |= {c.name: max(c.slots, self.slots.get(c.name, 0)) for c in self.scheduler.classes}
        self._trackers.news(view.note)
        for line in self.watch.news(time.monotonic()):
            view.note(line)
        if not self.options.silent:
            view.update()

    def _handle_signals(self, say: Say) -> None:
        """Stop the study: after one Ctrl-C running trials finish first; after two, or after SIGTERM, stop at once.

        While the store cannot be reached, a single Ctrl-C ends the run at once. --resume later reads the results of the
        trials that were sent, and sends the other trials.
        """
        is_first = not self.scheduler.stopping
        if self.study.trouble is not None and (self._signals.are_urgent or is_first):
            raise self.study.trouble
        if self._signals.are_urgent or is_first:
            self.steering.obey_signal(self._signals.noted[-1])
        if self._signals.are_urgent:
            raise _StopNow
        if is_first:
            say("stopping: running trials finish first; Ctrl-C again stops at once")

    def _give_up_at_limit(self) -> None:
        """Raise ServiceError if the study is stopping and a server has not answered for GIVE_UP_SECONDS.

        Without this, the run would wait for ever, because no running trial can end meanwhile.
        """
        now = time.monotonic()
        if not self.scheduler.stopping:
            self._stuck_since = now
        elif now - self._stuck_since > GIVE_UP_SECONDS:
            raise ServiceError(
                f"{self.study.trouble or self.executor.trouble}; the study has reached its limit and ends without "
                f"the results of {self.study.in_flight} trials that run: --resume {self.study.name} takes them up"
            )

    def _refuse_nested_trials(self) -> None:
        """Raise NestedStart if a trial has tried to start a study on workers, because all other trials would do the
        same.
        """
        kind = f"{NestedStart.__module__}.{NestedStart.__qualname__}: "
        for each in self.study.failures.common():
            if each.failure.headline.startswith(kind):
                raise NestedStart(f"trial {each.first} failed: {str(each.failure).removeprefix(kind)}")

    def _fail_too_wide(self, slots: Mapping[str, int]) -> None:
        """End as FAILED the waiting trials that take more slots than any embedded class has. No other workers can join.

        Do nothing if the scheduler chooses the number of slots, because such a trial may take fewer.
        """
        for trial in [] if self.plan.settings.widths else self.study.wider(max(slots.values())):
            self._too_wide += 1
            error = f"it takes {trial.slots} slots of one class, and no class has that many here"
            self.scheduler.give_up([trial.number], f"{error}; give --workers {next(iter(slots))}={trial.slots}")

    def _refuse_other_code(self) -> None:
        """Raise UsageError if all embedded workers have other code than this process, and no trial runs or has ended.

        This happens if a file was edited just before the workers read it. No other workers can join, so the study would
        wait for ever.
        """
        has_run = self.study.counted > self.counts_before.total() + self._too_wide
        if self.embedded is None or has_run or self.executor.has_workers:
            return
        found = self.executor.workers.with_other_code()
        if len(found) < len(self.embedded.workers) or self.study.count(TrialState.RUNNING):
            return
        if (path := self.disk.edited(self.code)) is not None:
            then = f"--resume {self.study.name} goes on with the new code"
            raise UsageError(f"{path} was edited after this run had read it and before a trial began; {then}")
        raise UsageError(f"no embedded worker can run this study: {found[0]}")


def _shipped(code: CodeVersion, file: StudyFile) -> tuple[Sources, dict[str, bytes]]:
    """Return the sources of a study to be shipped to workers, and by digest the files that its objective reads.

    Raises UsageError if they cannot be shipped.
    """
    files = {**contents(code), **file.data}
    read = file.objective.files if isinstance(file.objective, Command) else {}
    inputs = {name: files.pop(name) for name in read if name in files}
    digests = {name: sha256(content).hexdigest() for name, content in inputs.items()}
    try:
        sources = msgspec.convert({"code": code.digest, "files": files, "inputs": digests}, Sources)
        return sources, {digests[name]: content for name, content in inputs.items()}
    except msgspec.ValidationError as error:
        raise UsageError(f"the study's code cannot be shipped: {error}; copy its files to the workers") from None


class Watch:
    """Finds the warnings of one run. Each is yielded only once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = set[str]()
        self._looked_at = -math.inf
        #: price per hour of all slots, as last shown
        self._money_an_hour = 0.0
        self._missing = Conditions()
        self._outages = {name: Outage(name) for name in ("the store", "the broker", "Redis")}

    @property
    def outages(self) -> dict[str, int]:
        """Number of outages of the store, and of broker and Redis together (`servers`)."""
        store, *servers = (each.count for each in self._outages.values())
        return {"store": store, "servers": sum(servers)}

    def news(self, now: float) -> Iterator[str]:
        """Yield a line for each new notice, and for each condition that has ended."""
        session = self._session
        for name, trouble in {"the store": session.study.trouble, **session.executor.troubles}.items():
            text = None if trouble is None else f"Warning: {trouble}; trying again"
            if (line := self._outages[name].see(text, now)) is not None:
                yield line
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        yield from self._untold(self.present())
        # After an outage, or if Redis has lost its data, workers need some time to announce themselves again.
        if session.executor.known_for >= MISSING_SECONDS:
            yield from self._missing.see(self.missing(), now)

    def last_news(self, *, is_fleet: bool) -> Iterator[str]:
        """Yield a line for each notice that was not shown yet. A short run may end before the first check."""
        session = self._session
        if is_fleet and not session.disk.edited(session.code):
            # In a short run, workers with other code had no time to import edited files again, so they are reported
            # at once.
            others = sorted(session.executor.workers.with_other_code(0.0))
            yield from self._untold(others)
        deleted = session.study.deletions(at_end=True)
        yield from self._untold([*session.executor.notices(), *deleted, *session.scheduler.notices()])

    def present(self) -> Iterator[object]:
        """Yield the current notices about money, workers, deleted files, the search, failures and code."""
        session, study = self._session, self._session.study
        if session.scheduler.limits.money or session.scheduler.cheapest:
            yield from self._on_money()
        yield from [*session.executor.notices(), *study.deletions(), *session.scheduler.notices()]
        if study.best is not None and (starved := session.scheduler.proposals.shares.notice) is not None:
            yield starved
        if study.best is not None and study.count(TrialState.FAILED):
            most, failures = session.plan.limits.failures or math.inf, study.failures.common()
            # The text must not contain the number of trials, which changes: each notice is shown once.
            yield from [f"{most} trials and more fail with {each.failure}" for each in failures if each.trials >= most]
        edited = session.disk.edited(session.code)
        yield from [self._edited(edited)] if edited else session.executor.workers.with_other_code()

    def missing(self) -> Iterator[Notice]:
        """Yield a notice for each class without a live worker, and if no live worker can run the trials."""
        session, module, classes = self._session, self._session.file.module, [*self._session.declared]
        live = session.executor.workers.announced
        if session.embedded is not None:
            # Users who have given --workers do not expect workers of other classes.
            expected = () if session.options.workers else classes
            yield from _missing_here(session.embedded, expected, {worker.compute_class for worker in live.values()})
            return
        wanted = module, session.executor.workers.servers.signer.fingerprint, session.code
        served: Counter[str] = Counter()
        is_on_one = session.plan.settings.gpus is not None
        for worker in able(live, *wanted).values():
            before = served[worker.compute_class]
            served[worker.compute_class] = max(before, worker.slots) if is_on_one else before + worker.slots
        live = {name: worker for name, worker in live.items() if worker.drained or not worker.draining}
        first = next(iter([*classes, *session.slots]), "gpu_large")
        trouble = unable(live, *wanted, refused=session.executor.workers.refused, compute_class=first)
        if trouble is not None and not session.disk.edited(session.code):
            # If there is no worker at all, one warning names all classes, unless a scaler starts the workers.
            is_empty = not live and not session.executor.workers.refused and session.options.class_spec is None
            more = [f"-Q {shlex.quote(name)}" for name in classes[1:]] if is_empty else []
            also = f", and others with {listed(more, 5)}" if more else ""
            over = "a worker can run this study now"
            yield Notice(about="able", text=f"{trouble}{also}", over=over)
            if is_empty or any(module in worker.imports for worker in live.values()):
                # Live workers exist, or the warning above has named all classes.
                return
        coming = session.coming
        if max([*served.values(), *coming.values()], default=math.inf) < session.widest:
            of, remedy = ("worker", "a worker") if is_on_one else ("class", "more workers of one class, or")
            lacking = f"trials take up to {session.widest} slots of one {of}, and no {of} has that many"
            also = f", or raise slots of class {next(iter(coming))} in the file of --class-spec" if coming else ""
            text = f"{lacking}; start {remedy} with more slots{also}"
            yield Notice(about="slots", text=text, over=f"a {of} has {session.widest} slots now")
        # Workers with other modules count as workers of their class here; the notice above is about them.
        there = {worker.compute_class for worker in live.values()}
        for name in classes:
            if name not in there:
                command = start_command(name, module, is_shipped=session.code.is_shipped)
                text = f"no worker serves the queue {name}; start one: {command}"
                if name in coming:
                    text = f"no worker serves the queue {name}; shadho-celery scale starts some when they are wanted"
                over = f"a worker serves the queue {name} now"
                yield Notice(about=f"class {name}", text=text, over=over)

    def _on_money(self) -> Iterator[str]:
        """Yield notices about costs that the limit on money does not include, again whenever the workers' prices have
        doubled.
        """
        sessions, has_limit = self._session.study.recorder.sessions, self._session.scheduler.limits.money is not None
        if unknown := sorted({each.compute_class for each in sessions if each.price is None}):
            why = "no price is known (worker --price, or --class-spec)"
            yield f"trials on class {listed(unknown, 3)} cost nothing here: {why}"
        an_hour = sum(each.slots * (each.price or 0.0) for each in sessions)
        if an_hour > 2 * self._money_an_hour:
            self._money_an_hour = an_hour
        if self._money_an_hour and has_limit:
            timeout = self._session.plan.settings.trial_timeout
            most = (
                "until they end; --trial-timeout bounds that"
                if timeout is None
                else f"so at most {money(self._money_an_hour * (timeout + HARD_SECONDS) / 3600)} by --trial-timeout"
            )
            yield f"after --max-cost running trials finish, for up to {money(self._money_an_hour)} an hour, {most}"

    def _untold(self, notices: Iterable[object]) -> Iterator[str]:
        for text in map(str, notices):
            if text not in self._told:
                self._told.add(text)
                yield f"Warning: {text}"

    def _edited(self, path: str) -> str:
        """Return the notice that a file of the study was edited after this run had read it."""
        then = f"stop it with Ctrl-C, and --resume {self._session.study.name} goes on with the new code"
        if self._session.executor.has_workers:
            return f"{path} was edited; this run continues with its earlier code while workers have that: {then}"
        return f"{path} was edited, no worker has its earlier version, and this run waits for one: {then}"


def _missing_here(embedded: Embedded, expected: Sequence[str], live: Collection[str]) -> Iterator[Notice]:
    """Yield a notice for each embedded class without a live worker, and a notice for expected classes without workers
    here.

    The remedy is never to start a worker, because a user cannot start embedded workers by hand.
    """
    for name in embedded.workers:
        if name not in live:
            text = f"the embedded worker of class {name} does not answer; see its log in {embedded.directory}"
            over = f"the embedded worker of class {name} answers again"
            yield Notice(about=f"class {name}", text=text, over=over)
    if missing := [name for name in expected if name not in embedded.workers]:
        slots = {**embedded.workers, **dict.fromkeys(missing, 1)}
        wanted = ",".join(f"{name}={count}" for name, count in slots.items())
        text = (
            f"STUDY['classes'] names {', '.join(missing)}, which no embedded worker serves; trials run on "
            f"{', '.join(embedded.workers)} alone, unless you give --workers {shlex.quote(wanted)}"
        )
        yield Notice(about="classes", text=text)
