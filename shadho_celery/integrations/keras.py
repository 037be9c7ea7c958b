"""Keras 3: ``model.fit(..., callbacks=[ShadhoCallback("val_loss")])``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras.callbacks import BackupAndRestore

from shadho_celery.integrations.callbacks import TrialCallback


class ShadhoCallback(TrialCallback, BackupAndRestore):
    """Reports a metric, such as ``"val_loss"``, after each epoch. A step is the number of epochs so far.

    `fit` continues from the checkpoint of an earlier attempt, or of the trial that this one continues, by itself.
    """

    file = "keras"

    def __init__(self, metric: str, context: Any = None) -> None:
        TrialCallback.__init__(self, metric, context)
        BackupAndRestore.__init__(self, str(self.path or "nowhere"), delete_checkpoint=False)
        # A process may be killed while it writes a checkpoint; then the one before is used.
        self.double_checkpoint = True

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self.checkpoint:
            super().on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.model.stop_training |= self.stops(epoch + 1, logs or {})
        if self.saves():
            super().on_epoch_end(epoch, logs)
