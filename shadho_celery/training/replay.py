"""Replay: compute a distributed training again in one process, from the log of the vectors that made each step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from shadho_celery.errors import UsageError
from shadho_celery.training.coordinator.centre import Mean, ModelCentre
from shadho_celery.training.replica.batches import Batches, Computer, Data, Loss
from shadho_celery.training.report import Log
from shadho_celery.training.strategies import Strategy, Sync
from shadho_celery.training.wire.vectors import Bucket


def replay(
    model: nn.Module,
    optimizer: Optimizer,
    data: Data,
    loss: Loss,
    log: Log,
    *,
    batch: int,
    seed: int = 0,
    micro_batches: int = 1,
    strategy: Strategy | None = None,
) -> Iterable[int]:
    """Take every step of `log` on a model and an optimizer in their initial state. Yield each step's number after it.

    A gradient is a function of parameters, step and place, and gradients are added in the logged order. The parameters
    therefore equal those of the training: to the bit if the same instructions compute the gradients, else within float
    tolerance. This holds only for gradients that were sent without quantisation (codec `Raw`). Raises UsageError for a
    strategy other than `Sync`, and for a log with missing steps.
    """
    if strategy is not None and not isinstance(strategy, Sync):
        raise UsageError(
            f"a training by {type(strategy).__name__} cannot be replayed, because it depends on the times at which "
            "vectors arrived; use Sync"
        )
    if [step.step for step in log.steps] != list(range(len(log.steps))):
        raise UsageError("the log does not begin at the first step, or has a gap; give the whole log")
    batches = Batches(data, batch=batch, seed=seed, places=log.places, micro_batches=micro_batches)
    return _steps(model, optimizer, batches, loss, log)


def _steps(model: nn.Module, optimizer: Optimizer, batches: Batches, loss: Loss, log: Log) -> Iterable[int]:
    centre = ModelCentre(model, optimizer)
    if log.places == 1:
        yield from _local_steps(centre, Computer(model, loss, batches), log)
        return
    shape = centre.shape
    bucket = Bucket(shape)
    computer = Computer(model, loss, batches, bucket)
    before, after = (shape.vector(shape.buffers.size) for _ in range(2))
    mean = Mean(centre.scratch(), shape.vector(shape.buffers.size))
    try:
        for step in log.steps:
            shape.buffers.read(before)
            for place in step.accepted:
                shape.buffers.write(before)
                value = computer.backward(step.step, place)
                shape.buffers.read(after)
                mean.add(place, bucket.finish(), after, value or 0.0)
            if step.accepted:
                mean.take()
                centre.scale = step.scale
                centre.descend(mean.vector)
                shape.buffers.write(mean.buffers)
            yield step.step
    finally:
        bucket.remove()


def _local_steps(centre: ModelCentre, computer: Computer, log: Log) -> Iterable[int]:
    """Replay a training in one process. Parameters that the loss does not use have no gradient, as they had then."""
    for step in log.steps:
        if step.accepted:
            computer.backward(step.step, 0)
            centre.step()
        yield step.step
