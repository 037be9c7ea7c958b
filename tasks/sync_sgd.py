"""A convolutional network on handwritten digits, trained by a gang: synchronous SGD with backup workers.

    shadho-celery run tasks.sync_sgd --trials 8    # replicas from the queue: embedded, or on the fleet
    python -m tasks.sync_sgd                       # alone: replicas are processes of this machine

The search covers the learning rate, the number of replicas N and of backup replicas b, and finds the least seconds to
an accuracy. A trial takes N + b slots, so that its backups have slots too; the metric `backups_came` has the ranks of
those that joined. Reports are the share of wrong digits. Each trial computes its training again in one process, from
the record of the gradients that counted, and returns the difference of the parameters.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hyperopt import hp

# torch and scikit-learn are imported where they are used: the scheduler reads SPACE and needs no training library.
if TYPE_CHECKING:
    from torch import Tensor, nn

    from shadho_celery.context import Context


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: the training ends once this share of the held-out digits is right
    accuracy: float = 0.95
    #: maximum number of steps, unless the trial's budget says otherwise
    steps: int = 300
    #: steps between two measurements of the accuracy
    report_every: int = 10
    #: digits per gradient; a step takes N times as many
    batch: int = 32
    #: parts of a batch; between them a replica checks whether its step is still open
    micro_batches: int = 2
    #: part of the digits on which the accuracy is measured
    held_out: float = 0.25
    #: seed of that split: the same digits for every trial, because accuracies could not be compared otherwise
    split_seed: int = 0


SETTINGS = Settings()

SPACE = {
    "learning_rate": hp.loguniform("learning_rate", np.log(1e-2), np.log(5e-1)),
    "replicas": hp.choice("replicas", [1, 2, 3]),
    "backups": hp.choice("backups", [0, 1]),
}


def slots(params: dict[str, Any]) -> int:
    """Return N + b: a slot for each replica and each backup replica."""
    return int(params["replicas"] + params["backups"])


STUDY = {"trials": 8, "slots": slots}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and held-out pixels (1 x 8 x 8 each, scaled to 0..1), training and held-out labels."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        pixels.reshape(-1, 1, 8, 8) / 16,
        labels,
        test_size=SETTINGS.held_out,
        random_state=SETTINGS.split_seed,
        stratify=labels,
    )
    kinds = (torch.float32, torch.float32, torch.int64, torch.int64)
    train, held_out, train_labels, held_out_labels = (
        torch.as_tensor(part, dtype=kind) for part, kind in zip(parts, kinds, strict=True)
    )
    return train, held_out, train_labels, held_out_labels


def network(seed: int) -> nn.Module:
    """Two convolutional layers and one fully connected layer: ten scores for a digit."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch, which is copied to the model's device."""
    from torch.nn.functional import cross_entropy

    device = next(model.parameters()).device
    pixels, labels = batch
    return cross_entropy(model(pixels.to(device)), labels.to(device))


def objective(params: dict[str, Any], context: Context) -> dict[str, Any]:
    """Seconds of training until the accuracy is reached.

    If it is not reached, the seconds are multiplied by the ratio of the wrong digits to those that are allowed.
    """
    import torch

    from shadho_celery.training import gang, replay

    torch.set_num_threads(1)  # in such a small network, more threads would wait for one another
    train, held_out, train_labels, held_out_labels = digits()
    model = network(context.seed).to(context.device)
    start, allowed = copy.deepcopy(model), 1 - SETTINGS.accuracy

    def descent(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(of.parameters(), lr=params["learning_rate"], momentum=0.9)

    def wrong(model: nn.Module) -> float:
        found = model(held_out.to(context.device)).argmax(dim=1).cpu()
        return float((found != held_out_labels).float().mean())

    with gang(context, replicas=params["replicas"], backups=params["backups"]) as g:
        report = g.fit(
            model,
            descent(model),
            (train, train_labels),
            loss_of,
            steps=int(context.budget or SETTINGS.steps),
            batch=SETTINGS.batch,
            micro_batches=SETTINGS.micro_batches,
            evaluate=wrong,
            goal=allowed,
            report_every=SETTINGS.report_every,
        )

    # From here on only the trial continues: replicas have left in `fit`.
    again = replay(
        start,
        descent(start),
        (train, train_labels),
        loss_of,
        report.log,
        batch=SETTINGS.batch,
        micro_batches=SETTINGS.micro_batches,
        seed=context.seed,
    )
    for _ in again:
        pass
    share = wrong(model)
    apart = [(a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    return {
        **report.as_metrics(),
        "loss": report.seconds * max(1.0, share / allowed),
        "accuracy": 1 - share,
        "replay_difference": max(apart),
    }


if __name__ == "__main__":
    from shadho_celery.context import LocalContext

    result = objective({"learning_rate": 0.1, "replicas": 3, "backups": 1}, LocalContext())
    print(
        f"accuracy {result['accuracy']:.3f} after {result['training_seconds']:.2f} s and {result['steps']} steps of "
        f"three replicas and a backup; recomputed parameters differ by {result['replay_difference']:.1e}"
    )
