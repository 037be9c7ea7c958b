"""A choice between two models, each with hyperparameters of its own; some combinations fail."""

import numpy as np
from hyperopt import STATUS_FAIL, STATUS_OK, Trials, anneal, fmin, hp, rand, space_eval, tpe

space = hp.choice(
    "model",
    [
        {"type": "linear", "C": hp.lognormal("C", 0, 1)},
        {
            "type": "forest",
            "depth": hp.quniform("depth", 1, 10, 1),
            "criterion": hp.choice("criterion", ["gini", "log"]),
        },
    ],
)


def objective(config):
    if config["type"] == "linear":
        if config["C"] > 8:
            return {"status": STATUS_FAIL}
        return {"loss": abs(np.log(config["C"])) + 0.5, "status": STATUS_OK}
    return {"loss": abs(config["depth"] - 7) / 7 + (config["criterion"] == "log"), "status": STATUS_OK}


for algo in (rand.suggest, anneal.suggest, tpe.suggest):
    trials = Trials()
    best = fmin(
        objective,
        space,
        algo=algo,
        max_evals=80,
        trials=trials,
        rstate=np.random.default_rng(1),
        show_progressbar=False,
    )
    print(space_eval(space, best), min(loss for loss in trials.losses() if loss is not None))
    assert set(trials.statuses()) <= {STATUS_OK, STATUS_FAIL}
    assert trials.best_trial["result"]["loss"] < 1
