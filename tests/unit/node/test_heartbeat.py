"""A worker announces itself as long as it lives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
from services.clocks import MachineTime

from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.core.system import HEARTBEAT_FILE, ManualClock, SystemClock
from shadho_celery.core.trial import Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.fleet.registry import ANNOUNCE_SECONDS, Worker
from shadho_celery.node.heartbeat import ANNOUNCE_EVERY, COMPARE_EVERY, Heartbeat, HeartbeatFile
from shadho_celery.node.leases import Lease, Leases


def make_client() -> MagicMock:
    """A client of a Redis whose clock is that of 1970."""
    client = MagicMock()
    client.time.return_value = (10, 500_000)
    return client


@pytest.mark.parametrize("step", [0.0, -600.0, -3600.0, 3600.0])
def test_a_worker_announces_itself_although_its_clock_is_set(machine_time: MachineTime, step: float) -> None:
    client = make_client()
    heartbeat = Heartbeat(client, "cpu@h.1", Worker(), Leases(MagicMock(), MagicMock()), SystemClock())
    heartbeat.announce()
    machine_time.set_by(step)
    for second in range(60):
        machine_time.sleep(1.0)
        heartbeat.beat(has_free_slot=True)
        assert client.pipeline.call_count == 1 + (second + 1) // ANNOUNCE_EVERY
    assert ANNOUNCE_EVERY < ANNOUNCE_SECONDS


def test_a_worker_announces_its_complaints_at_once_and_once() -> None:
    client = make_client()
    heartbeat = Heartbeat(client, "cpu@h.1", Worker(), Leases(MagicMock(), MagicMock()), SystemClock())
    heartbeat.announce()
    for _ in range(2):
        heartbeat.tell(complaints=["it is slow"])
    pipe = client.pipeline.return_value.__enter__.return_value
    announced = [msgspec.json.decode(call.args[1], type=Worker).complaints for call in pipe.set.call_args_list]
    assert announced == [[], ["it is slow"]]


def test_a_worker_names_once_another_one_that_uses_its_gpu(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(pool="p", cards=(Gpu(name="T4", id="0", uuid="GPU-a"), Gpu(name="T4", id="1", uuid="GPU-b")))
    other = Machine(pool="p", cards=(Gpu(name="T4", id="0", uuid="GPU-b"),))
    client = make_client()
    worker = Worker(machine=machine, compute_class="gpu")
    heartbeat = Heartbeat(client, "gpu@h.1", worker, Leases(MagicMock(), MagicMock()), SystemClock())
    heartbeat._host = MagicMock()
    heartbeat._host.neighbours.return_value = {
        "gpu@h.2": Worker(machine=other, compute_class="gpu"),
        "cpu@h.3": Worker(machine=other, compute_class="cpu"),
    }
    heartbeat.announce()
    heartbeat.announce()
    [record] = caplog.records
    assert record.getMessage().startswith("GPU 1 is also used by worker gpu@h.2; ")


def test_a_worker_that_drains_says_so_at_once_and_takes_nothing_for_a_scheduler_of_before() -> None:
    client = make_client()
    announced = client.pipeline.return_value.__enter__.return_value.set
    leases = Leases(MagicMock(), MagicMock())
    heartbeat = Heartbeat(client, "cpu@h.1", Worker(slots=2), leases, ManualClock())
    lease = Lease(study="k", name="svm", number=1, attempt=1, delivery="d", runner=MagicMock())
    with leases.holding(lease):
        heartbeat.announce()
        heartbeat.tally.end(Outcome(state=TrialState.FAILED, error="no"))
        heartbeat.drain()
    before, after = (json.loads(call.args[1]) for call in announced.call_args_list)
    assert (before["draining"], before["quarantined"]) == (False, False)
    assert (after["draining"], after["quarantined"]) == (True, True)
    assert (before["ended"], after["ended"]) == (0, 1)
    assert (after["busy"], after["studies"]["k"]["name"], after["studies"]["k"]["slots"]) == (1, "svm", 1)


def test_a_worker_announces_in_whole_seconds_how_far_its_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference to the clock of the Redis server; it is measured again every minute."""
    monkeypatch.setattr("shadho_celery.fleet.redis.time.time", lambda: 13.6)
    client, clock = make_client(), ManualClock()
    heartbeat = Heartbeat(client, "cpu@h.1", Worker(), Leases(MagicMock(), MagicMock()), clock)
    heartbeat._studies = MagicMock(refused=0)
    heartbeat._workers = MagicMock()
    heartbeat.check()
    heartbeat.announce()
    assert heartbeat._workers.announce.call_args.args[1].clock_offset == 3
    client.time.return_value = (20, 0)
    clock.sleep(COMPARE_EVERY)
    heartbeat.beat(has_free_slot=False)
    assert heartbeat._workers.announce.call_args.args[1].clock_offset == -6


def test_a_worker_touches_its_heartbeat_file_and_removes_it_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "alive"
    monkeypatch.setenv(HEARTBEAT_FILE, str(path))
    file = HeartbeatFile()
    os.utime(path, (0, 0))
    file.touch()
    assert path.stat().st_mtime > 0
    file.remove()
    assert not path.exists()
    monkeypatch.setenv(HEARTBEAT_FILE, "")
    HeartbeatFile().touch()


def test_a_heartbeat_file_that_cannot_be_written_is_refused_at_the_start_and_logged_once_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_FILE, str(tmp_path / "no" / "alive"))
    with pytest.raises(UsageError, match=r"SHADHO_HEARTBEAT_FILE: .*/no/alive cannot be written"):
        HeartbeatFile()
    caplog.clear()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv(HEARTBEAT_FILE, str(tmp_path / "here" / "alive"))
    file = HeartbeatFile()
    file.remove()
    (tmp_path / "here").rmdir()
    file.touch()
    file.touch()
    assert len(caplog.records) == 1
