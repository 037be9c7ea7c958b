"""A classifier that is trained step by step, whose hopeless trials end early."""

import optuna
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

X, y = load_iris(return_X_y=True)
train_x, valid_x, train_y, valid_y = train_test_split(X, y, test_size=0.3, random_state=0)


def objective(trial):
    model = SGDClassifier(alpha=trial.suggest_float("alpha", 1e-6, 1.0, log=True), random_state=trial.number)
    for step in range(30):
        model.partial_fit(train_x, train_y, classes=[0, 1, 2])
        trial.report(1.0 - model.score(valid_x, valid_y), step)
        if trial.should_prune():
            raise optuna.TrialPruned()
    return 1.0 - model.score(valid_x, valid_y)


if __name__ == "__main__":
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2))
    study.optimize(objective, n_trials=25)
    pruned = study.get_trials(deepcopy=False, states=[TrialState.PRUNED])
    complete = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    assert pruned
    assert len(pruned) + len(complete) == 25
    assert all(trial.last_step < 29 and trial.intermediate_values for trial in pruned)
    print("best", study.best_value, "pruned", len(pruned))
