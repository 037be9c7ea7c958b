"""Every strategy over real sockets, with real processes as replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shadho_celery.objective.context import LocalContext
from shadho_celery.training.gang import Gang, gang
from shadho_celery.training.report import Report
from shadho_celery.training.strategies import Async, Average, Elastic, Strategy, Sync
from shadho_celery.training.wire.vectors import Quantize

SIZE, ROWS = 40, 200
INPUTS = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS @ torch.linspace(-1, 1, SIZE)[:, None]

#: by name: strategy, and steps in which it comes near the solution
MODES: dict[str, tuple[Strategy, int]] = {
    "sync": (Sync(replicas=3), 150),
    "async": (Async(replicas=3), 400),
    "average": (Average(replicas=3, tau=4, delay=2), 60),
    "average with a backup": (Average(replicas=2, tau=4, delay=1, backups=1), 60),
    "elastic": (Elastic(replicas=3, alpha=0.3, every=2), 300),
}


def mean_square(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


def trained(folder: Path, strategy: Strategy, steps: int, codec: Quantize | None = None) -> tuple[float, Report, Gang]:
    """Train on a linear problem; return the loss on all of it."""
    torch.manual_seed(0)
    model = nn.Linear(SIZE, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    context = LocalContext(checkpoints=folder)
    with gang(context, strategy=strategy, codec=codec) as g:
        report = g.fit(model, optimizer, (INPUTS, TARGETS), mean_square, steps=steps, batch=16, checkpoint_every=0)
    with torch.no_grad():
        return float(mean_square(model, (INPUTS, TARGETS))), report, g


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "steps"), MODES.values(), ids=MODES)
def test_a_strategy_solves_a_linear_problem_and_leaves_no_process(
    tmp_path: Path, strategy: Strategy, steps: int
) -> None:
    loss, report, g = trained(tmp_path, strategy, steps)
    start = float((TARGETS**2).mean())
    assert loss < 0.1 * start
    assert report.steps == steps
    assert not g.processes.alive()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Sync(replicas=2), Average(replicas=2, tau=2)], ids=["sync", "average"])
def test_four_bits_solve_a_linear_problem_with_fewer_bytes(tmp_path: Path, strategy: Strategy) -> None:
    loss, quantised, _ = trained(tmp_path / "four", strategy, 150, Quantize(4))
    _, raw, _ = trained(tmp_path / "raw", strategy, 150)
    assert loss < 0.1 * float((TARGETS**2).mean())
    assert quantised.bytes_in < raw.bytes_in
