"""The loop of a study: collect events, learn from them, update the classes, and fill their free slots with trials."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from shadho_celery.core.failures import Hopelessness, headline
from shadho_celery.core.hardware import DEFAULT_CLASSES, ComputeClass, by_strength
from shadho_celery.core.trial import WELL, Attempt, Event, Lost, Report, Result, Retry, Trial, TrialState
from shadho_celery.core.units import counted, money
from shadho_celery.errors import StoreOutage
from shadho_celery.fidelity.pruners import Pruning
from shadho_celery.placement.copies import Declined, Idle, Speculation, most_copies, record_placements
from shadho_celery.placement.durations import Extrapolation
from shadho_celery.placement.memory import MemoryFit
from shadho_celery.placement.model import CostModel, preemption_rate
from shadho_celery.placement.widths import Reservations, Widths
from shadho_celery.scheduler.executors import Executor
from shadho_celery.scheduler.proposals import Proposals
from shadho_celery.scheduler.wishes import CheapestSlots, Demand
from shadho_celery.study.keeper import Keeper
from shadho_celery.study.state import Limits, StudyState

#: seconds that one turn of the loop waits for an event
TURN_SECONDS = 0.5

#: seconds between two checks of the run times of the running trials
WATCH_SECONDS = 10.0

#: after this number of attempts, a trial may run again on workers on which it has failed, because no other has taken it
MAX_AVOIDING = 30

#: trials for which no machine is started become FAILED after this many seconds without a live class and other trials
ALONE_SECONDS = 60.0
#: seconds for which a trial whose latest machines have vanished is sent only if no other trial fits
LAST_SECONDS = 600.0
#: the user is told about the first trial that workers have given back this many times
MANY_RETURNS = 3

#: once the model has learned from this many trials of every class, classes are ordered by speed instead of hardware
TIMED_TRIALS = 5


class Ending(NamedTuple):
    """The reason why a study ends."""

    #: "" as long as there is none
    why: str = ""
    #: cause: a setting whose limit was reached, `hopeless`, `sampler` without further params, or `on_trial`; else ""
    of: str = ""


@dataclass(eq=False)
class Scheduler:
    """Runs one study with one executor until it reaches a limit. Call `begin` before the first turn."""

    study: StudyState
    executor: Executor
    proposals: Proposals
    _: KW_ONLY
    cost_model: CostModel
    limits: Limits
    #: names of classes, the strongest first, which order classes with equal hardware
    expected: Sequence[str] = DEFAULT_CLASSES
    #: True to copy late trials to idle slots
    speculate: bool = True
    #: stops trials early because of their reports; None to let all trials run to their end
    pruning: Pruning | None = None
    #: chooses the slots that are used if trials are placed by money; None to use all slots
    cheapest: CheapestSlots | None = None
    #: finds the trials whose folders are not needed; None to keep all folders
    keeper: Keeper | None = None

    def __post_init__(self) -> None:
        #: names of the subspaces, in the order of the search space
        self.subspaces = self.proposals.subspaces
        #: live classes, strongest first
        self.classes: list[ComputeClass] = []
        #: maximum number of seconds for which a turn waits for an event
        self.turn_seconds = TURN_SECONDS
        #: function that is called with each ended trial after it is recorded
        self.on_trial: Callable[[Trial], None] | None = None
        #: ended trials for which `on_trial` has not been called yet
        self._ended: list[Trial] = []
        #: True once no more trials are sent and the scheduler only waits for running trials
        self.stopping = False
        #: reason for which it was stopped first
        self._ending = Ending()
        #: True while no more trials are sent, until `unpause`
        self.paused = False
        self._memory_fit = MemoryFit(self.cost_model, self.expected)
        self._reservations = Reservations(self.study, is_searched=bool(self.cost_model.widths))
        self._widths = Widths(self.study, self.cost_model, self._memory_fit, self._reservations)
        self._declined = Declined()
        self._hopelessness = Hopelessness(self.study.next_numbers(self.limits.failures or 0))
        self._speculation = Speculation(self.cost_model) if self.speculate else None
        self._extrapolation = Extrapolation()
        #: computes the slots that the study wants of each class; None if workers are not started on demand
        self.demand: Demand | None = None
        #: last time at which the study was paused, or had a live class, a trial in flight, or a trial left for which a
        #: machine may be started
        self._served_at = self.study.clock.now()
        #: placed attempts whose placement is not recorded yet, each with the prices of the classes at that time
        self._unrecorded: list[tuple[Attempt, Mapping[str, float]]] = []
        #: attempts that will be submitted to the executor once this turn is recorded
        self._to_submit: list[Attempt] = []
        #: numbers of pruned trials that will be stopped once this turn is recorded
        self._to_stop: list[int] = []
        self._began = self._watched_at = self.study.clock.now()
        #: True once the limit on trials without a better loss is reached, so that the study ends
        self.is_stale = False
        #: notice about the first trial that workers have given back MANY_RETURNS times; None before
        self._returned: str | None = None

    def begin(self, *, is_known: bool = False) -> None:
        """Learn from the trials of earlier runs, and submit the attempts in flight unless the executor knows them."""
        self._to_stop = self.study.to_stop
        # An earlier run may have had other bounds between params. Waiting trials outside the present bounds are
        # cancelled.
        space = self.proposals.members[0].space
        while (refused := self.study.next_waiting(lambda each: not space.allows(each.params))) is not None:
            self.study.cancel(refused.number)
        self.proposals.begin()
        self.proposals.teach(self.study.warm_start)
        for trials, following in self.study.history():
            self._learn(trials, following)
            self.executor.renew_lock()
        self.proposals.end_history()
        self.is_stale = self._is_without_gain()
        if self.pruning is not None:
            self.pruning.recall(self.study.recalled(), self.study.reports())
        if self.study.in_flight and not is_known:
            self.executor.submit(self.study.attempts)

    @property
    def is_exhausted(self) -> bool:
        """True once all points of a finite search, such as a grid, have been proposed and their trials have ended."""
        has_proposed = self.proposals.is_exhausted and not self.study.count(TrialState.WAITING)
        return has_proposed and not self.study.in_flight and not self.proposals.lacking

    def become(self, other: Scheduler) -> None:
        """Continue as `other`, the scheduler of the grown space. Only the state of the run is kept, such as a pause."""
        self._to_submit += [attempt for attempt, _ in self._unrecorded]
        kept = ("on_trial", "paused", "stopping", "turn_seconds", "_began", "_ended", "_ending", "_hopelessness")
        vars(self).update({**vars(other), **{name: getattr(self, name) for name in (*kept, "_to_submit")}})

    # The loop

    def run(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """Run the loop until the study has reached a limit or was stopped, and no trial runs.

        `on_turn` is called after each turn. If the space of the study has grown, it calls `become`.
        """
        while not self.done:
            self.turn()
            on_turn()

    def turn(self) -> None:
        """Run one turn of the loop. It waits for at most `turn_seconds`, or for a trial that runs in this process.

        While the store is unavailable, no events are collected, because the next `poll` would confirm events that are
        not recorded.
        """
        if self.study.trouble is not None:
            self.study.clock.sleep(min(self.turn_seconds, TURN_SECONDS))
            self.executor.renew_lock()
            self._stop_at_limit()
            self._record_and_submit()
            self._call_on_trial()
            return
        self.tell(self.collect())
        if self._ended:
            # This comes before the next trials are sent, because `on_trial` may stop the study.
            self._call_on_trial()
        if self.study.has_grown:
            # No more trials are proposed in the old space. The caller makes the new one.
            self.study.commit()
            return
        self.update_classes()
        self._stop_at_limit()
        self.fill()

    def collect(self) -> Sequence[Event]:
        """Wait for events, and return the events since the last turn."""
        # Once the study is stopping, its limit on time no longer shortens the turns.
        seconds = min(self.turn_seconds, math.inf if self.stopping else self._seconds_left())
        now = self.study.clock.now()
        if self._speculation is not None:
            seconds = min(seconds, self._speculation.due - now)
        if self._declined:
            seconds = min(seconds, self._declined.due(now) - now)
        return self.executor.poll(max(0.0, seconds))

    def tell(self, events: Sequence[Event]) -> None:
        """Record `events`, prune trials by their reports, and let models and samplers learn from finished trials."""
        told = []
        for event in events:
            if isinstance(event, Lost) and event.is_too_long:
                if (sent := self.study.live.find(event.number, event.attempt)) is not None:
                    self._declined.add(event.number, str(sent.attempt.compute_class), self.study.clock.now())
            elif self._declined and not isinstance(event, Lost):
                self._declined.end(event.number)
            decided = self._with_retry_and_hint(event) if isinstance(event, Result) else event
            change = self.study.tell(decided)
            trial = change.trial
            if change.ended is not None:
                self.executor.note_end(decided, change.ended, is_over=change.is_over)
            if trial is not None and isinstance(event, Report):
                self._extrapolation.tell(trial, event)
                if self.pruning is not None and self.pruning.tell(trial, event):
                    self.study.prune(trial.number)
                    # Each later report requests the stop again, in case the first request was lost.
                    self._to_stop.append(trial.number)
            told.append(trial)
            # This is checked after each event, because a later event of the same turn may be an improvement.
            self.is_stale |= self._is_without_gain()
        self._finish([trial for trial in told if trial is not None and trial.state.is_finished])

    def _finish(self, finished: Sequence[Trial]) -> None:
        """Let models, samplers and the pruner learn from trials that have just ended."""
        # All trials are passed at once, because the models then learn much faster.
        if finished:
            self._learn(finished)
        for trial in finished:
            self._extrapolation.end(trial)
            if self.pruning is not None:
                self.pruning.end(trial)
        if self.on_trial is not None:
            self._ended += finished
        for trial in finished:
            if trial.state is TrialState.FAILED:
                self._hopelessness.add(trial, self.study.failures.add(trial))

    def update_classes(self) -> None:
        """Update the live classes and their order, and pass them to the models and the proposals."""
        now = self.study.clock.now()
        if now - self._watched_at >= WATCH_SECONDS:
            self._watched_at = now
            running = [trial for trial in self.study.sent if trial.state is TrialState.RUNNING]
            self.cost_model.watch([self._extrapolation.elapsed(t, now - self.study.running_since(t)) for t in running])
            counts = self.study.recorder.preemptions(self.study.clock.wall())
            self.cost_model.note_preemptions({name: preemption_rate(*each) for name, each in counts.items()})
        classes = self.executor.classes()
        self.cost_model.see(classes)
        self.classes = self._strongest_first(classes) if len(classes) > 1 else [*classes]
        self._memory_fit.see(self.classes)
        self._widths.see(self.classes)
        if self._reservations.reserved:
            self._reservations.see(self.classes, self._fits)
        if self.cheapest is not None:
            # The plan is made without `is_in_time`, which depends on the plan.
            self.cheapest.see(self.classes, self._began, self._memory_fit.fits)
        self.proposals.see(self._used_classes, self._seconds_left())

    def fill(self) -> None:
        """Fill the free slots of all classes with trials. If no other trial can be sent, send copies of late trials.

        Attempts are recorded before they are submitted.
        """
        try:
            for target, trial in self._placements():
                home = self.proposals.machines.pop(trial.number, None)
                only_on, again = target.host or home, self._may_return(trial)
                attempt = self.study.send(trial, target.name, only_on=only_on, again=again)
                self._unrecorded.append((attempt, self.proposals.prices(trial.subspace)))
            if self._speculation is not None and not (self._unrecorded or self._to_submit):
                copies = self._copy_late_trials(self._speculation)
                self._unrecorded = [(each, self.proposals.prices(each.subspace)) for each in copies]
            if self._unrecorded:
                names = [each.name for each in self.classes]
                self._to_submit += record_placements(self._unrecorded, names, self.cost_model, self.study.recorder)
                self._unrecorded = []
                self._set_gpu_memory({each.name for each in self.classes if each.shares_gpus})
            if self.cheapest is not None and not self.study.in_flight:
                self.cheapest.release()
            self._record_and_submit()
        except StoreOutage as error:
            # A trial that should be promoted could not be read from the store. Attempts that are already placed are
            # sent later.
            self.study.wait_for_store(error)
        if self.demand is not None:
            # This comes after the trials are sent, because the import for the linear program takes a moment.
            self._update_demand(self.demand, self.study.clock.now())

    def _set_gpu_memory(self, sharing: Collection[str]) -> None:
        """Set the GPU memory that the attempts to submit need, for the classes whose trials share GPUs.

        Only a first attempt shares a GPU. If it runs out of memory beside other trials, the trial is repeated alone.
        """
        for index, each in enumerate(self._to_submit if sharing else ()):
            name = str(each.compute_class)
            if name in sharing and each.attempt == 1 and each.slots == 1:
                found = self.cost_model.enough_gpu_memory(each.subspace, each.params, name, budget=each.budget)
                self._to_submit[index] = each.evolve(gpu_bytes=found)

    def stop(self, why: str = "stopped", of: str = "", *, running: bool = False) -> None:
        """Send no more trials, and cancel the attempts that no worker has claimed. If `running`, cancel all attempts.

        Trials whose unclaimed attempts are cancelled wait until the study is resumed. Of several calls, the reason of
        the first one (see `Ending`) is kept.
        """
        self.stopping = True
        self._ending = self._ending if self._ending.why else Ending(why, of)
        self._take_back(running=running)

    def pause(self) -> None:
        """Send no more trials until `unpause`, and take back the attempts that no worker has claimed.

        Running trials continue, and their results are collected.
        """
        self.paused = True
        self._take_back(running=False)

    def unpause(self) -> None:
        """Send trials again."""
        self.paused = False

    def change_limits(self, limits: Limits) -> None:
        """Replace the limits of the study. Do not call this while the study is stopping."""
        self.limits = self.proposals.limits = limits
        self.is_stale = self._is_without_gain()

    def enqueue(self, trials: Sequence[Trial]) -> None:
        """Send these trials, which were just added to the study, before new trials."""
        for trial in trials:
            self.proposals.deal(trial.subspace)
            self.study.put_waiting(trial)

    def cancel(self, trial: Trial) -> None:
        """Cancel an unfinished trial. It becomes CANCELLED now, or once its worker has stopped it.

        Do not call this for a trial that was drawn ahead (`Proposals.is_ahead`).
        """
        ended = self.study.cancel(trial.number)
        if ended is None:
            self.executor.cancel([trial.number], running=True)
        else:
            self._finish([ended])

    @property
    def reserved(self) -> list[tuple[Trial, ComputeClass, int]]:
        """Reservations: a waiting trial, the class or machine that is reserved for it, and the number of its free
        slots.
        """
        targets = {target.key: target for each in self.classes for target in each.targets}
        found = [(self.study.find_open(n), targets.get(key)) for key, n in self._reservations.reserved.items()]
        return [(trial, c, self._reservations.free(c)) for trial, c in found if trial is not None and c is not None]

    @property
    def wanted_slots(self) -> Mapping[str, int]:
        """By class: number of slots that the study could use, including those that it uses; {} without workers on
        demand.
        """
        return {} if self.demand is None else self.demand.wanted

    @property
    def trials_left(self) -> float:
        """Number of trials that may still be sent by the limit on trials."""
        return self.limits.trials_left(self.study.counted + self.study.in_flight)

    @property
    def sendable(self) -> float:
        """Number of trials that may be sent before one in flight ends; infinity without limits, 0 if paused.

        It depends on the limit on trials, on the limit `at_once`, and on whether the samplers have more params.
        """
        most = min(self._trials_to_send(), self._free_at_once)
        return min(most, self.study.count(TrialState.WAITING)) if self.proposals.is_exhausted else most

    @property
    def spent(self) -> float:
        """Money that attempts have cost so far, in all runs of the study."""
        return self.study.recorder.spending(self.study.clock.wall())

    @property
    def state(self) -> str:
        """State of the study in one word: running, paused or stopping."""
        return "stopping" if self.stopping else "paused" if self.paused else "running"

    @property
    def ending(self) -> Ending:
        """The reason why the study ends: it was stopped, has reached a limit, or its first trials have all failed."""
        if self._ending.why:
            return self._ending
        ended, limits = self.study.counted, self.limits
        gain = "a change of the front" if len(self.study.record.objectives) > 1 else "a better feasible loss"
        tried = "has no further params, all of its points have been tried" if ended else "returned no params"
        reached = {
            "hopeless": self.hopeless,
            "target": limits.is_met_by(self.study.settled) and "the target was reached",
            "early_stop": self.is_stale and f"{counted(limits.without_gain or 0, 'trial')} without {gain}",
            "max_cost": limits.money and self.spent >= limits.money and f"the trials have cost {money(self.spent)}",
            "sampler": self.is_exhausted and f"the sampler {tried}",
            "trials": limits.trials_left(ended) <= 0 and f"{counted(ended, 'trial has', 'trials have')} ended",
            "seconds": self._seconds_left() <= 0 and "the time of the run is over",
        }
        return next((Ending(str(why), of) for of, why in reached.items() if why), Ending())

    @property
    def done(self) -> bool:
        """True if the study has ended: it reached a limit or was stopped, no trial runs, and the store is available."""
        return self.study.in_flight == 0 and self.study.trouble is None and bool(self.ending.why)

    # Parts of the methods above

    def _update_demand(self, demand: Demand, now: float) -> None:
        """Update the wanted slots.

        If no other trials are left, the trials for which no machine is started become FAILED.
        """
        left, vanishing = 0.0, self.study.vanishing
        if not (self.stopping or self.paused):
            left = self.limits.trials_left(self.study.counted + self.study.count(TrialState.RUNNING))
            if self.proposals.is_exhausted:
                left = min(left, self.study.count(TrialState.WAITING, TrialState.QUEUED))
            left = max(0.0, left - len(vanishing))
        demand.update(self.classes, left, self._seconds_left(), self._trials_for_new_slots(left))
        if self.classes or self.study.in_flight or left or self.paused:
            self._served_at = now
        elif vanishing and now - self._served_at >= ALONE_SECONDS:
            error = "no machine is started for it, because the machines of its last attempts have vanished"
            self.give_up(vanishing, error)

    def give_up(self, numbers: Iterable[int], error: str) -> None:
        """End these waiting trials as FAILED with this error."""
        self._finish([self.study.give_up(number, error) for number in numbers])

    def _trials_for_new_slots(self, left: float) -> float:
        """Return the number of the `left` trials, which do not run yet, for which new slots would be useful now.

        Trials in the queues of live workers are subtracted. The result is 0 if slots are idle and no trial waits,
        because new slots would be idle, too. Trials that wait although slots are idle do not fit these slots.
        """
        is_idle = any(self._free_slots(each) > 0 for each in self.classes if each.name not in self._reservations.names)
        if is_idle and not self.study.count(TrialState.WAITING):
            return 0.0
        queued = sum(self.study.count(TrialState.QUEUED, compute_class=each.name) for each in self.classes)
        return max(0.0, left - queued)

    def _is_without_gain(self) -> bool:
        most = self.limits.without_gain
        return most is not None and self.study.trials.without_gain >= most

    def _take_back(self, *, running: bool) -> None:
        if self.study.in_flight:
            self.executor.cancel([trial.number for trial in self.study.sent], running=running)

    @property
    def hopeless(self) -> str | None:
        """The reason why no trial of this study can succeed; None if a trial has succeeded, or may still succeed."""
        return self._hopelessness.reason if not self.study.count(*WELL) else None

    def notices(self) -> Sequence[str]:
        """Return notices for the user about the choice and placement of trials, one sentence each."""
        points = self.proposals.all_tried
        repeated = f"all {points} points of the space have been tried; trials repeat them, because losses may be noisy"
        # In a space with a single point, the notice would be obvious.
        found = [repeated] if points is not None and points > 1 else []
        told = [self.proposals.rounds.present.notice]
        told += [] if self.pruning is None else [self.pruning.notice]
        told += [] if self.cheapest is None else [self.cheapest.notice]
        told += [self._returns_notice()]
        return [*self._memory_fit.notices, *found, *[notice for notice in told if notice is not None]]

    def _returns_notice(self) -> str | None:
        """Return the notice about the first trial that MANY_RETURNS workers have given back, or None."""
        numbers = (
            () if self._returned is not None or self.cost_model.has_checkpoints else self.study.given_back(MANY_RETURNS)
        )
        if numbers:
            self._returned = (
                f"trial {numbers[0]} was given back by {MANY_RETURNS} workers, which ended before it did; let workers "
                "stay longer (worker --for), or let trials continue from checkpoints"
            )
        return self._returned

    def _stop_at_limit(self) -> None:
        if not self.stopping and (ending := self.ending).why:
            self.stop(*ending, running=ending.of in {"target", "hopeless"})

    def _record_and_submit(self) -> None:
        """Write the changes of this turn to the store. Then stop the pruned trials, and submit the placed attempts."""
        if not self.study.commit():
            return
        if self._to_stop:
            self.executor.cancel(self._to_stop, running=True, pruned=True)
            self._to_stop = []
        if self._to_submit:
            self.executor.submit(self._to_submit)
            self._to_submit = []
        elif not (self._unrecorded or self.stopping or self.paused) and len(self.classes) > 1:
            self._rebalance()

    def _call_on_trial(self) -> None:
        """Call `on_trial` with the ended trials, once they are recorded."""
        if self.on_trial is None or not self._ended or not self.study.commit():
            return
        ended, self._ended = self._ended, []
        for trial in ended:
            self.on_trial(trial)

    def _with_retry_and_hint(self, result: Result) -> Result:
        """Return a result with a `retry`, a warning or a hint, if it needs one, before `StudyState.tell` gets it.

        A `retry` lets the result end only its attempt. It is added in two cases: the trial has lost a rank of its
        process group, or it has run out of memory and another class may have enough (`MemoryFit.retry`). A warning is
        added if the trial succeeded without a GPU after it had run out of GPU memory. The error gets a hint if the
        objective needs ints where the space draws floats.
        """
        trial, is_short = self.study.find_open(result.number), result.outcome.out_of_memory is not None
        if result.outcome.rank_lost:
            result = replace(result, retry=Retry(reason=headline(result.outcome.error), is_loss=True))
        elif trial and (is_short or trial.outgrown) and self.study.is_current(result.number, result.attempt):
            retry = self._memory_fit.retry(result, trial)
            result = self._memory_fit.warned(result, trial) if retry is None else replace(result, retry=retry)
        if trial is None or (error := result.outcome.error) is None:
            return result
        hint = self.proposals.members[0].space.whole_number_hint(error, trial.params)
        outcome = replace(result.outcome, error=f"{error.rstrip()}; {hint}")
        return replace(result, outcome=outcome) if hint else result

    def _learn(self, trials: Sequence[Trial], following: Mapping[str, int] | None = None) -> None:
        if self.keeper is not None:
            self.keeper.tell(trials)
        self.proposals.tell(trials, following)
        self.cost_model.tell(*map(self.study.current, trials), following=following)

    def _strongest_first(self, classes: Sequence[ComputeClass]) -> list[ComputeClass]:
        """Return the classes, the strongest first: by speed if the speeds of all classes are known, else by
        hardware.
        """
        ordered = by_strength(classes, self.expected)
        if all(self.cost_model.timed(compute_class.name) >= TIMED_TRIALS for compute_class in ordered):
            costs = self.cost_model.costs(self.cost_model.typical(), [each.name for each in ordered]).log_seconds
            means = dict(zip([each.name for each in ordered], costs.mean(axis=0).tolist(), strict=True))
            ordered.sort(key=lambda compute_class: means[compute_class.name])
        return ordered

    def _placements(self) -> Iterator[tuple[ComputeClass, Trial]]:
        """Yield pairs of a target and a trial to send there, until no target takes another trial.

        Each target in turn gets one trial, the strongest class first. The targets are the classes, or the machines of a
        class if all slots of a trial must be on one worker.
        """
        # Near the end of the study, or if `at_once` allows no more trials than slots, no trial is queued ahead, so that
        # it can go to the first slot that becomes free in any class.
        most = min(self._trials_to_send(), self.limits.at_once or math.inf, self.proposals.rounds.present.left)
        near_end = most <= self.proposals.slots
        # Before its first success, a study sends few trials, because all of them may fail.
        is_shallow = near_end or (self.limits.failures and not self.study.count(*WELL))
        takers = targets = [target for each in self.classes for target in each.targets]
        while takers:
            still_taking = []
            for compute_class in takers:
                ahead = 0 if is_shallow else min(compute_class.ahead, self.proposals.most_ahead)
                trial = None
                if min(self._trials_to_send(), self._free_at_once) > 0:
                    trial = self._next_trial(compute_class) if self._free_slots(compute_class, ahead) > 0 else None
                    trial = trial or (None if self.cheapest is None else self._trial_for_unused_class(compute_class))
                if trial is None:
                    continue
                if self.cost_model.widths and trial.number not in self._reservations.reserved.values():
                    trial = self.study.widen(trial, self._widths.choose(trial, compute_class))
                target = compute_class
                if target.host is not None and target.key not in self._reservations.reserved:
                    alike = [each for each in targets if each.name == target.name and trial.slots <= each.room]
                    fitting = [each for each in alike if self._fits(trial, each)]
                    target = self._reservations.best(trial, fitting, self.proposals.machines.get(trial.number))
                if self._reservations.may_start(trial, target):
                    self._reservations.reserved.pop(target.key, None)
                    still_taking.append(compute_class)
                    yield target, trial
                else:
                    # No other trial is sent to the target until this one can start.
                    self._reservations.reserved[target.key] = trial.number
                    self.study.put_waiting(trial, first=True)
            takers = still_taking

    def _next_trial(self, compute_class: ComputeClass) -> Trial | None:
        """Return a trial for a free slot: a waiting trial that fits, else a new trial, else None.

        A reserved class gets only the trial for which it is reserved. For LAST_SECONDS, a trial whose latest machines
        have vanished comes after all other trials, because it may be the cause.
        """

        def may_take(trial: Trial) -> bool:
            return self._fits(trial, compute_class) and self._reservations.may_take(compute_class, trial)

        last = self.study.vanishing_since(self.study.clock.now() - LAST_SECONDS)
        waiting = self.study.next_waiting(lambda trial: trial.number not in last and may_take(trial))
        if waiting is None and compute_class.key not in self._reservations.reserved:
            excess = partial(self._widths.excess, compute_class=compute_class) if self.cost_model.widths else None
            waiting = self.proposals.ask(compute_class, self._fits, self._trials_to_send(), excess)
        return waiting or (self.study.next_waiting(may_take) if last else None)

    @property
    def _used_classes(self) -> list[ComputeClass]:
        """The live classes with slots that the study uses, the strongest first."""
        if self.cheapest is None:
            return self.classes
        return [each for each in self.classes if self.cheapest.most(each) > 0]

    def _free_slots(self, compute_class: ComputeClass, ahead: int = 0) -> int:
        """Return the number of a class's free slots that the study may use, plus `ahead` places in its queue."""
        free = self._reservations.free(compute_class, ahead)
        if self.cheapest is None:
            return free
        most = self.cheapest.most(compute_class)
        return min(free, most + ahead - self.study.taken(compute_class.name)) if most else min(free, 0)

    def _trial_for_unused_class(self, compute_class: ComputeClass) -> Trial | None:
        """Return a waiting trial that fits a free slot of this class but no class that the study uses; else None."""
        if self._reservations.free(compute_class) <= 0:
            return None
        used = self._used_classes
        return self.study.next_waiting(
            lambda trial: (
                self._fits(trial, compute_class)
                and self._reservations.may_take(compute_class, trial)
                and not any(self._fits(trial, each) for each in used)
            )
        )

    def _rebalance(self) -> None:
        """Cancel attempts in the queue of a crowded class if they fit free slots of another class.

        Call this if no other trial can be sent.
        """
        slots = [(c, self._free_slots(c)) for c in self.classes]
        crowded = {c.name for c, free in slots if free < 0}
        # Reserved classes are left out, because a trial cancelled for them would return to its old class.
        takers = [(c, free) for c, free in slots if free > 0 and c.name not in self._reservations.names]
        if not crowded or not takers:
            return
        waiting = [t for t in self.study.sent if t.state is TrialState.QUEUED and t.compute_class in crowded]
        for compute_class, free in takers:
            fitting = [t.number for t in waiting if t.slots <= free and self._fits(t, compute_class)]
            if fitting:
                self.executor.cancel(fitting[-free:], running=False)

    def _copy_late_trials(self, speculation: Speculation) -> list[Attempt]:
        """Return new attempts that are copies of late trials, for idle slots.

        Call this if no other trial can be sent.
        """
        speculation.due = math.inf
        if self.stopping or self.paused or not [each for each in self.classes if self._free_slots(each) > 0]:
            return []
        alone = [each for each in self.study.alone if each.subspace in self.subspaces]
        size = self.proposals.rounds.present.size
        most = most_copies(self.study.in_flight if size is None else size) - self.study.copies
        running = [(trial, self.study.running_since(trial)) for trial in alone]
        late = speculation.ask(running, self._idle, int(min(most, self._free_at_once)), self.study.clock.now())
        return [self.study.send(trial, compute_class) for trial, compute_class in late]

    def _idle(self) -> list[Idle]:
        """Return the idle slots of the classes that are not reserved."""
        busy = Counter((attempt.compute_class, attempt.host) for attempt in self.study.attempts)
        return [
            Idle(
                compute_class=each.name,
                slots=self._free_slots(each),
                hosts={host: slots - busy[each.name, host] for host, slots in each.hosts.items()},
                fits=partial(self._fits, compute_class=each),
            )
            for each in self.classes
            if self._free_slots(each) > 0 and each.name not in self._reservations.names
        ]

    def _fits(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Return whether a trial may be sent to a class.

        The class must have enough slots and probably enough memory, and the trial must be likely to end there in time.
        It must also have a worker on which the trial has not failed, unless the trial may return to the other workers.
        """
        if not self._memory_fit.fits(trial, compute_class):
            return False
        if self._declined and self._declined.is_paused(trial.number, compute_class.name, self.study.clock.now()):
            return False
        if self.cheapest is not None and not self.cheapest.is_in_time(trial, compute_class):
            return False
        if not trial.failed_on or not compute_class.names or compute_class.names - {*trial.failed_on}:
            return True
        return self._may_return(trial)

    def _may_return(self, trial: Trial) -> bool:
        """Return whether a trial may run on a worker on which it has failed.

        It may if no other live worker could run it, or after MAX_AVOIDING attempts.
        """
        if not trial.failed_on or trial.attempt >= MAX_AVOIDING:
            return bool(trial.failed_on)
        failed_on = {*trial.failed_on}
        return not any(each.names - failed_on and self._memory_fit.fits(trial, each) for each in self.classes)

    def _trials_to_send(self) -> float:
        """Return the number of trials that may still be sent; 0 while the study is paused or stopping."""
        return 0 if self.stopping or self.paused else self.trials_left

    @property
    def _free_at_once(self) -> float:
        """Number of attempts that `at_once` allows in addition to those in flight; infinity without `at_once`."""
        if self.limits.at_once is None:
            return math.inf
        return max(0, self.limits.at_once - self.study.in_flight - self.study.copies)

    def _seconds_left(self) -> float:
        return self.limits.seconds_left(self._began, self.study.clock.now())
