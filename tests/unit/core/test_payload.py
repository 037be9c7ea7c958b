"""A message's payload is looked at before anything is done with it: what it names becomes a folder and an import."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from services.cases import cases

from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import MAX_ATTEMPTS, Attempt, ReplicaSeat

GOOD: dict[str, Any] = {
    "study": "0123456789abcdef",
    "module": "tasks.svm",
    "watched": True,
    "timeout": 3600,
    "attempts": [
        {"number": 0, "attempt": 1, "subspace": "all", "params": {"x": 1.5}, "seed": 7},
        {"number": 2**40, "attempt": 3, "subspace": "all", "params": {}, "seed": 2**62, "budget": 0.5, "origin": 5},
    ],
}


def passes(plain: dict[str, Any]) -> Payload:
    return msgspec.convert(json.loads(json.dumps(plain)), Payload)


def refusal(plain: Any) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(plain, Payload)
    return str(caught.value)


def test_what_schedulers_send_passes() -> None:
    payload = passes(GOOD)
    assert (payload.study, payload.module, payload.watched, payload.timeout) == (GOOD["study"], "tasks.svm", True, 3600)
    assert [(each.number, each.attempt, each.origin) for each in payload.attempts] == [(0, 1, None), (2**40, 3, 5)]
    passes({name: GOOD[name] for name in ("study", "module", "attempts")})
    passes({**GOOD, "attempts": [], "study": "study-1_B", "code": "0123456789ab"})
    passes({**GOOD, "something": "that a later version says"})


def test_what_is_sent_is_read_as_it_was_and_what_goes_without_saying_is_left_out() -> None:
    attempt = Attempt(number=3, attempt=2, subspace="all", params={"x": 1}, compute_class="cpu", not_on="h")
    seat = ReplicaSeat(address="10.0.0.1:5000", token="t", rank=2)
    for payload in (
        Payload(study="s", module="m", attempts=[attempt, attempt.evolve(number=4)], timeout=2.5, watched=True),
        Payload(study="s", module="m", attempts=[attempt], replica=seat),
    ):
        plain = msgspec.to_builtins(payload)
        assert passes(plain) == payload
    assert plain["attempts"] == [
        {"number": 3, "attempt": 2, "subspace": "all", "params": {"x": 1}, "compute_class": "cpu", "not_on": "h"}
    ]
    assert plain.keys() == {"study", "module", "attempts", "replica"}


@pytest.mark.parametrize("attempt", [0, MAX_ATTEMPTS + 1, 2**53])
def test_a_message_with_more_attempts_than_a_trial_may_have_is_refused(attempt: int) -> None:
    [good, *_] = GOOD["attempts"]
    assert passes({**GOOD, "attempts": [{**good, "attempt": MAX_ATTEMPTS}]})
    assert "attempts[0].attempt" in refusal({**GOOD, "attempts": [{**good, "attempt": attempt}]})


@pytest.mark.parametrize("payload", [None, "text", 1, [], [GOOD]])
def test_a_payload_is_an_object(payload: Any) -> None:
    assert "object" in refusal(payload)


@cases(
    "name, value",
    [
        *(("study", value) for value in ("", "..", "../x", "/x", "a/b", "a\nb", "a:b", "ä", "x" * 65, "x\n", None, 5)),
        *(("module", value) for value in ("", ".", "a.", ".a", "a..b", "a-b", "a/b", "os;x", "a b", None, ["a"])),
        *(("attempts", value) for value in (None, {}, "text", 5)),
        *(("watched", value) for value in ("yes", 1, {})),
        *(("timeout", value) for value in ("1", 0, -1, float("nan"), float("inf"), True)),
    ],
)
def test_what_the_payload_says_has_its_form(name: str, value: Any) -> None:
    assert refusal({**GOOD, name: value}).endswith(f"`$.{name}`")


@pytest.mark.parametrize("name", ["study", "module", "attempts"])
def test_what_the_payload_must_say_is_not_left_out(name: str) -> None:
    assert f"`{name}`" in refusal({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize("module", ["a", "a.b", "_a.B9", "größe.学习"])
def test_a_module_has_any_name_that_python_gives_one(module: str) -> None:
    assert passes({**GOOD, "module": module}).module == module


@cases(
    "name, value",
    [
        *(("number", value) for value in (-1, "0", "../x", 1.0, True, None, 2**53, 10**400)),
        *(("attempt", value) for value in (0, -1, "1", 1.5, True, None)),
        *(("params", value) for value in (None, [], "x", 1)),
        *(("seed", value) for value in ("1", 1.5, True, [])),
        *(("budget", value) for value in ("1", float("nan"), float("inf"), True)),
        *(("slots", value) for value in (0, -1, "3", 2.0, True, 10**6)),
        *(("origin", value) for value in (-1, "0", "../x", 1.0, True, 2**53)),
        *((name, value) for name in ("not_on", "only_on") for value in (5, True, [], {})),
        *(("only_on", value) for value in ("a\nb", "x" * 256)),
    ],
)
def test_what_an_attempt_says_has_its_form(name: str, value: Any) -> None:
    good = GOOD["attempts"][0]
    passes({**GOOD, "attempts": [good]})
    assert refusal({**GOOD, "attempts": [good, {**good, name: value}]}).endswith(f"`$.attempts[1].{name}`")


SEAT: dict[str, Any] = {"address": "10.0.0.1:5000", "token": "s3cr3t_=+/.-", "call": 1, "rank": 2}
REPLICA: dict[str, Any] = {**GOOD, "attempts": [{**GOOD["attempts"][0], "slots": 3}], "replica": SEAT}


@pytest.mark.parametrize("address", ["10.0.0.1:1", "node7.cluster:65535", "localhost:5000", "[fe80::1%eth0]:5000"])
def test_a_message_for_a_replica_passes(address: str) -> None:
    assert passes(REPLICA).replica == ReplicaSeat(**SEAT)
    passes({**REPLICA, "replica": {**SEAT, "address": address}})


@cases(
    "name, value",
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
    said = refusal({**REPLICA, "replica": {**SEAT, name: value}})
    assert "$.replica" in said
    assert name in said


def test_a_replica_is_one_of_one_attempt() -> None:
    assert "replica" in refusal({**REPLICA, "attempts": []})
    assert "replica" in refusal({**REPLICA, "attempts": 2 * REPLICA["attempts"]})
    assert "replica" in refusal({**REPLICA, "replica": "text"})


@pytest.mark.parametrize("attempt", [None, "text", 1, []])
def test_an_attempt_is_an_object(attempt: Any) -> None:
    assert refusal({**GOOD, "attempts": [attempt]}).endswith("`$.attempts[0]`")
