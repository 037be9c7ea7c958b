"""A worker that uses the default broker says so."""

from __future__ import annotations

import pytest

from shadho_celery.fleet.urls import BROKER, DEFAULTS, default_broker


def test_a_broker_that_is_not_named_is_told_with_what_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BROKER, raising=False)
    assert default_broker("amqp://127.0.0.1") == (
        "no broker is named, so the default amqp://127.0.0.1 is used; to name another one, give --broker or set "
        "CELERY_BROKER_URL"
    )
    assert default_broker("amqp://of-a-celeryconfig") is None
    monkeypatch.setenv(BROKER, DEFAULTS[BROKER])
    assert default_broker(DEFAULTS[BROKER]) is None
