from __future__ import annotations

import socket

import pytest

from shadho_celery.core import users
from shadho_celery.core.users import USER, own_user
from shadho_celery.errors import UsageError


def test_the_user_is_login_and_host_or_the_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER, "anna")
    assert own_user() == "anna"
    monkeypatch.setenv(USER, "")
    monkeypatch.setattr(users.getpass, "getuser", lambda: "bert")
    assert own_user() == f"bert@{socket.gethostname()}"


def test_a_user_without_an_entry_in_the_systems_list_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.delenv(USER)
    monkeypatch.setattr(users.getpass, "getuser", fail)
    monkeypatch.setattr(users.os, "getuid", lambda: 4711)
    assert own_user() == f"4711@{socket.gethostname()}"


@pytest.mark.parametrize("name", ["two words", "a\nb", "a\x1b[31m", "x" * 300, "\udc80"])
def test_a_name_that_cannot_be_shown_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER, name)
    with pytest.raises(UsageError, match="SHADHO_USER is "):
        own_user()
