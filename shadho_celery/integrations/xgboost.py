"""XGBoost: ``xgboost.train(..., callbacks=[ShadhoCallback("validation-logloss")])``."""

from __future__ import annotations

from typing import Any

from xgboost import Booster
from xgboost.callback import TrainingCallback

from shadho_celery.integrations.callbacks import TrialCallback


class ShadhoCallback(TrialCallback, TrainingCallback):
    """Reports a metric, such as ``"validation-logloss"``, after each round. A step is the number of rounds so far.

    To continue, pass `checkpoint` as `xgb_model` and ``left(rounds)`` as `num_boost_round`. `xgboost.cv` is reported,
    but has no checkpoint.
    """

    file = "xgboost.ubj"
    #: number of rounds from one checkpoint to the next; the last round is saved, too
    every = 10

    def left(self, rounds: int) -> int:
        """Return how many of `rounds` are left after the checkpoint: at least one, so that there is an evaluation."""
        return max(1, rounds - (Booster(model_file=self.checkpoint).num_boosted_rounds() if self.checkpoint else 0))

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        latest = {f"{data}-{name}": values[-1] for data, each in evals_log.items() for name, values in each.items()}
        # In a cross-validation, these are the mean and the standard deviation.
        metrics = {name: value[0] if isinstance(value, tuple) else value for name, value in latest.items()}
        stop = self.stops(rounds := model.num_boosted_rounds(), metrics)
        if rounds % self.every == 0:
            self.after_training(model)
        return stop

    def after_training(self, model: Any) -> Any:
        if isinstance(model, Booster):
            self.save(model.save_raw("ubj"))
        return model
