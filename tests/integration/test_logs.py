"""Logs of trials are asked for and answered over a real Redis; what is forged or malformed is refused and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import services
from msgspec.structs import replace

from shadho_celery.core.system import ManualClock
from shadho_celery.fleet.control import (
    KEPT_SECONDS,
    MAX_REQUEST,
    MAX_REQUESTS,
    TO_WORKERS,
    Asked,
    Client,
    ReadLog,
    Requests,
    WorkerAnswer,
    of_worker,
)
from shadho_celery.fleet.redis import connect, run
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.node.logs import LOOK_SECONDS, AnswerServer
from shadho_celery.runner.output import log_path

SIGNER = Signer(b"a key of sixteen bytes")
STUDY = "0123456789abcdef"
DEED = ReadLog(study=STUDY, number=3, attempt=1)
INBOX = "shadho:worker:cpu@h.1:inbox"


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with connect(redis_url) as client:
        yield client


def serve(client: Any, folder: Path, worker: str = "cpu@h.1", signer: Signer = UNSIGNED) -> Any:
    """Have a worker answer what waits for it; return its end."""
    logs = Requests(client, of_worker(worker), signer, TO_WORKERS)
    clock = ManualClock()
    server = AnswerServer(logs, folder, None, clock)
    clock.sleep(LOOK_SECONDS)
    server.beat()
    if server._answering is not None:
        server._answering.join()
    return logs


def asked(client: Any, worker: str = "cpu@h.1", signer: Signer = UNSIGNED) -> Asked[ReadLog]:
    """Ask without waiting for an answer."""
    asker = Client(client, signer, TO_WORKERS)
    request = asker.request(of_worker(worker), "me@here", DEED)
    asker.send(request)
    return request


def written(folder: Path, text: str) -> None:
    path = log_path(folder, STUDY, 3, 1)
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_the_worker_that_has_a_log_answers_with_it_and_the_others_that_they_have_none(
    client: Any, tmp_path: Path
) -> None:
    written(tmp_path / "b", "said\n")
    requests = [asked(client, name) for name in ("a", "b", "gone")]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: dict(Client(client, UNSIGNED, TO_WORKERS).answers(requests, 1.0)))
        for name in ("a", "b"):
            serve(client, tmp_path / name, name)
        assert asking.result() == {
            requests[0]: WorkerAnswer(),
            requests[1]: WorkerAnswer(is_done=True, text="said\n", end=5),
        }


@pytest.mark.parametrize(
    ("worker", "asker", "is_answered"), [(SIGNER, SIGNER, True), (SIGNER, UNSIGNED, False), (UNSIGNED, SIGNER, False)]
)
def test_with_a_key_both_sides_sign(
    client: Any, tmp_path: Path, worker: Signer, asker: Signer, is_answered: bool
) -> None:
    written(tmp_path, "said\n")
    request = asked(client, signer=asker)
    assert serve(client, tmp_path, signer=worker).forged == (worker is SIGNER and asker is UNSIGNED)
    answer = Client(client, asker, TO_WORKERS).wait(request, 0.0)
    assert answer == (WorkerAnswer(is_done=True, text="said\n", end=5) if is_answered else None)


@pytest.mark.parametrize(
    "changed",
    [
        {"study": "../../etc"},
        {"number": -1},
        {"after": -5},
    ],
    ids=["folder", "number", "position"],
)
def test_a_malformed_request_is_refused_once_in_the_log(
    client: Any, tmp_path: Path, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = Client(client, UNSIGNED, TO_WORKERS).request(of_worker("cpu@h.1"), "me@here", DEED)
    bad = [replace(good, deed=replace(DEED, **changed)), replace(good, id="x:*")]
    sealed = UNSIGNED.seal("", good)
    for text in (*(UNSIGNED.seal("", each) for each in bad), sealed + " " * MAX_REQUEST, "no record", "{}"):
        client.xadd(INBOX, {"r": text})
    client.xadd(INBOX, {"another": "field"})
    with caplog.at_level(logging.WARNING):
        logs = serve(client, tmp_path)
    assert logs.forged == 6
    assert caplog.text.count("requests for logs and folders are refused") == 1
    assert client.keys("shadho:*:answer:*") == []


def test_a_request_of_many_bytes_is_dropped_in_redis(client: Any, tmp_path: Path) -> None:
    """Of each the worker would read all, before it could refuse it."""
    for text in ("x" * 1001, "é" * 501, "x" * 1000):
        client.xadd(INBOX, {"r": text})
    assert run(client, "take_requests", of_worker("cpu@h.1"), 20, 1000)[1:] == ["", "", "x" * 1000]
    assert len(run(client, "take_requests", of_worker("cpu@h.1"), 20, 1000)) == 1, "only the time"


def test_a_key_of_a_wrong_type_is_removed(client: Any, tmp_path: Path) -> None:
    client.set(INBOX, "x")
    assert serve(client, tmp_path).forged == 1
    assert not client.exists(INBOX)


def test_of_many_requests_a_worker_gets_some_and_all_expire(client: Any, tmp_path: Path) -> None:
    for _ in range(MAX_REQUESTS + 5):
        asked(client)
    assert client.xlen(INBOX) == MAX_REQUESTS
    assert 0 < client.ttl(INBOX) <= KEPT_SECONDS
    serve(client, tmp_path)
    assert client.xlen(INBOX) == 0
    answers = client.keys("shadho:worker:cpu@h.1:answer:*")
    assert len(answers) == MAX_REQUESTS
    assert all(0 < client.ttl(key) <= KEPT_SECONDS for key in answers)


def test_a_request_whose_reader_has_given_up_is_not_answered(client: Any, tmp_path: Path) -> None:
    old = replace(Client(client, UNSIGNED, TO_WORKERS).request(of_worker("cpu@h.1"), "me@here", DEED), expires=1)
    Client(client, UNSIGNED, TO_WORKERS).send(old)
    assert serve(client, tmp_path).forged == 0
    assert client.xlen(INBOX) == 0
    assert client.keys("shadho:*:answer:*") == []


def test_while_nobody_asks_a_worker_looks_now_and_then(client: Any, tmp_path: Path) -> None:
    clock = ManualClock()
    server = AnswerServer(Requests(client, of_worker("cpu@h.1"), UNSIGNED, TO_WORKERS), tmp_path, None, clock)
    asked(client)
    server.beat()
    assert client.xlen(INBOX) == 1
    clock.sleep(LOOK_SECONDS)
    server.beat()
    assert client.xlen(INBOX) == 0
    assert server._answering is not None
    server._answering.join()
    asked(client)
    server.beat()
    assert client.xlen(INBOX) == 0, "somebody who follows a log asks again"
    services.wait_until(lambda: len(client.keys("shadho:worker:cpu@h.1:answer:*")) == 2)
