"""A distributed training computed again in one process, from the log of whose gradients made each step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from shadho_celery.errors import UsageError
from shadho_celery.training.centre import ModelCentre
from shadho_celery.training.compute import Computer
from shadho_celery.training.data import Batches, Data, Loss
from shadho_celery.training.log import Log
from shadho_celery.training.mean import Mean
from shadho_celery.training.strategies import Strategy, Sync
from shadho_celery.training.vectors import Bucket


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
    """Take every step of `log` on a model and optimizer as they were at the start; yield each step's number after it.

    Every gradient is a function of the parameters, the step and the place, and they are added up in the order in which
    they were: so the parameters come out equal, to the last bit where the gradients are computed by the same
    instructions, else to float tolerance. That holds for gradients that were sent as they are (codec `Raw`). Raises
    UsageError for a strategy other than `Sync` and for a log whose first steps are missing.
    """
    if strategy is not None and not isinstance(strategy, Sync):
        raise UsageError(f"what {type(strategy).__name__} trains depends on when vectors came; only Sync is replayed")
    if [step.step for step in log.steps] != list(range(len(log.steps))):
        raise UsageError("the log does not begin at the first step, or has a gap; replay needs all of it")
    batches = Batches(data, batch=batch, seed=seed, places=log.places, micro_batches=micro_batches)
    return _steps(model, optimizer, batches, loss, log)


def _steps(model: nn.Module, optimizer: Optimizer, batches: Batches, loss: Loss, log: Log) -> Iterable[int]:
    centre = ModelCentre(model, optimizer)
    if log.places == 1:
        yield from _alone(centre, Computer(model, loss, batches), log)
        return
    shape = centre.shape
    bucket = Bucket(shape)
    computer = Computer(model, loss, batches, bucket)
    before, now = (shape.vector(shape.buffers.size) for _ in range(2))
    mean = Mean(centre.scratch(), shape.vector(shape.buffers.size))
    try:
        for step in log.steps:
            shape.buffers.read(before)
            for slot in step.slots:
                shape.buffers.write(before)
                told = computer.backward(step.step, slot)
                shape.buffers.read(now)
                mean.add(slot, bucket.finish(), now, told or 0.0)
            if step.slots:
                mean.take()
                centre.scale = step.scale
                centre.descend(mean.vector)
                shape.buffers.write(mean.buffers)
            yield step.step
    finally:
        bucket.remove()


def _alone(centre: ModelCentre, computer: Computer, log: Log) -> Iterable[int]:
    """One replica without backups: a parameter that the loss does not use has no gradient, where a gang's is zero."""
    for step in log.steps:
        if step.slots:
            computer.backward(step.step, 0)
            centre.step()
        yield step.step
