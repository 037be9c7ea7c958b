"""How slots are shared out between studies."""

from __future__ import annotations

import pytest

from shadho_celery.fleet.workers import allow


@pytest.mark.parametrize(
    ("slots", "weight", "others", "allowance"),
    [
        (8, 1.0, [], 8),
        (8, 1.0, [(1.0, 8)], 4),
        (8, 3.0, [(1.0, 8)], 6),
        (8, 1.0, [(1.0, 2)], 6),
        (8, 1.0, [(1.0, 0)], 8),
        (9, 1.0, [(1.0, 1), (1.0, 9)], 4),
        (9, 1.0, [(1.0, 9), (1.0, 1)], 4),
        (0, 1.0, [(1.0, 5)], 0),
    ],
)
def test_slots_go_by_weight_and_what_a_study_does_not_want_goes_to_those_that_do(
    slots: int, weight: float, others: list[tuple[float, float]], allowance: float
) -> None:
    assert allow(slots, weight, others) == pytest.approx(allowance)


def test_studies_that_want_all_get_all_together() -> None:
    weights = [0.5, 1.0, 2.0, 7.0]
    parts = [allow(10, mine, [(w, 10) for w in weights[:i] + weights[i + 1 :]]) for i, mine in enumerate(weights)]
    assert sum(parts) == pytest.approx(10)
