"""Lightning: ``Trainer(callbacks=[ShadhoCallback("val_loss")])``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Checkpoint

from shadho_celery.integrations.callbacks import TrialCallback


class ShadhoCallback(TrialCallback, Checkpoint):
    """Reports a metric that the module logs, such as ``"val_loss"``, and saves a checkpoint after each report.

    There is a report after each epoch, and a step is the number of epochs so far. If the trainer does not validate once
    per epoch, there is one after each validation, and a step is the number of optimiser steps so far. To continue, pass
    `checkpoint` as `ckpt_path` to `fit`. The trainer has no checkpoint of its own then.
    """

    file = "lightning.ckpt"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if _validates_once(trainer):
            self._report(trainer, trainer.current_epoch + 1)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not (trainer.sanity_checking or _validates_once(trainer)):
            self._report(trainer, trainer.global_step)

    def _report(self, trainer: Any, step: int) -> None:
        stop = self.stops(step, trainer.callback_metrics)
        trainer.should_stop |= trainer.strategy.reduce_boolean_decision(stop, all=False)
        if self.saves(every_rank=True):
            # All ranks take part, and Lightning replaces the file as a whole.
            trainer.save_checkpoint(self.path)


def _validates_once(trainer: Any) -> bool:
    """Return whether there is one validation in each epoch, at its end, as Lightning decides where to stop early."""
    return bool(trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1)
