"""What the objectives of this process are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadho_celery.core.trial import Attempt, Result
from shadho_celery.objective.context import Context
from shadho_celery.scheduler.executors import HOST, INLINE_CLASS, InlineExecutor


@pytest.mark.parametrize("saves", [True, False])
def test_a_promoted_trial_tells_whether_a_checkpoint_was_there(tmp_path: Path, saves: bool) -> None:
    def objective(params: object, context: Context) -> float:
        folder = context.checkpoint_dir / "parts"
        folder.mkdir(exist_ok=True)
        if saves:
            (folder / "weights").touch()
        return 0.0

    executor = InlineExecutor(objective, lambda params: params, checkpoints=tmp_path)
    found = []
    for number, origin in enumerate([None, 0, 5, 5]):
        executor.submit(
            [Attempt(number=number, attempt=1, subspace="all", params={}, origin=origin, compute_class=INLINE_CLASS)]
        )
        [result] = [event for event in executor.poll(0.0) if isinstance(event, Result)]
        found.append(result.outcome.continued)
    assert found == [None, saves, False, saves]


def test_all_of_this_process_is_on_one_storage() -> None:
    [local] = InlineExecutor(lambda params: 0.0, lambda params: params).classes()
    assert local.storages[HOST]


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
