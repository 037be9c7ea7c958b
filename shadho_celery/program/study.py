"""`Study`, a study that a program runs with an objective in this process or with ask and tell; and `minimize`.

`minimize` is a complete search in one call, in this process or on workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import RLock, get_ident
from typing import Any

from msgspec import ValidationError, convert
from msgspec.structs import replace

from shadho_celery.core.checks import listed, short
from shadho_celery.core.code import Digest
from shadho_celery.core.files import CHECKPOINTS, below
from shadho_celery.core.settings import Resume, read_settings, refuse_unknown, with_settings
from shadho_celery.core.trial import Attempt, Lost, Outcome, Seconds, TrialState, whole
from shadho_celery.core.units import counted
from shadho_celery.errors import NoTrialToAsk, StoreError, UsageError
from shadho_celery.objective.call import MAX_ERROR, Objective, check_objective, describe, with_notes
from shadho_celery.objective.context import LocalContext
from shadho_celery.objective.result import Unreadable, read
from shadho_celery.objective.sources import function_version
from shadho_celery.objective.suggest import Suggesting, Trial, read_losses
from shadho_celery.program.interrupts import Interrupts, warn
from shadho_celery.program.recorded import ShownStudy, progress_bar
from shadho_celery.results.study import EndCallback, OnEnd, OnTrial, check_callbacks
from shadho_celery.results.trial import TrialResult
from shadho_celery.results.warm_start import WarmStartSource
from shadho_celery.samplers.random import MakeSampler
from shadho_celery.scheduler import known_points
from shadho_celery.scheduler.executors import ByHandExecutor, InlineExecutor, record_process
from shadho_celery.scheduler.plan import DEFAULT_SETTINGS, ENDLESS
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.session.opening import Opening, Request
from shadho_celery.session.tracking import Trackers
from shadho_celery.space.schema import Law, suggested
from shadho_celery.study.state import Limits

#: means that no result is given; None cannot mean that, because an objective without a return statement returns it
_NOTHING: Any = object()


@dataclass(frozen=True, kw_only=True)
class AskedTrial:
    """A trial that `Study.ask` has returned. Pass it to `Study.tell` with its result."""

    #: position of the trial in its study, from 0
    number: int
    #: drawn value of each active label; for a choice, the index of the option
    params: Mapping[str, Any]
    #: the argument of an objective: the values in the space's own shape
    values: Any
    #: seed for random numbers in the evaluation
    seed: int
    #: budget of the trial; None for the full fidelity
    budget: float | None
    #: number of the trial on a lower budget that this trial continues, and whose params it has; None if there is none
    origin: int | None
    #: key of the trial's study
    study: str


class Study(ShownStudy):
    """A study in your own program: `ask` for trials and `tell` their results, or `run` an objective in this process.

    ::

        with Study({"x": hp.uniform("x", -1, 1)}, store="sqlite:///shadho.db", study="mine") as study:
            study.enqueue([{"x": 0.5}])
            for _ in range(20):
                trial = study.ask()
                study.tell(trial, trial.values["x"] ** 2)
        print(study.best.values)

    The object holds the study's lock until `close`; afterwards its results can still be read. Several threads may ask
    and tell: a lock allows one change at a time. A forked process cannot change the study.
    """

    @with_settings
    @refuse_unknown
    def __init__(
        self,
        space: object = None,
        *,
        store: str = "sqlite://",
        study: str | None = None,
        resume: Resume = False,
        seed: int | None = None,
        sampler: str | MakeSampler | None = None,
        policy: str | None = None,
        shares: str | None = None,
        fidelity: Mapping[str, object] | None = None,
        pruner: str | Mapping[str, object] | None = None,
        repeats: int | None = None,
        objectives: Mapping[str, str] | None = None,
        direction: str | None = None,
        where: Callable[[Any], Any] | None = None,
        track: str | None = None,
        enqueue: Iterable[Mapping[str, Any]] = (),
        warm_start: WarmStartSource | None = None,
    ) -> None:
        """Begin or resume a study of `space`, a hyperopt expression.

        Without a space, the objective gets a `Trial`, which it asks for values as in Optuna. `ask` also returns one.

        `store`, `study`, `resume`, `seed`, `enqueue` and `warm_start` are as in `minimize`. A resumed study keeps its
        earlier settings, except those that are given. `policy` has an effect only on workers. Raises SpaceError,
        UsageError, StudyError or StoreError.
        """
        given: dict[str, Any] = {"sampler": sampler, "policy": policy, "shares": shares, "pruner": pruner}
        given |= {"fidelity": fidelity, "repeats": repeats, "where": where, "track": track}
        given |= {"objectives": objectives, "direction": direction}
        given = {name: value for name, value in given.items() if value is not None}
        points = _listed(enqueue)
        names: dict[str, Any] = {"store": store, "name": study, "resume": resume, "seed": seed}
        opening = Opening(
            Request(space=space, given=given, limits=ENDLESS, points=points, warm_start=warm_start, **names)
        )
        self._interrupts = Interrupts()
        #: held by the thread that changes the study
        self._lock = RLock()
        #: id of the thread in which `run` is active; None while it is not active
        self._run_by: int | None = None
        self._process = os.getpid()
        with ExitStack() as opened:
            # An interrupt in this block closes the study, because the caller does not have it yet.
            with self._interrupts:
                self._open(opening)
                opened.callback(self.close)
                self.enqueue(points)
            opened.pop_all()

    def _open(self, opening: Opening) -> None:
        """Open store and study, and prepare `ask` and `tell`."""
        self._opened = opened = opening.open()
        self._study, self._plan = opened.study, opened.plan
        super().__init__(opened.store, self._study.record, opened.space)
        #: by number: contexts of the trials that `ask` has returned and that have no result
        self._contexts: dict[int, LocalContext] = {}
        self._by_hand = ByHandExecutor(self._study.clock)
        record_process(self._study.recorder, self._study.clock.wall())
        self._trackers = Trackers(self._plan.settings, self._study.name, opened.store.url)
        #: scheduler for `ask` and `tell`, created at the first `ask`
        self._loop: Scheduler | None = None
        self._is_open = True
        if opened.warm_start is not None and not opened.warm_start.is_whole:
            warn(opened.warm_start.words)
        for line in filter(None, [*opened.changes, self._plan.warning]):
            warn(line)

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enqueue(self, points: Iterable[Mapping[str, Any]]) -> int:
        """Add known points, which run in this order before all other trials. Return how many were added.

        A point is a dict of values by label; for a choice, the value is the index or the name of an option, and in a
        study without a space the option itself. The sampler proposes values for missing labels. If a point is invalid,
        no point is enqueued. Raises UsageError, which gives the position of the point and the cause.
        """
        points = _listed(points)
        with self._changing(within_run=True):
            # Create a new scheduler at the next `ask`, because shares and samplers count the trials when they are
            # created.
            self._loop = None
            return len(known_points.enqueue(self._study, self._plan, points))

    def add(
        self,
        points: Iterable[Mapping[str, Any]],
        results: Iterable[Any],
        *,
        laws: Mapping[str, Law] | None = None,
        reports: Mapping[int, float] | None = None,
    ) -> None:
        """Record trials that were evaluated elsewhere. `points` are as in `enqueue`, and `results` as in `tell`.

        In a study without a space, trials must have asked for the labels before, unless `laws` has them. `reports` are
        losses by step, which each of the trials gets. The search learns from all trials at once, which is much faster
        than `ask` and `tell`. Raises like `enqueue`.
        """
        points, outcomes = _listed(points), [self._outcome(result, None) for result in results]
        if len(points) != len(outcomes):
            raise UsageError(f"{len(points)} points cannot have {len(outcomes)} results; give one for each")
        with self._changing(within_run=True):
            if (schema := self._study.schema) is not None:
                # All points are checked before one is added.
                asked = [suggested({**schema.laws, **(laws or {})}, point) for point in points]
                for labels in asked:
                    schema = schema.seen(labels, is_complete=True)
                outcomes = [replace(each, asked=labels) for each, labels in zip(outcomes, asked, strict=True)]
                points = [{} for _ in points]
            # Create a new scheduler at the next `ask`. It learns from all trials that are recorded then.
            self._loop = None
            known_points.add_finished(self._study, self._plan, points, outcomes, reports)
            if self._run_by is None:
                self._grow()

    def ask(self) -> Any:
        """Return the next trial, an `AskedTrial`. The caller evaluates it, and passes its result to `tell`.

        In a study without a space it is a `Trial`, with `suggest_float` and the like, `report` and `should_prune`.
        Several trials may be open at the same time. Raises UsageError if the study has budgets and the next trial
        depends on results that are still missing, or if all points have been tried.
        """
        with self._changing():
            attempt = self._ask()
            number = attempt.number
            context = self._contexts[number] = LocalContext(
                study=self.name,
                trial=number,
                seed=attempt.seed,
                budget=whole(attempt.budget),
                checkpoints=below(CHECKPOINTS, self.key) / str(number),
                objectives=self._plan.settings.objectives,
                on_report=partial(self._report, number),
                stopped=lambda: number not in self._by_hand.fetched,
            )
            if self._study.schema is not None:
                return Trial(context, attempt.params)
        return AskedTrial(
            number=number,
            params=dict(attempt.params),
            values=self._plan.space.evaluate(attempt.params),
            seed=attempt.seed,
            budget=whole(attempt.budget),
            origin=attempt.origin,
            study=self.key,
        )

    def _ask(self) -> Attempt:
        self._by_hand.is_asked = True
        try:
            # A pass of the scheduler's loop may send no trial although there is one. It may only take back trials of an
            # earlier run that have no result, or extend the space by new labels. So up to three passes are made.
            for _ in range(3):
                self._turn()
                if (attempt := self._by_hand.fetch()) is not None:
                    break
            else:
                depends = f"the next trial depends on those that were asked for: tell the results of {self._asked}"
                ended = "the search has ended: all of its points have been tried"
                raise self._study.trouble or NoTrialToAsk(f"{depends} first" if self._by_hand.fetched else ended)
        finally:
            self._by_hand.is_asked = False
        self._turn()
        return attempt

    def report(self, trial: AskedTrial, step: int, loss: float | Mapping[str, float]) -> bool:
        """Report the loss that a trial has reached at `step`. Return True if the study's pruner stops the trial.

        With several objectives, `loss` is a dict with all losses by name. A trial that is stopped has ended as PRUNED,
        and `tell` does not change it. `step` is an integer that must increase. If a trial has more than a thousand
        reports, only evenly spaced ones are kept, with a warning; the pruner may then stop the trial a few reports
        later. Raises UsageError like `tell`, and for invalid numbers.
        """
        with self._changing():
            number = self._number_of(trial)
            if number not in self._by_hand.fetched:
                return True
            try:
                self._contexts[number].report(step, loss)
            except (TypeError, ValueError) as error:
                raise UsageError(str(error)) from None
            return number not in self._by_hand.fetched

    def _report(self, number: int, step: int, loss: float | Mapping[str, float]) -> None:
        """Let the pruner judge a report of a trial that the caller evaluates."""
        with self._changing():
            if number in self._by_hand.fetched:
                self._by_hand.report(number, step, loss)
                self._turn()
            if number not in self._by_hand.fetched:
                self._turn()

    def tell(
        self, trial: AskedTrial | Trial, result: Any = _NOTHING, *, error: BaseException | str | None = None
    ) -> TrialResult:
        """Record the result of a trial that `ask` has returned. Return the recorded trial.

        `result` is a value that an objective may return: a loss, or a dict with `loss` and further metrics (with
        `losses` in a study that has `objectives`). The seconds that the evaluation took may stand beside the loss as
        `seconds`: the search then spends less time on the proposals of short trials. An invalid result, such as NaN or
        None, counts as a failure. `error` is the reason of a failure: an exception or a text. A pruned trial stays
        PRUNED. Raises UsageError for a trial that already has a result, or that belongs to another study.
        """
        with self._changing():
            number = self._number_of(trial)
            if number in self._by_hand.fetched:
                if result is None and error is not None:
                    result = _NOTHING
                if (result is _NOTHING) == (error is None):
                    raise UsageError(f"tell trial {number} either a result or an error")
                outcome = with_notes(self._outcome(result, error), self._contexts[number])
                self._by_hand.bring(number, _timed(outcome))
                self._turn()
            self._contexts.pop(number, None)
            return self.trial(number)

    def _turn(self) -> None:
        """Let the scheduler for `ask` and `tell` record what has happened. If the space has grown, continue in it."""
        self._scheduler().turn()
        self._grow()

    def _grow(self) -> bool:
        """If trials have asked for new labels, continue in the space that includes them, unless the store cannot be
        reached. Return whether this was done.
        """
        if not self._study.has_grown:
            return False
        self._opened = self._opened.grown()
        self._plan, self._loop = self._opened.plan, None
        super().__init__(self._opened.store, self._study.record)
        return not self._study.has_grown

    @refuse_unknown
    def run(
        self,
        objective: Objective,
        *,
        trials: int | None = None,
        seconds: float | None = None,
        target: float | None = None,
        max_failures: int = DEFAULT_SETTINGS.max_failures,
        early_stop: int | None = None,
        progress: bool | None = None,
        on_trial: OnTrial | None = None,
        on_end: OnEnd | None = None,
    ) -> Study:
        """Search for the params with the best loss, one trial after another in this process. Return this study.

        The search ends when the study has `trials` trials, after `seconds`, or when a feasible loss is as good as
        `target`, whichever comes first. It also ends after `early_stop` trials in a row without a better feasible loss
        (with several losses, without a change of the front). If its first `max_failures` trials all fail in the same
        way, it ends with a warning (0: never). Ctrl-C ends it at once; the interrupted trial waits for the next run.

        `progress` decides whether progress is shown on standard error; by default it is in a terminal and in a
        notebook.

        `on_trial(study, trial)` is called after each trial, once the trial is recorded, and `on_end(study, why)` at the
        end; see `minimize`.
        """
        check_objective(objective, "the objective")
        bounds: dict[str, Any] = {"trials": trials, "seconds": seconds, "target": target, "early_stop": early_stop}
        bounds |= {"max_failures": max_failures, "objectives": self._plan.settings.objectives}
        limits = Limits.of(read_settings(bounds))
        check_callbacks(on_trial=on_trial, on_end=on_end)
        with EndCallback(on_end, warn) as at_end, self._changing():
            if self._by_hand.fetched:
                raise UsageError(f"tell the results of {self._asked} first")
            self._run_by, at_end.study = get_ident(), self
            try:
                at_end.why = self._run(objective, limits, progress, on_trial)
            finally:
                self._run_by = None
        return self

    def _run(self, objective: Objective, limits: Limits, progress: bool | None, on_trial: OnTrial | None) -> str:
        """Run trials until the search ends. Return the reason."""
        where = self._plan.settings.where
        self._study.use_code(code := function_version(objective if where is None else partial(objective, where)))
        self._opened.record_settings({}, {**self._study.record.in_force, "trials": limits.trials})
        self.record = self._study.record
        if (line := self._opened.other_code()) is not None:
            warn(line)
        self._loop = None
        called = objective if self._study.schema is None else Suggesting(objective)
        begin = partial(self._scheduler_of, self._interrupts.at_once(called), limits, code)
        scheduler = begin()
        if on_trial is not None:
            self._opened.call(on_trial, scheduler, warn)

        try:
            with progress_bar(scheduler, progress) as update:

                def after_turn() -> None:
                    if self._grow():
                        scheduler.become(begin())
                    update()
                    self._trackers.news(_warn_of_tracker)
                    self._interrupts.deliver()

                scheduler.run(after_turn)
        except KeyboardInterrupt:
            if self._interrupts.is_torn:
                raise
            self._interrupts.forget()
            for attempt in [*self._study.attempts]:
                lost = Lost(number=attempt.number, attempt=attempt.attempt, reason="interrupted", claimed=False)
                self._study.tell(lost)
            scheduler.stop(why := f"interrupted: {counted(self._study.counted, 'trial has', 'trials have')} ended")
            warn(why)
        self._end(scheduler)
        return scheduler.ending.why

    def _scheduler_of(self, called: Objective, limits: Limits, code: Digest) -> Scheduler:
        """Return the scheduler that calls an objective in this process."""
        pruning = self._plan.make_pruning(needs_reports=self._study.schema is None)
        executor = InlineExecutor(
            called,
            self._plan.space.evaluate if self._study.schema is None else dict,
            checkpoints=below(CHECKPOINTS, self.key),
            study=self.name,
            objectives=self._plan.settings.objectives,
            prunes=(lambda attempt, report: False) if pruning is None else pruning.tell,
            code=code,
        )
        return self._opened.scheduler(executor, limits, pruning=pruning)

    def _end(self, scheduler: Scheduler) -> None:
        """Record the last changes of a run, and issue warnings about its end and its result."""
        self._study.commit()
        if scheduler.hopeless:
            warn(f"stopped: {scheduler.hopeless} (max_failures)")
        elif scheduler.is_exhausted and scheduler.limits.trials is not None:
            # Warn only if there is a limit on trials: without one, this is the expected end.
            warn(f"ended after {counted(self._study.counted, 'trial')}: the sampler has no further params")
        for notice in scheduler.notices():
            warn(notice)
        if self._study.counted and not scheduler.hopeless and (why := self.why_no_best()) is not None:
            warn(why)

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return self._is_open

    def close(self) -> None:
        """Record the remaining changes and unlock the study. Trials without a result wait for the next run."""
        if self._process != os.getpid():
            return
        with self._changing(or_closed=True):
            if not self._is_open:
                return
            self._is_open = False
            try:
                self._leave()
            finally:
                self._opened.store.close()
        self._trackers.close(_warn_of_tracker)

    def _leave(self) -> None:
        """Record the remaining changes, unless a second Ctrl-C has interrupted one. Unlock the study in any case."""
        if self._interrupts.is_torn:
            self._study.unlock()
            return
        try:
            if self._by_hand.fetched:
                self._by_hand.give_back()
                self._scheduler().turn()
        finally:
            self._study.close()
        for line in self._study.deletions(at_end=True):
            warn(line)

    def __del__(self) -> None:
        # If an ask/tell loop fails, the study must not stay locked until the program ends.
        if getattr(self, "_is_open", False) and self._process == os.getpid() and not sys.is_finalizing():
            with suppress(StoreError):
                self.close()

    def _outcome(self, result: Any, error: BaseException | str | None) -> Outcome:
        """Return the outcome of a trial that the caller has evaluated."""
        if error is not None:
            text = describe(error) if isinstance(error, BaseException) else str(error)[:MAX_ERROR]
            return Outcome(state=TrialState.FAILED, error=text)
        try:
            return (read if self._study.schema is None else read_losses)(result, self._plan.settings.objectives)
        except Unreadable as problem:
            return Outcome(state=TrialState.FAILED, error=str(problem))

    @property
    def _asked(self) -> str:
        """Text that lists the trials that `ask` has returned and that have no result."""
        return f"trial {listed(sorted(self._by_hand.fetched), 5)}"

    def _scheduler(self) -> Scheduler:
        """Return the scheduler for `ask` and `tell`, which is created at the first call."""
        if self._loop is None:
            # The version of the code that evaluates the trials is not known.
            self._study.use_code("")
            self._loop = self._opened.scheduler(self._by_hand)
        return self._loop

    def _number_of(self, trial: object) -> int:
        """Return the number of a trial that has no result yet, or was pruned. Raises UsageError for any other trial."""
        if not isinstance(trial, AskedTrial | Trial):
            raise UsageError(f"tell and report take a trial that ask has returned, not {short(trial, 60)}")
        is_own = trial.study == self.key
        if isinstance(trial, Trial):
            is_own = (
                trial.context.study == self.name and self._contexts.get(trial.number, trial.context) is trial.context
            )
        if not is_own:
            raise UsageError(f"trial {trial.number} is one of another study, not of {self.name!r}")
        if trial.number not in self._by_hand.fetched:
            known = self._study.trial(trial.number)
            if known.state is TrialState.PRUNED:
                return trial.number
            if known.state.is_finished:
                ended = known.state if known.outcome.loss is None else f"loss {known.outcome.loss:g}"
                raise UsageError(f"trial {trial.number} has its result already ({ended}); a trial is told once")
            raise UsageError(f"trial {trial.number} was given back when its study was closed; ask again")
        return trial.number

    @contextmanager
    def _changing(self, *, within_run: bool = False, or_closed: bool = False) -> Iterator[None]:
        """Let only this thread change the study during a `with` block, and delay Ctrl-C meanwhile.

        Raises UsageError if the study is closed, unless `or_closed`; if the study was opened by another process, from
        which this one was forked; and while `run` is active. With `within_run`, the thread of `run` may still change
        it, as in `on_trial`.
        """
        if self._process != os.getpid():
            raise UsageError(
                f"study {self.name!r} was opened by process {self._process}, and only that process can change it"
            )
        # Check this before taking the lock, which `run` holds until its end.
        if self._run_by is not None and not (within_run and self._run_by == get_ident()):
            raise UsageError(f"study {self.name!r} is active in run(); call this after it has returned")
        with self._lock, self._interrupts:
            if not (self._is_open or or_closed):
                raise UsageError(f"study {self.name!r} is closed; open it again with Study(..., resume=True)")
            yield


def _timed(outcome: Outcome) -> Outcome:
    """Return the outcome with its metric `seconds` as its duration. Raises UsageError if it cannot be one."""
    metrics = dict(outcome.metrics)
    if (seconds := metrics.pop("seconds", None)) is None:
        return outcome
    try:
        return replace(outcome, metrics=metrics, seconds=convert(seconds, Seconds))
    except ValidationError:
        raise UsageError(f"seconds: {short(seconds, 60)} is not a duration; tell a number from 0 to 1e10") from None


def _warn_of_tracker(line: str) -> None:
    warn(line.removeprefix("Warning: "))


def _listed(points: object) -> list[Any]:
    """Return known points as a list. Raises UsageError for a single dict, a text, or a value that is not iterable."""
    if isinstance(points, (str, bytes, Mapping)) or not isinstance(points, Iterable):
        raise UsageError(f"points are a list of dicts, not {short(points, 60)}")
    return list(points)


@with_settings
@refuse_unknown
def minimize(
    objective: Objective | str,
    space: object = None,
    *,
    trials: int | None = None,
    seconds: float | None = None,
    target: float | None = None,
    max_failures: int = DEFAULT_SETTINGS.max_failures,
    early_stop: int | None = None,
    seed: int | None = None,
    sampler: str | MakeSampler | None = None,
    policy: str | None = None,
    shares: str | None = None,
    fidelity: Mapping[str, object] | None = None,
    pruner: str | Mapping[str, object] | None = None,
    repeats: int | None = None,
    objectives: Mapping[str, str] | None = None,
    direction: str | None = None,
    where: Callable[[Any], Any] | None = None,
    track: str | None = None,
    enqueue: Iterable[Mapping[str, Any]] = (),
    store: str = "sqlite://",
    study: str | None = None,
    resume: Resume = False,
    progress: bool | None = None,
    workers: int | Mapping[str, int] | None = None,
    n_jobs: int | None = None,
    broker: str | None = None,
    redis: str | None = None,
    trial_timeout: float | None = None,
    at_once: int | None = None,
    keep: Mapping[str, int] | None = None,
    on_trial: OnTrial | None = None,
    on_end: OnEnd | None = None,
    warm_start: WarmStartSource | None = None,
) -> ShownStudy:
    """Search for the params with the best loss.

    `objective` is a function of a point of `space` (a hyperopt expression), or the name of a study file, such as
    "my_study". Without a space, it gets a trial that it asks for values, as in Optuna: ``trial.suggest_float("x", 0,
    1)``. The trials of a function run one after another in this process, unless `workers` or a fleet is given.
    `workers` (or `n_jobs`) is the number of trials at a time on this machine, or slots by class, such as
    ``{"cpu": 4}``. A fleet has the URLs `broker` and `redis`, by default from CELERY_BROKER_URL and SHADHO_REDIS_URL.

    `seed` makes the search repeatable. `store` is a database URL; the default is in memory. `study` is the study's name
    in the store. `resume` continues the study; with "if-exists", the study begins if there is none with this name.
    `enqueue` are known points, which run first (see `Study.enqueue`). `warm_start` is the source of finished trials to
    learn from: a study, its name, "STORE_URL#STUDY", a CSV file, hyperopt's `Trials`, or pairs of params and loss.
    `on_trial(study, trial)` is called after each trial. In it, `study.stop()` ends the search. `on_end(study, why)` is
    called once at the end, also after an error or Ctrl-C.

    Returns the study. It has `.trials`, each with `.params` by label, `.values`, `.loss` and `.state`. Its `.best`
    raises NoSuccessfulTrial if no trial has succeeded. Raises SpaceError or UsageError for invalid arguments.
    """
    bounds: dict[str, Any] = {"trials": trials, "seconds": seconds, "target": target, "early_stop": early_stop}
    bounds["max_failures"] = max_failures
    losses: dict[str, Any] = {"objectives": objectives, "direction": direction}
    settings: dict[str, Any] = {"sampler": sampler, "policy": policy, "shares": shares, "pruner": pruner}
    settings |= {"fidelity": fidelity, "repeats": repeats, "where": where, "track": track, **losses}
    opened: dict[str, Any] = {"store": store, "resume": resume, "seed": seed, "warm_start": warm_start}
    of_workers = {"trial_timeout": trial_timeout, "at_once": at_once, "keep": keep}
    if n_jobs is not None:
        if workers is not None:
            raise UsageError("n_jobs is another name of workers; leave out one of them")
        workers = n_jobs
    if isinstance(objective, str) or workers not in (None, {}) or broker or redis:
        # Imported here, because a search in this process does not need it.
        from shadho_celery.program.on_workers import search_on_workers

        settings |= {**bounds, **of_workers}
        opened |= {"name": study, "points": enqueue, "silent": progress is False}
        opened |= {"on_trial": on_trial, "on_end": on_end}
        return search_on_workers(objective, space, settings, opened, workers=workers, broker=broker, redis=redis)
    # Check the arguments before a study is recorded.
    check_objective(objective, "the objective")
    check_callbacks(on_trial=on_trial, on_end=on_end)
    Limits.of(read_settings({**bounds, **losses, **of_workers}))
    if given := [name for name, value in of_workers.items() if value is not None]:
        raise UsageError(
            f"{given[0]} needs workers: this process runs one trial at a time, cannot stop it, and keeps all folders"
        )
    with Study(space, study=study, enqueue=enqueue, **opened, **settings) as found:
        return found.run(objective, **bounds, progress=progress, on_trial=on_trial, on_end=on_end)
