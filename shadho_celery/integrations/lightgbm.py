"""LightGBM: ``lightgbm.train(..., callbacks=[ShadhoCallback("valid_0-binary_logloss")])``."""

from __future__ import annotations

from lightgbm import Booster
from lightgbm.callback import CallbackEnv, EarlyStopException

from shadho_celery.integrations.callbacks import TrialCallback


class ShadhoCallback(TrialCallback):
    """Reports a metric, such as ``"valid_0-binary_logloss"``, after each round. A step is the number of rounds so far.

    To continue, pass `checkpoint` as `init_model` and ``left(rounds)`` as `num_boost_round`. `lightgbm.cv` is reported,
    but has no checkpoint.
    """

    file = "lightgbm.txt"
    #: number of rounds from one checkpoint to the next; the last round is saved, too
    every = 10

    def left(self, rounds: int) -> int:
        """Return how many of `rounds` are left after the checkpoint: at least one, which LightGBM needs."""
        return max(1, rounds - (Booster(model_file=self.checkpoint).current_iteration() if self.checkpoint else 0))

    def __call__(self, env: CallbackEnv) -> None:
        rounds, evaluated = env.iteration + 1, env.evaluation_result_list or []
        stop = self.stops(rounds, {f"{data}-{name}": value for data, name, value, *_ in evaluated})
        if isinstance(env.model, Booster) and (stop or rounds == env.end_iteration or rounds % self.every == 0):
            self.save(env.model.model_to_string(num_iteration=-1).encode())
        if stop:
            raise EarlyStopException(env.iteration, evaluated)
