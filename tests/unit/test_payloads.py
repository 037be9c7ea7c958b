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


@pytest.mark.parametrize("attempt", [None, "text", 1, []])
def test_an_attempt_is_an_object(attempt: Any) -> None:
    assert malformed({**GOOD, "attempts": [attempt]}) is not None
