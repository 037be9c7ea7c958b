"""The error of a tree and its number of leaves, both as small as possible."""

from itertools import pairwise

import optuna
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.tree import DecisionTreeClassifier

train_x, valid_x, train_y, valid_y = train_test_split(*load_digits(return_X_y=True), random_state=0)


def objective(trial):
    tree = DecisionTreeClassifier(
        criterion=trial.suggest_categorical("criterion", ["gini", "entropy"]),
        max_leaf_nodes=trial.suggest_int("leaves", 2, 200, log=True),
        min_samples_split=trial.suggest_int("split", 2, 40, step=2),
        random_state=0,
    ).fit(train_x, train_y)
    return tree.score(valid_x, valid_y), tree.get_n_leaves()


if __name__ == "__main__":
    study = optuna.create_study(directions=["maximize", "minimize"])
    study.optimize(objective, n_trials=30, timeout=60)
    front = sorted(study.best_trials, key=lambda trial: trial.values[1])
    assert all(one.values[0] < other.values[0] for one, other in pairwise(front))
    assert {"values_0", "values_1", "params_leaves", "state"} <= {*study.trials_dataframe().columns}
    print("best", [trial.values for trial in front][:3])
