"""LightGBM with its usual parameters, most of which are searched by their logarithms."""

import lightgbm
import optuna
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import accuracy_score
from sklearn.model_selection import train_test_split

X, y = load_breast_cancer(return_X_y=True)
train_x, valid_x, train_y, valid_y = train_test_split(X, y, test_size=0.25, random_state=0)


def objective(trial):
    params = {
        "objective": "binary",
        "verbosity": -1,
        "num_threads": 1,
        "boosting_type": trial.suggest_categorical("boosting_type", ["gbdt", "dart"]),
        "lambda_l1": trial.suggest_float("lambda_l1", 1e-8, 10.0, log=True),
        "num_leaves": trial.suggest_int("num_leaves", 2, 64),
        "feature_fraction": trial.suggest_float("feature_fraction", 0.4, 1.0, step=0.1),
        "min_child_samples": trial.suggest_int("min_child_samples", 5, 100, log=True),
    }
    if params["boosting_type"] == "dart":
        params["drop_rate"] = trial.suggest_float("drop_rate", 0.05, 0.5)
    booster = lightgbm.train(params, lightgbm.Dataset(train_x, label=train_y), num_boost_round=20)
    return accuracy_score(valid_y, booster.predict(valid_x).round())


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=15)
    trial = study.best_trial
    assert trial.value > 0.9
    assert ("drop_rate" in trial.params) is (trial.params["boosting_type"] == "dart")
    for key, value in trial.params.items():
        print(f"    {key}: {value}")
    print("best", trial.value)
