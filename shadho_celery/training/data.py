"""Which examples a gradient is taken on: a function of seed, step and place, and of nothing else.

The data are gone through in epochs, each a permutation of its own. Batch (step, slot) is number
``step * places + slot`` of the stream of batches that this makes, so no replica has a shard of its own: what a slow one
misses is not always the same. A batch may reach over the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from shadho_celery.errors import UsageError

#: tensors of equal first dimension, or anything with `len` and whole numbers as keys (a map-style Dataset)
Data = Sequence[Tensor] | Any
#: (model, batch) -> mean loss, a scalar tensor
Loss = Callable[[nn.Module, Any], Tensor]

#: permutations kept: a batch may lie in two epochs
_KEPT = 2


class Batches:
    """The stream of batches. Raises UsageError where the data are fewer than one batch."""

    def __init__(self, data: Data, *, batch: int, seed: int, places: int = 1, micro_batches: int = 1) -> None:
        _check(data)
        self.tensors = isinstance(data, tuple | list) and all(isinstance(each, Tensor) for each in data)
        sizes = {len(each) for each in data} if self.tensors else {len(data)}
        if len(sizes) != 1:
            raise UsageError(f"the data's tensors differ in length, {sorted(sizes)}; give one entry for each example")
        self.size = sizes.pop()
        if batch < 1:
            raise UsageError(f"batch is {batch}; give the number of examples of one gradient, from 1 up")
        if self.size < batch:
            raise UsageError(
                f"the data set has {self.size} examples, fewer than a batch of {batch}; give a smaller batch"
            )
        if not 1 <= micro_batches <= batch:
            raise UsageError(f"micro_batches is {micro_batches}; a batch of {batch} has 1 to {batch} parts")
        self.batch, self.seed, self.places, self.micro_batches = batch, seed, places, micro_batches
        self._data = data
        self._epochs: dict[int, Tensor] = {}

    @property
    def digest(self) -> str:
        """Equal for equal data and batches, as far as a look at some examples of tensors tells."""
        described: list[Any] = [self.size, self.batch]
        if self.tensors:
            some = sorted({0, self.size // 2, self.size - 1})
            described += [(tuple(t.shape), str(t.dtype), t[some].flatten()[:64].tolist()) for t in self._data]
        return repr(described)

    def indices(self, step: int, slot: int) -> Tensor:
        """Examples of batch (step, slot), int64, shape (batch,)."""
        first = (step * self.places + slot) * self.batch
        parts, last = [], first + self.batch
        while first < last:
            epoch, at = divmod(first, self.size)
            parts.append(self._permutation(epoch)[at : at + last - first])
            first += len(parts[-1])
        return torch.cat(parts)

    def parts(self, step: int, slot: int) -> Iterator[tuple[Any, float]]:
        """The micro-batches of batch (step, slot), each with its share of the batch."""
        for chosen in self.indices(step, slot).tensor_split(self.micro_batches):
            yield self._pick(chosen), len(chosen) / self.batch

    def _pick(self, chosen: Tensor) -> Any:
        if self.tensors:
            return tuple(each[chosen.to(each.device)] for each in self._data)
        return default_collate([self._data[i] for i in chosen.tolist()])

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            self._epochs[epoch] = torch.randperm(self.size, generator=generator)
            # Those furthest from the one that is asked for, which may lie behind them after a restart.
            for old in sorted(self._epochs, key=lambda kept: abs(kept - epoch))[_KEPT:]:
                del self._epochs[old]
        return self._epochs[epoch]


def check_loss(loss: object) -> None:
    """Raise UsageError for a criterion, which knows nothing of the model."""
    if isinstance(loss, nn.Module):
        raise UsageError(
            f"loss is a {type(loss).__name__}; give a function of (model, batch) that returns a batch's mean loss, "
            "such as lambda model, batch: criterion(model(batch[0]), batch[1])"
        )


def _check(data: Any) -> None:
    """Raise UsageError for what holds data, but not as it is wanted here."""
    wanted = "give tensors of equal length, or a Dataset with len() and data[i]"
    if isinstance(data, DataLoader):
        raise UsageError("data is a DataLoader; give its data set (loader.dataset): a gang makes the batches itself")
    if isinstance(data, tuple) and any(isinstance(each, np.ndarray) for each in data):
        raise UsageError(f"data are numpy arrays; {wanted}: torch.as_tensor makes one of an array")
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(f"data is a {type(data).__name__}; {wanted}")


def mixed(*numbers: int) -> int:
    """A seed of 63 bits that differs where any of the numbers does (SplitMix64, Steele et al., 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = 2**64 - 1
