"""Events arrive as they were sent. Malformed ones, and those that are not signed with our key, are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.cases import cases

from shadho_celery.core.trial import (
    MAX_ATTEMPTS,
    MAX_LEVELS,
    Called,
    Event,
    GangCall,
    GangEvent,
    Lost,
    Memory,
    Outcome,
    ReplicaFailed,
    Report,
    Result,
    Retry,
    Started,
    TrialState,
)
from shadho_celery.fleet.channel import MAX_EVENT, unseal
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.objective.result import MAX_DEPTH, read

SIGNER = Signer(b"a key of sixteen bytes")
STARTED = Started(number=0, attempt=1, host="größe", at=1.5, worker="w")
RESULT = Result(
    number=2**53 - 1,
    attempt=3,
    outcome=Outcome(
        state=TrialState.COMPLETE, loss=0.1, metrics={"{": [None, {"ü": 1e300}]}, memory=2**62, warning="w"
    ),
    host="h",
    compute_class="gpu_large",
    at=2.5,
    worker="w",
)
EVENTS: list[Event | GangEvent] = [
    STARTED,
    Report(number=0, attempt=1, step=-(2**63), loss=-math.inf, at=0.0),
    RESULT,
    Result(
        number=0,
        attempt=1,
        outcome=Outcome(state=TrialState.FAILED, error="文字 \x00 \ud800\n", out_of_memory=Memory.HOST),
        at=0.0,
    ),
    Lost(number=0, attempt=1, reason="silence", claimed=False),
    Called(number=0, attempt=1, call=2, gang=GangCall(address="h:1", token="t", backups=1, assembled=True), at=0.0),
    ReplicaFailed(number=0, attempt=1, call=1, rank=2, error="e", host="h", at=0.0),
]


@cases("event", EVENTS)
@cases("signer", [UNSIGNED, SIGNER])
def test_an_event_arrives_as_it_was_sent(event: Event | GangEvent, signer: Signer) -> None:
    assert unseal("k1", signer.seal("k1", event), signer) == event


def test_a_loss_that_is_no_number_arrives_too() -> None:
    told = unseal("k1", UNSIGNED.seal("k1", Report(number=0, attempt=1, step=1, loss=math.nan, at=0.0)), UNSIGNED)
    assert isinstance(told, Report)
    assert math.isnan(told.loss)


def test_with_a_key_only_what_it_signed_for_this_study_arrives() -> None:
    sealed = SIGNER.seal("k1", STARTED)
    assert unseal("k2", sealed, SIGNER) is None
    assert unseal("k1", sealed.replace('"attempt":1', '"attempt":2'), SIGNER) is None
    assert unseal("k1", Signer(b"another key of sixteen bytes").seal("k1", STARTED), SIGNER) is None
    assert unseal("k1", UNSIGNED.seal("k1", STARTED), SIGNER) is None
    assert unseal("k1", sealed, UNSIGNED) == STARTED, "who has no key takes what is signed, too"


@cases("text", ["", "{", "{}", "[]", "5", "none", "{" * 100_000, '{"kind": "started"}', '{"a": 1} {'])
@cases("signature", ["", "0" * 64, "ü", "\udcff"])
def test_what_is_no_event_does_not_arrive(text: str, signature: str) -> None:
    assert unseal("k1", signature + text, UNSIGNED) is None
    assert unseal("k1", signature + text, SIGNER) is None


def test_an_event_of_more_attempts_than_a_trial_may_have_does_not_arrive() -> None:
    for attempt in (MAX_ATTEMPTS, MAX_ATTEMPTS + 1):
        event = Lost(number=0, attempt=attempt, reason="silence")
        assert unseal("k1", UNSIGNED.seal("k1", event), UNSIGNED) == (event if attempt == MAX_ATTEMPTS else None)


def changed(**changes: Any) -> str:
    return json.dumps(
        {"kind": "result", "number": 0, "attempt": 1, "at": 0.0, "outcome": {"state": "FAILED"}, **changes}
    )


@cases(
    "changes",
    [
        {"number": -1},
        {"number": 2**53},
        {"number": "0"},
        {"attempt": 0},
        {"at": math.inf},
        {"at": math.nan},
        {"outcome": None},
        {"outcome": {"state": "WON"}},
        *({"outcome": {"state": state}} for state in ("WAITING", "QUEUED", "RUNNING", "LOST", "COMPLETE")),
        {"outcome": {"state": "FAILED", "loss": 0.0}},
        {"outcome": {"state": "COMPLETE", "loss": math.nan}},
        {"outcome": {"state": "COMPLETE", "loss": 0.0, "memory": 2**63}},
        {"outcome": {"state": "COMPLETE", "loss": 0.0, "seconds": -3597.0}},
        {"kind": "won"},
        {"at": None},
        {"at": -1.0},
        {"at": 1e12},
        *({name: text} for name in ("host", "worker", "compute_class") for text in (5, "a\0b", "\ud800", 256 * "x")),
        *({"outcome": {"state": "FAILED", "seconds": seconds}} for seconds in (-1.0, math.nan, math.inf, 1e11, "1")),
        *({"outcome": {"state": "FAILED", "memory": memory}} for memory in (-1, 1.5, math.nan)),
        *({"outcome": {"state": "FAILED", name: 20_000 * "x"}} for name in ("error", "warning")),
        *(
            {"outcome": {"state": "FAILED", "metrics": metrics}}
            for metrics in ([], {"a": math.nan}, {"a": [-math.inf]})
        ),
        {"outcome": {"state": "COMPLETE", "loss": -math.inf}},
        {"outcome": {"state": "PRUNED", "loss": math.nan}},
    ],
)
def test_an_event_with_a_wrong_field_does_not_arrive(changes: dict[str, Any]) -> None:
    assert unseal("k1", changed(), UNSIGNED) is not None
    assert unseal("k1", changed(**changes), UNSIGNED) is None


def test_no_worker_says_whether_a_trial_is_tried_again() -> None:
    told = Result(
        number=0, attempt=1, outcome=Outcome(state=TrialState.FAILED), at=0.0, retry=Retry(reason="I would like it")
    )
    assert unseal("k1", SIGNER.seal("k1", told), SIGNER) is None


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else 1.0


def test_metrics_that_no_encoder_could_take_do_not_arrive_and_those_of_an_objective_do() -> None:
    deepest: Any = 1.0
    for _ in range(MAX_DEPTH + 1):
        deepest = [deepest]
    outcome = read({"loss": 0.0, "deep": deepest})
    assert outcome.warning is None
    told = Result(number=0, attempt=1, outcome=outcome, at=0.0)
    assert unseal("k1", UNSIGNED.seal("k1", told), UNSIGNED) == told
    for levels in (MAX_LEVELS + 1, 500, 900):
        assert unseal("k1", changed(outcome={"state": "FAILED", "metrics": nested(levels)}), UNSIGNED) is None


def test_an_event_of_many_megabytes_is_not_read() -> None:
    assert unseal("k1", "{" + MAX_EVENT * " " + changed()[1:], UNSIGNED) is None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all fields."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))


@pytest.mark.slow
@given(st.data())
def test_whatever_stands_in_a_field_the_event_is_refused_or_can_be_recorded(data: st.DataObject) -> None:
    event = data.draw(st.sampled_from(EVENTS))
    plain = msgspec.to_builtins(event)
    *path, last = data.draw(st.sampled_from([place for place in places(plain) if place]))
    parent = plain
    for key in path:
        parent = parent[key]
    parent[last] = data.draw(JSON_VALUES)
    told = unseal("k1", json.dumps(plain), UNSIGNED)
    if told is not None:
        assert 0 <= getattr(told, "at", 0.0) <= 1e11
        names = [getattr(told, name, None) or "" for name in ("host", "worker", "compute_class")]
        assert all(len(name) < 256 and "\0" not in name and name.encode() for name in names if name)
    if isinstance(told, Result):
        assert told.outcome.loss is None or math.isfinite(told.outcome.loss)
        assert (told.outcome.seconds or 0) >= 0 <= (told.outcome.memory or 0)
        json.dumps(msgspec.to_builtins(told.outcome.metrics), allow_nan=False)
