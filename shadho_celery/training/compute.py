"""Gradient of one batch's mean loss at the model's parameters, computed by micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shadho_celery.errors import UsageError
from shadho_celery.training.data import Batches, Loss, mixed
from shadho_celery.training.vectors import Bucket


class Computer:
    """Backward passes of one model. The gradient is left in ``parameter.grad``, and in the bucket if there is one."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Batches, bucket: Bucket | None = None) -> None:
        self.model, self.batches, self.bucket = model, batches, bucket
        self._loss = loss

    def backward(self, draw: int, place: int, abandon: Callable[[], bool] | None = None) -> float | None:
        """Compute the gradient of batch (draw, place). Return the mean loss.

        Returns None if `abandon` returned True between two micro-batches. Random draws of the model (dropout) also
        depend on (seed, draw, place), so a gradient can be computed again. The process's own generator keeps its state.
        """
        self.model.zero_grad(set_to_none=True)
        self.model.train()
        if self.bucket is not None:
            self.bucket.begin()
        total = 0.0
        with _drawn_from(mixed(self.batches.seed, draw, place, 1)):
            for number, (part, share) in enumerate(self.batches.parts(draw, place), 1):
                if abandon is not None and abandon():
                    return None
                if self.bucket is not None:
                    self.bucket.armed = number == self.batches.micro_batches
                value = self._loss(self.model, part)
                if not isinstance(value, torch.Tensor) or value.numel() != 1:
                    raise UsageError("loss(model, batch) must return a tensor with one number, the batch's mean loss")
                # A single micro-batch, the usual case, computes the same bits as a plain loop.
                (value if share == 1 else value * share).backward()
                total += value.item() * share
        return total


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed the generators for the duration of the block, and restore that of the CPU after it."""
    # Not `torch.random.fork_rng` and `torch.manual_seed`: they take 0.25 ms, as long as a small gradient.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        generator.set_state(state)
