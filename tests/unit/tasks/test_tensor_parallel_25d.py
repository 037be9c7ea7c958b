"""The spread network: eight processes compute what one does, and send what the formula says."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from shadho_celery.objective.context import LocalContext
from tasks import tensor_parallel_25d as task

STEPS = 10
PARAMS = {"width": 64, "learning_rate": 2.0}
LAYERS = [(task.SETTINGS.inputs, 64), (64, task.SETTINGS.outputs)]

# Eight processes start: seconds, or a minute where the machine is busy.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_launch")]


CUBE = (2, 2, 2)


@cache
def spread(shape: tuple[int, ...] = CUBE) -> task.Learned:
    size = int(np.prod(shape))
    context = LocalContext(budget=STEPS, seed=3, gpus=size, slots=size)
    learned = context.launch(task.spread, PARAMS, shape)
    assert isinstance(learned, task.Learned)
    return learned


def alone() -> dict[str, Any]:
    """The same learning in this process, by torch's own products."""
    whole = task.problem(PARAMS["width"], seed=3)
    weights = [weight.requires_grad_() for weight in whole.weights]
    descent = torch.optim.SGD(weights, lr=PARAMS["learning_rate"])
    losses = []
    for _ in range(STEPS):
        descent.zero_grad()
        outputs = torch.nn.functional.gelu(whole.x @ weights[0]) @ weights[1]
        loss = (outputs - whole.y).square().mean()
        loss.backward()
        losses.append(loss.item())
        descent.step()
    matrices = (outputs, *(weight.grad for weight in weights), *weights)
    return {"losses": losses, "matrices": [matrix.detach().numpy() for matrix in matrices]}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CUBE, (2, 2, 1), (4,)], ids=["2.5-D", "2-D", "1-D"])
def test_forward_and_backward_equal_one_process(shape: tuple[int, ...]) -> None:
    expected, learned = alone(), spread(shape)
    assert learned.losses == pytest.approx(expected["losses"], abs=1e-5)
    assert learned.outputs is not None
    found = [learned.outputs, *learned.gradients, *learned.weights]
    for mine, its in zip(found, expected["matrices"], strict=True):
        assert np.abs(its).max() > 1e-3  # there is something to compare
        np.testing.assert_allclose(mine, its, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_bytes_sent_are_those_of_the_formula() -> None:
    """By hand for q = d = 2: three products (two for the first layer) move X once and W twice; W there and back."""
    rows = task.SETTINGS.rows
    by_hand = [
        4 * (products * (rows * inputs + 2 * inputs * outputs) + 2 * inputs * outputs)
        for products, (inputs, outputs) in zip((2, 3), LAYERS, strict=True)
    ]
    formula = [
        task.bytes_of_layer(2, 2, rows, *sizes, first=first) for first, sizes in zip((True, False), LAYERS, strict=True)
    ]
    assert formula == by_hand
    assert spread().sent == STEPS * sum(formula)


def test_on_a_line_the_outputs_are_sent_to_the_first_process_and_back() -> None:
    assert spread((4,)).sent == STEPS * 4 * 2 * (4 - 1) * task.SETTINGS.rows * task.SETTINGS.outputs


def test_a_process_of_a_cube_holds_an_eighth_of_the_rows_and_a_quarter_of_the_weights() -> None:
    rows = task.SETTINGS.rows * (task.SETTINGS.inputs + task.SETTINGS.outputs)
    weights = 64 * (task.SETTINGS.inputs + task.SETTINGS.outputs)
    assert spread().held == rows // 8 + weights // 4
    assert spread((4,)).held == rows + weights // 4


def test_it_stops_when_told_to() -> None:
    seen: list[int] = []
    context = LocalContext(
        gpus=8, slots=8, on_report=lambda step, loss: seen.append(step), stopped=lambda: len(seen) >= 2
    )
    assert task.objective(PARAMS, context)["steps"] == 2
