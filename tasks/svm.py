"""A support vector machine on handwritten digits: the search of SHADHO's authors, on data included in scikit-learn.

    shadho-celery run tasks.svm --trials 40        # embedded, or on the fleet
    python -m tasks.svm                                         # alone, in this process
    python -m tasks.svm --data mnist                            # on MNIST, kept in the folder mnist
    SHADHO_SVM_DATA=mnist shadho-celery run tasks.svm

The four kernels are four subspaces of very different size, with the paper's ranges. A trial takes at most a few
seconds. The authors' own data is MNIST, with minutes per trial. scikit-learn downloads it from openml.org into the
folder if it is missing. On a fleet each worker needs the variable, and either the data in the folder or network access.
"""

from __future__ import annotations

import argparse
import os
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

from hyperopt import hp

# scikit-learn is imported where it is used: the scheduler reads SPACE and needs no training library for that.


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: part of the digits on which the loss is measured
    held_out: float = 0.25
    #: seed of that split: the same digits for every trial, because losses could not be compared otherwise
    split_seed: int = 0
    #: maximum steps of the solver for each pair of digits. Good parameters converge within a few thousand steps. Bad
    #: ones (a huge C, a kernel that does not separate anything) never converge and are stopped here, after at most
    #: about a second
    max_iter: int = 10_000
    #: images of MNIST to train on: all 60,000 take about thirty times as long
    mnist_train: int = 10_000
    #: folds whose held-out scores calibrate the probabilities
    folds: int = 3


SETTINGS = Settings()

#: environment variable with the folder of MNIST; without it the data are scikit-learn's digits
FOLDER = "SHADHO_SVM_DATA"
#: position of the first of MNIST's 10,000 test images
MNIST_HELD_OUT = 60_000

# One node each, shared by the kernels that have the parameter: it is one hyperparameter with one label.
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
def images(folder: str | None) -> Any:
    """Training and held-out pixels (one row per image, scaled to 0..1), training and held-out labels.

    If a `folder` is given, these are MNIST's. Raises FileNotFoundError if it is missing and cannot be downloaded.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    if folder is not None:
        pixels, labels = mnist(folder)
        train, held_out = slice(SETTINGS.mnist_train), slice(MNIST_HELD_OUT, None)
        return pixels[train], pixels[held_out], labels[train], labels[held_out]
    pixels, labels = load_digits(return_X_y=True)
    return train_test_split(
        pixels / 16, labels, test_size=SETTINGS.held_out, random_state=SETTINGS.split_seed, stratify=labels
    )


def mnist(folder: str) -> Any:
    """All of MNIST's pixels, scaled to 0..1, and its labels."""
    from sklearn.datasets import fetch_openml

    try:
        # This parser needs no pandas.
        pixels, labels = fetch_openml(
            "mnist_784", version=1, data_home=folder, return_X_y=True, as_frame=False, parser="liac-arff"
        )
    except OSError as error:
        raise FileNotFoundError(
            f"MNIST is not in {folder!r} and cannot be fetched from openml.org ({error}); run this once where there is "
            f"a network, and copy the folder"
        ) from error
    return pixels / 255, labels.astype(int)


def rescaled(params: dict[str, Any], largest: float) -> dict[str, Any]:
    """The params of the same machine with polynomial kernel values of at most 1; params of other kernels are unchanged.

    `largest` is the largest square of an image's length. The solver stores the kernel in single precision, which
    overflows with a degree of 10. Dividing the kernel by a number and multiplying C by it gives the same decision
    function.
    """
    if params["kernel"] != "poly":
        return params
    base = params["gamma"] * largest + abs(params["coef0"])
    scale = base ** params["degree"]
    return params | {
        "C": params["C"] * scale,
        "gamma": params["gamma"] / base,
        "coef0": params["coef0"] / base,
    }


def objective(params: dict[str, Any]) -> dict[str, float]:
    """Log loss on held-out images of a machine with these `params` (those of SVC)."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import accuracy_score, log_loss
    from sklearn.svm import SVC

    train, held_out, train_labels, held_out_labels = images(os.environ.get(FOLDER))
    machine = SVC(max_iter=SETTINGS.max_iter, **rescaled(params, (train**2).sum(axis=1).max()))
    # A machine's scores are not probabilities: Platt's sigmoid is fitted to scores of images not used for training.
    machine = CalibratedClassifierCV(machine, ensemble=False, cv=SETTINGS.folds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # stopped at max_iter, as intended
        warnings.simplefilter("ignore", RuntimeWarning)  # overflow of a score, whose effect shows in the loss
        machine.fit(train, train_labels)
        chances = machine.predict_proba(held_out)
    return {
        "loss": float(log_loss(held_out_labels, chances)),
        "accuracy": float(accuracy_score(held_out_labels, machine.classes_[chances.argmax(axis=1)])),
    }


def main() -> None:
    """Search in this process, on the data that the command names."""
    import shadho_celery

    parser = argparse.ArgumentParser(description="A search of support vector machines in this process.")
    parser.add_argument("--data", metavar="FOLDER", help="folder of MNIST, fetched if it is not there [digits]")
    given = parser.parse_args()
    if given.data is not None:
        os.environ[FOLDER] = given.data
        try:
            images(given.data)
        except FileNotFoundError as error:
            parser.error(str(error))
    best = shadho_celery.minimize(objective, SPACE, trials=STUDY["trials"], seed=0).best_or_none
    print(f"log loss {best.loss:.4f} with {best.params}" if best else "no trial succeeded")


if __name__ == "__main__":
    main()
