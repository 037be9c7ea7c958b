"""An objective that is an object with data, and a loop whose length is searched, too."""

import warnings

import optuna
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

warnings.simplefilter("ignore")


class Objective:
    def __init__(self, data):
        self.data = data

    def __call__(self, trial):
        train_x, valid_x, train_y, valid_y = self.data
        layers = trial.suggest_int("layers", 1, 3)
        widths = [trial.suggest_int(f"width {place}", 4, 32, log=True) for place in range(layers)]
        rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
        model = MLPClassifier(widths, learning_rate_init=rate, max_iter=8, early_stopping=True, random_state=0)
        return 1.0 - model.fit(train_x, train_y).score(valid_x, valid_y)


if __name__ == "__main__":
    data = train_test_split(*load_digits(return_X_y=True), train_size=500, random_state=0)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    study.optimize(Objective(data), n_trials=12)
    for trial in study.trials:
        assert len(trial.params) == 2 + trial.params["layers"]
    print("best", study.best_value)
