"""A support vector machine on flowers: known points first, saved, carried on with more trials."""

import pickle
from pathlib import Path

import numpy as np
from hyperopt import STATUS_OK, Trials, fmin, hp, tpe
from hyperopt.fmin import generate_trials_to_calculate
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC

X, y = load_iris(return_X_y=True)
space = {
    "C": hp.loguniform("C", np.log(1e-2), np.log(1e2)),
    "gamma": hp.loguniform("gamma", np.log(1e-3), np.log(1e1)),
    "kernel": hp.choice("kernel", ["rbf", "poly"]),
}


def objective(params):
    return {"loss": -cross_val_score(SVC(**params), X, y, cv=3).mean(), "status": STATUS_OK, "params": params}


trials = generate_trials_to_calculate([{"C": 1.0, "gamma": 0.1, "kernel": 0}])
fmin(objective, space, algo=tpe.suggest, max_evals=10, trials=trials, rstate=np.random.default_rng(0), verbose=False)
assert trials.results[0]["params"] == {"C": 1.0, "gamma": 0.1, "kernel": "rbf"}

saved = Path("trials.pkl")
saved.write_bytes(pickle.dumps(trials))
trials = pickle.loads(saved.read_bytes())

best = fmin(
    objective, space, algo=tpe.suggest, max_evals=25, trials=trials, rstate=np.random.default_rng(1), verbose=False
)
assert len(trials) == 25
assert isinstance(trials, Trials) or len(trials.losses()) == 25
print("best:", best, "accuracy:", -min(trials.losses()))
assert -min(trials.losses()) > 0.95
