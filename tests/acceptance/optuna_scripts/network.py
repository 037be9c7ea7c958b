"""A network of PyTorch for small digits, whose layers, optimiser and rate are searched, with pruning."""

import optuna
import torch
from optuna.trial import TrialState
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
images = images.float() / 16
train, valid = slice(0, 400), slice(400, 800)


def make_model(trial):
    layers, width = [], 64
    for place in range(trial.suggest_int("n_layers", 1, 3)):
        units = trial.suggest_int(f"n_units_l{place}", 8, 64)
        layers += [nn.Linear(width, units), nn.ReLU(), nn.Dropout(trial.suggest_float(f"dropout_l{place}", 0.0, 0.5))]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, 10))


def objective(trial):
    torch.manual_seed(0)
    model = make_model(trial)
    name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    optimiser = getattr(torch.optim, name)(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
    for epoch in range(4):
        model.train()
        for batch in torch.randperm(400).split(100):
            optimiser.zero_grad()
            cross_entropy(model(images[train][batch]), labels[train][batch]).backward()
            optimiser.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[valid]).argmax(1) == labels[valid]).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.exceptions.TrialPruned()
    return accuracy


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=10, timeout=100)
    ended = study.get_trials(deepcopy=False, states=[TrialState.PRUNED, TrialState.COMPLETE])
    assert len(ended) == len(study.trials) == 10
    assert study.best_value > 0.3
    print("best", study.best_value, study.best_params)
