"""A convolutional network on handwritten digits, trained by a gang: synchronous SGD with backup workers.

    shadho-celery run tasks.sync_sgd --trials 8    # replicas from the queue: embedded, or on the fleet
    python -m tasks.sync_sgd                                    # alone: replicas are processes of this machine

The search covers the learning rate, the number of replicas N and of backup replicas b. Each trial computes its training
again in one process, from the record of the gradients that counted, and returns the difference of the parameters. A
trial takes a few seconds.
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

    #: steps, unless the trial's budget says otherwise
    steps: int = 300
    #: digits per gradient; a step takes N times as many
    batch: int = 32
    #: parts of a batch; between them a replica checks whether its step is still open
    micro_batches: int = 2
    #: part of the digits on which the loss is measured
    held_out: float = 0.25
    #: seed of that split: the same digits for every trial, because losses could not be compared otherwise
    split_seed: int = 0


SETTINGS = Settings()

SPACE = {
    "learning_rate": hp.loguniform("learning_rate", np.log(1e-2), np.log(5e-1)),
    "replicas": hp.choice("replicas", [1, 2, 3]),
    "backups": hp.choice("backups", [0, 1]),
}

STUDY = {"trials": 8, "slots": "replicas"}


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
    """Mean cross-entropy of a batch."""
    from torch.nn.functional import cross_entropy

    pixels, labels = batch
    return cross_entropy(model(pixels), labels)


def objective(params: dict[str, Any], context: Context) -> dict[str, Any]:
    """Cross-entropy on held-out digits after the last step."""
    import torch

    from shadho_celery.training import gang, replay

    torch.set_num_threads(1)  # in such a small network, more threads would wait for one another
    train, held_out, train_labels, held_out_labels = digits()
    model = network(context.seed)
    start = copy.deepcopy(model)

    def descent(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(of.parameters(), lr=params["learning_rate"], momentum=0.9)

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            return loss_of(model, (held_out, held_out_labels)).item()

    with gang(context, replicas=params["replicas"], backups=params["backups"]) as g:
        report = g.fit(
            model,
            descent(model),
            (train, train_labels),
            loss_of,
            steps=int(context.budget or SETTINGS.steps),
            batch=SETTINGS.batch,
            micro_batches=SETTINGS.micro_batches,
            evaluate=evaluate,
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
    with torch.no_grad():
        accuracy = (model(held_out).argmax(dim=1) == held_out_labels).float().mean().item()
    apart = [(a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    return {
        **report.as_metrics(),
        "loss": evaluate(model),
        "accuracy": accuracy,
        "replay_difference": max(apart),
    }


if __name__ == "__main__":
    from shadho_celery.context import LocalContext

    result = objective({"learning_rate": 0.1, "replicas": 3, "backups": 1}, LocalContext())
    print(
        f"loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f} after {result['steps']} steps of three replicas "
        f"and a backup; {result['training_seconds']:.1f} s; recomputed parameters differ by "
        f"{result['replay_difference']:.1e}"
    )
