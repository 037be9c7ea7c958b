"""Steering: carries out users' requests to a running study, records them, and then answers them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from signal import Signals
from typing import Any, Protocol

from msgspec.structs import asdict, replace

from shadho_celery.core import records
from shadho_celery.core.checks import one_line, short
from shadho_celery.core.records import Action, Answer, OfStudy, name_of
from shadho_celery.core.settings import CHANGEABLE, read_settings
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.core.units import counted
from shadho_celery.core.users import own_user
from shadho_celery.errors import StoreOutage, UsageError
from shadho_celery.fleet.control import Request
from shadho_celery.fleet.drains import Drain
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.scheduler import known_points
from shadho_celery.scheduler.plan import Plan
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.session.opening import OpenStudy
from shadho_celery.study.state import StudyState, named


class Steered(Protocol):
    """The parts of a run that its steering uses."""

    opened: OpenStudy
    study: StudyState
    plan: Plan
    executor: QueueExecutor
    scheduler: Scheduler


class Steering:
    """Carries out the requests to one run of a study.

    Call `turn` after a turn of the loop if `executor.has_news` or if there are `pending_answers`, and once at the end.
    """

    def __init__(self, run: Steered) -> None:
        self._run = run
        #: requests that were carried out or refused, with answers that are sent once the store has recorded them
        self.pending_answers: list[tuple[Request, Answer]] = []
        #: True if a request has stopped the study
        self.has_stopped = False

    def turn(self, say: Callable[[str], None]) -> None:
        """Carry out the requests since the last call, and answer them. `say` shows a line about each.

        Requests that were refused on arrival, and drains that workers obey, are recorded too.
        """
        for place, drain in self._run.executor.drains().items():
            if drain.at >= self._run.study.record.created_at:
                self._run.study.note_action(_of_drain(place, drain))
        for request, refusal in self._run.executor.requests():
            answer = refusal or self._carry_out(request)
            self._record(request, answer)
            if refusal is None:
                self.pending_answers.append((request, answer))
                refused = "" if answer.is_done else ", refused"
                say(f"{name_of(request.deed)}, asked by {one_line(request.by)}{refused}: {answer.text}")
        if self.pending_answers and self._run.study.commit():
            for request, answer in self.pending_answers:
                self._run.executor.answer(request, answer)
            self.pending_answers.clear()

    def obey_signal(self, number: int) -> None:
        """Stop the study because of a signal. This is recorded in the same form as a request, once in a run."""
        self._stop(number, f"stopped by {Signals(number).name}")

    def expel(self, reason: str) -> None:
        """Stop the study as a request does, because its user may not run it any more."""
        self._stop(0, f"stopped: {reason}")
        self.has_stopped = True

    def _stop(self, number: int, text: str) -> None:
        study, by = self._run.study, own_user()
        once = f"{study.fence:028x}{number:04x}"
        request = Request(to=study.record.key, fence=study.fence, id=once, expires=0, by=by, deed=records.Stop())
        self._record(request, Answer(is_done=True, text=text))
        self._run.scheduler.stop(text)

    def _record(self, request: Request, answer: Answer) -> None:
        study, deed = self._run.study, request.deed
        action = Action(
            id=request.id,
            at=study.clock.wall(),
            by=request.by,
            action=name_of(deed),
            # Record only the number of points, because there may be very many.
            arguments={"points": len(deed.points)} if isinstance(deed, records.Enqueue) else asdict(deed),
            answer=answer,
            fence=study.fence,
        )
        study.note_action(action)

    def _carry_out(self, request: Request) -> Answer:
        try:
            return Answer(is_done=True, text=self._done(request.deed, one_line(request.by)))
        except (UsageError, StoreOutage) as refusal:
            return Answer(is_done=False, text=str(refusal))

    def _done(self, deed: OfStudy, by: str) -> str:
        """Carry out an action that the user `by` has requested. Return a text that says what was done.

        Raises UsageError or StoreOutage if it is refused.
        """
        scheduler = self._run.scheduler
        was_stopping, was_paused = scheduler.stopping, scheduler.paused
        if was_stopping and isinstance(deed, (records.Pause, records.Enqueue, records.Set)):
            raise UsageError("the study is stopping")
        match deed:
            case records.Stop():
                self.has_stopped = True
                scheduler.stop(f"stopped by {by}")
                return f"{'already stopping' if was_stopping else 'stopping'}: {self._running()}"
            case records.Pause():
                scheduler.pause()
                return f"{'already paused' if was_paused else 'paused'}: {self._running()}, no others start"
            case records.Unpause():
                scheduler.unpause()
                return "unpaused: trials start again" if was_paused else "the study is not paused"
            case records.Cancel(number):
                return self._cancel(number)
            case records.Enqueue(points):
                return self._enqueue(points)
            case records.Set(settings):
                return self._set(settings)
            case records.Note(_, trial):
                if trial is not None:
                    self._trial(trial)
                return "noted"

    def _trial(self, number: int) -> Trial:
        try:
            return self._run.study.trial(number)
        except KeyError:
            raise UsageError(f"there is no trial {number}; the study has {len(self._run.study)} so far") from None

    def _cancel(self, number: int) -> str:
        trial = self._run.study.find_open(number)
        if trial is None:
            raise UsageError(f"trial {number} has ended: {self._trial(number).state.lower()}")
        if self._run.scheduler.proposals.is_ahead(trial):
            raise UsageError(f"trial {number} was drawn ahead and is not sent yet; cancel it when it waits or runs")
        self._run.scheduler.cancel(trial)
        return f"trial {number} is cancelled" + ("" if trial.state is TrialState.WAITING else " and stops")

    def _enqueue(self, points: Sequence[object]) -> str:
        run = self._run
        if len(points) > (left := max(0.0, run.scheduler.trials_left)):
            more = run.study.counted + run.study.in_flight + len(points)
            starts = counted(int(left), "more trial starts", "more trials start")
            raise UsageError(
                f"only {starts} before the limit on trials is reached; raise it first: "
                f"shadho-celery set {run.study.name} --trials {more}"
            )
        numbers = known_points.enqueue(run.study, run.plan, points, run.scheduler)
        return f"enqueued {named(numbers)}, which {'runs' if len(numbers) == 1 else 'run'} next"

    def _set(self, given: Mapping[str, Any]) -> str:
        run, checked = self._run, read_settings(given)
        if checked.trials is not None and checked.trials <= run.study.counted:
            # Refuse a number that would end the study, because it is probably a mistake.
            ended = f"{counted(run.study.counted, 'trial has', 'trials have')} ended"
            raise UsageError(f"{ended}; give a larger number, or end the study with shadho-celery stop")
        if refused := [name for name in given if name not in CHANGEABLE]:
            raise UsageError(
                f"{refused[0]} cannot change while the study runs; stop it, and resume it with the new value; "
                f"these can: {', '.join(CHANGEABLE)}"
            )
        settings = replace(run.plan.settings, **{name: getattr(checked, name) for name in given})
        plan = run.plan.with_settings(settings)
        run.opened.record_settings(dict(given), settings.in_force())
        run.plan = plan
        run.scheduler.change_limits(plan.limits)
        run.executor.change(settings.trial_timeout, settings.weight)
        return "set " + ", ".join(f"{name} {short(getattr(settings, name))}" for name in given)

    def _running(self) -> str:
        if not (running := self._run.study.count(TrialState.RUNNING)):
            return "no trial runs"
        return counted(running, "running trial finishes", "running trials finish")


def _of_drain(place: str, drain: Drain) -> Action:
    """Return the action of a drain or an undrain. Its id is the same in each scheduler, so that it is recorded once."""
    return Action(
        id=hashlib.blake2b(f"{place} {drain.sequence}".encode(), digest_size=16).hexdigest(),
        at=drain.at,
        by=drain.by,
        action="drain" if drain.is_drained else "undrain",
        arguments={"worker": place},
        answer=Answer(is_done=True, text=f"{place} takes {'no more trials' if drain.is_drained else 'trials again'}"),
    )
