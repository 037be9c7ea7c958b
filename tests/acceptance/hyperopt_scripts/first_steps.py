"""The least loss of a parabola, with the history of all trials."""

import numpy as np
from hyperopt import STATUS_OK, Trials, fmin, hp, tpe
from hyperopt.early_stop import no_progress_loss


def objective(x):
    return {"loss": (x - 2) ** 2 + 1, "status": STATUS_OK, "squared": x**2}


trials = Trials()
best = fmin(
    objective,
    space=hp.uniform("x", -10, 10),
    algo=tpe.suggest,
    max_evals=60,
    trials=trials,
    early_stop_fn=no_progress_loss(50),
    rstate=np.random.default_rng(42),
)

print("best:", best)
print("best loss:", trials.best_trial["result"]["loss"])
print("trials:", len(trials.trials), "losses:", len(trials.losses()), "vals:", len(trials.vals["x"]))
print("squared:", round(trials.results[0]["squared"], 6) == round(trials.vals["x"][0] ** 2, 6))
assert abs(best["x"] - 2) < 0.5
assert trials.argmin == best
