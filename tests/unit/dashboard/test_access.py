"""Who may ask the dashboard."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from shadho_celery.dashboard.access import MOST_BODY, MOST_SESSIONS, Access, Guard, read_token
from shadho_celery.errors import UsageError

TOKEN = "t" * 32
HOST = "http://127.0.0.1:8420"
JSON = {"origin": HOST, "content-type": "application/json"}


async def echo(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


@pytest.fixture
def access() -> Access:
    return Access(TOKEN)


@pytest.fixture
def client(access: Access) -> TestClient:
    """A browser that has logged in."""
    routes = [Route(path, echo, methods=["GET", "POST"]) for path in ("/", "/login", "/api/studies")]
    client = TestClient(Starlette(routes=routes, middleware=[Middleware(Guard, access=access)]), base_url=HOST)
    client.cookies.set("shadho_celery_8420", access.log_in(TOKEN) or "")
    return client


def test_a_code_logs_in_once_and_a_new_one_replaces_it(access: Access) -> None:
    old, code = access.new_code(), access.new_code()
    assert access.log_in(old) is None
    session = access.log_in(code)
    assert session is not None
    assert access.knows(session)
    assert access.log_in(code) is None
    assert access.log_in(TOKEN), "the token logs in any number of browsers"
    for nothing in ("", "x", "\ud800", code[:-1]):
        assert access.log_in(nothing) is None
        assert not access.knows(nothing)


def test_the_oldest_browser_is_logged_out_when_there_are_many(access: Access) -> None:
    sessions = [access.log_in(TOKEN) or "" for _ in range(MOST_SESSIONS + 1)]
    assert [access.knows(session) for session in sessions] == [False] + [True] * MOST_SESSIONS


def test_a_browser_without_a_session_gets_only_the_empty_page(client: TestClient) -> None:
    assert client.get("/api/studies").status_code == 200
    client.cookies.clear()
    assert client.get("/").status_code == 200
    refused = client.get("/api/studies")
    assert refused.status_code == 401
    assert "open the URL that was printed" in refused.text
    assert client.get("/api/studies", headers={"cookie": "shadho_celery_1=x; shadho_celery_8420=y"}).status_code == 401


@pytest.mark.parametrize(
    "query",
    [
        *("token=x", "code=x", "a=1&TOKEN=x", "key", "password=", "a=1;token=x"),
        *(f"auth={TOKEN}", f"a=1;t={TOKEN}", TOKEN, f"t=%74{TOKEN[1:]}"),
        *(f"a=Bearer%20{TOKEN}", f"a=Bearer+{TOKEN}", f"a=Bearer:{TOKEN}", "access_token=x", "Authorization=x"),
    ],
)
def test_a_secret_in_a_query_is_refused(client: TestClient, query: str) -> None:
    refused = client.get(f"/api/studies?{query}")
    assert refused.status_code == 400
    assert "stay in logs" in refused.text


def test_a_code_in_a_query_is_refused_until_it_is_used(client: TestClient, access: Access) -> None:
    code = access.new_code()
    assert client.get(f"/?c={code}").status_code == 400
    access.log_in(code)
    assert client.get(f"/?c={code}").status_code == 200
    assert client.get(f"/?search={'x' * len(TOKEN)}").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8420", "", "10.0.0.1:8420"])
def test_another_host_is_refused_as_after_dns_rebinding(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9000", "[::1]:8420", "127.0.0.1"])
def test_a_tunnel_may_have_another_port(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 200),
        ({}, 403),
        (JSON | {"origin": "http://evil.example"}, 403),
        (JSON | {"origin": "http://127.0.0.1:1"}, 403),
        (JSON | {"origin": "null"}, 403),
        (JSON | {"sec-fetch-site": "cross-site"}, 403),
        (JSON | {"content-type": "text/plain"}, 415),
    ],
)
def test_a_strangers_page_cannot_post(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.post("/api/studies", content=b"{}", headers=headers).status_code == status


def test_a_strangers_page_cannot_embed_or_read(client: TestClient) -> None:
    assert client.get("/api/studies", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    headers = client.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("site", ["same-site", "cross-site"])
def test_a_link_on_another_page_leads_to_the_empty_page_only(client: TestClient, site: str) -> None:
    link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client.get("/", headers=link).status_code == 200
    assert client.get("/api/studies", headers=link).status_code == 403
    assert client.get("/", headers=link | {"sec-fetch-mode": "no-cors"}).status_code == 403


def test_long_requests_are_refused(client: TestClient) -> None:
    assert client.get(f"/api/studies?search={'x' * 5000}").status_code == 414
    assert client.post("/api/studies", content=b"x" * (MOST_BODY + 1), headers=JSON).status_code == 413
    assert client.post("/api/studies", content=b"x" * MOST_BODY, headers=JSON).text == str(MOST_BODY)


def test_a_body_without_a_length_is_refused_at_the_limit(client: TestClient) -> None:
    def sent(count: int) -> Any:
        return client.post("/api/studies", content=(b"x" * 100_000 for _ in range(count)), headers=JSON)

    assert sent(MOST_BODY // 100_000).text == str(MOST_BODY)
    refused = sent(1000)
    assert (refused.status_code, refused.text) == (413, "send at most 1000000 bytes")
    assert "default-src 'none'" in refused.headers["content-security-policy"]


def test_a_token_file_is_made_for_its_owner_only_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_token(path)
    assert len(token) >= 24
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == token


def test_a_bad_token_file_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(UsageError, match=r"--token-file \. cannot be read: Is a directory"):
        read_token(Path())
    with pytest.raises(UsageError, match="cannot be written"):
        read_token(tmp_path / "no folder" / "token")
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="fewer than 24 characters; remove it"):
        read_token(path)
    path.chmod(0o644)
    with pytest.raises(UsageError, match=r"other users can read --token-file .*chmod 600"):
        read_token(path)
    path.chmod(0o600)
    path.write_bytes(b"\xff" * 30)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(path)
