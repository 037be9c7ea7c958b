"""What people ask of a running study is carried out, recorded, and only then answered."""

from __future__ import annotations

from typing import Any

import pytest
from hyperopt import hp
from services.cases import cases
from services.searching import SimulatedSearch

from shadho_celery.core.records import Answer, Cancel, Enqueue, Note, OfStudy, Pause, Set, Stop, Unpause, notes_of
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.errors import StoreOutage
from shadho_celery.fleet.control import Request
from shadho_celery.fleet.drains import Drain
from shadho_celery.scheduler.plan import Plan
from shadho_celery.session.steering import Steering
from shadho_celery.space.compile import compile_space
from shadho_celery.study.state import Limits

S = TrialState


def play(trial: Attempt, _: str) -> Outcome:
    return Outcome(state=S.COMPLETE, loss=trial.params["x"], seconds=1.0)


class Run:
    """A study on simulated machines, and what it is asked; `answers` are those that were given."""

    def __init__(self) -> None:
        self.search = SimulatedSearch(
            compile_space({"x": hp.uniform("x", 0, 1)}),
            play,
            {"cpu": 2},
            settings=StudySettings(sampler="random"),
            limits=Limits(trials=10),
            clock=ManualClock(1000.0),
            seed=0,
        )
        self.study, self.scheduler, self.executor = self.search.study, self.search.scheduler, self
        self.opened = self
        self.plan = Plan.of(self.search.space, StudySettings(sampler="random", trials=10))
        self.kept: list[dict[str, Any]] = []
        self.changed: list[tuple[float | None, float]] = []
        self.asked: list[tuple[Request, Answer | None]] = []
        self.answers: list[Answer] = []
        self.drained: dict[str, Drain] = {}
        self.said: list[str] = []
        self.steering = Steering(self)  # type: ignore[arg-type]

    def record_settings(self, settings: dict[str, Any], in_force: dict[str, Any]) -> None:
        self.kept.append(settings)

    def change(self, trial_timeout: float | None, weight: float) -> None:
        self.changed.append((trial_timeout, weight))

    def requests(self) -> list[tuple[Request, Answer | None]]:
        found, self.asked = self.asked, []
        return found

    def drains(self) -> dict[str, Drain]:
        found, self.drained = self.drained, {}
        return found

    def answer(self, _: Request, answer: Answer) -> None:
        self.answers.append(answer)

    def ask(self, deed: OfStudy) -> Answer:
        """Ask after a turn of the loop."""
        self.put(deed)
        self.steering.turn(self.said.append)
        return self.answers[-1]

    def put(self, deed: OfStudy) -> None:
        number = f"{len(self.answers) + len(self.asked):032x}"
        self.asked.append((Request(to="k", fence=1, id=number, expires=1, by="me@here", deed=deed), None))

    def until(self, counted: int) -> Run:
        """Go on until so many trials have ended, and both slots run a trial."""

        def reached(search: SimulatedSearch) -> bool:
            return search.study.counted >= counted and search.study.count(S.RUNNING) == 2

        self.search.run(until=reached)
        return self


def test_a_study_that_is_stopped_ends_after_its_running_trials() -> None:
    run = Run().until(3)
    assert run.ask(Stop()).text == "stopping: 2 running trials finish"
    assert run.ask(Stop()).text == "already stopping: 2 running trials finish"
    assert run.steering.has_stopped
    refused = run.ask(Pause())
    assert (refused.is_done, refused.text) == (False, "the study is stopping")
    run.search.run()
    assert run.search.study.counted < 10
    assert run.said[0] == "stop, asked by me@here: stopping: 2 running trials finish"


def test_each_reason_to_stop_is_kept_if_it_is_the_first() -> None:
    run = Run().until(3)
    run.ask(Stop())
    run.steering.obey_signal(2)
    run.search.run()
    assert run.scheduler.ending == ("stopped by me@here", "")
    run = Run()
    run.search.run()
    assert run.scheduler.ending == ("10 trials have ended", "trials")


def test_a_note_is_recorded_also_while_the_study_stops_unless_there_is_no_such_trial() -> None:
    run = Run().until(3)
    run.ask(Stop())
    asked = Note("late"), Note("high loss", 1), Note("none", 99)
    assert [run.ask(each).is_done for each in asked] == [True, True, False]
    assert run.answers[-1].text == "there is no trial 99; the study has 6 so far"
    notes = notes_of(run.search.store.actions(run.study.record.key))
    assert [(each["trial"], each["text"], each["by"]) for each in notes] == [
        (None, "late", "me@here"),
        (1, "high loss", "me@here"),
    ]


def test_a_study_is_paused_and_unpaused_once() -> None:
    run = Run().until(3)
    texts = [run.ask(deed).text for deed in (Unpause(), Pause(), Pause(), Unpause(), Unpause())]
    assert texts == [
        "the study is not paused",
        "paused: 2 running trials finish, no others start",
        "already paused: 2 running trials finish, no others start",
        "unpaused: trials start again",
        "the study is not paused",
    ]
    run.search.run()
    assert run.search.study.counted == 10


def test_a_trial_is_cancelled_while_it_runs_or_waits_and_not_once_it_has_ended() -> None:
    run = Run().until(3)
    running = run.search.study.sent[0].number
    assert run.ask(Cancel(running)) == Answer(is_done=True, text=f"trial {running} is cancelled and stops")
    assert run.ask(Cancel(0)) == Answer(is_done=False, text="trial 0 has ended: complete")
    absent = run.ask(Cancel(400))
    assert (absent.is_done, absent.text.partition(";")[0]) == (False, "there is no trial 400")
    run.search.run()
    assert run.search.study.trial(running).state is S.CANCELLED
    assert run.ask(Cancel(running)) == Answer(is_done=False, text=f"trial {running} has ended: cancelled")


def test_a_trial_that_was_drawn_ahead_is_left() -> None:
    """The policy may choose it for any slot."""
    run = Run().until(3)
    trial = run.search.study.add("all", {"x": 0.5}, seed=0)
    run.search.scheduler.proposals._ahead["all"][trial.number] = trial
    answer = run.ask(Cancel(trial.number))
    assert (answer.is_done, "drawn ahead" in answer.text) == (False, True)


def test_known_points_run_next() -> None:
    run = Run().until(3)
    answer = run.ask(Enqueue([{"x": 0.125}, {"x": 0.25}]))
    assert answer.is_done
    first, second = (int(word.strip(",")) for word in answer.text.split()[2:4])
    sent_before = {trial.number for trial in run.search.study.sent}
    run.search.run()
    assert [run.search.study.trial(number).params["x"] for number in (first, second)] == [0.125, 0.25]
    assert run.search.study.counted == 10, "they count towards the limit"
    later = [trial.number for trial in run.search.study if trial.number not in {*sent_before, first, second}]
    assert all(number < second for number in later if number < first)


@cases(
    "points, reason",
    [
        ([{"x": 0.5}, {"y": 1}], "point 1: there is no label 'y'"),
        ([{"x": 5}], "point 0: "),
        (["x"], "point 0: "),
    ],
)
def test_points_that_do_not_fit_are_refused_and_none_is_added(points: list[Any], reason: str) -> None:
    run = Run().until(3)
    count = len(run.search.study)
    answer = run.ask(Enqueue(points))
    assert (answer.is_done, reason in answer.text, len(run.search.study)) == (False, True, count)


def test_points_that_the_limit_leaves_no_room_for_are_refused_with_the_limit_that_has_room() -> None:
    run = Run().until(7)
    left = 10 - run.study.counted - run.study.in_flight
    answer = run.ask(Enqueue([{"x": 0.5}] * (left + 1)))
    assert not answer.is_done
    assert answer.text.startswith(f"only {left} more trial")
    assert answer.text.endswith(" --trials 11")
    assert run.ask(Set({"trials": 11})).is_done
    assert run.ask(Enqueue([{"x": 0.5}])).text.endswith(", which runs next")


def test_a_limit_is_raised_and_lowered_while_the_study_runs() -> None:
    run = Run().until(3)
    assert run.ask(Set({"trials": 15})) == Answer(is_done=True, text="set trials 15")
    run.search.run(until=lambda search: search.study.counted >= 12)
    assert run.ask(Set({"trials": 13, "trial_timeout": 60.0})).text == "set trials 13, trial_timeout 60.0"
    run.search.run()
    assert 12 <= run.search.study.counted < 15
    assert run.kept == [{"trials": 15}, {"trials": 13, "trial_timeout": 60.0}]
    assert run.changed == [(None, 1.0), (60.0, 1.0)]


def test_the_weight_beside_other_studies_changes_and_lasts() -> None:
    run = Run().until(3)
    assert run.ask(Set({"weight": 2.5})) == Answer(is_done=True, text="set weight 2.5")
    assert (run.changed, run.kept, run.plan.settings.weight) == ([(None, 2.5)], [{"weight": 2.5}], 2.5)


def test_a_study_ends_after_trials_without_a_gain_once_it_is_told_to() -> None:
    run = Run().until(5)
    assert run.ask(Set({"trials": 1000, "early_stop": 4})).is_done
    run.search.run()
    assert run.search.scheduler.is_stale


@cases(
    "settings, reason",
    [
        ({"sampler": "tpe"}, "sampler cannot change while the study runs"),
        ({"policy": "fifo"}, "policy cannot change while the study runs"),
        ({"weight": 0}, "weight: 0 is not allowed"),
        ({"trials": 0}, "trials: 0 is not allowed"),
        ({"trials": 1}, " have ended; give a larger number, or end the study with shadho-celery stop"),
        ({"trials": "many"}, "trials: "),
        ({"trials": None}, "a study needs an end"),
        ({"nothing": 1}, "is not a setting"),
    ],
)
def test_a_change_that_is_not_possible_is_refused(settings: dict[str, Any], reason: str) -> None:
    run = Run().until(3)
    limits = run.search.scheduler.limits
    answer = run.ask(Set(settings))
    assert (answer.is_done, reason in answer.text) == (False, True), answer
    assert (run.search.scheduler.limits, run.kept) == (limits, [])


def test_a_stopping_study_takes_neither_points_nor_settings() -> None:
    run = Run().until(3)
    run.ask(Stop())
    for deed in (Enqueue([{"x": 0.5}]), Set({"trials": 20})):
        assert run.ask(deed) == Answer(is_done=False, text="the study is stopping")


def test_what_was_refused_on_arrival_is_recorded_once_and_not_answered_again() -> None:
    run = Run().until(3)
    request = Request(to="k", fence=0, id="a" * 32, expires=1, by="me@here", deed=Cancel(3))
    answer = Answer(is_done=False, text="the request has expired")
    for _ in range(2):
        run.asked = [(request, answer)] * 2
        run.steering.turn(run.said.append)
        run.study.commit()
    [action] = run.search.store.actions(run.study.record.key)
    assert (action.id, action.by, action.action, action.arguments) == ("a" * 32, "me@here", "cancel", {"number": 3})
    assert (action.answer, action.fence) == (answer, run.study.fence)
    assert (run.answers, run.said) == ([], [])


def test_signals_of_one_kind_are_recorded_once() -> None:
    """Ctrl-C may send several, for instance to a process and to its group."""
    run = Run().until(3)
    for number in (2, 2, 15):
        run.steering.obey_signal(number)
        run.study.commit()
    found = run.search.store.actions(run.study.record.key)
    assert [each.answer.text for each in found] == ["stopped by SIGINT", "stopped by SIGTERM"]


def test_drains_since_the_study_began_are_recorded_once_whichever_scheduler_sees_them() -> None:
    run = Run().until(3)
    began = run.study.record.created_at
    for _ in range(2):
        run.drained = {
            "cpu@a": Drain(by="me@here", at=began + 5.0, sequence=7),
            "cpu@b": Drain(by="you@there", at=began + 6.0, sequence=7, is_drained=False),
            "cpu@c": Drain(by="me@here", at=began - 1.0, sequence=3),
        }
        run.steering.turn(run.said.append)
        run.study.commit()
    drain, undrain = run.search.store.actions(run.study.record.key)
    assert (drain.action, drain.by, drain.at, drain.arguments) == ("drain", "me@here", began + 5.0, {"worker": "cpu@a"})
    assert drain.answer == Answer(is_done=True, text="cpu@a takes no more trials")
    assert (undrain.action, undrain.answer.text) == ("undrain", "cpu@b takes trials again")
    assert run.search.store.steered(run.study.record.key) == [], "no scheduler was asked"


@cases("deed", [Stop(), Pause(), Cancel(0), Enqueue([{"x": 0.5}])])
def test_an_answer_is_given_once_the_action_is_recorded(deed: OfStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run().until(3)
    store, writes = run.search.store, []

    def write(*_: Any, **__: Any) -> Any:
        writes.append(1)
        raise StoreOutage

    with monkeypatch.context() as patched:
        patched.setattr(store, "write", write)
        run.put(deed)
        run.steering.turn(run.said.append)
    assert writes
    assert run.answers == []
    run.search.clock.sleep(60.0)
    run.steering.turn(run.said.append)
    assert len(run.answers) == 1
    [action] = store.actions(run.search.study.record.key)
    assert (action.by, action.answer) == ("me@here", run.answers[0])
    assert action.action == type(deed).__name__.lower()
    arguments: dict[type[Any], dict[str, int]] = {Cancel: {"number": 0}, Enqueue: {"points": 1}}
    assert action.arguments == arguments.get(type(deed), {})
