"""The processes of a trial find one another by addresses that other machines can reach."""

from __future__ import annotations

import sys

import pytest
from services.cases import cases

from shadho_celery.core.addresses import HOST_VARIABLE, LOOPBACK, interface_of, listen, own_address
from shadho_celery.errors import UsageError


def test_the_own_address_is_the_given_one_or_that_on_the_route_to_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    assert own_address(LOOPBACK) == LOOPBACK
    assert own_address("no-such-host.invalid") == LOOPBACK
    monkeypatch.setenv(HOST_VARIABLE, "node7.cluster")
    assert own_address() == own_address(LOOPBACK) == "node7.cluster"


@cases("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_machines_is_a_usage_error_that_names_the_switch(host: str) -> None:
    with pytest.raises(UsageError, match="; set SHADHO_LISTEN to an address of this machine") as caught:
        listen(host)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_a_usage_error() -> None:
    with listen(LOOPBACK) as server, pytest.raises(UsageError, match=r"cannot listen on .*; give another port"):
        listen(LOOPBACK, server.getsockname()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the name is that of Linux")
def test_the_interface_of_an_address() -> None:
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("192.0.2.1") is None
