"""A loop of one's own, with a trial that fails and one that is pruned."""

import optuna
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import scale

X, y = load_iris(return_X_y=True)
train_x, valid_x, train_y, valid_y = train_test_split(scale(X), y, random_state=0)

if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    for number in range(12):
        trial = study.ask()
        cost = trial.suggest_float("cost", 1e-5, 1e5, log=True)
        solver = trial.suggest_categorical("solver", ["lbfgs", "newton-cg"])
        if number == 5:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        if number == 6:
            study.tell(trial.number, state=optuna.trial.TrialState.PRUNED)
            continue
        model = LogisticRegression(C=cost, solver=solver, max_iter=200).fit(train_x, train_y)
        told = study.tell(trial, model.score(valid_x, valid_y))
        assert told.params == {"cost": cost, "solver": solver}
    fixed = study.ask({"cost": optuna.distributions.FloatDistribution(1e-5, 1e5, log=True)})
    assert set(fixed.params) == {"cost"}
    study.tell(fixed, 0.0)
    states = [trial.state.name for trial in study.trials]
    assert states[5:7] == ["FAIL", "PRUNED"]
    assert states.count("COMPLETE") == 11
    print("best", study.best_value, study.best_params)
