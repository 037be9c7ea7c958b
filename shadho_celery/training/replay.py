"""Replay: compute a distributed training again in one process, from the log of the vectors that made each step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shadho_celery.errors import UsageError
from shadho_celery.training.coordinator.centre import Mean, ModelCentre
from shadho_celery.training.coordinator.update import Update
from shadho_celery.training.replica.batches import Batches, Computer, Data, Draws, Loss, Weight
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
    schedule: LRScheduler | None = None,
    warmup: int = 0,
    clip: float | None = None,
    scale_with_replicas: int | None = None,
    weight: Weight | None = None,
    by_hand: bool = False,
) -> Iterable[int]:
    """Take every step of `log` on a model and an optimizer in their initial state. Yield each step's number after it.

    `log` is that of the report. Give the settings that `fit` was given, and the trial's seed. `scale_with_replicas` is
    the number of replicas N if it was True there. With `by_hand`, a step is yielded when its gradient is in the
    parameters, as by `Gang.steps`, and the caller takes the step. Loss scales are in the log.

    A gradient is a function of parameters, step and place, and a sum is one of the places that count. The parameters
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
    update = Update(optimizer, schedule, warmup=warmup, clip=clip, rate=float(scale_with_replicas or 1))
    centre = ModelCentre(model, optimizer, update=update)
    return _steps(centre, batches, loss, log, weight=weight, by_hand=by_hand)


def _steps(
    centre: ModelCentre, batches: Batches, loss: Loss, log: Log, *, weight: Weight | None, by_hand: bool
) -> Iterable[int]:
    if log.places == 1:
        yield from _local_steps(centre, Computer(centre.model, loss, batches, weight=weight), log, by_hand)
        return
    shape = centre.shape
    bucket = Bucket(shape)
    computer = Computer(centre.model, loss, batches, bucket, weight)
    draws = Draws(log.places, batch=batches.batch, examples=batches.size)
    before, after = (shape.vector(shape.buffers.size) for _ in range(2))
    mean = Mean(centre.scratch(), shape.vector(shape.buffers.size), log.places)
    try:
        for step in log.steps:
            shape.buffers.read(before)
            numbers = draws.numbers
            for place in step.accepted:
                shape.buffers.write(before)
                result = computer.backward(*divmod(numbers[place], log.places), loss_scale=step.loss_scale)
                assert result is not None
                shape.buffers.read(after)
                vector = bucket.finish()
                if step.loss_scale != 1.0:
                    vector *= np.float32(1.0 / step.loss_scale)
                mean.add(place, vector.copy(), after.copy(), result.loss, result.weight)
            draws.end_step(step.accepted)
            if step.accepted:
                mean.take()
                centre.scale = step.scale
                if by_hand:
                    centre.set_scaled_gradient(mean.vector)
                    yield step.step
                else:
                    centre.descend(mean.vector)
                shape.buffers.write(mean.buffers)
            centre.update.advance(step.loss)
            if not by_hand:
                yield step.step
    finally:
        bucket.remove()


def _local_steps(centre: ModelCentre, computer: Computer, log: Log, by_hand: bool) -> Iterable[int]:
    """Replay a training in one process. Parameters that the loss does not use have no gradient, as they had then."""
    for step in log.steps:
        if step.accepted:
            computer.backward(step.step, 0, loss_scale=step.loss_scale)
            centre.shape.divide_gradients(step.loss_scale)
            if by_hand:
                yield step.step
            else:
                centre.step()
        centre.update.advance(step.loss)
        if not by_hand:
            yield step.step
