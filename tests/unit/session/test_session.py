"""What a session warns of, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hyperopt import hp

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.failures import Failures
from shadho_celery.core.files import ClassSpec
from shadho_celery.core.records import SessionRecord
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.errors import NestedStart, ServiceError, UsageError
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.registry import Worker
from shadho_celery.fleet.signing import KEY_FILE, UNSIGNED
from shadho_celery.node.heartbeat import ANNOUNCE_EVERY
from shadho_celery.objective.call import describe
from shadho_celery.objective.sources import DiskWatch
from shadho_celery.objective.study_file import refuse_nested, within
from shadho_celery.scheduler.plan import Plan
from shadho_celery.session.opening import Opening, Request
from shadho_celery.session.session import (
    GIVE_UP_SECONDS,
    LOOK_SECONDS,
    MISSING_SECONDS,
    OVER_SECONDS,
    Conditions,
    Notice,
    Session,
    Watch,
)
from shadho_celery.space.compile import compile_space
from shadho_celery.study.state import Limits


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_FILE, raising=False)


def watch(executor: object, study: object, embedded: object = None, **more: Any) -> Watch:
    """A watch over a run with stand-ins for its parts."""
    parts: dict[str, Any] = {
        "executor": executor,
        "study": study,
        "embedded": embedded,
        "scheduler": SimpleNamespace(notices=list, limits=Limits(trials=1), cheapest=None),
        "plan": SimpleNamespace(settings=StudySettings(classes=("gpu", "cpu")), limits=Limits(trials=1)),
        "declared": {"gpu": ClassSpec(), "cpu": ClassSpec()},
        "coming": {},
        "slots": {},
        "code": CodeVersion(),
        "disk": DiskWatch(),
    }
    parts |= {"file": SimpleNamespace(module="m"), "options": SimpleNamespace(workers={}, class_spec=None), "widest": 1}
    return Watch(SimpleNamespace(**{**parts, **more}))  # type: ignore[arg-type]


SERVERS = SimpleNamespace(signer=UNSIGNED)


def warnings(
    known_for: float,
    embedded: object = None,
    live: Mapping[str, Worker] | None = None,
    notices: Sequence[str] = (),
    *,
    names_workers: bool = False,
) -> list[str]:
    """Return the warnings where these workers are announced, known for so many seconds."""
    executor = SimpleNamespace(
        known_for=known_for,
        notices=list,
        workers=SimpleNamespace(announced=live or {}, refused=0, with_other_code=lambda *_: [], servers=SERVERS),
        troubles={},
    )
    study = SimpleNamespace(best=None, deletions=list, trouble=None)
    scheduler = SimpleNamespace(notices=lambda: notices, limits=Limits(trials=1), cheapest=None)
    options = SimpleNamespace(workers=names_workers, class_spec=None)
    found = watch(executor, study, embedded, scheduler=scheduler, options=options)
    return [*found.news(0.0)]


def test_missing_workers_are_warned_of_once_they_have_had_the_time_to_announce_themselves() -> None:
    assert MISSING_SECONDS > ANNOUNCE_EVERY
    assert warnings(MISSING_SECONDS - 0.1) == []
    [only] = warnings(MISSING_SECONDS)
    assert "no worker is live" in only
    assert only.endswith("-Q gpu, and others with -Q cpu"), "the remedy is a worker of each class of the study"
    live = {"w": Worker(protocol=PROTOCOL, compute_class="gpu", imports=["m"], slots=1)}
    [cpu] = warnings(MISSING_SECONDS, live=live)
    assert "no worker serves the queue cpu" in cpu


def test_the_remedy_for_no_worker_names_a_class_that_this_run_has_had() -> None:
    workers = SimpleNamespace(announced={}, refused=0, servers=SERVERS)
    executor = SimpleNamespace(workers=workers, known_for=MISSING_SECONDS)
    [only] = watch(executor, SimpleNamespace(), declared={}, slots={"rack": 2}).missing()
    assert str(only).endswith("-Q rack")


def test_a_retry_without_failed_trials_says_that_others_wait() -> None:
    said: list[str] = []
    study = SimpleNamespace(history=list, pending=lambda: [Trial(number=8, subspace="s", params={})], counted=8)
    plan, options = (
        SimpleNamespace(settings=StudySettings(trials=9)),
        SimpleNamespace(retry_failed=True, given={}, points=()),
    )
    parts: dict[str, Any] = {"options": options, "study": study, "plan": plan, "_say": said.append}
    study.schema = None
    assert Session._to_retry(SimpleNamespace(**parts)) == []  # type: ignore[arg-type]
    assert said == ["no failed trial is left to run again, beside 1 waiting trial"]


def test_known_points_count_in_the_limit_that_a_retry_raises() -> None:
    failed = [Trial(number=number, subspace="s", params={"x": number}, state=TrialState.FAILED) for number in range(2)]
    study = SimpleNamespace(history=lambda: [(failed, {})], pending=list, counted=2, schema=None)
    plan = Plan.of(compile_space(hp.uniform("x", 0, 9)), StudySettings(trials=2))
    options = SimpleNamespace(retry_failed=True, given={}, points=[{"x": 5}])
    opened = Opening(Request(space=hp.uniform("x", 0, 9), limits=plan.limits, store="sqlite://")).open()
    session: Any = SimpleNamespace(options=options, study=study, plan=plan, opened=opened, _say=lambda line: None)
    assert Session._to_retry(session) == [{"x": 0}, {"x": 1}]
    assert session.plan.limits.trials == 5
    opened.close()


def test_it_is_said_where_trials_go_as_the_last_resort() -> None:
    assert warnings(0.0, notices=["they go to cpu"]) == ["Warning: they go to cpu"]


def test_workers_that_sign_with_another_key_are_not_called_missing() -> None:
    live = {"w": Worker(protocol=PROTOCOL, key="12345678", compute_class="gpu", imports=["m"])}
    [only] = warnings(MISSING_SECONDS, live=live)
    assert "another key" in only
    others = {"w": Worker(protocol=PROTOCOL, compute_class="gpu", imports=["other"])}
    none, cpu = warnings(MISSING_SECONDS, live=others)
    assert "no live worker has m" in none
    assert "no worker serves the queue cpu" in cpu


def test_on_one_machine_no_command_for_a_node_is_advised() -> None:
    embedded = SimpleNamespace(workers={"cpu": 2}, directory="/here/.shadho/s")
    silent, missing = warnings(MISSING_SECONDS, embedded)
    assert "class cpu does not answer" in silent
    assert "/here/.shadho/s" in silent
    assert "names gpu" in missing
    assert "--workers cpu=2,gpu=1" in missing
    assert "celery" not in silent + missing
    assert warnings(MISSING_SECONDS, embedded, names_workers=True) == [silent], (
        "those who name the workers know what they leave out"
    )


def test_a_warning_is_said_once_an_outage_at_once_and_workers_are_looked_at_once_a_second() -> None:
    looks = [["a"], ["a", "b", "b"]]
    workers = SimpleNamespace(announced={}, with_other_code=list)
    executor = SimpleNamespace(troubles={}, known_for=0.0, notices=lambda: looks.pop(0), workers=workers)
    found = watch(executor, SimpleNamespace(trouble=None, best=None, deletions=list))
    said: list[str] = []
    for now in (0.0, LOOK_SECONDS - 0.1, LOOK_SECONDS, LOOK_SECONDS + 0.1):
        # Its error is another one at each try.
        executor.troubles = {"Redis": ServiceError(f"full, {now} s") if 0 < now <= LOOK_SECONDS else None}
        said += found.news(now)
    assert (said, looks) == (["Warning: a", "Warning: full, 0.9 s; trying again", "Warning: b"], [])
    executor.known_for, executor.notices, found._session.embedded = MISSING_SECONDS, list, Mock(workers={"cpu": 1})
    found._session.options.workers = {"cpu": 1}  # type: ignore[misc]
    for second in range(2, 12):
        executor.workers.announced = {} if second < 4 else {"w": Worker(compute_class="cpu")}
        said += found.news(float(second))
    missing = "the embedded worker of class cpu does not answer"
    assert [line.partition(";")[0] for line in said[3:]] == [
        f"Warning: {missing}",
        "Redis answers again, after 0 s",
        "the embedded worker of class cpu answers again, after 1 s",
    ]
    assert found.outages == {"store": 0, "servers": 1}


def test_a_study_at_its_limit_does_not_wait_for_ever_for_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SimpleNamespace(trouble=ServiceError("Redis cannot be used"))
    session: Any = SimpleNamespace(
        executor=executor,
        study=SimpleNamespace(trouble=None, in_flight=2, name="s"),
        scheduler=SimpleNamespace(stopping=False),
        _stuck_since=0.0,
    )
    now = 1000.0
    monkeypatch.setattr("shadho_celery.session.session.time.monotonic", lambda: now)
    Session._give_up_at_limit(session)
    session.scheduler.stopping = True
    now += GIVE_UP_SECONDS
    Session._give_up_at_limit(session)
    now += 1.0
    with pytest.raises(ServiceError, match=r"Redis cannot be used; .* without the results of 2 trials .* --resume s"):
        Session._give_up_at_limit(session)


def test_an_embedded_study_whose_workers_all_have_other_code_ends_with_the_reason() -> None:
    """No other worker can come. It waits for a worker that has just been started, and once a trial has ended."""
    found = ["a gets no trials: why"]
    executor = SimpleNamespace(has_workers=False, workers=SimpleNamespace(with_other_code=lambda: found))
    session: Any = SimpleNamespace(
        executor=executor,
        embedded=SimpleNamespace(workers={"a": 1, "b": 1}),
        study=SimpleNamespace(counted=3, count=lambda state: 0, name="s"),
        counts_before=Counter({TrialState.COMPLETE: 3}),
        _too_wide=0,
        code=CodeVersion(),
        disk=DiskWatch(),
    )
    Session._refuse_other_code(session)
    found.append("b gets no trials: why")
    with pytest.raises(UsageError, match="no embedded worker can run this study: a gets no trials: why"):
        Session._refuse_other_code(session)
    for name, value in {
        "counts_before": Counter({TrialState.FAILED: 2}),
        "study": SimpleNamespace(counted=3, count=lambda state: 1),
        "embedded": None,
        "executor": SimpleNamespace(has_workers=True),
    }.items():
        Session._refuse_other_code(SimpleNamespace(**{**vars(session), name: value}))  # type: ignore[arg-type]
    session.disk = SimpleNamespace(edited=lambda code: "my_study.py")
    with pytest.raises(UsageError, match=r"my_study\.py was edited after this run had read it.*--resume s goes on"):
        Session._refuse_other_code(session)


def test_a_trial_that_starts_a_study_on_workers_ends_its_own_study() -> None:
    failures = Failures()

    def fail(number: int, error: str) -> None:
        failures.add(
            Trial(
                number=number,
                params={},
                seed=0,
                subspace="",
                state=TrialState.FAILED,
                outcome=Outcome(state=TrialState.FAILED, error=error),
            )
        )

    session: Any = SimpleNamespace(study=SimpleNamespace(failures=failures))
    fail(0, "ValueError: shadho_celery.errors.NestedStart: no")
    Session._refuse_nested_trials(session)
    try:
        with within("a trial"):
            refuse_nested()
    except NestedStart as error:
        fail(1, describe(error))
    with pytest.raises(NestedStart, match=r"^trial 1 failed: a study on workers is started within a trial"):
        Session._refuse_nested_trials(session)


def test_what_was_warned_of_is_said_to_be_over_once_it_is() -> None:
    over = "cpu answers again"
    missing = [Notice(about="class cpu", text="cpu does not answer; see its log", over=over)]
    conditions, line = Conditions(), "Warning: cpu does not answer; see its log"

    def see(found: Sequence[Notice], now: float) -> list[str]:
        return [*conditions.see(found, now)]

    assert see(missing, 0.0) == [line]
    assert see(missing, 1.0) == []
    assert see([], 2.0) == see(missing, 3.0) == see([], 3.0 + OVER_SECONDS - 0.1) == []
    assert see([], 3.0 + OVER_SECONDS) == ["cpu answers again, after 3 s"]
    assert see(missing, 20.0) == [line], "it has begun anew"


def test_it_is_said_how_much_more_than_the_limit_running_trials_can_cost() -> None:
    def session(compute_class: str, price: float | None) -> SessionRecord:
        return SessionRecord(worker="w", since=0.0, compute_class=compute_class, host="h", slots=2, price=price)

    def said(sessions: Sequence[SessionRecord], timeout: float | None = None) -> list[str]:
        executor = SimpleNamespace(notices=list, workers=SimpleNamespace(with_other_code=list))
        study = SimpleNamespace(best=None, deletions=list, recorder=SimpleNamespace(sessions=sessions))
        limits = Limits(money=50.0)
        plan = SimpleNamespace(settings=StudySettings(trial_timeout=timeout), limits=limits)
        scheduler = SimpleNamespace(notices=list, limits=limits, cheapest=None)
        found = watch(executor, study, scheduler=scheduler, plan=plan)
        return [*map(str, found.present())]

    assert said([session("gpu", 2.4), session("gpu", 1.2)]) == [
        "after --max-cost running trials finish, for up to 7.20 an hour, until they end; --trial-timeout bounds that"
    ]
    assert said([session("gpu", 2.4)], 600.0) == [
        "after --max-cost running trials finish, for up to 4.80 an hour, so at most 0.81 by --trial-timeout"
    ]
    assert said([session("cpu", None)]) == [
        "trials on class cpu cost nothing here: no price is known (worker --price, or --class-spec)"
    ]


def test_classes_whose_workers_would_have_too_few_slots_are_told_before_any_comes() -> None:
    workers = SimpleNamespace(announced={}, refused=0, with_other_code=list, servers=SERVERS)
    spec = {"gpu": ClassSpec(slots=2, max_workers=8), "cpu": ClassSpec()}

    def said(widest: int, settings: StudySettings) -> list[str]:
        executor = SimpleNamespace(known_for=1e9, notices=list, workers=workers)
        plan = SimpleNamespace(settings=settings, limits=Limits(trials=1))
        options = SimpleNamespace(workers={}, class_spec="spec.toml")
        coming = Session.coming.fget(SimpleNamespace(plan=plan, class_spec=spec))  # type: ignore[attr-defined]
        found = watch(executor, None, coming=coming, widest=widest, plan=plan, options=options)
        return [each.text for each in found.missing() if each.about == "slots"]

    assert said(2, StudySettings(gpus=2)) == said(16, StudySettings(slots=16)) == []
    assert said(4, StudySettings(gpus=4)) == [
        "trials take up to 4 slots of one worker, and no worker has that many; start a worker with more slots, or "
        "raise slots of class gpu in the file of --class-spec"
    ]


def test_an_edited_file_takes_the_place_of_workers_with_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = SimpleNamespace(with_other_code=lambda: ["w gets no trials"])
    executor = SimpleNamespace(has_workers=True, notices=list, workers=workers)
    found = watch(executor, SimpleNamespace(best=None, deletions=list, name="s"))
    assert [*found.present()] == ["w gets no trials"]
    monkeypatch.setattr(found._session.disk, "edited", lambda code: "m.py")
    [edited] = found.present()
    assert str(edited).startswith("m.py was edited; this run continues with its earlier code")
