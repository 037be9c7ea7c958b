"""Batches of examples, which depend only on seed, step and place, and the gradient of a batch's mean loss.

Each epoch visits the data in its own permutation. Batch (step, place) is number ``step * places + place`` of the stream
of batches. Replicas have no fixed shards of the data, because a slow replica's shard would then count too little. A
batch may span the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from shadho_celery.errors import UsageError
from shadho_celery.training.wire.vectors import Bucket


class Examples(Protocol):
    """Map-style data set: examples by number, from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


#: tensors of equal first dimension, or a map-style data set
Data = Sequence[Tensor] | Examples
#: (model, batch) -> mean loss, a scalar tensor; a batch is a tuple of tensors, or collated examples of a data set
Loss = Callable[[nn.Module, Any], Tensor]

#: number of permutations kept, because a batch may span two epochs
_KEPT = 2


class Batches:
    """Stream of batches. Raises UsageError for data of an unsupported type, or with fewer examples than one batch."""

    def __init__(self, data: Data, *, batch: int, seed: int, places: int = 1, micro_batches: int = 1) -> None:
        _check_data(data)
        self._data = data
        self._tensors = _tensors_of(data)
        sizes = {len(each) for each in self._tensors} if self._tensors is not None else {len(data)}
        if len(sizes) != 1:
            raise UsageError(f"the data's tensors differ in length, {sorted(sizes)}; give one entry for each example")
        self.size = sizes.pop()
        if batch < 1:
            raise UsageError(f"batch is {batch}; give the number of examples for one gradient, at least 1")
        if self.size < batch:
            raise UsageError(
                f"the data set has {self.size} examples, fewer than a batch of {batch}; give a smaller batch"
            )
        if not 1 <= micro_batches <= batch:
            raise UsageError(f"micro_batches is {micro_batches}; a batch of {batch} has 1 to {batch} parts")
        self.batch, self.seed, self.places, self.micro_batches = batch, seed, places, micro_batches
        self._epochs: dict[int, Tensor] = {}

    @property
    def digest(self) -> str:
        """Text that is equal for equal data and batch size. For tensors it has shapes, types and three examples."""
        described: list[object] = [self.size, self.batch]
        if self._tensors is not None:
            some = sorted({0, self.size // 2, self.size - 1})
            described += [(tuple(t.shape), str(t.dtype), t[some].flatten()[:64].tolist()) for t in self._tensors]
        return repr(described)

    def indices(self, step: int, place: int) -> Tensor:
        """Return the indices of the examples in batch (step, place), int64, shape (batch,)."""
        first = (step * self.places + place) * self.batch
        parts, last = [], first + self.batch
        while first < last:
            epoch, at = divmod(first, self.size)
            parts.append(self._permutation(epoch)[at : at + last - first])
            first += len(parts[-1])
        return torch.cat(parts)

    def parts(self, step: int, place: int) -> Iterator[tuple[object, float]]:
        """Yield the micro-batches of batch (step, place), each with its share of the batch."""
        for chosen in self.indices(step, place).tensor_split(self.micro_batches):
            yield self._pick(chosen), len(chosen) / self.batch

    def _pick(self, chosen: Tensor) -> object:
        if self._tensors is not None:
            return tuple(each[chosen.to(each.device)] for each in self._tensors)
        collated: object = default_collate([self._data[i] for i in chosen.tolist()])
        return collated

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            self._epochs[epoch] = torch.randperm(self.size, generator=generator)
            # Remove the furthest epochs, in either direction: after a restart, an earlier epoch may be needed.
            for old in sorted(self._epochs, key=lambda kept: abs(kept - epoch))[_KEPT:]:
                del self._epochs[old]
        return self._epochs[epoch]


class Computer:
    """Computes gradients of one model. They are left in ``parameter.grad``, and in the bucket if there is one."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Batches, bucket: Bucket | None = None) -> None:
        self.model, self.batches, self.bucket = model, batches, bucket
        self._loss = loss

    def backward(self, draw: int, place: int, abandon: Callable[[], bool] | None = None) -> float | None:
        """Compute the gradient of batch (draw, place). Return the mean loss.

        Returns None if `abandon` returned True before a micro-batch. Random draws of the model (dropout) depend only on
        (seed, draw, place), so a gradient can be computed again. The process's CPU generator keeps its state.
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
                # With a single micro-batch, the usual case, the result equals that of a plain loop to the bit.
                (value if share == 1 else value * share).backward()
                total += value.item() * share
        return total


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed torch's generators for the duration of the `with` block. Restore the CPU's generator after it."""
    # torch.random.fork_rng and torch.manual_seed are avoided: they take 0.25 ms, as long as a small gradient.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def check_loss(loss: object) -> None:
    """Raise UsageError if `loss` is a torch criterion, which takes predictions instead of the model."""
    if isinstance(loss, nn.Module):
        raise UsageError(
            f"loss is a {type(loss).__name__}; give a function of (model, batch) that returns the batch's mean loss, "
            "such as lambda model, batch: criterion(model(batch[0]), batch[1])"
        )


def _tensors_of(data: Data) -> Sequence[Tensor] | None:
    """Return the data if they are a tuple or list of tensors, else None."""
    if isinstance(data, tuple | list) and all(isinstance(each, Tensor) for each in data):
        return data
    return None


def _check_data(data: object) -> None:
    """Raise UsageError for containers of data that a gang does not support."""
    wanted = "give tensors of equal length, or a Dataset with len() and data[i]"
    if isinstance(data, DataLoader):
        raise UsageError(
            "data is a DataLoader; give its data set (loader.dataset), because a gang draws the batches itself"
        )
    if isinstance(data, tuple) and any(isinstance(each, np.ndarray) for each in data):
        raise UsageError(f"data are numpy arrays; {wanted}; torch.as_tensor converts an array")
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(f"data is a {type(data).__name__}; {wanted}")


def mixed(*numbers: int) -> int:
    """Return a seed of 63 bits that differs if any of the numbers differs (SplitMix64, Steele et al., 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = 2**64 - 1
