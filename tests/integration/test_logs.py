"""Logs of trials are asked for and answered over a real Redis; what is forged or malformed is refused and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import services

from shadho_celery.core.clock import ManualClock
from shadho_celery.node.logs import LOOK_SECONDS, LogServer
from shadho_celery.runner.output import log_path
from shadho_celery.transport.logs import KEPT_SECONDS, MAX_REQUEST, MAX_REQUESTS, LogAnswer, LogClient, WorkerLogs
from shadho_celery.transport.redis import connect, run_on
from shadho_celery.transport.signing import UNSIGNED, Signer

SIGNER = Signer(b"a key of sixteen bytes")
STUDY = "0123456789abcdef"


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with connect(redis_url) as client:
        yield client


def serve(client: Any, folder: Path, worker: str = "cpu@h.1", signer: Signer = UNSIGNED) -> WorkerLogs:
    """Have a worker answer what waits for it; return its end."""
    logs = WorkerLogs(client, worker, signer)
    clock = ManualClock()
    server = LogServer(logs, folder, clock)
    clock.sleep(LOOK_SECONDS)
    server.beat()
    if server._answering is not None:
        server._answering.join()
    return logs


def asked(client: Any, worker: str) -> None:
    """Ask without waiting for an answer."""
    assert not list(LogClient(client).ask([worker], STUDY, 3, 1, seconds=0.0))


def answers(client: Any, folder: Path, workers: dict[str, Signer], signer: Signer) -> tuple[list[LogAnswer], int]:
    """Ask these workers, each with its signer; return the answers, and the number of refused ones."""
    asker = LogClient(client, signer)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: list(asker.ask(list(workers), STUDY, 3, 1, seconds=1.0)))
        for name, key in workers.items():
            services.wait_until(lambda name=name: client.exists(f"shadho:worker:{name}:logs") == 1)
            serve(client, folder / name, name, key)
        return asking.result(), asker.refused


def written(folder: Path, text: str) -> None:
    path = log_path(folder, STUDY, 3, 1)
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_the_worker_that_has_a_log_answers_with_it_and_the_others_that_they_have_none(
    client: Any, tmp_path: Path
) -> None:
    written(tmp_path / "b", "said\n")
    found, refused = answers(client, tmp_path, {"a": UNSIGNED, "b": UNSIGNED}, UNSIGNED)
    assert {answer.worker: (answer.text, answer.end) for answer in found} == {"a": (None, 0), "b": ("said\n", 5)}
    assert refused == 0


@pytest.mark.parametrize(
    ("worker", "asker", "count"), [(SIGNER, SIGNER, 1), (SIGNER, UNSIGNED, 0), (UNSIGNED, SIGNER, 0)]
)
def test_with_a_key_both_sides_sign(client: Any, tmp_path: Path, worker: Signer, asker: Signer, count: int) -> None:
    written(tmp_path / "a", "said\n")
    found, refused = answers(client, tmp_path, {"a": worker}, asker)
    assert len(found) == count
    assert refused == (worker is UNSIGNED)


@pytest.mark.parametrize(
    "text",
    [
        "no record",
        "{}",
        '{"study": "../../etc", "number": 1, "attempt": 1, "id": "%s"}' % ("a" * 32),
        '{"study": "s", "number": -1, "attempt": 1, "id": "%s"}' % ("a" * 32),
        '{"study": "s", "number": 1, "attempt": 1, "id": "x:*"}',
        '{"study": "s", "number": 1, "attempt": 1, "after": -5, "id": "%s"}' % ("a" * 32),
        '{"study": "s", "number": 1, "attempt": 1, "id": "%s"}' % ("a" * 32) + " " * 1000,
        "[" * 900,
    ],
    ids=["no record", "empty", "folder", "number", "key", "position", "long", "deep"],
)
def test_a_malformed_request_is_refused_once_in_the_log(
    client: Any, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.rpush("shadho:worker:cpu@h.1:logs", text, text)
    with caplog.at_level(logging.WARNING):
        logs = serve(client, tmp_path)
    assert logs.refused == 2
    assert caplog.text.count("requests for logs are refused") == 1
    assert client.keys("shadho:*:log:*") == []


def test_a_request_of_many_bytes_is_dropped_in_redis(client: Any, tmp_path: Path) -> None:
    """Of each the worker would read all, before it could refuse it."""
    key = "shadho:worker:cpu@h.1:logs"
    client.rpush(key, "é" * MAX_REQUEST, "x" * MAX_REQUEST)
    assert run_on(client, "take_requests", [key], MAX_REQUESTS, MAX_REQUEST) == ["", "x" * MAX_REQUEST]
    assert run_on(client, "take_requests", [key], MAX_REQUESTS, MAX_REQUEST) == []
    client.rpush(key, "x" * (MAX_REQUEST + 1))
    assert serve(client, tmp_path).refused == 1


def test_a_key_of_a_wrong_type_is_removed(client: Any, tmp_path: Path) -> None:
    client.set("shadho:worker:cpu@h.1:logs", "x")
    assert serve(client, tmp_path).refused == 1
    assert not client.exists("shadho:worker:cpu@h.1:logs")


def test_of_many_requests_a_worker_reads_some_at_a_time_and_all_expire(client: Any, tmp_path: Path) -> None:
    for _ in range(MAX_REQUESTS + 5):
        asked(client, "cpu@h.1")
    assert 0 < client.ttl("shadho:worker:cpu@h.1:logs") <= KEPT_SECONDS
    serve(client, tmp_path)
    assert client.llen("shadho:worker:cpu@h.1:logs") == 5
    assert len(client.keys(f"shadho:{STUDY}:log:*")) == MAX_REQUESTS
    assert all(0 < client.ttl(key) <= KEPT_SECONDS for key in client.keys(f"shadho:{STUDY}:log:*"))


def test_a_worker_that_does_not_answer_is_waited_for_in_vain(client: Any) -> None:
    asker = LogClient(client)
    assert list(asker.ask(["gone"], STUDY, 3, 1, seconds=0.5)) == []
    assert asker.refused == 0


def test_while_nobody_asks_a_worker_looks_now_and_then(client: Any, tmp_path: Path) -> None:
    clock = ManualClock()
    server = LogServer(WorkerLogs(client, "cpu@h.1"), tmp_path, clock)
    asked(client, "cpu@h.1")
    server.beat()
    assert client.llen("shadho:worker:cpu@h.1:logs") == 1
    clock.sleep(LOOK_SECONDS)
    server.beat()
    assert client.llen("shadho:worker:cpu@h.1:logs") == 0
    assert server._answering is not None
    server._answering.join()
    asked(client, "cpu@h.1")
    server.beat()
    assert client.llen("shadho:worker:cpu@h.1:logs") == 0, "somebody who follows a log asks again"
    services.wait_until(lambda: len(client.keys(f"shadho:{STUDY}:log:*")) == 2)
