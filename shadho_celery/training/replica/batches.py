"""Batches of examples, which depend only on seed, step and place; and computation of the gradient of a batch's mean
loss.

Each epoch visits the data in a permutation of its own. Batch (step, place) is number ``step * places + place`` of the
stream of batches. Replicas have no fixed shards of the data, because a slow replica's shard would then count too
little. A batch may span the end of an epoch.

In synchronous SGD, a batch whose gradient was dropped is used again after its epoch (`Draws`), so that examples that
make a gradient slow are not lost.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from shadho_celery.core.checks import check_whole, short
from shadho_celery.errors import UsageError


class Examples(Protocol):
    """Map-style data set, which returns examples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


#: tensors of equal first dimension, a map-style data set, or a loader of one
Data = Sequence[Tensor] | Examples | DataLoader[Any]
#: (model, batch) -> mean loss, a scalar tensor; a batch is a tuple of tensors, or collated examples of a data set
Loss = Callable[[nn.Module, Any], Tensor]
#: batch -> weight of its mean loss, such as its number of tokens
Weight = Callable[[Any], float]

#: maximum number of times that a dropped batch is used again
RETURNS = 2
#: number of permutations kept in memory; a batch may span two epochs
_KEPT = 2


class Batches:
    """Stream of batches. Raises UsageError for data of an unsupported type or with fewer examples than one batch.

    Of a DataLoader, only the data set, the collate function and the workers are used (`load_ahead`).
    """

    def __init__(self, data: Data, *, batch: int, seed: int, places: int = 1, micro_batches: int = 1) -> None:
        _check_data(data, batch)
        loader = data if isinstance(data, DataLoader) else None
        #: the DataLoader, if it has workers
        self.loader = loader if loader is not None and loader.num_workers else None
        self._data = cast(Any, data if loader is None else loader.dataset)
        is_tensors = isinstance(data, tuple | list) and all(isinstance(each, Tensor) for each in data)
        self._tensors = cast(Sequence[Tensor], data) if is_tensors else None
        self._collate = default_collate if loader is None or loader.collate_fn is None else loader.collate_fn
        self._loading: _Loading | None = None
        sizes = {len(each) for each in self._tensors} if self._tensors is not None else {len(self._data)}
        if len(sizes) != 1:
            raise UsageError(f"the data's tensors differ in length, {sorted(sizes)}; give one entry for each example")
        self.size = sizes.pop()
        check_whole(1, batch=batch)
        if self.size < batch:
            raise UsageError(
                f"the data set has {self.size} examples, fewer than a batch of {batch}; give a smaller batch"
            )
        check_whole(1, batch, micro_batches=micro_batches)
        self.batch, self.seed, self.places, self.micro_batches = batch, seed, places, micro_batches
        self._epochs: dict[int, Tensor] = {}

    @property
    def digest(self) -> str:
        """Text that describes the batches, to compare them between processes. It has shapes, types and three examples
        of tensors.
        """
        described: list[object] = [self.size, self.batch, self.seed, self.places, self.micro_batches]
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
        """Yield the micro-batches of batch (step, place), each with its fraction of the batch's examples.

        Raises UsageError if the data set raises an error.
        """
        for number, chosen in enumerate(self.indices(step, place).tensor_split(self.micro_batches)):
            try:
                loaded = self._loading.take(step, place, number) if self._loading is not None else None
                yield self._pick(step, place, number, chosen) if loaded is None else loaded, len(chosen) / self.batch
            except _Failed as failed:
                raise UsageError(f"the data set failed in a batch of step {step}: {failed}") from failed.__cause__

    def load_ahead(self, place: int) -> None:
        """Let the loader's workers load the batches of this place in advance, until `close`."""
        if self.loader is not None:
            self._loading = _Loading(self.loader, self, place)

    def close(self) -> None:
        """End the loader's workers."""
        if self._loading is not None:
            self._loading.close()

    def move(self, device: torch.device) -> None:
        """Move the data's tensors that are on a GPU to the GPU `device`."""
        if self._tensors is not None:
            self._tensors = [each.to(device) if each.is_cuda else each for each in self._tensors]

    def keyed(self, step: int, place: int, number: int, chosen: Tensor) -> Keyed:
        """Return the seed of a micro-batch's random numbers, and the indices of its examples."""
        return mixed(self.seed, step, place, number, 3), chosen.tolist()

    def _pick(self, step: int, place: int, number: int, chosen: Tensor) -> object:
        if self._tensors is not None:
            return tuple(each[chosen.to(each.device)] for each in self._tensors)
        collated: object = self._collate(_Seeded(self._data).__getitems__(self.keyed(step, place, number, chosen)))
        return collated

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            self._epochs[epoch] = torch.randperm(self.size, generator=generator)
            # Remove the permutations of the most distant epochs, earlier or later: after a restart, an earlier epoch
            # may be needed.
            for old in sorted(self._epochs, key=lambda kept: abs(kept - epoch))[_KEPT:]:
                del self._epochs[old]
        return self._epochs[epoch]


class Draws:
    """Decides which batches the places compute in each step. That depends only on which places counted in the steps
    before.

    Batch (step, place) has the number ``step * places + place``. A step usually takes the next `places` batches of the
    stream. At the end of an epoch of `examples` examples, dropped batches are used again, in the order of their step
    and place. They fill whole steps, so a few may wait for the end of the next epoch. A batch is used again at most
    RETURNS times. If `examples` is 0, dropped batches are not used again.
    """

    def __init__(self, places: int, *, batch: int = 1, examples: int = 0) -> None:
        self.places, self._batch, self._examples = places, batch, examples
        #: number of batches that were dropped too often to be used again
        self.lost = 0
        self._turn = 0
        self._returning: deque[int] = deque()
        #: numbers of dropped batches that wait for the end of the epoch
        self._dropped: list[int] = []
        #: number of times that each waiting batch was dropped
        self._times: Counter[int] = Counter()

    @property
    def waiting(self) -> int:
        """Number of dropped batches that may still return."""
        return len(self._dropped) + len(self._returning)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the current step's batches, by place."""
        if len(self._returning) >= self.places:
            return [self._returning[place] for place in range(self.places)]
        return [self._turn * self.places + place for place in range(self.places)]

    def end_step(self, accepted: Collection[int]) -> None:
        """End the current step, in which the batches of the places `accepted` counted. If it is empty, the step was
        skipped.
        """
        numbers, returns = self.numbers, len(self._returning) >= self.places
        if returns:
            for _ in numbers:
                self._returning.popleft()
        else:
            self._turn += 1
        if not self._examples:
            return
        for place, number in enumerate(numbers):
            if accepted and place not in accepted:
                self._drop(number)
            else:
                self._times.pop(number, None)
        if not returns and self._epoch(self._turn) > self._epoch(self._turn - 1):
            self._returning.extend(self._dropped)
            self._dropped.clear()
        if len(self._returning) < self.places:
            self._dropped[:0] = self._returning
            self._returning.clear()

    def _epoch(self, turn: int) -> int:
        return turn * self.places * self._batch // self._examples

    def _drop(self, number: int) -> None:
        self._times[number] += 1
        if self._times[number] <= RETURNS:
            self._dropped.append(number)
        else:
            del self._times[number]
            self.lost += 1


#: seed of random numbers, and indices of examples
Keyed = tuple[int, list[int]]


class _Failed(Exception):
    """Raised if the data set has raised an error, which is the cause."""


class _Seeded(Dataset[Any]):
    """Data set whose random numbers (for augmentation) depend only on the batch."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitems__(self, keyed: Keyed) -> list[object]:
        seed, chosen = keyed
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            return [self._data[index] for index in chosen]
        except Exception as error:
            raise _Failed(f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])


class _Loading:
    """Micro-batches of one place, which the workers of a DataLoader load in advance, in the order of the steps."""

    def __init__(self, loader: DataLoader[Any], batches: Batches, place: int) -> None:
        self._batches, self._place = batches, place
        #: step and number of the next micro-batch
        self._next = (0, 0)
        self._loaded: Iterator[object] | None = None
        self._begin = 0
        self._loader: DataLoader[Any] = DataLoader(
            _Seeded(loader.dataset),
            batch_sampler=self,  # type: ignore[arg-type]
            # By default, the loader would draw from the generator that the model uses.
            generator=torch.Generator(),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )

    def __iter__(self) -> Iterator[Keyed]:
        """Yield the indices of the micro-batches from step `_begin` on, as the loader's batch sampler."""
        step = self._begin
        while True:
            chosen = self._batches.indices(step, self._place).tensor_split(self._batches.micro_batches)
            yield from (self._batches.keyed(step, self._place, n, part) for n, part in enumerate(chosen))
            step += 1

    def take(self, step: int, place: int, number: int) -> object | None:
        """Return a micro-batch, or None if it was already passed or is of another place. Micro-batches before it are
        discarded.
        """
        ahead = (step, number) >= self._next
        if place != self._place or (self._loaded is not None and not ahead):
            return None
        if self._loaded is None:
            self._begin, self._next = step, (step, 0)
            self._loaded = iter(self._loader)
        while True:
            try:
                loaded = next(self._loaded)
            except Exception as error:
                # The last line of a worker's traceback names the error.
                raise _Failed(str(error).strip().splitlines()[-1].rpartition("_Failed: ")[2]) from error
            at, n = self._next
            self._next = (at, n + 1) if n + 1 < self._batches.micro_batches else (at + 1, 0)
            if (at, n) == (step, number):
                return loaded

    def close(self) -> None:
        self._loaded = None


class Computer:
    """Computes gradients of one model. It leaves them in ``parameter.grad``."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Batches, weight: Weight | None = None) -> None:
        self.model, self.batches = model, batches
        self._loss, self._weight = loss, weight

    def backward(
        self, draw: int, place: int, abandon: Callable[[], bool] | None = None, *, loss_scale: float = 1.0
    ) -> tuple[float, float] | None:
        """Compute the gradient of batch (draw, place), multiplied by `loss_scale`. Return the batch's mean loss and
        weight.

        Returns None if `abandon` returned True before a micro-batch. Random numbers in the model (dropout) depend only
        on (seed, draw, place), so that a gradient can be computed again. The state of the process's CPU generator is
        kept.
        """
        self.model.zero_grad(set_to_none=True)
        self.model.train()
        losses: list[tuple[Tensor, float]] = []
        queued: deque[Callable[[], None]] = deque()
        with _drawn_from(mixed(self.batches.seed, draw, place, 1)):
            parts, weight = self._weighed(self.batches.parts(draw, place))
            for part, share in parts:
                if abandon is not None and abandon():
                    return None
                if not share:
                    continue
                value = self._loss(self.model, part)
                if not isinstance(value, torch.Tensor) or value.numel() != 1:
                    raise UsageError("loss(model, batch) must return a tensor with one number, the batch's mean loss")
                # Do not multiply by 1: with a single micro-batch, the result is then exactly that of a plain loop.
                (value if share * loss_scale == 1 else value * (share * loss_scale)).backward()
                losses.append((value.detach(), share))
                queued.append(_queued())
                if len(queued) > 1:
                    # Queue at most two micro-batches on a GPU, so that an abandoned gradient ends soon.
                    queued.popleft()()
        return sum(value.item() * share for value, share in losses), weight

    def blame(self, error: Exception) -> str:
        """Return "the loss raised at FILE:LINE: " if `error` was raised within the loss function, else ""."""
        code = getattr(self._loss, "__code__", None)
        lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code is code]
        return f"the loss raised at {Path(code.co_filename).name}:{lines[0]}: " if code and lines else ""

    def _weighed(self, parts: Iterator[tuple[object, float]]) -> tuple[Iterable[tuple[object, float]], float]:
        """Return the micro-batches with their shares of the weight, and the sum of their weights. Raises UsageError for
        a weight that is not valid.
        """
        if self._weight is None:
            return parts, 1.0
        loaded = [part for part, _ in parts]
        weights = [_checked_weight(self._weight(part)) for part in loaded]
        total = math.fsum(weights)
        return [(part, each / (total or 1.0)) for part, each in zip(loaded, weights, strict=True)], total


def _checked_weight(value: object) -> float:
    """Return the weight of a batch. Raises UsageError unless it is a number of at least 0."""
    try:
        weight = float(value)  # type: ignore[arg-type]  # a number, or a tensor with one
        if 0 <= weight < math.inf:
            return weight
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(
        f"weight(batch) returned {short(value)}; return a number of at least 0, such as the number of tokens"
    )


def _queued() -> Callable[[], None]:
    """Return a function that waits for the operations that are queued on the GPU now. On a CPU it does nothing."""
    if not torch.cuda.is_initialized():
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed torch's generators for a `with` block. Restore the state of the CPU's generator after it."""
    # Avoid torch.random.fork_rng and torch.manual_seed, which take 0.25 ms, as long as a small gradient.
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


def _check_data(data: object, batch: int) -> None:
    """Raise UsageError for data of a type that a gang does not support."""
    wanted = "give tensors of equal length, or a Dataset with len() and data[i]"
    if isinstance(data, DataLoader):
        if data.batch_size not in (None, 1, batch):
            raise UsageError(
                f"the loader's batches have {data.batch_size} examples, but batch is {batch}; give both the same number"
            )
        if not (hasattr(data.dataset, "__len__") and hasattr(data.dataset, "__getitem__")):
            raise UsageError("the loader's data set cannot be read by index; give one with len() and data[i]")
        return
    if isinstance(data, tuple) and any(isinstance(each, np.ndarray) for each in data):
        raise UsageError(f"data are numpy arrays; {wanted}; torch.as_tensor converts an array")
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(f"data is a {type(data).__name__}; {wanted}")


def mixed(*numbers: int) -> int:
    """Return a seed of 63 bits, made from all the numbers by hashing (SplitMix64, Steele et al., 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = 2**64 - 1
