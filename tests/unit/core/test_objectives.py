"""Losses to maximise are negative inside, and nobody sees it; a study keeps its objectives."""

from __future__ import annotations

import pytest

from shadho_celery.core.trial import refuse_others, turned
from shadho_celery.errors import UsageError

TWO = {"error": "minimize", "accuracy": "maximize"}


def test_what_is_maximised_is_turned_and_turned_back() -> None:
    inside = turned({"error": 0.25, "accuracy": 0.75}, TWO)
    assert inside == {"error": 0.25, "accuracy": -0.75}
    assert turned(inside, TWO) == {"error": 0.25, "accuracy": 0.75}
    assert str(turned({"accuracy": 0.0}, TWO)) == "{'accuracy': 0.0}"


@pytest.mark.parametrize("others", [None, {"error": "minimize"}, {"accuracy": "maximize", "error": "minimize"}])
def test_a_study_is_resumed_with_the_objectives_it_was_begun_with(others: dict[str, str] | None) -> None:
    refuse_others(TWO, {})
    refuse_others(TWO, {"sampler": "tpe", "objectives": dict(TWO)})
    with pytest.raises(UsageError, match="started with other objectives: minimize error, maximize accuracy, not"):
        refuse_others(others, {"objectives": dict(TWO)})
    with pytest.raises(UsageError, match="one loss without a name, not minimize error, maximize accuracy"):
        refuse_others(TWO, {"sampler": "tpe"})
