"""What the objectives of this process are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadho_celery.core.trial import Attempt, Result
from shadho_celery.executors.inline import INLINE_CLASS, InlineExecutor
from shadho_celery.objective.context import Context


@pytest.mark.parametrize(("budget", "given"), [(3.0, "3"), (3, "3"), (0.5, "0.5"), (None, "None")])
def test_a_budget_that_the_store_gave_back_as_a_float_is_whole_again(
    budget: float | None, given: str, tmp_path: Path
) -> None:
    def objective(params: object, context: Context) -> dict[str, object]:
        return {"loss": 0.0, "budget": repr(context.budget)}

    executor = InlineExecutor(objective, lambda params: params, checkpoints=tmp_path)
    executor.submit(
        [Attempt(number=0, attempt=1, subspace="all", params={}, budget=budget, compute_class=INLINE_CLASS)]
    )
    [result] = [event for event in executor.poll(0.0) if isinstance(event, Result)]
    assert result.outcome.metrics["budget"] == given
