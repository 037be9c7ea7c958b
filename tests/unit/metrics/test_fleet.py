"""The exporter shows the whole fleet, and answers in time whatever its servers do."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shadho_celery.cli.group import commands
from shadho_celery.core.hardware import GpuUsage, Machine, Usage
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.registry import Progress, Share, StudyWants, Worker
from shadho_celery.fleet.state import FleetState
from shadho_celery.metrics import fleet, server
from shadho_celery.metrics.fleet import FAMILIES, Exporter
from shadho_celery.metrics.server import MetricsServer

HOSTILE = 'a"} 1\nshadho_other{x="\x1b[31m'
WORKERS = {
    "gpu@a.1.x": Worker(
        compute_class="gpu",
        slots=4,
        busy=3,
        price=2.0,
        machine=Machine(host="a"),
        metrics="10.0.0.1:9432",
        usage=Usage(load=1.5, memory=0.25, gpus={"0": GpuUsage(busy=0.5), "1": GpuUsage(busy=1.0, memory=0.75)}),
        studies={"k": Share(name="svm", slots=2), "l": Share(name=HOSTILE, slots=1)},
    ),
    "gpu@b.2.x": Worker(compute_class="gpu", slots=2, busy=2, studies={"k": Share(name="svm", slots=2)}),
    "cpu@b.3.x": Worker(compute_class="cpu", slots=2, draining=True, machine=Machine(host="b")),
}
STUDIES = {
    "k": StudyWants(
        name="svm",
        owner="ada",
        progress=Progress(running=4, waiting=9),
        wanted_slots={"gpu": 8},
        metrics="10.0.0.9:9431",
    ),
    "l": StudyWants(name=HOSTILE),
}
FLEET = FleetState(
    workers=WORKERS,
    studies=STUDIES,
    refused=1,
    drained={},
    depths={"gpu": {"gpu": None, "gpu,a": None}, "cpu": {"cpu": None}},
    ages={},
)

Found = dict[tuple[str, ...], float]


def shown(exporter: Exporter) -> Found:
    """Return the samples that Prometheus reads, by name and values of the labels, sorted by their names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)  # type: ignore[arg-type]  # it only needs `collect`
    found: Found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("fleet") == "lab"
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


class Servers:
    """What the servers of the fleet answer."""

    def __init__(self) -> None:
        self.state: FleetState | ServiceError = FLEET
        self.counts: dict[str, int | None] | ServiceError = {"gpu": 5, "gpu,a": 1, "cpu": None}

    def read_fleet(self, *, has_broker: bool) -> FleetState:
        assert not has_broker
        if isinstance(self.state, ServiceError):
            raise self.state
        return self.state

    def depths(self, names: Iterable[str]) -> dict[str, int | None]:
        if isinstance(self.counts, ServiceError):
            raise self.counts
        return {name: self.counts[name] for name in names}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(fleet, "read_fleet", made.read_fleet)
    monkeypatch.setattr(fleet, "depths", made.depths)
    monkeypatch.setattr(server, "WAIT_SECONDS", 30.0)
    return made


def test_the_fleet_is_what_is_announced(servers: Servers) -> None:
    found = shown(Exporter("lab", print))
    assert {name for name, *_ in found} == {family.name for family in FAMILIES}
    assert [found["shadho_fleet_up", server] for server in ("redis", "broker")] == [1, 1]
    assert found["shadho_fleet_workers", "gpu", "serving"] == 2
    assert found["shadho_fleet_workers", "cpu", "draining"] == 1
    assert (found["shadho_fleet_slots", "gpu"], found["shadho_fleet_busy_slots", "gpu"]) == (6, 5)
    money = {use: found["shadho_fleet_money_per_hour", "gpu", use] for use in ("busy", "idle")}
    assert money == {"busy": 6.0, "idle": 2.0}
    assert found["shadho_fleet_study_slots", "gpu", "ada", "svm"] == 4
    assert found["shadho_fleet_trials", "ada", "waiting", "svm"] == 9
    assert found["shadho_fleet_wanted_slots", "gpu"] == 8
    # With the queue for one machine.
    assert found["shadho_fleet_queue_messages", "gpu"] == 6
    assert ("shadho_fleet_queue_messages", "cpu") not in found
    assert found["shadho_fleet_refused_announcements",] == 1
    assert (found["shadho_fleet_machine_load", "a"], found["shadho_fleet_machine_memory", "a"]) == (1.5, 0.25)
    assert ("shadho_fleet_machine_load", "b") not in found
    assert [found["shadho_fleet_gpu_busy", gpu, "a"] for gpu in "01"] == [0.5, 1.0]
    assert [of for of in found if of[0] == "shadho_fleet_gpu_memory"] == [("shadho_fleet_gpu_memory", "1", "a")]


def test_what_a_stranger_announces_is_the_text_of_a_label(servers: Servers) -> None:
    [study] = [each for name, *labels in shown(Exporter("lab", print)) for each in labels if each.startswith('a"')]
    assert study == 'a"} 1 shadho_other{x="\\x1b[31m'


def test_runs_and_workers_that_serve_metrics_are_found(servers: Servers) -> None:
    assert Exporter("lab", print).targets() == [
        {"targets": ["10.0.0.1:9432"], "labels": {"fleet": "lab", "role": "worker"}},
        {"targets": ["10.0.0.9:9431"], "labels": {"fleet": "lab", "role": "run"}},
    ]


def test_of_a_fleet_whose_redis_is_away_only_that_is_shown(servers: Servers) -> None:
    servers.state = ServiceError("Redis at redis://h cannot be used\n(refused)")
    lines: list[str] = []
    exporter = Exporter("lab", lines.append)
    for _ in range(2):
        assert shown(exporter) == {("shadho_fleet_up", "redis"): 0, ("shadho_fleet_up", "broker"): 0}
    assert exporter.targets() is None
    assert lines == ["Warning: Redis at redis://h cannot be used (refused)"]


def test_a_broker_that_is_away_takes_only_the_queues_away(servers: Servers) -> None:
    servers.counts = ServiceError("the broker does not answer")
    found = shown(Exporter("lab", lambda line: None))
    assert [found["shadho_fleet_up", server] for server in ("redis", "broker")] == [1, 0]
    assert not [name for name, *_ in found if name == "shadho_fleet_queue_messages"]


def test_a_state_that_cannot_be_read_again_is_shown_only_for_a_while(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("shadho_celery.metrics.server.time", type("Time", (), {"monotonic": lambda: now}))
    made = iter([1])
    found = server.Kept(lambda: next(made), 1.0, 20.0)
    assert found.get() == 1
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    now = 20.0
    assert found.get() == 1
    now = 20.5
    assert found.get() is None


def test_a_thousand_workers_are_shown_in_well_under_a_second(servers: Servers) -> None:
    """The limit is in seconds of the processor, and generous."""
    usage = Usage(load=1.0, memory=0.5, gpus={str(gpu): GpuUsage(busy=0.5, memory=0.5) for gpu in range(4)})
    worker = {"compute_class": "gpu", "slots": 4, "busy": 4, "usage": usage, "studies": {"k": Share(slots=4)}}
    many = {f"gpu@h{number}.1.x": Worker(**worker, machine=Machine(host=f"h{number}")) for number in range(1000)}
    servers.state = FleetState(workers=many, studies={}, refused=0, drained={}, depths={}, ages={})
    exporter = Exporter("lab", print)
    assert exporter.targets() is not None
    began = time.process_time()
    found = shown(exporter)
    assert len([name for name, *_ in found if name == "shadho_fleet_gpu_busy"]) == 4000
    assert time.process_time() - began < 3.0


def test_a_port_in_use_and_a_missing_fleet_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CELERY_BROKER_URL", "SHADHO_BROKER_URL", "SHADHO_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    with MetricsServer(0) as taken:
        port = str(taken.server_address[1])
        refused = CliRunner().invoke(commands, ["exporter", "--redis", "redis://h/0", "--port", port])
    assert refused.exit_code == 2
    assert refused.output.count("\n") == 1
    assert f"--port: 127.0.0.1 port {port} cannot be used" in refused.output
    nowhere = CliRunner().invoke(commands, ["exporter"])
    assert (nowhere.exit_code, "no fleet is named" in nowhere.output) == (2, True)
