"""What a model computes and sends, by layer, counted on one forward: a prior for the cost of width (Das et al., arXiv
1602.06709).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: floating-point operations of a backward pass beside those of its forward one
BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer takes for one forward."""

    #: its name in the model
    name: str
    #: floating-point operations of the forward, two for a multiplication and its addition
    flops: float
    #: bytes of its parameters, and so of its gradient
    bytes: int


def count(model: nn.Module, *inputs: Any) -> list[Layer]:
    """Count each layer's flops and bytes by hooks on one forward; `inputs` are a batch as the model takes it.

    Flops are those of linear layers and convolutions; whatever else a model does is small beside them. The model stays
    as it is, statistics of a batch norm and all.
    """
    flops: dict[nn.Module, float] = {}

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        flops[module] = flops.get(module, 0.0) + _flops(module, output)

    named = [(name, module) for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    modes = [(module, module.training) for module in model.modules()]
    handles = [module.register_forward_hook(hook) for _, module in named]
    try:
        model.eval()
        with torch.no_grad():
            model(*inputs)
    finally:
        for module, training in modes:
            module.training = training
        for handle in handles:
            handle.remove()
    return [
        Layer(
            name=name or type(module).__name__,
            flops=flops.get(module, 0.0),
            bytes=sum(p.numel() * p.element_size() for p in module.parameters(recurse=False)),
        )
        for name, module in named
    ]


def prior_seconds(
    layers: Sequence[Layer], *, examples: int, flops_per_second: float, bytes_per_second: float
) -> tuple[float, float]:
    """What b and d of f(m) should be: seconds to compute one example, and seconds to serve one more replica.

    `examples` are those of the counted forward. The coordinator sends the parameters to each replica and gets as many
    bytes of gradient back.
    """
    compute = (1 + BACKWARD) * sum(layer.flops for layer in layers) / examples / flops_per_second
    return compute, 2 * sum(layer.bytes for layer in layers) / bytes_per_second


def _flops(module: nn.Module, output: Any) -> float:
    """Two for each weight and each place of the output that it works on."""
    weight = getattr(module, "weight", None)
    if not isinstance(output, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return 0.0
    if isinstance(module, nn.Linear):
        return 2.0 * weight.numel() * output.numel() / weight.shape[0]
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return 2.0 * weight[0].numel() * output.numel()
    return 0.0
