"""The exporter reads what workers and schedulers announce in Redis."""

from __future__ import annotations

import json
import urllib.request
from typing import Any
from unittest.mock import MagicMock

import pytest

from shadho_celery.core.hardware import Machine
from shadho_celery.core.system import ManualClock
from shadho_celery.fleet import urls
from shadho_celery.fleet.registry import Progress, Registry, Share, StudyWants
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.metrics.fleet import Exporter
from shadho_celery.metrics.server import MetricsServer
from shadho_celery.node.heartbeat import ANNOUNCE_EVERY, Heartbeat, Meter, announced

OTHER = Signer(b"another key of thirty-two bytes!")


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_a_workers_announcement_is_scraped_and_its_address_is_found(
    client: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The announcements of strangers are counted; without Redis, the server says only that."""
    for name in (urls.BROKER, urls.REDIS):
        monkeypatch.setenv(name, redis_url)
    monkeypatch.delenv("SHADHO_SIGNING_KEY_FILE", raising=False)
    monkeypatch.setattr("shadho_celery.metrics.server.WAIT_SECONDS", 30.0)
    clock, leases = ManualClock(), MagicMock()
    leases.studies.return_value = {"k": Share(name="svm", slots=2)}
    worker = announced(compute_class="gpu", slots=3, machine=Machine(host="a"), price=2.0)
    heartbeat = Heartbeat(client, "gpu@a.1.x", worker, leases, clock, measure=Meter([]).look)
    heartbeat.tell(metrics="10.0.0.7:9432")
    heartbeat.announce()
    clock.sleep(ANNOUNCE_EVERY)
    heartbeat.beat(has_free_slot=True)
    studies = Registry(client, StudyWants, UNSIGNED)
    studies.announce("k", StudyWants(name="svm", owner="ada", progress=Progress(running=2), metrics="10.0.0.9:9431"))
    Registry(client, StudyWants, OTHER).announce("l", StudyWants(name="forged"))
    lines: list[str] = []
    with MetricsServer(0) as server:
        exporter = Exporter("lab", lines.append)
        server.serve(exporter, {"/sd": exporter.targets})
        try:
            found = read(server.url)
            assert 'shadho_fleet_up{fleet="lab",server="redis"} 1.0' in found
            assert 'shadho_fleet_study_slots{class="gpu",fleet="lab",owner="ada",study="svm"} 2.0' in found
            assert 'shadho_fleet_money_per_hour{class="gpu",fleet="lab",use="idle"} 2.0' in found
            assert 'shadho_fleet_machine_memory{fleet="lab",host="a"} 0.' in found
            assert "forged" not in found
            groups = json.loads(read(server.url.replace("/metrics", "/sd")))
            places = {each["labels"]["role"]: each["targets"] for each in groups}
            assert places == {"worker": ["10.0.0.7:9432"], "run": ["10.0.0.9:9431"]}
            monkeypatch.setenv(urls.REDIS, "redis://127.0.0.1:1/0")
            away = Exporter("lab", lines.append)
            assert away.targets() is None
            assert [sample.value for each in away.collect() for sample in each.samples] == [0.0, 0.0]
        finally:
            server.shutdown()
    assert len(lines) == 1
    assert "redis://127.0.0.1:1/0" in lines[0]
