"""A support vector machine on handwritten digits: the search SHADHO's authors ran, on data that every scikit-learn has.

    python -m shadho_celery.launch tasks.svm --trials 40        # embedded, or on the fleet
    python -m tasks.svm                                         # alone, in this process

The four kernels are four subspaces of very unlike size; the ranges are the paper's. No trial takes over a few seconds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

from hyperopt import hp

# scikit-learn is imported where it is used: the scheduler reads SPACE and needs no training library for that.


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: share of the digits the loss is taken on
    held_out: float = 0.25
    #: seed of that split: the same digits for every trial, or losses could not be compared
    split_seed: int = 0
    #: the solver's steps for each pair of digits. Good parameters converge within a few thousand; bad ones (a huge C, a
    #: kernel that tells nothing apart) never do, and are stopped here, a trial at its worst costing about a second.
    max_iter: int = 10_000
    #: folds whose held-out scores calibrate the probabilities
    folds: int = 3


SETTINGS = Settings()

# One node each, shared by the kernels that have the parameter: they are one hyperparameter with one label.
C = 2 ** hp.uniform("C", -5, 15)
GAMMA = 10 ** hp.uniform("gamma", -3, 3)
COEF0 = hp.uniform("coef0", -1000, 1000)

SPACE = hp.choice(
    "kernel",
    [
        {"kernel": "linear", "C": C},
        {"kernel": "rbf", "C": C, "gamma": GAMMA},
        {"kernel": "sigmoid", "C": C, "gamma": GAMMA, "coef0": COEF0},
        {
            "kernel": "poly",
            "C": C,
            "gamma": GAMMA,
            "coef0": COEF0,
            "degree": hp.choice("degree", list(range(2, 15))),
        },
    ],
)

STUDY: dict[str, Any] = {"trials": 40, "classes": ["gpu_large", "gpu_small", "cpu"]}


@cache
def digits() -> Any:
    """Training and held-out pixels (64 each, scaled to 0..1), training and held-out labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    return train_test_split(
        pixels / 16, labels, test_size=SETTINGS.held_out, random_state=SETTINGS.split_seed, stratify=labels
    )


def objective(params: dict[str, Any]) -> dict[str, float]:
    """Log loss on held-out digits of a machine with these `params` (those of SVC).

    Raises ValueError where the kernel's numbers overflow (a high degree with a large coef0): a failed trial.
    """
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import accuracy_score, log_loss
    from sklearn.svm import SVC

    train, held_out, train_labels, held_out_labels = digits()
    # A machine's scores are no probabilities: Platt's sigmoid is fitted to scores of digits that it was not trained on.
    machine = CalibratedClassifierCV(SVC(max_iter=SETTINGS.max_iter, **params), ensemble=False, cv=SETTINGS.folds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # stopped at max_iter, as intended
        warnings.simplefilter("ignore", RuntimeWarning)  # overflow; what it leads to shows in the loss, or raises
        machine.fit(train, train_labels)
        chances = machine.predict_proba(held_out)
    return {
        "loss": float(log_loss(held_out_labels, chances)),
        "accuracy": float(accuracy_score(held_out_labels, machine.classes_[chances.argmax(axis=1)])),
    }


if __name__ == "__main__":
    import shadho_celery

    best = shadho_celery.minimize(objective, SPACE, trials=STUDY["trials"], seed=0).best
    print(f"log loss {best.loss:.4f} with {best.params}" if best else "no trial succeeded")
