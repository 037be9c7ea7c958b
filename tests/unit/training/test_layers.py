"""Counting of flops and bytes by layer leaves the model unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shadho_celery.training.layers import count, prior_seconds


def test_flops_and_bytes_are_counted_by_layer() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10)
    )
    layers = {layer.name: layer for layer in count(model, torch.zeros(5, 3, 4, 4))}
    assert list(layers) == ["0", "1", "4"]
    # Each of 5 x 8 x 16 outputs takes 3 x 9 products.
    assert layers["0"].flops == 2 * 27 * 5 * 8 * 16
    assert layers["4"].flops == 2 * 128 * 10 * 5
    assert layers["1"].flops == 0
    assert layers["4"].bytes == 4 * (1280 + 10)
    assert sum(layer.bytes for layer in layers.values()) == 4 * sum(p.numel() for p in model.parameters())


def test_counting_leaves_no_hook_behind() -> None:
    model = nn.Linear(2, 2)
    count(model, torch.zeros(1, 2))
    with pytest.raises(RuntimeError):
        count(model, torch.zeros(1, 3))
    assert not model._forward_hooks


def test_counting_changes_no_statistics_and_no_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count(model, torch.randn(8, 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, True, False]
    assert model.training


def test_the_prior_is_three_forward_passes_of_flops_and_both_directions_of_bytes() -> None:
    layers = count(nn.Linear(100, 10, bias=False), torch.zeros(4, 100))
    compute, serve = prior_seconds(layers, examples=4, flops_per_second=1e3, bytes_per_second=1e4)
    assert compute == pytest.approx(3 * 2 * 1000 / 1e3)
    assert serve == pytest.approx(2 * 4000 / 1e4)
