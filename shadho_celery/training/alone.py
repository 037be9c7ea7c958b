"""One replica and no backups: the same training in this process, with no socket and no copy."""

from __future__ import annotations

import math

from shadho_celery.training.compute import Computer
from shadho_celery.training.data import Batches, Loss
from shadho_celery.training.run import Run

#: gradients in a row that are not finite, after which the training has diverged
MOST_NOT_FINITE = 3


def train_alone(run: Run, loss: Loss, batches: Batches) -> None:
    """Plain SGD: what N = 1 and b = 0 come to, bit for bit. Raises Diverged, and UsageError at the first step."""
    computer = Computer(run.centre.model, loss, batches)
    shape = run.centre.shape
    before = shape.vector(shape.buffers.size)
    bad = 0
    run.start_clock()
    while not run.over:
        shape.buffers.read(before)
        value = computer.backward(run.step, 0, run.context.should_stop)
        if value is None:
            return
        if math.isfinite(value) and shape.has_finite_gradients():
            bad = 0
            run.centre.step()
            run.took((0,), value)
        else:
            bad += 1
            run.log.refused["not finite"] += 1
            if run.step == 0 or bad >= MOST_NOT_FINITE:
                raise run.no_gradient()
            # A step that nobody's gradient made: its batch is passed over.
            shape.buffers.write(before)
            run.took((), math.nan)
        run.tell()
