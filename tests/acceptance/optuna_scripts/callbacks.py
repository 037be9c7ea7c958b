"""Facts of trials, failures that do not end the search, and callbacks that do."""

import optuna
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_validate
from sklearn.svm import LinearSVC

X, y = load_iris(return_X_y=True)
optuna.logging.set_verbosity(optuna.logging.WARNING)
seen = []


def objective(trial):
    if trial.number == 3:
        raise FloatingPointError("as may happen")
    found = cross_validate(LinearSVC(C=trial.suggest_float("C", 1e-3, 10, log=True)), X, y, cv=3)
    trial.set_user_attr("seconds", found["fit_time"].tolist())
    return found["test_score"].mean()


def note(study, trial):
    seen.append((trial.number, study.best_trial.number))


if __name__ == "__main__":
    study = optuna.create_study(study_name="facts", storage="sqlite:///facts.db", direction="maximize")
    ends = MaxTrialsCallback(8, states=(TrialState.COMPLETE,))
    study.optimize(objective, n_trials=50, catch=(FloatingPointError,), callbacks=[note, ends])
    assert len(study.get_trials(states=[TrialState.COMPLETE])) == 8
    assert len(seen) == 9
    assert len(study.best_trial.user_attrs["seconds"]) == 3
    again = optuna.load_study(study_name="facts", storage="sqlite:///facts.db")
    assert again.best_params == study.best_params
    assert (study.trials_dataframe().state == "FAIL").sum() == 1
    print("best", again.best_value)
