"""Prometheus reads the metrics of a run, and a port in use is known before a study starts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from acceptance.commands import Command, Desk, until
from acceptance.commands import desk as make_desk

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(name="desk")
def _desk(no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    with make_desk(tmp_path) as made:
        made.study(seconds=0.1, settings={"sampler": "random", "cores": 1})
        yield made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def test_a_port_in_use_ends_a_run_before_there_is_a_study(desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = desk.told("run", "my_study", "--metrics-port", str(port))
    assert run.code == 2
    assert run.messages == [
        f"Error: --metrics-port: 127.0.0.1 port {port} cannot be used: Address already in use; give another port, or 0 "
        "for a free one, or another host"
    ]
    assert not (desk.folder / "shadho.db").exists()


@contextmanager
def slow_clients(url: str) -> Iterator[None]:
    """Six clients that send a byte of a request each second."""
    where, ended = urllib.parse.urlsplit(url), threading.Event()

    def send() -> None:
        assert where.hostname is not None
        assert where.port is not None
        with suppress(OSError), socket.create_connection((where.hostname, where.port), 30) as client:
            while not ended.wait(1.0):
                client.sendall(b"G")

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(2)
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def metrics_url(command: Command) -> str:
    command.says("metrics: http://")
    found = re.search(r"metrics: (http://\S+)", command.out + command.err)
    assert found is not None
    return found.group(1)


def test_slow_clients_keep_neither_a_run_nor_a_worker_from_ending_and_from_serving_metrics(
    desk: Desk, redis_url: str
) -> None:
    fleet = {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    worker = desk.worker("cpu", "-c", "1", "-l", "INFO", SHADHO_METRICS_PORT="0", SHADHO_IMPORTS="my_study", **fleet)
    with slow_clients(metrics_url(worker)):
        run = desk.launch("my_study", "--trials", "100000", "--metrics-port", "0", **fleet)
        with slow_clients(url := metrics_url(run)):
            desk.await_runs(3)
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert b"shadho_trials" in answer.read()
            run.send(signal.SIGTERM)
            assert run.wait(60).code == 143, desk.said()
        worker.send(signal.SIGTERM)
        assert worker.wait(60).code == 0, desk.said()


def test_prometheus_finds_a_run_and_a_worker_by_the_exporter(desk: Desk, redis_url: str) -> None:
    """Prometheus understands each expression of the dashboard of Grafana, and those of a busy run have numbers.

    Its settings are those of deploy/, with other addresses.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    port = free_port()
    fleet = {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": redis_url}
    served = {"SHADHO_METRICS_PORT": "0", "SHADHO_IMPORTS": "my_study", "SHADHO_PRICE": "2", "SHADHO_USER": "ada"}
    worker = desk.worker("cpu", "-c", "2", "-l", "INFO", **served, **fleet)
    exporter = desk.start(sys.executable, "-m", "shadho_celery", "exporter", "--port", "0", "--fleet", "lab", **fleet)
    run = desk.launch("my_study", "--trials", "10000", "--metrics-port", "0", **fleet, SHADHO_USER="ada")
    target = urllib.parse.urlsplit(metrics_url(exporter)).netloc
    settings = (DEPLOY / "prometheus.yml").read_text().replace("exporter:9430", target).replace("15s", "1s")
    desk.write("prometheus.yml", settings)
    shutil.copy(DEPLOY / "alerts.yml", desk.folder)
    prometheus = desk.start(
        program,
        "--config.file=prometheus.yml",
        f"--storage.tsdb.path={desk.folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    )

    def ask(expression: str) -> list[float]:
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as answer:
                found = json.load(answer)
        except ConnectionError:
            return []
        except urllib.error.HTTPError as error:
            return [] if error.code == 503 else pytest.fail(f"{expression}: {error.read().decode()}")
        except urllib.error.URLError:
            return []
        assert found["status"] == "success", found
        return [float(each["value"][1]) for each in found["data"]["result"]]

    until(lambda: sum(ask('shadho_trials{state="complete"}')) >= 10, 90, lambda: desk.said() + prometheus.err)
    places = {urllib.parse.urlsplit(metrics_url(each)).netloc for each in (worker, run)}
    for place in places:
        until(lambda place=place: ask(f'up{{job="shadho",fleet="lab",instance="{place}"}}') == [1.0], 60, desk.said)  # type: ignore[misc]
    until(lambda: ask('shadho_fleet_up{fleet="lab"}') == [1.0, 1.0], 60, desk.said)
    assert ask("sum(shadho_slots)") == ask("sum(shadho_fleet_slots)") == [2.0]
    assert ask('shadho_server_up{server="servers"}') == [1.0]
    assert ask("sum(shadho_fleet_money_per_hour)") == [4.0]
    until(lambda: sum(ask('shadho_fleet_study_slots{owner="ada"}')) > 0, 60, desk.said)
    until(lambda: bool(ask("shadho_fleet_machine_load")), 60, desk.said)
    until(lambda: bool(ask("shadho_bound_share")), 60, desk.said)
    [share] = ask("shadho_bound_share")
    assert share > 0
    panels = json.loads((DEPLOY / "grafana/dashboard.json").read_text())["panels"]
    expressions = [
        re.sub(r"\$(study|fleet)", ".*", target["expr"]) for panel in panels for target in panel.get("targets", ())
    ]
    answers = {each: ask(each) for each in expressions}
    of_a_run = [each for each in expressions if re.search("shadho_(trials|turn_age_seconds|fleet_slots)", each)]
    assert all(answers[each] for each in of_a_run)
