"""What a scaler reads from Redis and writes there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from services.controlled import SIGNER

from shadho_celery.fleet import urls
from shadho_celery.fleet.drains import KEY, Drains, Start, Starts
from shadho_celery.fleet.registry import Registry, StudyWants, Worker
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.session import scaling
from shadho_celery.session.scaling import ScaledFleet


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def fleet(client: Any, said: list[str], redis_url: str, monkeypatch: pytest.MonkeyPatch) -> ScaledFleet:
    monkeypatch.setenv(urls.REDIS, redis_url)
    monkeypatch.setattr(Signer, "configured", lambda: SIGNER)
    monkeypatch.setattr(scaling, "connect", lambda _: client)
    return ScaledFleet(said.append)


def test_the_slots_that_all_studies_want_are_added_and_unsigned_ones_are_ignored(
    fleet: ScaledFleet, client: Any, said: list[str]
) -> None:
    signed, unsigned = (Registry(client, StudyWants, each) for each in (SIGNER, UNSIGNED))
    signed.announce("k1", StudyWants(wanted_slots={"gpu": 2}))
    signed.announce("k2", StudyWants(wanted_slots={"gpu": 3, "cpu": 1}))
    assert fleet.look() == ({"gpu": 5, "cpu": 1}, {}, {})
    assert said == []
    unsigned.announce("k3", StudyWants(wanted_slots={"gpu": 1000}))
    assert fleet.look()[0] == {"gpu": 5, "cpu": 1}
    fleet.look()
    assert len(said) == 1
    assert "not signed" in said[0]


def test_a_request_to_end_is_signed_for_one_worker_and_removed_when_it_is_gone(
    fleet: ScaledFleet, client: Any, said: list[str]
) -> None:
    workers = Registry(client, Worker, SIGNER)
    workers.announce("cpu@h.1.aa", Worker(control=SIGNER.fingerprint))
    workers.announce("cpu@h.2.bb", Worker())
    fleet.look()
    assert (fleet.may_end("cpu@h.1.aa"), fleet.may_end("cpu@h.2.bb")) == (True, False)
    assert len(said) == 1
    assert "refuses control" in said[0]
    fleet.end(["cpu@h.1.aa"])
    drain = Drains(client, SIGNER).latest("cpu@h.1.aa")
    assert drain is not None
    assert (drain.is_drained, drain.ends) == (True, True)
    assert Drains(client, SIGNER).latest("cpu@h") is None
    fleet.look()
    assert client.hlen(KEY) == 1
    workers.note_leaving("cpu@h.1.aa")
    workers.withdraw("cpu@h.1.aa")
    fleet.look()
    assert client.hlen(KEY) == 0
    assert fleet.has_left("cpu@h.1.aa")


def test_what_starts_is_kept_signed_with_a_time_to_live_until_all_have_come(fleet: ScaledFleet, client: Any) -> None:
    key = "shadho:starts:gpu"
    record = Starts(starts=[Start(count=3, missing=2, at=fleet.time())], known=["gpu@h.1.aa"], job="7")
    fleet.keep({"gpu": record}, {"gpu": 100.0})
    assert 99_000 < client.pttl(key) <= 100_000
    assert fleet.recall(["cpu", "gpu"]) == {"gpu": record}
    client.set(key, re.sub('"count": ?3', '"count":9', client.get(key)))
    assert fleet.recall(["gpu"]) == {}, "its signature is of another text"
    client.delete(key)
    client.lpush(key, "x")
    assert fleet.recall(["gpu"]) == {}, "another client's key"
    fleet.keep({"gpu": record}, {"gpu": 100.0})
    assert fleet.recall(["gpu"]) == {"gpu": record}
    fleet.keep({}, {})
    assert not client.exists(key)
