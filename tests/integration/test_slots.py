"""A worker's slots with a real Redis, without a broker: messages are given to them by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from acceptance.commands import until
from hyperopt import hp
from msgspec.structs import replace

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Lost, Report, Result, Started, TrialState
from shadho_celery.errors import ServiceError
from shadho_celery.fleet import channel
from shadho_celery.fleet.channel import SchedulerChannel
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker, place_of
from shadho_celery.node import heartbeat
from shadho_celery.node import slots as node_slots
from shadho_celery.node.slots import NotMine, Slots
from shadho_celery.objective.sources import read
from shadho_celery.space.compile import compile_space

STUDY = """
from hyperopt import hp

def objective(params, context):
    for step in range(20):
        context.report(step, 0.5)
    return 0.25

SPACE = hp.uniform("x", 0, 1)
"""


@pytest.fixture
def slots(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slots]:
    (tmp_path / "my_study.py").write_text(STUDY)
    (tmp_path / "broken.py").write_text("import no_such_library\n" + STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with connect(redis_url) as client:
        slots = Slots(
            client,
            machine=Machine(host="h"),
            compute_class="cpu",
            count=1,
            imports=["my_study", "broken", "no_such_study"],
            checkpoints=tmp_path,
            address="127.0.0.1",
        )
        slots.start()
        yield slots
        slots.close()


def test_a_worker_without_a_thread_for_its_leases_is_refused(
    slots: Slots, refuse_threads: Callable[[str], None]
) -> None:
    """All its leases would run out."""
    refuse_threads("_beat")
    with pytest.raises(ServiceError, match=r"this worker cannot renew leases: .*ulimit -u"):
        slots.start()


def test_a_worker_ends_and_does_what_it_was_asked_though_the_system_refuses_threads(
    slots: Slots, refuse_threads: Callable[[str], None]
) -> None:
    done: list[int] = []
    slots.beat.do_soon(lambda: done.append(1 // 0))
    slots.beat.do_soon(lambda: done.append(2))
    until(lambda: done == [2], 10)
    refuse_threads("close")
    slots.close()
    assert not slots._devices.runners[0].codes()


@pytest.mark.slow
def test_a_trial_says_how_many_of_its_reports_redis_refused(
    slots: Slots, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is away; its stream takes no more than 8 events but results."""
    monkeypatch.setattr(channel, "MAX_WAITING", 8)
    attempt = Attempt(number=0, attempt=1, params={"x": 0.5}, subspace="", seed=0, state=TrialState.QUEUED)
    slots.run(Payload(study="k1", module="my_study", attempts=[attempt]))
    with connect(redis_url) as client:
        events = SchedulerChannel(client, "k1").drain(0)
    assert sum(isinstance(event, Report) for event in events) == 7
    result = events[-1]
    assert isinstance(result, Result)
    assert result.outcome.loss == 0.25, result.outcome.error
    assert "13 reports were lost" in str(result.outcome.warning)


def test_a_trial_that_a_worker_has_failed_is_declined_there_once_another_may_have_become_free(
    slots: Slots, redis_url: str
) -> None:
    attempt = Attempt(number=0, attempt=2, params={"x": 0.5}, subspace="", failed_on=("other", slots.name))
    slots.run(Payload(study="k1", module="my_study", attempts=[attempt]))
    with connect(redis_url) as client:
        [event] = SchedulerChannel(client, "k1").drain(10_000)
    reason = f"it has failed on {slots.name}, and must run on another worker"
    assert event == Lost(number=0, attempt=2, reason=reason, claimed=False)


def test_a_worker_declines_before_it_ends_what_would_not_end_in_time(
    slots: Slots, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beat, which declines such attempts, does not come any more."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 1000.0)
    slots.leaves_at = 0.0
    attempt = Attempt(number=0, attempt=1, params={"x": 0.5}, subspace="", expected=60.0)
    slots.run(Payload(study="k1", module="my_study", attempts=[attempt]))
    slots.close()
    with connect(redis_url) as client:
        [event] = SchedulerChannel(client, "k1").drain(0)
    assert isinstance(event, Lost)
    assert (event.number, event.claimed, "ends before that" in event.reason) == (0, False, True)


@pytest.mark.slow
def test_an_attempt_for_another_machine_is_declined_at_once(slots: Slots, redis_url: str) -> None:
    attempts = [
        Attempt(number=number, attempt=1, params={"x": 0.5}, subspace="", only_on=host)
        for number, host in enumerate(["elsewhere", "h"])
    ]
    slots.run(Payload(study="k1", module="my_study", attempts=attempts))
    with connect(redis_url) as client:
        events = SchedulerChannel(client, "k1").drain(0)
    ends = [event for event in events if isinstance(event, (Lost, Result))]
    assert ends[0] == Lost(number=0, attempt=1, reason="it is for elsewhere, but was delivered to h", claimed=False)
    assert [end.number for end in ends] == [0, 1]
    assert isinstance(ends[1], Result)


@pytest.mark.slow
def test_a_worker_without_a_disk_for_checkpoints_runs_and_announces_no_storage(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_study.py").write_text(STUDY)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    attempt = Attempt(number=0, attempt=1, params={"x": 0.5}, subspace="")
    with connect(redis_url) as client:
        places = [tmp_path / "file" / "checkpoints", tmp_path / "checkpoints"]
        made = [
            Slots(
                client,
                machine=Machine(host="h"),
                compute_class="cpu",
                count=1,
                imports=["my_study"],
                checkpoints=place,
                address="127.0.0.1",
            )
            for place in places
        ]
        for each in made:
            assert place_of(each.name) == "cpu@h", "its place is its class and the host that it announces"
            each.heartbeat.announce()
        storages = [Registry(client, Worker).living()[each.name].storage for each in made]
        made[0].start()
        made[0].run(Payload(study="k1", module="my_study", attempts=[attempt]))
        for each in made:
            each.close()
    assert storages[0] == ""
    assert storages[1] != ""
    assert losses(redis_url) == {0: 0.25}


@pytest.mark.slow
def test_trials_share_the_cores_with_another_worker_of_the_host_as_long_as_it_lives(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = STUDY.replace("return 0.25", "return int(__import__('os').environ['OMP_NUM_THREADS'])")
    (tmp_path / "my_study.py").write_text(counting)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("heartbeat.BEAT_SECONDS", "heartbeat.ANNOUNCE_EVERY"):
        monkeypatch.setattr(f"shadho_celery.node.{name}", 0.1)
    numbers = count()

    def threads(slots: Slots) -> float | None:
        attempt = Attempt(number=next(numbers), attempt=1, params={"x": 0.5}, subspace="")
        slots.run(Payload(study="k1", module="my_study", attempts=[attempt]))
        return losses(redis_url)[attempt.number]

    with connect(redis_url) as client:
        first, second = (
            Slots(
                client,
                machine=Machine(host="h", cores=4, processors="f", pool="p"),
                compute_class=name,
                count=1,
                imports=["my_study"],
                checkpoints=tmp_path,
                address="127.0.0.1",
            )
            for name in ("cpu", "other")
        )
        first.start()
        first.heartbeat.announce()
        assert threads(first) == 4
        second.check()
        second._devices.share_cores(second.heartbeat.neighbours)
        assert second._devices._core_share.threads == 2, "from its first trial on"
        second.heartbeat.announce()
        until(lambda: threads(first) == 2, 20)
        second.close()
        until(lambda: threads(first) == 4, 20)
        first.close()


# Code


def version(folder: Path) -> CodeVersion:
    """Return the version of the study that is in the folder now."""
    return read("my_study", str(folder / "my_study.py")).with_space(compile_space(hp.uniform("x", 0, 1)).describe())


def message(code: str, *numbers: int) -> Payload:
    attempts = [Attempt(number=n, attempt=1, params={"x": 0.5}, subspace="", state=TrialState.QUEUED) for n in numbers]
    return Payload(study="k1", module="my_study", code=code, attempts=attempts)


def runs(slots: Slots, payload: Payload) -> bool:
    """Run a message, or return False if the worker has declined it."""
    with suppress(NotMine):
        slots.run(payload)
        return True
    return False


def losses(redis_url: str) -> dict[int, float | None]:
    """Return the losses of the results so far, by trial."""
    with connect(redis_url) as client:
        events = SchedulerChannel(client, "k1").drain(0)
    return {event.number: event.outcome.loss for event in events if isinstance(event, Result)}


@pytest.mark.slow
def test_a_study_that_is_edited_under_a_live_worker_simply_works(slots: Slots, redis_url: str, tmp_path: Path) -> None:
    old = version(tmp_path)
    slots.run(message(old.digest, 0))
    (tmp_path / "my_study.py").write_text(STUDY.replace("0.25", "0.75"))
    new = version(tmp_path)
    for number in (1, 2):
        # On a busy machine the worker may not have read the file again yet. The message then goes back to its queue.
        until(partial(runs, slots, message(new.digest, number)), 30)
    assert losses(redis_url) == {0: 0.25, 1: 0.75, 2: 0.75}


@pytest.mark.slow
def test_attempts_for_another_version_are_given_back_at_no_cost_and_the_worker_says_which_it_has(
    slots: Slots, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next messages do not even reach its slots; once the file is as they want it, they do."""
    monkeypatch.setattr(node_slots, "REQUEUE_SECONDS", 0.01)
    old = version(tmp_path)
    (tmp_path / "my_study.py").write_text(STUDY.replace("0.25", "0.75"))
    slots.heartbeat.announce()
    slots.run(message(old.digest, 0, 1))
    with connect(redis_url) as client:
        events = SchedulerChannel(client, "k1").drain(0)
        announced = Registry(client, Worker).living()[slots.name]
    lost = [event for event in events if isinstance(event, Lost)]
    assert [(each.number, each.claimed) for each in lost] == [(0, False), (1, False)], events
    assert old.digest in lost[0].reason
    assert [type(event) for event in events if not isinstance(event, Lost)] == [Started]
    assert announced.codes["my_study"] == version(tmp_path)
    with pytest.raises(NotMine, match=old.digest):
        slots.run(message(old.digest, 2))
    (tmp_path / "my_study.py").write_text(STUDY)
    # The next process may have imported it already.
    until(lambda: not slots._gate._codes.lacks("my_study", old.digest), 30)
    slots.run(message(old.digest, 2))
    assert losses(redis_url) == {2: 0.25}


@pytest.mark.slow
def test_a_worker_announces_what_it_cannot_import_and_runs_nothing_with_it(
    slots: Slots, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_slots, "REQUEUE_SECONDS", 0.01)
    slots.heartbeat.announce()
    until(lambda: len(slots._gate._codes.known) == 3, 30)
    with connect(redis_url) as client:
        announced = Registry(client, Worker).living()[slots.name]
    problems = {name: code.problem for name, code in announced.codes.items()}
    assert problems["my_study"] == ""
    assert "No module named 'no_such_library'" in problems["broken"]
    assert "there is no module no_such_study" in problems["no_such_study"]
    with pytest.raises(NotMine, match="no_such_library"):
        slots.run(replace(message("0123456789ab", 0), module="broken"))


# The end of a worker


def test_what_runs_when_a_worker_closes_is_given_back_at_no_cost_with_the_rest_of_its_message(
    slots: Slots, redis_url: str, tmp_path: Path
) -> None:
    """No FAILED result of the process that was killed counts; what comes later is for another worker."""
    (tmp_path / "my_study.py").write_text(STUDY.replace("return 0.25", "import time; time.sleep(60)"))
    running = threading.Thread(target=slots.run, args=[message("", 0, 1)])
    running.start()
    until(lambda: len(slots.leases) == 1, 30)
    slots.close()
    running.join(30)
    with connect(redis_url) as client:
        events = SchedulerChannel(client, "k1").drain(0)
    reason = "its worker was stopped"
    # The second one was not claimed.
    losses = [Lost(number=n, attempt=1, reason=reason, claimed=False, given_back=n == 0) for n in (0, 1)]
    assert [event for event in events if isinstance(event, (Lost, Result))] == losses
    with pytest.raises(NotMine, match="this worker stops"):
        slots.run(message("", 2))
