"""What comes from a trial's process is one of its records, or is refused: a trial may have written it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, GangCall, Memory, Outcome, ReplicaSeat, TrialState
from shadho_celery.runner.protocol import (
    MAX_TEXT,
    Ended,
    FromChild,
    Gang,
    Ready,
    Refused,
    Reported,
    RunAttempt,
    Tell,
    Threads,
    ToChild,
    decode_from_child,
    decode_to_child,
    encode,
)

ATTEMPT = Attempt(number=7, attempt=2, subspace="all", params={"größe": 0.1, "layers": [1, {"n": None}]}, budget=0.5)
SEAT = ReplicaSeat(address="10.0.0.1:5000", token="secret", rank=2)
ENDED = {"kind": "ended", "order": 1, "outcome": {"state": "COMPLETE", "loss": 0.5}}


@pytest.mark.parametrize(
    "record",
    [
        RunAttempt(
            order=3,
            payload=Payload(study="s", module="m", attempts=[ATTEMPT], timeout=2.5, replica=SEAT),
            checkpoint_dir="/c",
            compute_class="cpu",
            slot=1,
        ),
        Tell(order=3, what="time up"),
        Threads(threads=2),
    ],
    ids=lambda record: type(record).__name__,
)
def test_what_is_sent_to_the_process_is_read_there_in_one_line(record: ToChild) -> None:
    line = encode(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_to_child(line.decode()) == record


@pytest.mark.parametrize(
    "record",
    [
        Ready(),
        Ready(codes={"my_study": CodeVersion(root="/ü", files={"my_study.py": ""}, problem="why")}),
        Refused(order=1, code=CodeVersion(digest="0123456789ab")),
        Reported(order=1, step=-1, loss=float("inf")),
        Gang(order=1, call=GangCall(address="[::1]:5000", token="secret", backups=2, assembled=True)),
        Ended(
            order=1,
            outcome=Outcome(state=TrialState.COMPLETE, loss=0.1, metrics={"a\nb": "ü"}, memory=2**62, warning="w"),
        ),
        Ended(order=1, outcome=Outcome(state=TrialState.FAILED, error="e", out_of_memory=Memory.HOST), is_unfit=True),
    ],
    ids=lambda record: type(record).__name__,
)
def test_what_the_process_sends_is_read_as_it_was(record: FromChild) -> None:
    assert decode_from_child(encode(record)) == record


def ended(**changes: Any) -> dict[str, Any]:
    return {**ENDED, "outcome": {**ENDED["outcome"], **changes}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "sent",
    [
        None,
        [],
        7,
        {},
        {"kind": "over"},
        {"kind": "tell"},
        {"kind": "ended"},
        ended(loss=None),
        ended(state="FAILED"),
        ended(state="RUNNING", loss=None),
        ended(state="WON"),
        ended(loss="0.5"),
        ended(loss=float("nan")),
        ended(loss=float("inf")),
        ended(seconds=float("-inf")),
        ended(seconds=-3597.0),
        ended(memory=-1),
        ended(memory=2**63),
        ended(metrics=[]),
        ended(error=5),
        {**ENDED, "order": "1"},
        {"kind": "ended", "outcome": ENDED["outcome"]},
        {"kind": "reported", "order": 1, "step": 2**63, "loss": 0.0},
        {"kind": "reported", "order": 1, "step": 1.5, "loss": 0.0},
        {"kind": "gang", "order": 1, "call": {"address": "x y:1", "token": "t"}},
        {"kind": "gang", "order": 1, "call": {"address": "h:70000", "token": "t"}},
        {"kind": "gang", "order": 1, "call": {"address": "h:1", "token": "t", "backups": -1}},
    ],
    ids=str,
)
def test_anything_else_is_refused(sent: Any) -> None:
    decode_from_child(json.dumps(ENDED).encode())
    with pytest.raises(ValueError, match=r"."):
        decode_from_child(json.dumps(sent).encode())


@pytest.mark.parametrize("line", [b"", b"not a record", b"{", b"\xff", b'{"kind": "ready"} {}'])
def test_what_is_no_json_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_from_child(line)


@pytest.mark.parametrize("field", ["error", "warning"])
def test_a_text_is_cut_and_half_surrogate_pairs_in_it_are_replaced(field: str) -> None:
    record = decode_from_child(json.dumps(ended(**{field: "a\ud800b" + "ü" * 50_000 + "\udfff"})).encode())
    assert isinstance(record, Ended)
    text = getattr(record.outcome, field)
    assert text == "a?b" + "ü" * (MAX_TEXT - 3)
    assert len(text) < 20_000
