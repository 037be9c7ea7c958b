"""The names that a command's help shows are those of what there is."""

from __future__ import annotations

import pytest

from shadho_celery import samplers
from shadho_celery.core.settings import EARLIER_DEFAULTS, IN_FORCE, KEPT, SAMPLERS, StudySettings, changes


def test_the_names_of_samplers_are_those_of_the_samplers_that_there_are() -> None:
    assert tuple(samplers.SAMPLERS) == SAMPLERS


def test_each_setting_that_is_kept_as_it_was_in_force_has_the_default_of_the_versions_that_did_not_keep_it() -> None:
    assert {*IN_FORCE} == {*EARLIER_DEFAULTS} <= {*KEPT}
    assert StudySettings(sampler="tpe").in_force()["sampler"] == "tpe"
    assert StudySettings(**EARLIER_DEFAULTS).in_force() == EARLIER_DEFAULTS


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
    assert line == (
        "budgets from now on: least 1, most 81; until now: least 1, most 27, how hyperband; trials of other budgets "
        "are not promoted"
    )
    assert changes(before, now, 0) == changes(before, before, 7) == []
    assert "from now on: none; until now: least 1, most 27" in changes(before, {"sampler": "auto"}, 7)[0]
