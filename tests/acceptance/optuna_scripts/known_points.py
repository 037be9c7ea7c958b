"""Settings that somebody has used before are tried first, and results from elsewhere are added."""

import optuna
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier

X, y = load_iris(return_X_y=True)


def objective(trial):
    neighbours = trial.suggest_int("neighbours", 1, 40)
    weights = trial.suggest_categorical("weights", ["uniform", "distance"])
    return cross_val_score(KNeighborsClassifier(neighbours, weights=weights), X, y, cv=3).mean()


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.enqueue_trial({"neighbours": 5, "weights": "uniform"})
    study.enqueue_trial({"neighbours": 12})
    study.enqueue_trial({"neighbours": 12}, skip_if_exists=True)
    study.add_trial(
        optuna.trial.create_trial(
            params={"neighbours": 1, "weights": "uniform"},
            distributions={
                "neighbours": optuna.distributions.IntDistribution(1, 40),
                "weights": optuna.distributions.CategoricalDistribution(["uniform", "distance"]),
            },
            value=0.1,
        )
    )
    study.optimize(objective, n_trials=15)
    assert study.trials[0].params == {"neighbours": 5, "weights": "uniform"}
    assert study.trials[1].params["neighbours"] == 12
    assert study.trials[2].value == 0.1
    print("best", study.best_params)
