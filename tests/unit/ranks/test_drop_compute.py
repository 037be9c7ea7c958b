"""DropCompute: the choice of a deadline by recorded times, and the mean over what ranks have computed until then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services.ranks import in_slots
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import LocalContext
from shadho_celery.ranks import DropCompute, process_group
from shadho_celery.ranks.drop_compute import best_deadline
from shadho_celery.ranks.launch import RankContext

pytestmark = pytest.mark.timeout(120)

MICRO_BATCHES = 4


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def straggling(steps: int, ranks: int, seed: int) -> np.ndarray:
    """Seconds at which micro-batches end: .05 s for four, and one rank in twenty takes four to many times as long."""
    generator = np.random.default_rng(seed)
    slow = generator.random((steps, ranks, 1)) < 0.05
    factors = np.where(slow, 4 * (1 + generator.pareto(2, slow.shape)), 1.0)
    return np.cumsum(np.broadcast_to(factors * 0.05 / MICRO_BATCHES, (steps, ranks, MICRO_BATCHES)), axis=-1)


def outcome(ends: np.ndarray, deadline: float) -> tuple[float, float]:
    """Return the share of micro-batches that a deadline keeps, and the seconds of all steps, by a plain loop."""
    kept, seconds = 0, 0.0
    for step in ends:
        slowest = 0.0
        for rank in step:
            began = 0.0
            for number, end in enumerate(rank):
                if number and began >= deadline:
                    break
                kept, began = kept + 1, end
            slowest = max(slowest, began)
        seconds += slowest
    return kept / ends.size, seconds


@pytest.mark.parametrize("seed", range(3))
def test_a_deadline_keeps_its_share_also_of_times_that_it_has_not_seen_and_makes_steps_shorter(seed: int) -> None:
    deadline = best_deadline(straggling(200, 8, seed), 0.0, 0.8)
    later = straggling(200, 8, seed + 100)
    share, seconds = outcome(later, deadline)
    assert share > 0.78
    assert seconds * 1.5 < later.max(axis=(1, 2)).sum()
    assert outcome(straggling(200, 8, seed), deadline)[0] >= 0.8


def test_equal_ranks_get_no_deadline() -> None:
    ends = np.cumsum(np.full((20, 4, MICRO_BATCHES), 0.05), axis=-1)
    assert best_deadline(ends, 0.01, 0.8) == math.inf
    assert best_deadline(ends[..., :1], 0.01, 0.8) == math.inf, "a step of one micro-batch cannot be cut"


def test_the_gradient_is_the_mean_over_the_micro_batches_of_all_ranks(tmp_path: Path) -> None:
    """Rank 1 computes two of four micro-batches until the deadline. The parameters begin as those of rank 0."""

    def objective(context: LocalContext) -> None:
        clock = Hands()
        with process_group(context) as pg:
            torch.manual_seed(pg.rank)
            model = nn.Linear(1, 1)
            inputs = [torch.full((1, 1), float(10 * pg.rank + number)) for number in range(MICRO_BATCHES)]
            drop = DropCompute(pg, model, deadline=1.5, now=clock)
            counted = []
            for part in drop.parts(inputs):
                model(part).sum().backward()
                counted.append(part.item())
                clock.time += 0.1 if pg.rank == 0 else 1.0
            assert counted == ([0.0, 1.0, 2.0, 3.0] if pg.rank == 0 else [10.0, 11.0])
            count = drop.reduce()
            (tmp_path / f"weight-{pg.rank}").write_text(str(model.weight.item()))
        assert count == 6
        assert model.weight.grad is not None
        assert model.weight.grad.item() == pytest.approx((0 + 1 + 2 + 3 + 10 + 11) / 6)
        assert drop.share == 6 / 8

    in_slots(2, objective, checkpoints=tmp_path)
    assert (tmp_path / "weight-0").read_text() == (tmp_path / "weight-1").read_text()


def choosing(context: RankContext) -> tuple[list[float | None], list[float]]:
    """Return the deadlines and shares of 60 steps, in which ranks are slow by turns."""
    clock = Hands()
    model = DistributedDataParallel(nn.Linear(1, 1))
    drop = DropCompute(context, model, record=4, now=clock)
    deadlines, shares = [], []
    for step in range(60):
        # Each rank is slow in one step of four; from step 30 on, rank 1 is slow always.
        is_slow = step % 4 == 2 * context.rank or (step >= 30 and context.rank == 1)
        for number, _ in enumerate(drop.parts(range(MICRO_BATCHES))):
            model(torch.ones(1, 1)).sum().backward()
            clock.time += 3.0 if is_slow and number else 1.0
        drop.reduce()
        deadlines.append(drop.deadline)
        shares.append(drop.share)
    (context.checkpoint_dir / f"deadlines-{context.rank}").write_text(str(deadlines))
    return deadlines, shares


@pytest.mark.slow
@pytest.mark.usefixtures("forked_launch")
def test_every_rank_chooses_the_same_deadline_and_chooses_again_when_it_keeps_too_few(tmp_path: Path) -> None:
    """Also with DistributedDataParallel, which must not reduce the gradients itself, and in ranks of a launch."""
    deadlines, shares = LocalContext(gpus=2, slots=2, checkpoints=tmp_path).launch(choosing)
    assert (tmp_path / "deadlines-0").read_text() == (tmp_path / "deadlines-1").read_text()
    assert deadlines[:3] == [None, None, None]
    assert deadlines[3] is not None
    assert 3.0 < deadlines[3] < math.inf
    assert shares[29] >= 0.8
    assert None in deadlines[30:], "times were recorded again"


def test_a_deadline_below_one_micro_batch_keeps_the_first_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Hands()
    with process_group(LocalContext(checkpoints=tmp_path)) as pg:
        drop = DropCompute(pg, nn.Linear(1, 1), deadline=0.001, now=clock)
        for _ in range(3):
            for _ in drop.parts(range(MICRO_BATCHES)):
                clock.time += 1.0
            assert drop.reduce() == 1
    [said] = [record.getMessage() for record in caplog.records if "deadline" in record.getMessage()]
    assert said.startswith("the deadline of 0.001 s is less than a micro-batch takes (1 s), so only the first one")


def test_ranks_with_unequal_numbers_of_micro_batches_are_refused(tmp_path: Path) -> None:
    def objective(context: LocalContext) -> None:
        with process_group(context) as pg:
            model = nn.Linear(1, 1)
            drop = DropCompute(pg, model)
            for _ in drop.parts(range(2 + pg.rank)):
                model(torch.ones(1, 1)).sum().backward()
            drop.reduce()

    with pytest.raises(ShadhoError, match=r"have 5 micro-batches in all, but .* give each rank the same number"):
        in_slots(2, objective, checkpoints=tmp_path)


def test_a_shorter_step_is_not_recorded(tmp_path: Path) -> None:
    """Such as the last one of an epoch."""
    with process_group(LocalContext(checkpoints=tmp_path)) as pg:
        drop = DropCompute(pg, nn.Linear(1, 1), record=3)
        for count in (4, 2, 4, 4):
            assert drop.deadline is None
            list(drop.parts(range(count)))
            assert drop.reduce() == count
        assert drop.deadline is not None


def test_bad_arguments_are_one_line(tmp_path: Path) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "keep is 0; give the share": {"keep": 0},
        "keep is 1.5": {"keep": 1.5},
        "record is 0; give a whole number from 1 up": {"record": 0},
        "deadline is 0; give a number of seconds above 0": {"deadline": 0},
        "deadline is nan": {"deadline": math.nan},
    }
    with process_group(LocalContext(checkpoints=tmp_path)) as pg:
        for says, arguments in wrong.items():
            with pytest.raises(UsageError, match=says):
                DropCompute(pg, nn.Linear(1, 1), **arguments)
