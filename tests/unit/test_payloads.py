"""A message's payload is looked at before anything is done with it: what it names becomes a folder and an import."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shadho_celery.payloads import malformed

GOOD: dict[str, Any] = {
    "study": "0123456789abcdef",
    "module": "tasks.svm",
    "watched": True,
    "attempts": [
        {"number": 0, "attempt": 1, "params": {"x": 1.5}, "seed": 7},
        {"number": 2**40, "attempt": 3, "params": {}, "seed": 2**62, "budget": 0.5, "timeout": 3600},
    ],
}


def test_what_schedulers_send_passes() -> None:
    assert malformed(json.loads(json.dumps(GOOD))) is None
    assert malformed({name: GOOD[name] for name in ("study", "module", "attempts")}) is None
    assert malformed({**GOOD, "attempts": [], "study": "study-1_B"}) is None
    assert malformed({**GOOD, "something": "that a later version says"}) is None


@pytest.mark.parametrize("payload", [None, "text", 1, [], [GOOD]])
def test_a_payload_is_an_object(payload: Any) -> None:
    assert malformed(payload) == "its payload is no object"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("study", value) for value in ("", "..", "../x", "/x", "a/b", "a\nb", "a:b", "ä", "x" * 65, "x\n", None, 5)),
        *(("module", value) for value in ("", ".", "a.", ".a", "a..b", "a-b", "a/b", "os;x", "a b", None, ["a"])),
        *(("attempts", value) for value in (None, {}, "text", 5)),
        *(("watched", value) for value in ("yes", 1, {})),
    ],
)
def test_what_the_payload_says_has_its_form(name: str, value: Any) -> None:
    assert name in str(malformed({**GOOD, name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("number", value) for value in (-1, "0", "../x", 1.0, True, None, 2**53, 10**400)),
        *(("attempt", value) for value in (0, -1, "1", 1.5, True, None)),
        *(("params", value) for value in (None, [], "x", 1)),
        *(("seed", value) for value in ("1", 1.5, True, [])),
        *(("budget", value) for value in ("1", float("nan"), float("inf"), True)),
        *(("timeout", value) for value in ("1", 0, -1, float("nan"), float("inf"), True)),
    ],
)
def test_what_an_attempt_says_has_its_form(name: str, value: Any) -> None:
    good = GOOD["attempts"][0]
    assert malformed({**GOOD, "attempts": [good]}) is None
    assert name in str(malformed({**GOOD, "attempts": [good, {**good, name: value}]}))


SEAT: dict[str, Any] = {"address": "10.0.0.1:5000", "token": "s3cr3t_=+/.-", "call": 1, "rank": 2}
REPLICA: dict[str, Any] = {**GOOD, "attempts": [{**GOOD["attempts"][0], "slots": 3}], "replica": SEAT}


@pytest.mark.parametrize("address", ["10.0.0.1:1", "node7.cluster:65535", "localhost:5000", "[fe80::1%eth0]:5000"])
def test_a_message_for_a_replica_passes(address: str) -> None:
    assert malformed(json.loads(json.dumps(REPLICA))) is None
    assert malformed({**REPLICA, "replica": {**SEAT, "address": address}}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("address", value)
            for value in (None, 5, "", "host", ":1", "host:", "a b:1", "host:65536", "host:-1", "h:1\n")
        ),
        *(("token", value) for value in (None, 5, "", "a b", "x" * 257, "ä", "x\n")),
        *(("call", value) for value in (None, 0, "1", True)),
        *(("rank", value) for value in (None, 0, -1, "1", 1.5, True, 10**6)),
    ],
)
def test_what_a_message_says_of_a_replicas_seat_has_its_form(name: str, value: Any) -> None:
    assert f"the {name} of a replica" in str(malformed({**REPLICA, "replica": {**SEAT, name: value}}))


def test_a_replica_is_one_of_one_attempt() -> None:
    assert malformed({**REPLICA, "attempts": []}) is not None
    assert malformed({**REPLICA, "attempts": 2 * REPLICA["attempts"]}) is not None
    assert malformed({**REPLICA, "replica": "text"}) is not None


@pytest.mark.parametrize("slots", [0, -1, "3", 2.0, True, 10**6])
def test_the_slots_of_an_attempt_are_a_number_that_a_class_may_have(slots: Any) -> None:
    attempt = {**GOOD["attempts"][0], "slots": slots}
    assert malformed({**GOOD, "attempts": [attempt]}) == "the slots of an attempt cannot be right"


@pytest.mark.parametrize("attempt", [None, "text", 1, []])
def test_an_attempt_is_an_object(attempt: Any) -> None:
    assert malformed({**GOOD, "attempts": [attempt]}) is not None
