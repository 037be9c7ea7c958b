"""Metrics are read when they are asked for, and what a stranger wrote into a label stays text."""

from __future__ import annotations

import math
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from services.cases import cases

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.system import OVER_SECONDS
from shadho_celery.core.trial import Outcome, TrialState
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet.registry import Worker
from shadho_celery.metrics import run, server, worker
from shadho_celery.metrics.server import MOST, TRIES, Collector, Family, Kept, Kind, MetricsServer, Samples
from shadho_celery.node.heartbeat import Tally
from shadho_celery.placement.durations import filled
from shadho_celery.study.table import Timed

Read = dict[str, dict[tuple[tuple[str, str], ...], float]]


@pytest.fixture
def listening() -> Iterator[MetricsServer]:
    with MetricsServer(0) as made:
        yield made
        if any(each.name == "shadho-metrics" for each in threading.enumerate()):
            made.shutdown()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bound imports scipy, which takes long on a busy machine."""
    monkeypatch.setattr(server, "WAIT_SECONDS", 60.0)


def text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def read(listening: MetricsServer, collector: Any) -> Read:
    """Serve a collector, and return what Prometheus' own parser reads: the samples by name and labels."""
    listening.serve(collector)
    found: Read = {}
    for family in text_string_to_metric_families(text(listening.url)):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def one(samples: Samples, kind: Kind = Kind.GAUGE) -> Collector[None]:
    labels = ("class",) if next(iter(samples), ()) else ()
    family: Family[None] = Family("shadho_some", "Help.", read=lambda _: samples, labels=labels, kind=kind)
    return Collector([family], None, {"study": "s"})


# Families


def test_labels_are_escaped_and_one_line(listening: MetricsServer) -> None:
    name = 'a"} 1\nshadho_other{class="\\b\x1b[31m' + "x" * 1000
    found = read(listening, one({(name,): 1.0}))
    assert [*found] == ["shadho_some"]
    [((_, label), study)] = found["shadho_some"]
    assert label.startswith('a"} 1 shadho_other{class="\\b')
    assert (len(label), study) == (255, ("study", "s"))
    assert label.isprintable()


def test_a_family_has_a_limited_number_of_samples_and_none_without_a_number(listening: MetricsServer) -> None:
    many = {(f"{number:05}",): float(number) for number in range(2 * MOST)}
    found = read(listening, one({**many, ("00001",): math.inf}))
    assert len(found["shadho_some"]) == MOST - 1


def test_counters_and_summaries_have_the_names_that_the_family_says(listening: MetricsServer) -> None:
    for kind, number in ((Kind.GAUGE, 1.0), (Kind.COUNTER, 1.0), (Kind.SUMMARY, (2.0, 3.0))):
        family: Family[None] = Family("shadho_some", "Help.", read=lambda _, number=number: {(): number}, kind=kind)  # type: ignore[misc]
        names = [sample.name for each in Collector([family], None, {}).collect() for sample in each.samples]
        assert names == [*family.names]


@pytest.mark.parametrize(("failures", "count"), [(TRIES - 1, 1), (TRIES, 0)])
def test_a_family_whose_dictionary_changes_meanwhile_is_read_again(failures: int, count: int) -> None:
    left = [RuntimeError("dictionary changed size during iteration")] * failures

    def look(_: None) -> Samples:
        if left:
            raise left.pop()
        return {(): 1.0}

    [metric] = Collector([Family("shadho_some", "Help.", read=look)], None, {}).collect()
    assert len(metric.samples) == count


# Server


def test_a_request_before_there_is_a_study_waits_for_it(listening: MetricsServer) -> None:
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(text(listening.url)))
    asking.start()
    listening.serve(one({("cpu",): 2.0}))
    asking.join(20)
    assert 'shadho_some{class="cpu",study="s"} 2.0' in found[0]


def test_clients_that_send_nothing_or_a_part_keep_none_from_its_metrics_and_take_few_threads() -> None:
    before, most = threading.active_count(), 3
    with ExitStack() as stack:
        listening = stack.enter_context(MetricsServer(0, most=most))
        listening.serve(one({("cpu",): 2.0}))
        stack.callback(listening.shutdown)
        for number in range(4 * most):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", listening.server_address[1]), 60))
            client.sendall(b"GET /metrics HTTP/1.1"[: number % 20])
        assert "shadho_some" in text(listening.url)
        deadline = time.monotonic() + 60
        while threading.active_count() > before + 1 + most:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert client.send(b"G") == 1, "the latest ones are still there"


def test_a_failure_of_ours_is_no_answer_and_does_not_end_the_server(
    listening: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    may_fail = [True]

    def fail(_: None) -> Samples:
        if may_fail.pop():
            raise ValueError("a bug")
        return {(): 1.0}

    listening.serve(Collector([Family("shadho_some", "Help.", read=fail)], None, {}))
    with pytest.raises(ConnectionError):
        text(listening.url)
    may_fail.append(False)
    assert "shadho_some 1.0" in text(listening.url)
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_refused_with_the_remedy(listening: MetricsServer) -> None:
    port = listening.server_address[1]
    with pytest.raises(UsageError, match=f"127.0.0.1 port {port} cannot be used: .* give another port, or 0") as caught:
        MetricsServer(int(port))
    assert caught.value.exit_code == 2


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'pip install -e "\.\[metrics\]"'):
        MetricsServer(0)


@cases("port", ["x", "-1", "65536", "123456", "²", "1.5"])
def test_a_workers_variable_that_is_no_port_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server.PORT, port)
    with pytest.raises(UsageError, match="SHADHO_METRICS_PORT is a port from 0 to 65535"):
        MetricsServer.configured()


def test_a_worker_serves_nothing_unless_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(server.PORT, raising=False)
    assert MetricsServer.configured() is None
    monkeypatch.setenv(server.PORT, "0")
    monkeypatch.setenv(server.HOST, "::1")
    made = MetricsServer.configured()
    assert made is not None
    with made:
        assert made.url.startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("host", "address", "place"),
    [
        ("0.0.0.0", "10.0.0.7", "10.0.0.7:{}"),
        ("::", "2001:db8::7", "[2001:db8::7]:{}"),
        ("0.0.0.0", "a name\x1b", ""),
        (None, "10.0.0.7", ""),
        (None, "127.0.0.1", "127.0.0.1:{}"),
        ("127.0.0.2", "10.0.0.7", ""),
    ],
)
def test_an_address_is_announced_if_prometheus_reaches_it(host: str | None, address: str, place: str) -> None:
    with MetricsServer(0, host) as made:
        assert made.place(address) == place.format(made.server_address[1])


# A run, and a worker


def make_session(**parts: Any) -> Any:
    """A session of one study on two classes, of which 20 trials have ended."""
    counts = {TrialState.COMPLETE: 20, TrialState.RUNNING: 3}
    workers = {
        "a": Worker(compute_class="gpu", slots=2, busy=1),
        "b": Worker(compute_class="cpu", slots=4, busy=4),
        "c": Worker(compute_class="cpu", slots=4, draining=True, quarantined=True),
    }
    study = SimpleNamespace(
        name="svm-1",
        count=lambda state, compute_class=None: counts.get(state, 0),
        compute_classes=["cpu", "gpu"],
        trials=SimpleNamespace(
            timed={("svm", "cpu"): Timed(15, 16, 30.0, 60.0), ("svm", "gpu"): Timed(5, 5, 5.0, 5.0)}, repeated=None
        ),
        best=SimpleNamespace(outcome=SimpleNamespace(loss=-0.75)),
        record=SimpleNamespace(objectives={"accuracy": "maximize"}),
        recorder=SimpleNamespace(spent={"gpu": 1.5}, owner="anna"),
        lost=2,
        trouble=None,
    )
    scheduler = SimpleNamespace(
        state="running",
        limits=SimpleNamespace(trials=40),
        wanted_slots={"gpu": 3},
        classes=[ComputeClass(name="gpu", slots=2), ComputeClass(name="cpu", slots=4, allowance=2.0)],
    )
    executor = SimpleNamespace(
        workers=SimpleNamespace(announced=workers),
        trouble=ServiceError("no"),
        waiting_messages=lambda: {"cpu": 5},
    )
    made = {"study": study, "scheduler": scheduler, "executor": executor, "turned_at": 0.0}
    return SimpleNamespace(**{**made, "watch": SimpleNamespace(outages={"store": 0, "servers": 1}), **parts})


def value(found: Read, name: str, **labels: str) -> float:
    return found[name][tuple(sorted({"study": "svm-1", "owner": "anna", **labels}.items()))]


def test_a_run_says_what_its_records_say(listening: MetricsServer) -> None:
    found = read(listening, run.collector(make_session()))
    assert {*found} == {name for family in run.FAMILIES for name in family.names}
    assert value(found, "shadho_trials", state="complete") == 20
    assert value(found, "shadho_class_trials", state="running", **{"class": "gpu"}) == 3
    assert value(found, "shadho_trial_seconds_count", **{"class": "cpu"}) == 16
    assert value(found, "shadho_trial_seconds_sum", **{"class": "cpu"}) == 30.0
    assert value(found, "shadho_best_loss") == 0.75
    assert value(found, "shadho_workers", state="draining", **{"class": "cpu"}) == 1
    assert value(found, "shadho_slots", **{"class": "cpu"}) == 8
    assert value(found, "shadho_busy_slots", **{"class": "cpu"}) == 4
    assert value(found, "shadho_wanted_slots", **{"class": "gpu"}) == 3
    assert value(found, "shadho_queue_messages", **{"class": "cpu"}) == 5
    assert [value(found, "shadho_server_up", server=name) for name in ("store", "servers")] == [1, 0]
    assert value(found, "shadho_outages_total", server="servers") == 1
    # Two slots of a second each, and the study's two slots of four slot seconds each.
    assert value(found, "shadho_bound_trials_per_second") == pytest.approx(2.5)
    assert value(found, "shadho_bound_share") == 0.0


def test_a_run_at_its_start_and_without_a_broker_leaves_out_what_it_does_not_know(listening: MetricsServer) -> None:
    session = make_session()

    def fail() -> Mapping[str, int]:
        raise ServiceError("the broker does not answer")

    session.executor.waiting_messages = fail
    session.study.trials.timed.clear()
    session.study.best = None
    found = read(listening, run.collector(session))
    unknown = {"shadho_queue_messages", "shadho_bound_trials_per_second", "shadho_bound_share", "shadho_best_loss"}
    unknown |= {"shadho_trial_seconds_count", "shadho_trial_seconds_sum"}
    assert {name for family in run.FAMILIES for name in family.names} - {*found} == unknown


def test_a_scrape_does_not_wait_for_a_broker_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WAIT_SECONDS", 0.0)
    calls, may_end = [0], threading.Event()

    def make() -> int:
        calls[0] += 1
        assert may_end.wait(20)
        return 1

    caching = Kept(make, 60.0)
    assert [caching.get(), caching.get()] == [None, None]
    may_end.set()
    monkeypatch.setattr(server, "WAIT_SECONDS", 20.0)
    assert [caching.get(), caching.get(), *calls] == [1, 1, 1]


def test_the_seconds_of_a_pair_without_trials_are_estimated_from_its_subspace_and_class() -> None:
    means = {("net", "cpu"): 100.0, ("net", "gpu"): 1.0, ("svm", "gpu"): 2.0}
    found = filled(means, ["net", "svm"], ["gpu", "cpu", "tpu"])
    assert (found["net"]["cpu"], found["svm"]["gpu"]) == (100.0, 2.0)
    assert found["svm"]["cpu"] > 10 * found["svm"]["gpu"]
    assert found["net"]["gpu"] < found["net"]["tpu"] < found["net"]["cpu"]


def test_a_worker_says_what_it_has_done(listening: MetricsServer) -> None:
    tally = Tally()
    for outcome in (Outcome(state=TrialState.COMPLETE, loss=1.0, seconds=2.0), Outcome(state=TrialState.FAILED)):
        tally.end(outcome)
    for now, trouble in enumerate([None, "out", "out", *[None] * int(OVER_SECONDS + 1), "out", None, "out"]):
        tally.redis.see(trouble, float(now))
    slots: Any = SimpleNamespace(
        leases=[1],
        worker=Worker(compute_class="cpu", slots=4),
        heartbeat=SimpleNamespace(tally=tally, state="drained", age=1.5),
    )
    found = {
        (name, *(labels for key, labels in of if key != "class")): number
        for name, samples in read(listening, worker.collector(slots)).items()
        for of, number in samples.items()
    }
    assert {name for name, *_ in found} == {name for family in worker.FAMILIES for name in family.names}
    assert (found["shadho_worker_slots",], found["shadho_worker_busy_slots",]) == (4, 1)
    assert [found["shadho_worker_state", state] for state in worker.STATES] == [0, 1, 0, 0]
    assert (found["shadho_worker_trials_total", "complete"], found["shadho_worker_trials_total", "pruned"]) == (1, 0)
    assert (found["shadho_worker_trial_seconds_count",], found["shadho_worker_trial_seconds_sum",]) == (2, 2.0)
    assert found["shadho_worker_outages_total",] == 2
    assert found["shadho_worker_heartbeat_age_seconds",] == 1.5
