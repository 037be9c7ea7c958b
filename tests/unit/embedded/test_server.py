"""Why the server of a small fleet is not started; the fleets that run are in acceptance/test_join.py."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.cases import cases

from shadho_celery.embedded import server
from shadho_celery.embedded.server import own_folder, start, stop
from shadho_celery.errors import UsageError


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("SHADHO_HOST", "SHADHO_LISTEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_port_that_something_else_uses_is_named(taken: int) -> None:
    """Nothing is recorded, so that the next start may take another one."""
    with pytest.raises(
        UsageError, match=f"cannot listen on 127.0.0.1:{taken}: Address already in use; give another port"
    ):
        start("127.0.0.1", taken)
    assert not (own_folder() / "env").exists()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"on 192.0.2.77:6390: Cannot assign requested address; .* give another --host"
    ):
        start("192.0.2.77", None)


@cases("host", ["a b", "redis://h", "h:1/0", "", "x" * 64, "..", "ä", "0.0.0.0", "::"])
def test_what_is_no_host_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADHO_HOST", host or " ")
    with pytest.raises(UsageError, match="is not the name or the address of a machine; give another --host"):
        start(None, None)


def test_redis_listens_on_the_address_and_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """SHADHO_LISTEN may name all addresses, of which this machine's own is one."""
    access = server.Access("127.0.0.2", 1, "", "")
    monkeypatch.setattr(server, "listen", lambda host, port, for_others: _Listening(host))
    assert server._bound(access) == "127.0.0.2 127.0.0.1"
    monkeypatch.setattr(server, "listen", lambda host, port, for_others: _Listening("0.0.0.0" if for_others else host))
    assert server._bound(access) == "0.0.0.0"


class _Listening:
    """A socket that would listen on an address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def getsockname(self) -> tuple[str, int]:
        return self._address, 1

    def close(self) -> None:
        pass


def test_there_is_nothing_to_stop_before_the_first_start() -> None:
    assert stop() is False
    assert not own_folder().exists()
