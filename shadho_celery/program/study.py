"""A study that a program runs: with an objective in this process, or trial by trial with ask and tell."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import RLock, get_ident
from typing import Any

from msgspec.structs import replace

from shadho_celery.core.checks import short
from shadho_celery.core.folders import CHECKPOINTS, below
from shadho_celery.core.settings import read_settings, with_settings
from shadho_celery.core.trial import Attempt, Lost, Outcome, TrialState, whole
from shadho_celery.errors import StoreError, Surface, UsageError, told
from shadho_celery.executors.inline import ByHandExecutor, InlineExecutor
from shadho_celery.objective.call import MAX_ERROR, Objective, check_objective, describe, joined
from shadho_celery.objective.context import LocalContext, Thinning
from shadho_celery.objective.function_version import function_version
from shadho_celery.objective.result import Unreadable, read
from shadho_celery.program.interrupts import Interrupts
from shadho_celery.program.notices import warn
from shadho_celery.results.on_trial import OnTrial, check_on_trial
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.results.warm_start import WarmStartSource
from shadho_celery.samplers.base import MakeSampler
from shadho_celery.scheduler import known_points
from shadho_celery.scheduler.plan import DEFAULT_SETTINGS, ENDLESS
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.session.opening import Opening, Request
from shadho_celery.study.limits import Limits

#: replaces a missing result; None is what an objective without a return statement has returned
_NOTHING: Any = object()


@dataclass(frozen=True, kw_only=True)
class AskedTrial:
    """A trial that `Study.ask` proposes, and whose result `Study.tell` awaits."""

    #: position of the trial in its study, from 0
    number: int
    #: drawn value of each active label; for a choice the index of its option
    params: Mapping[str, Any]
    #: what an objective would get, in the space's own shape
    values: Any
    #: seed for random draws of the evaluation
    seed: int
    #: part of the fidelity; None for all of it
    budget: float | None
    #: key of its study
    study: str


class Study(StudyResults):
    """A study in your own program: `ask` for trials and `tell` their results, or `run` an objective in this process.

    ::

        with Study({"x": hp.uniform("x", -1, 1)}, store="sqlite:///shadho.db", study="mine") as study:
            study.enqueue([{"x": 0.5}])
            for _ in range(20):
                trial = study.ask()
                study.tell(trial, trial.values["x"] ** 2)
        print(study.best.values)

    It holds the study's lock until `close`; its results can be read afterwards, too. Several threads may ask and tell:
    one at a time changes the study. A forked process has no part in it.
    """

    @with_settings
    @told(Surface.PYTHON)
    def __init__(
        self,
        space: object,
        *,
        store: str = "sqlite://",
        study: str | None = None,
        resume: bool = False,
        seed: int | None = None,
        sampler: str | MakeSampler | None = None,
        policy: str | None = None,
        shares: str | None = None,
        fidelity: Mapping[str, object] | None = None,
        pruner: str | Mapping[str, object] | None = None,
        objectives: Mapping[str, str] | None = None,
        direction: str | None = None,
        enqueue: Iterable[Mapping[str, Any]] = (),
        warm_start: WarmStartSource | None = None,
    ) -> None:
        """Begin or resume a study of `space`, a hyperopt expression.

        `store`, `study`, `resume`, `seed`, `enqueue` and `warm_start` are those of `minimize`. A study that is
        continued has the settings of before unless others are given. `policy` matters to workers only.
        Raises SpaceError, UsageError, StudyError or StoreError.
        """
        given = {"sampler": sampler, "policy": policy, "shares": shares, "pruner": pruner, "fidelity": fidelity}
        given |= {"objectives": objectives, "direction": direction}
        points = _listed(enqueue)
        opening = Opening(
            Request(
                space=space,
                given={name: value for name, value in given.items() if value is not None},
                limits=ENDLESS,
                store=store,
                name=study,
                resume=resume,
                seed=seed,
                points=points,
                warm_start=warm_start,
            )
        )
        self._interrupts = Interrupts()
        #: held by the thread that changes the study
        self._lock = RLock()
        #: the thread in which `run` is active; None while it is not
        self._run_by: int | None = None
        self._process = os.getpid()
        with ExitStack() as opened:
            # An interrupted study is closed here, because the caller does not have it yet.
            with self._interrupts:
                self._open(opening)
                opened.callback(self.close)
                self.enqueue(points)
            opened.pop_all()

    def _open(self, opening: Opening) -> None:
        """Open store and study."""
        self._opened = opened = opening.open()
        self._study, self._plan = opened.study, opened.plan
        super().__init__(opened.store, self._study.record, self._plan.space.evaluate)
        self._by_hand = ByHandExecutor(self._study.clock)
        #: of the trials that were asked for and have reported something
        self._thinnings: defaultdict[int, Thinning] = defaultdict(Thinning)
        #: created at the first `ask`
        self._loop: Scheduler | None = None
        self._is_open = True
        if opened.warm_start is not None and not opened.warm_start.is_whole:
            warn(opened.warm_start.words)
        for line in opened.changes:
            warn(line)

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @told(Surface.PYTHON)
    def enqueue(self, points: Iterable[Mapping[str, Any]]) -> int:
        """Put known points before all other trials, in order. Return their number.

        A point is a dict of labels and values, for a choice the index or the name of its option. What it leaves out is
        proposed by the sampler. If one of them is refused, none is enqueued: raises UsageError with its place and the
        cause.
        """
        points = _listed(points)
        with self._changing(within_run=True):
            # Its shares and samplers count the trials when it is created.
            self._loop = None
            return known_points.enqueue(self._study, self._plan, points)

    @told(Surface.PYTHON)
    def add(self, points: Iterable[Mapping[str, Any]], results: Iterable[Any]) -> None:
        """Record trials that were evaluated elsewhere: their points, as `enqueue` accepts them, and what they returned.

        The search learns from all of them at once, much faster than it proposed them. Raises like `enqueue`.
        """
        points, outcomes = _listed(points), [self._outcome(result, None) for result in results]
        if len(points) != len(outcomes):
            raise UsageError(f"{len(points)} points cannot have {len(outcomes)} results; give one for each")
        with self._changing(within_run=True):
            # It learns from them when it is created.
            self._loop = None
            known_points.adopt(self._study, self._plan, points, outcomes)

    @told(Surface.PYTHON)
    def ask(self) -> AskedTrial:
        """Return the next trial, to be evaluated by the caller, who tells its result; several may be asked for at once.

        Raises UsageError if, with budgets, the next trial depends on results that were not told yet.
        """
        with self._changing():
            attempt = self._ask()
        return AskedTrial(
            number=attempt.number,
            params=dict(attempt.params),
            values=self._plan.space.evaluate(attempt.params),
            seed=attempt.seed,
            budget=whole(attempt.budget),
            study=self.key,
        )

    def _ask(self) -> Attempt:
        loop = self._scheduler()
        self._by_hand.is_asked = True
        try:
            # The first turn finds the trials of an earlier run that were never told.
            for _ in range(2):
                loop.turn()
                if (attempt := self._by_hand.fetch()) is not None:
                    break
            else:
                depends = f"the next trial depends on those that were asked for: tell the results of {self._asked}"
                ended = "the search has ended: all of its points have been tried"
                raise self._study.trouble or UsageError(f"{depends} first" if self._by_hand.fetched else ended)
        finally:
            self._by_hand.is_asked = False
        loop.turn()
        return attempt

    @told(Surface.PYTHON)
    def report(self, trial: AskedTrial, step: int, loss: float) -> bool:
        """Report the loss that a trial has reached at `step`. Return True if the study's pruner stops it there.

        Then it has ended as PRUNED, and another one can be asked for; telling its result after that changes nothing.
        `step` is a whole number that increases. More than a thousand reports of a trial are thinned out evenly, with a
        warning; an answer may then come some reports later. Raises UsageError like `tell`, and for invalid numbers.
        """
        with self._changing():
            number = self._number_of(trial)
            if number not in self._by_hand.fetched:
                return True
            try:
                on_report = partial(self._by_hand.report, number)
                thinning, objectives = self._thinnings[number], self._plan.settings.objectives
                LocalContext(on_report=on_report, thinning=thinning, objectives=objectives).report(step, loss)
            except (TypeError, ValueError) as error:
                raise UsageError(str(error)) from None
            self._scheduler().turn()
            if number not in self._by_hand.fetched:
                self._scheduler().turn()
            if has_ended := number not in self._by_hand.fetched:
                self._thinnings.pop(number, None)
            return has_ended

    @told(Surface.PYTHON)
    def tell(
        self, trial: AskedTrial, result: Any = _NOTHING, *, error: BaseException | str | None = None
    ) -> TrialResult:
        """Record the result of a trial that was asked for. Return the trial as it is recorded.

        `result` is a loss, or a dict with `loss` and further metrics, as an objective returns it (with `losses` in a
        study that has `objectives`). A result that cannot be read, such as NaN or None, is a failure. `error` is the
        reason of a failure: an exception or a text. A pruned trial stays pruned. Raises UsageError for a trial that was
        told before, or belongs to another study.
        """
        with self._changing():
            number = self._number_of(trial)
            if number in self._by_hand.fetched:
                if result is None and error is not None:
                    result = _NOTHING
                if (result is _NOTHING) == (error is None):
                    raise UsageError(f"tell trial {number} either a result or an error")
                outcome = self._outcome(result, error)
                thinned = self._thinnings.pop(number, Thinning()).warning
                outcome = outcome if thinned is None else replace(outcome, warning=joined(outcome.warning, thinned))
                self._by_hand.bring(number, outcome)
                self._scheduler().turn()
            return self.trial(number)

    @told(Surface.PYTHON)
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
        on_turn: Callable[[], None] = lambda: None,
    ) -> Study:
        """Search for the params with the least loss, trial after trial in this process; return the study itself.

        The search ends when the study has `trials`, after `seconds`, or at a feasible loss that is as good as `target`,
        whichever comes first. Ctrl-C ends it at once: its trial waits for the next run. It also ends, with a warning,
        if its first `max_failures` trials all fail in one way (0: never), and after `early_stop` trials without a
        better feasible loss; of several losses, without a change of the front.
        `progress` shows a bar on standard error, by default in a terminal and in a notebook.
        `on_trial(study, trial)` is called after each trial, once it is recorded: see `minimize`. `on_turn` is called
        after each turn of the loop.
        """
        check_objective(objective, "the objective")
        bounds: dict[str, Any] = {"trials": trials, "seconds": seconds, "target": target}
        bounds |= {
            "max_failures": max_failures,
            "early_stop": early_stop,
            "objectives": self._plan.settings.objectives,
        }
        limits = Limits.of(read_settings(bounds))
        check_on_trial(on_trial, "on_trial")
        with self._changing():
            if self._by_hand.fetched:
                raise UsageError(f"tell the results of {self._asked} first")
            self._run_by = get_ident()
            try:
                self._run(objective, limits, progress, on_trial, on_turn)
            finally:
                self._run_by = None
        return self

    def _run(
        self,
        objective: Objective,
        limits: Limits,
        progress: bool | None,
        on_trial: OnTrial | None,
        on_turn: Callable[[], None],
    ) -> None:
        code = function_version(objective)
        if (line := self._opened.other_code(code)) is not None:
            warn(line)
        pruning = self._plan.make_pruning()
        executor = InlineExecutor(
            self._interrupts.at_once(objective),
            self._plan.space.evaluate,
            checkpoints=below(CHECKPOINTS, self.key),
            study=self.name,
            objectives=self._plan.settings.objectives,
            prunes=(lambda attempt, report: False) if pruning is None else pruning.tell,
            code=code,
        )
        self._loop = None
        scheduler = self._opened.scheduler(executor, limits, pruning=pruning)
        if on_trial is not None:
            self._opened.call(on_trial, scheduler, warn)

        def after_turn() -> None:
            on_turn()
            self._interrupts.deliver()

        try:
            _turn(scheduler, progress, after_turn)
        except KeyboardInterrupt:
            if self._interrupts.is_torn:
                raise
            self._interrupts.forget()
            for attempt in [*self._study.attempts]:
                lost = Lost(number=attempt.number, attempt=attempt.attempt, reason="interrupted", claimed=False)
                self._study.tell(lost)
            warn(f"interrupted: {self._study.counted} trials have ended")
        self._study.commit()
        if scheduler.hopeless:
            warn(f"stopped: {scheduler.hopeless} (max_failures)")
        elif scheduler.is_exhausted and limits.trials is not None:
            # Without a limit on trials this is the end that was asked for.
            warn(f"ended after {self._study.counted} trials: the sampler has no further params")
        for notice in scheduler.notices():
            warn(notice)
        if self._study.counted and not scheduler.hopeless and (why := self.why_no_best()) is not None:
            warn(why)

    @told(Surface.PYTHON)
    def close(self) -> None:
        """Record what is left and unlock the study. Trials that were never told wait for the next run."""
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

    def _leave(self) -> None:
        """Record what is left, unless a second Ctrl-C has interrupted a change, and unlock the study in any case."""
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
        # An error that leaves a loop must not keep the study locked for the rest of the program.
        if getattr(self, "_is_open", False) and self._process == os.getpid() and not sys.is_finalizing():
            with suppress(StoreError):
                self.close()

    def _outcome(self, result: Any, error: BaseException | str | None) -> Outcome:
        """Return the outcome of a trial that the caller has run."""
        if error is not None:
            text = describe(error) if isinstance(error, BaseException) else str(error)[:MAX_ERROR]
            return Outcome(state=TrialState.FAILED, error=text)
        try:
            return read(result, self._plan.settings.objectives)
        except Unreadable as problem:
            return Outcome(state=TrialState.FAILED, error=str(problem))

    @property
    def _asked(self) -> str:
        """Text with the trials that were asked for but not told."""
        numbers = sorted(self._by_hand.fetched)
        more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
        return f"trial {', '.join(map(str, numbers[:5]))}{more}"

    def _scheduler(self) -> Scheduler:
        """Return the scheduler whose trials the caller runs."""
        if self._loop is None:
            self._loop = self._opened.scheduler(self._by_hand)
        return self._loop

    def _number_of(self, trial: object) -> int:
        """Return the number of a trial that waits for its result, or was pruned. Raises UsageError for others."""
        if not isinstance(trial, AskedTrial):
            raise UsageError(f"tell and report take a trial that ask has returned, not {short(trial, 60)}")
        if trial.study != self.key:
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
        """Let only this thread change the study, and delay Ctrl-C meanwhile.

        Raises UsageError if the study is closed (unless that is allowed), belongs to the process from which this one
        was forked, or is active in `run`; `within_run` allows it for the thread that runs it, as in `on_trial`.
        """
        if self._process != os.getpid():
            raise UsageError(
                f"study {self.name!r} was opened by process {self._process}, and only that process can change it"
            )
        # Without the lock, which `run` holds until its end.
        if self._run_by is not None and not (within_run and self._run_by == get_ident()):
            raise UsageError(f"study {self.name!r} is active in run(); call this after it has returned")
        with self._lock, self._interrupts:
            if not (self._is_open or or_closed):
                raise UsageError(f"study {self.name!r} is closed; open it again with Study(..., resume=True)")
            yield


def _listed(points: object) -> list[Any]:
    """Return known points as a list. Raises UsageError if they are not one."""
    if isinstance(points, (str, bytes, Mapping)) or not isinstance(points, Iterable):
        raise UsageError(f"points are a list of dicts, not {short(points, 60)}")
    return list(points)


def _turn(scheduler: Scheduler, progress: bool | None, on_turn: Callable[[], None]) -> None:
    # rich is slow to import, and a search without a bar does not need it.
    if progress is False or (progress is None and not (sys.stderr.isatty() or "ipykernel" in sys.modules)):
        scheduler.run(on_turn)
        return
    from shadho_celery.program.progress import ProgressBar

    with ProgressBar(scheduler) as update:

        def shown() -> None:
            update()
            on_turn()

        scheduler.run(shown)
