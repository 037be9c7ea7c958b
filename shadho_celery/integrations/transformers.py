"""Transformers: ``Trainer(..., callbacks=[ShadhoCallback("eval_loss")])``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback

from shadho_celery.integrations.callbacks import TrialCallback


class ShadhoCallback(TrialCallback, TrainerCallback):
    """Reports a metric, such as ``"eval_loss"``, after each evaluation. A step is the trainer's number of steps so far.

    The trainer saves its checkpoints if its `output_dir` is the trial's `checkpoint_dir`. To continue, pass
    `checkpoint` as `resume_from_checkpoint` to `train`.
    """

    #: step of the last report; names of all metrics so far
    _step = -1
    _names: frozenset[str] = frozenset()

    @property
    def checkpoint(self) -> Path | None:
        # The state of the trainer is the last file that it writes.
        states = self.path.glob("checkpoint-*/trainer_state.json") if self.path else ()
        return max((state.parent for state in states), key=lambda each: int(each.name.split("-")[1]), default=None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.context is not None and self.context.is_copy:
            args.save_strategy = "no"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **rest: Any) -> None:
        # Several data sets are evaluated one after another. The metric is missing only if none of them had it.
        is_missing = metrics.keys() <= self._names and self.metric not in self._names
        self._names |= metrics.keys()
        if state.global_step == self._step or not (is_missing or self.metric in metrics):
            return
        self._step = state.global_step
        if reduce(torch.tensor(float(self.stops(self._step, metrics)), device=args.device)) > 0:
            control.should_training_stop, control.should_save = True, self.saves(every_rank=True)
