"""A model converted to a vector and back is unchanged; the bucket holds its gradient after backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from shadho_celery.errors import UsageError
from shadho_celery.training.wire.vectors import Bucket, Shape, is_finite


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 4))


def backward(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    model(torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def test_parameters_and_buffers_are_copied_unchanged() -> None:
    source, target = network(0), network(1)
    backward(source)
    one, other = Shape(source), Shape(target)
    assert one.digest == other.digest
    for here, there in ((one.parameters, other.parameters), (one.buffers, other.buffers)):
        vector = one.vector(here.size)
        here.read(vector)
        there.write(vector)
    pairs = zip(source.state_dict().items(), target.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for (_, a), b in pairs)
    assert target.state_dict()["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_floating_point_types_are_sent_as_float32(kind: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(kind)
    shape = Shape(model)
    vector = shape.vector()
    shape.parameters.read(vector)
    before = [p.clone() for p in model.parameters()]
    shape.parameters.write(vector)
    assert vector.dtype == np.float32
    for a, b in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_tied_parameters_are_sent_once_and_frozen_ones_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert Shape(model).parameters.size == 9 + 3 + 3


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["none", "frozen"])
def test_a_model_without_parameters_is_an_error(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="no parameters"):
        Shape(model)


def test_complex_parameters_are_an_error() -> None:
    with pytest.raises(UsageError, match="complex64"):
        Shape(nn.Linear(2, 2, dtype=torch.complex64))


def test_the_bucket_has_the_gradient_of_every_parameter() -> None:
    model = network()
    shape = Shape(model)
    bucket = Bucket(shape)
    for seed in range(2):
        bucket.armed = True
        backward(model, seed)
        vector = bucket.finish()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert torch.equal(torch.from_numpy(vector), expected)
    bucket.remove()
    vector[:] = 7
    backward(model)
    assert (vector == 7).all()


def test_micro_batches_add_up_in_the_bucket() -> None:
    model = nn.Linear(2, 1)
    bucket = Bucket(Shape(model))
    for number in range(3):
        bucket.armed = number == 2
        model(torch.ones(1, 2)).sum().backward()
    assert bucket.finish().tolist() == [3, 3, 3]


def test_a_parameter_that_was_not_used_has_a_gradient_of_zero() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    bucket = Bucket(Shape(model))
    for used in (0, 1, 0):
        model.zero_grad(set_to_none=True)
        bucket.armed = True
        model[used](torch.ones(1, 2)).sum().backward()
        assert bucket.finish().tolist() == ([1, 1, 0, 0], [0, 0, 1, 1])[used]


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([1.0, -2.0], True),
        ([3e38, 3e38, 3e38], True),
        ([np.inf, 0], False),
        ([np.inf, -np.inf], False),
        ([np.nan], False),
    ],
    ids=["plain", "great", "infinite", "both", "nan"],
)
def test_a_vector_is_finite_if_every_number_is(values: list[float], finite: bool) -> None:
    assert is_finite(np.array(values, dtype=np.float32)) is finite
