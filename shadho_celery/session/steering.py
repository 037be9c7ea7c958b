"""Steering: carries out what people ask of a running study, records it, and then answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from signal import Signals
from typing import Any, Protocol
from uuid import uuid4

from msgspec.structs import asdict, replace

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.records import Action, Answer, Cancel, Deed, Enqueue, Pause, Set, Stop, Unpause, name_of
from shadho_celery.core.settings import CHANGEABLE, read_settings
from shadho_celery.core.trial import TrialState
from shadho_celery.core.units import counted
from shadho_celery.errors import StoreOutage, UsageError
from shadho_celery.fleet.control import Request
from shadho_celery.fleet.drains import Drain
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.scheduler import known_points
from shadho_celery.scheduler.plan import Plan
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.session.control import requester
from shadho_celery.study.state import StudyState, named


class Steered(Protocol):
    """A run that is steered."""

    study: StudyState
    plan: Plan
    executor: QueueExecutor
    scheduler: Scheduler

    def keep_settings(self, settings: Mapping[str, Any], in_force: Mapping[str, Any]) -> None:
        """Record the settings of the study. Raises StoreError."""


class Steering:
    """Carries out the requests to one run. `turn` is called after each turn of the scheduler's loop."""

    def __init__(self, run: Steered) -> None:
        self._run = run
        #: requests that were carried out or refused, with their answers, which are given once they are recorded
        self._unsaid: list[tuple[Request, Answer]] = []
        #: True if a request has stopped the study
        self.has_stopped = False

    def turn(self, say: Callable[[str], None]) -> None:
        """Carry out the requests since the last turn, and answer them. `say` shows a line about each.

        What was refused on arrival, and drains that workers obey, are recorded too.
        """
        self.note_drains()
        for request, answer in self._run.executor.refusals():
            self._record(request, answer)
        for request in self._run.executor.requests():
            answer = _CARRIED_OUT[type(request.deed)](self, request.deed)
            self._record(request, answer)
            self._unsaid.append((request, answer))
            refused = "" if answer.is_done else ", refused"
            say(f"{name_of(request.deed)}, asked by {one_line(request.by)}{refused}: {answer.text}")
        if self._unsaid and self._run.study.commit():
            for request, answer in self._unsaid:
                self._run.executor.answer(request, answer)
            self._unsaid.clear()

    def note_signal(self, number: int) -> None:
        """Record that a signal has stopped the study, as a request does."""
        study, by = self._run.study, requester()
        request = Request(to=study.record.key, fence=study.fence, id=uuid4().hex, expires=0, by=by, deed=Stop())
        self._record(request, _done(f"stopped by {Signals(number).name}"))

    def note_drains(self) -> None:
        """Record the drains and undrains, since the study began, that workers obey since the last call."""
        for place, drain in self._run.executor.drains().items():
            if drain.at >= self._run.study.record.created_at:
                self._run.study.note_action(_of_drain(place, drain))

    def _record(self, request: Request, answer: Answer) -> None:
        study = self._run.study
        action = Action(
            id=request.id,
            at=study.clock.wall(),
            by=request.by,
            action=name_of(request.deed),
            arguments=_arguments(request.deed),
            answer=answer,
            fence=study.fence,
        )
        study.note_action(action)

    def _stop(self, deed: Stop) -> Answer:
        before, self.has_stopped = self._run.scheduler.stopping, True
        if not before:
            self._run.scheduler.stop()
        return _done(f"{'already stopping' if before else 'stopping'}: {self._running()}")

    def _pause(self, deed: Pause) -> Answer:
        if self._run.scheduler.stopping:
            return _refused("the study is stopping")
        before = self._run.scheduler.paused
        if not before:
            self._run.scheduler.pause()
        return _done(f"{'already paused' if before else 'paused'}: {self._running()}, no others start")

    def _unpause(self, deed: Unpause) -> Answer:
        if not self._run.scheduler.paused:
            return _done("the study is not paused")
        self._run.scheduler.unpause()
        return _done("unpaused: trials start again")

    def _cancel(self, deed: Cancel) -> Answer:
        number = deed.number
        trial = self._run.study.find_open(number)
        if trial is not None and self._run.scheduler.proposals.is_ahead(trial):
            return _refused(f"trial {number} was drawn ahead and is not sent yet; cancel it when it waits or runs")
        if trial is not None:
            self._run.scheduler.cancel(trial)
            return _done(f"trial {number} is cancelled" + ("" if trial.state is TrialState.WAITING else " and stops"))
        try:
            return _refused(f"trial {number} has ended: {self._run.study.trial(number).state.lower()}")
        except KeyError:
            return _refused(f"there is no trial {number}; the study has {len(self._run.study)} so far")
        except StoreOutage as error:
            return _refused(f"trial {number} has ended; {error}")

    def _enqueue(self, deed: Enqueue) -> Answer:
        run, points = self._run, deed.points
        if run.scheduler.stopping:
            return _refused("the study is stopping")
        if len(points) > (left := max(0.0, run.scheduler.left)):
            more = run.study.counted + run.study.in_flight + len(points)
            starts = counted(int(left), "more trial starts", "more trials start")
            return _refused(
                f"only {starts} before the limit on trials is reached; raise it first: "
                f"shadho-celery set {run.study.name} --trials {more}"
            )
        try:
            numbers = known_points.enqueue(run.study, run.plan, points, run.scheduler)
        except (UsageError, StoreOutage) as error:
            return _refused(str(error))
        return _done(f"enqueued {named(numbers)}, which {'runs' if len(numbers) == 1 else 'run'} next")

    def _set(self, deed: Set) -> Answer:
        run, given = self._run, deed.settings
        if run.scheduler.stopping:
            return _refused("the study is stopping")
        try:
            checked = read_settings(given)
            if checked.trials is not None and checked.trials <= run.study.counted:
                # A number that is too small by mistake would end the study for good.
                ended = f"{counted(run.study.counted, 'trial has', 'trials have')} ended"
                return _refused(f"{ended}; give a larger number, or end the study with shadho-celery stop")
            if refused := [name for name in given if name not in CHANGEABLE]:
                raise UsageError(
                    f"{refused[0]} cannot change while the study runs; stop it, and resume it with the new value; "
                    f"these can: {', '.join(CHANGEABLE)}"
                )
            settings = replace(run.plan.settings, **{name: getattr(checked, name) for name in given})
            plan = run.plan.with_settings(settings)
            run.keep_settings(dict(given), settings.in_force())
        except (UsageError, StoreOutage) as error:
            return _refused(str(error))
        run.plan = plan
        run.scheduler.change_limits(plan.limits)
        run.executor.set_trial_timeout(settings.trial_timeout)
        run.executor.set_weight(settings.weight)
        changed = ", ".join(f"{name} {short(getattr(settings, name))}" for name in given)
        return _done(f"set {changed}")

    def _running(self) -> str:
        if not (running := self._run.study.count(TrialState.RUNNING)):
            return "no trial runs"
        return counted(running, "running trial finishes", "running trials finish")


#: by action, the method that carries it out
_CARRIED_OUT: Mapping[type[Deed], Callable[[Steering, Any], Answer]] = {
    Stop: Steering._stop,
    Pause: Steering._pause,
    Unpause: Steering._unpause,
    Cancel: Steering._cancel,
    Enqueue: Steering._enqueue,
    Set: Steering._set,
}


def _of_drain(place: str, drain: Drain) -> Action:
    """Return the action of a drain or an undrain, which is the same in each scheduler, so that it is recorded once."""
    return Action(
        id=hashlib.blake2b(f"{place} {drain.sequence}".encode(), digest_size=16).hexdigest(),
        at=drain.at,
        by=drain.by,
        action="drain" if drain.is_drained else "undrain",
        arguments={"worker": place},
        answer=_done(f"{place} takes {'no more trials' if drain.is_drained else 'trials again'}"),
    )


def _arguments(deed: Deed) -> dict[str, Any]:
    """Return the arguments of a request as they are recorded. Points are counted, because they may be very many."""
    return {"points": len(deed.points)} if isinstance(deed, Enqueue) else asdict(deed)


def _done(text: str) -> Answer:
    return Answer(is_done=True, text=text)


def _refused(reason: str) -> Answer:
    return Answer(is_done=False, text=reason)
