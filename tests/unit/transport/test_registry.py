"""Which live workers can run a study, and why none can where none can."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import MagicMock

import pytest

from shadho_celery.transport.broker import PROTOCOL
from shadho_celery.transport.registry import Registry, Worker, able, unable


def worker(**facts: Any) -> Worker:
    return Worker(**{"protocol": PROTOCOL, "compute_class": "cpu", "imports": ["my_study"], **facts})


def test_a_worker_can_that_has_the_module_speaks_our_protocol_and_signs_with_our_key() -> None:
    workers = {
        "good": worker(),
        "another module": worker(imports=["other"]),
        "older": worker(protocol=PROTOCOL - 1),
        "with a key": worker(key="12345678"),
    }
    assert able(workers, "my_study").keys() == {"good"}
    assert able(workers, "my_study", "12345678").keys() == {"with a key"}
    assert unable(workers, "my_study") is None


@pytest.mark.parametrize(
    ("workers", "fingerprint", "words"),
    [
        ({}, "", ["no worker is live", "SHADHO_IMPORTS=my_study"]),
        ({"a": worker(imports=[])}, "", ["no live worker has my_study", "-Q cpu"]),
        ({"a": worker(protocol=PROTOCOL - 1)}, "", [f"protocol {PROTOCOL - 1}", f"this scheduler {PROTOCOL}"]),
        (
            {"a": worker(protocol=1), "b": worker(protocol=PROTOCOL + 1), "c": worker(imports=[])},
            "",
            [f"protocol 1, {PROTOCOL + 1}", f"this scheduler {PROTOCOL}", "same version"],
        ),
        ({"a": worker(key="12345678")}, "", ["--signing-key-file"]),
        ({"a": worker()}, "12345678", ["--signing-key-file"]),
        ({"a": worker(key="12345678")}, "87654321", ["--signing-key-file"]),
        ({"a": worker(key="1", protocol=1), "b": worker(key="1")}, "", ["--signing-key-file"]),
    ],
)
def test_where_none_can_the_reason_and_the_remedy_are_told_in_one_line(
    workers: dict[str, Worker], fingerprint: str, words: list[str]
) -> None:
    told = str(unable(workers, "my_study", fingerprint))
    assert all(word in told for word in words), told
    assert "\n" not in told


def test_an_announcement_is_decoded_again_only_when_it_has_changed() -> None:
    texts = {"shadho:worker:a": {"slots": 1}, "shadho:worker:b": {"slots": 2}}
    client = MagicMock(**{"smembers.return_value": {"a", "b"}})
    client.mget.side_effect = lambda names: [json.dumps(texts[name]) for name in names]
    registry = Registry(client, Worker)
    before = registry.living()
    texts["shadho:worker:b"] = {"slots": 3}
    after = registry.living()
    assert after == {"a": Worker(slots=1), "b": Worker(slots=3)}
    assert after["a"] is before["a"]
