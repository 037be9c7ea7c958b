"""Flops and bytes of a model by layer, counted on one forward pass: a prior for the advisor's step times.

Follows Das et al., arXiv 1602.06709.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

#: floating-point operations of a backward pass, as a multiple of the forward pass
BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Cost of one layer in one forward pass."""

    #: name in the model
    name: str
    #: floating-point operations; a multiplication with its addition counts as two
    flops: float
    #: bytes of the parameters, and so of the gradient
    bytes: int


def count(model: nn.Module, *inputs: object) -> list[Layer]:
    """Count the flops and bytes of each layer with hooks, in one forward pass on `inputs`, the model's arguments.

    Flops are counted for linear layers and convolutions only; those of other layers are small in comparison. The model
    is left unchanged, including the statistics of batch norms.
    """
    flops: dict[nn.Module, float] = {}

    def hook(module: nn.Module, _: object, output: object) -> None:
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
    """Return a prior for b and d of f(m): seconds to compute one example, and seconds to serve one more replica.

    `examples` is the batch size of the counted forward pass. The coordinator sends the parameters to each replica, and
    receives a gradient of the same length.
    """
    compute = (1 + BACKWARD) * sum(layer.flops for layer in layers) / examples / flops_per_second
    return compute, 2 * sum(layer.bytes for layer in layers) / bytes_per_second


def _flops(module: nn.Module, output: object) -> float:
    """Return two flops for each pair of a weight and an output element to which it contributes."""
    weight = getattr(module, "weight", None)
    if not isinstance(output, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return 0.0
    if isinstance(module, nn.Linear):
        return 2.0 * weight.numel() * output.numel() / weight.shape[0]
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return 2.0 * weight[0].numel() * output.numel()
    return 0.0
