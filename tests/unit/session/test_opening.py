"""A study that is opened again tells what differs from the run before."""

from __future__ import annotations

from typing import Any

import pytest

from shadho_celery.session.opening import changes


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ("auto", "auto", None),
        ("auto", "cma", "sampler cma from now on, auto until now: it learns from the 7 trials so far"),
        (None, "tpe", "sampler tpe from now on, of its own until now: it learns from the 7 trials so far"),
    ],
)
def test_another_sampler_than_before_is_said(before: str | None, now: str, line: str | None) -> None:
    assert changes({"sampler": before}, {"sampler": now}, 7) == [line] * (line is not None)


def test_other_budgets_than_before_are_said_where_there_are_trials() -> None:
    before = {"sampler": "auto", "fidelity": {"least": 1, "most": 27, "how": "hyperband"}}
    now = {"sampler": "auto", "fidelity": {"least": 1, "most": 81}}
    [line] = changes(before, now, 7)
    assert line == "budgets from now on: 1 to 81, eta 3, auto; until now: 1 to 27, eta 3, hyperband"
    assert changes(before, now, 0) == changes(before, before, 7) == []
    assert "from now on: none; until now: 1 to 27, eta 3" in changes(before, {"sampler": "auto"}, 7)[0]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"fidelity": {"most": 9}}, {"fidelity": {"least": 1.0, "most": 9, "eta": 3, "how": "auto"}}),
        ({"rungs": {"least": 1, "most": 9}}, {"fidelity": {"most": 9, "how": "halving"}}),
        ({}, {"rungs": {"least": 1, "most": 9}}),
    ],
    ids=["defaults", "the same in other words", "not on record"],
)
def test_of_the_same_budgets_and_of_those_that_are_not_on_record_nothing_is_said(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    assert changes({"sampler": "auto", **before}, {"sampler": "auto", **now}, 7) == []
