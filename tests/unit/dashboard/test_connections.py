"""A client that is slow keeps no connection to the dashboard; one that waits for news keeps it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import services
import uvicorn
from starlette.types import Receive, Scope, Send

from shadho_celery.dashboard import command
from shadho_celery.dashboard.command import PromptProtocol

#: bytes of an answer that no buffer holds
LARGE = 30_000_000


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer /read after the body, /news by a line now and then, /large at once, and anything else without the body."""
    if scope["path"] == "/read":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while scope["path"] == "/news":
        await send({"type": "http.response.body", "body": b"news\n", "more_body": True})
        await asyncio.sleep(0.1)
    await send({"type": "http.response.body", "body": bytes(LARGE) if scope["path"] == "/large" else b"answer"})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> uvicorn.Server:
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "READ_SECONDS"):
        monkeypatch.setattr(command, name, 0.3)
    config = uvicorn.Config(app, http=PromptProtocol, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
    return uvicorn.Server(config)


@pytest.fixture
def address(server: uvicorn.Server) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield listening.getsockname()
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def client(address: tuple[str, int], sent: str) -> Iterator[socket.socket]:
    with socket.create_connection(address, 20 * services.PATIENCE) as made:
        made.sendall(sent.encode())
        yield made


HEAD = "Host: 127.0.0.1\r\n"
POST = f"POST /read HTTP/1.1\r\n{HEAD}Content-Length: 1000\r\n\r\n"
GET = f"GET / HTTP/1.1\r\n{HEAD}\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "G",
        f"GET / HTTP/1.1\r\n{HEAD}",
        POST,
        f"{POST}x",
        POST.replace("read", "other"),
        f"POST /read HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
        GET,
        f"{GET}{GET}GET /",
        f"{GET}{POST}",
    ],
    ids=repr,
)
@pytest.mark.parametrize("drips", [False, True], ids=["silent", "a byte now and then"])
def test_a_connection_without_a_whole_request_is_closed(address: tuple[str, int], sent: str, drips: bool) -> None:
    with client(address, sent) as made:
        made.settimeout(0.1)
        deadline = time.monotonic() + 20 * services.PATIENCE
        while True:
            assert time.monotonic() < deadline
            try:
                if drips:
                    made.send(b"x")
                if not made.recv(10_000):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_a_client_that_does_not_read_its_answer_is_cut_off(server: uvicorn.Server, address: tuple[str, int]) -> None:
    with client(address, GET.replace("/", "/large", 1)) as made:
        deadline = time.monotonic() + 20 * services.PATIENCE
        while not server.server_state.total_requests or server.server_state.connections:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        read = 0
        with contextlib.suppress(ConnectionError):
            while part := made.recv(1_000_000):
                read += len(part)
        assert read < LARGE


def test_a_stream_and_an_answer_that_is_read_go_on(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with client(address, GET.replace("/", "/news", 1)) as made:
        news = b""
        while news.count(b"news") < 30:
            part = made.recv(1000)
            assert part
            news += part
    monkeypatch.setattr(command, "READ_SECONDS", 60.0)
    with client(address, GET.replace("/", "/large", 1)) as made:
        read = 0
        while read < LARGE:
            part = made.recv(1_000_000)
            assert part
            read += len(part)
