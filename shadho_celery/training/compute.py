"""One gradient: the mean loss of a batch at the model's parameters, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shadho_celery.errors import UsageError
from shadho_celery.training.data import Batches, Loss, mixed
from shadho_celery.training.vectors import Bucket


class Computer:
    """Computes gradients of one model; each leaves them in ``parameter.grad``, and in the bucket where there is one."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Batches, bucket: Bucket | None = None) -> None:
        self.model, self.batches, self.bucket = model, batches, bucket
        self._loss = loss

    def backward(self, draw: int, slot: int, abandon: Callable[[], bool] | None = None) -> float | None:
        """Mean loss over batch (draw, slot), its gradient left behind; None where `abandon` was true on the way.

        Random draws (dropout) are of (seed, draw, slot) too, so that a gradient can be computed again; the process's
        own generator is left as it was.
        """
        self.model.zero_grad(set_to_none=True)
        self.model.train()
        if self.bucket is not None:
            self.bucket.begin()
        total = 0.0
        with _drawn_from(mixed(self.batches.seed, draw, slot, 1)):
            for place, (part, share) in enumerate(self.batches.parts(draw, slot), 1):
                if abandon is not None and abandon():
                    return None
                if self.bucket is not None:
                    self.bucket.armed = place == self.batches.micro_batches
                value = self._loss(self.model, part)
                if not isinstance(value, torch.Tensor) or value.numel() != 1:
                    raise UsageError("loss(model, batch) must return a tensor with one number, the batch's mean loss")
                # One micro-batch, the usual case, computes just what a plain loop does.
                (value if share == 1 else value * share).backward()
                total += value.item() * share
        return total


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed the generators for the block; that of the CPU then goes on where it was.

    Not ``torch.random.fork_rng`` and ``torch.manual_seed``: they take a quarter of a millisecond, as long as a small
    gradient.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        generator.set_state(state)
