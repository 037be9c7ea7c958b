"""A choice between two models of scikit-learn, each with labels of its own."""

import optuna
from sklearn.datasets import load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

X, y = load_wine(return_X_y=True)


def objective(trial):
    if trial.suggest_categorical("model", ["svm", "forest"]) == "svm":
        cost = trial.suggest_float("cost", 1e-4, 1e4, log=True)
        model = make_pipeline(StandardScaler(), SVC(C=cost, gamma="auto"))
    else:
        depth = trial.suggest_int("depth", 1, 16, log=True)
        model = RandomForestClassifier(max_depth=depth, n_estimators=5, random_state=0)
    return cross_val_score(model, X, y, cv=3).mean()


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=20)
    best = study.best_trial
    assert best.value == study.best_value > 0.9
    assert set(best.params) in ({"model", "cost"}, {"model", "depth"})
    print("best", best.value, best.params)
