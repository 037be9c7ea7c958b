"""A small training: a network with everything that travels or is drawn, and data that it learns in a moment."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

PIXELS = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
DATA = (PIXELS, (PIXELS[:, 0] > 0).long())


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def descent(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters and buffers are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
