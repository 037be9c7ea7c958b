"""Replay: computes a distributed training again in one process, from the log of the gradients that made each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shadho_celery.errors import UsageError
from shadho_celery.training.coordinator.centre import Mean, ModelCentre
from shadho_celery.training.plan import Plan
from shadho_celery.training.replica.batches import Computer, Data, Draws, Loss
from shadho_celery.training.report import Log


def replay(
    model: nn.Module,
    optimizer: Optimizer,
    data: Data,
    loss: Loss,
    log: Log,
    *,
    by_hand: bool = False,
    **settings: Any,
) -> Iterator[int]:
    """Take every step of `log` again. Yield the number of each step after it was taken.

    `model` and `optimizer` must be in their initial state, and `log` is the report's log. Give the arguments of `fit`
    that affect the steps, and the trial's seed as `seed`. Arguments such as `steps` and `evaluate` have no effect, and
    neither has `scaler`, because the log contains the scales. With `by_hand`, a step is yielded once its gradient is in
    ``parameter.grad``, as by `Gang.steps`, and the caller takes the step.

    A gradient depends only on parameters, step and place, and a mean only on the gradients of the places that counted.
    The parameters are therefore exactly those of the training, if the processor executes the same instructions, else
    equal within floating-point tolerance. Raises UsageError for a log with missing steps, and for trainings that cannot
    be computed again: with another strategy than `Sync`, or with quantised gradients.
    """
    if not log.can_replay:
        raise UsageError(
            "this training cannot be replayed: its vectors depend on the times at which others arrived, or were "
            "quantised; use Sync without a codec"
        )
    if [step.step for step in log.steps] != list(range(len(log.steps))):
        raise UsageError("the log does not begin at the first step, or has a gap; give the whole log")
    plan = Plan(model, optimizer, data, loss, **{**settings, "steps": max(1, len(log.steps))})
    return _steps(plan, log, by_hand)


def _steps(plan: Plan, log: Log, by_hand: bool) -> Iterator[int]:
    centre = ModelCentre(plan, log.replicas)
    shape = centre.shape
    batches = plan.batches(log.places, plan.seed or 0)
    # A single replica leaves its gradient in `parameter.grad`, which is None for parameters that the loss does not use.
    is_alone = log.places == 1
    computer = Computer(plan.model, plan.loss, batches, plan.weight)
    draws = Draws(log.places, batch=batches.batch, examples=batches.size)
    before = shape.vector(shape.buffers.size)
    mean = Mean(centre.scratch, shape.vector(shape.buffers.size), log.places)
    for step in log.steps:
        shape.buffers.read(before)
        for place in step.accepted:
            shape.buffers.write(before)
            result = computer.backward(*divmod(draws.numbers[place], log.places), loss_scale=step.loss_scale)
            assert result is not None
            loss, weight = result
            if is_alone:
                shape.divide_gradients(step.loss_scale)
            else:
                gradient, after = shape.vector(), shape.vector(shape.buffers.size)
                shape.parameters.read_gradients(gradient, step.loss_scale)
                shape.buffers.read(after)
                mean.add(place, gradient, after, loss, weight)
        draws.end_step(step.accepted)
        centre.scale = step.scale
        if mean:
            mean.take()
            centre.set_gradient(mean.vector, scaled=by_hand)
        if step.accepted and by_hand:
            yield step.step
        elif step.accepted:
            centre.step()
        if step.accepted and not is_alone:
            shape.buffers.write(mean.buffers)
        centre.update.advance(step.loss)
        if not by_hand:
            yield step.step
