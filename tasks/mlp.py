"""A small neural network on handwritten digits. It reports its loss after every epoch, and stops when told to.

    shadho-celery run tasks.mlp                    # embedded, or on the fleet
    shadho-celery run tasks.mlp --pruner asha      # bad networks are stopped after a few epochs
    python -m tasks.mlp                                         # alone, in this process

On a slot with a GPU it trains there. A trial takes a few seconds. With budgets of epochs, a promoted trial continues
from the checkpoint of the trial that it continues.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hyperopt import hp

from shadho_celery.context import TrialTimeout
from shadho_celery.core.files import replacing

# torch and scikit-learn are imported where they are used: the scheduler reads SPACE and needs no training library.
if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shadho_celery.context import Context


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: passes over the training digits, unless the trial's budget says otherwise
    epochs: int = 27
    #: digits per gradient step
    batch: int = 32
    #: epochs after which the learning rate is half of the initial one; it falls further after that. With a constant
    #: rate, the final loss depends on the last steps, varies much between seeds, and says little about the first steps
    half_rate: float = 3.0
    #: part of the digits on which the loss is measured
    held_out: float = 0.25
    #: seed of that split: the same digits for every trial, because losses could not be compared otherwise
    split_seed: int = 0


SETTINGS = Settings()

SPACE = {
    "width": hp.choice("width", [32, 64, 128, 256]),
    "layers": hp.uniformint("layers", 1, 3),
    "dropout": hp.uniform("dropout", 0.0, 0.5),
    "learning_rate": hp.loguniform("learning_rate", np.log(1e-4), np.log(1e-1)),
    # Two subspaces: each optimiser has its own parameter.
    "descent": hp.choice(
        "descent",
        [
            {"descent": "sgd", "momentum": hp.uniform("momentum", 0.0, 0.99)},
            {"descent": "adamw", "weight_decay": hp.loguniform("weight_decay", np.log(1e-6), np.log(1e-1))},
        ],
    ),
}

# The sampler ignores losses for the first twenty trials of two subspaces.
STUDY = {"trials": 45}


def digits(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and held-out pixels (64 each, scaled to 0..1), training and held-out labels."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        pixels / 16, labels, test_size=SETTINGS.held_out, random_state=SETTINGS.split_seed, stratify=labels
    )
    kinds = (torch.float32, torch.float32, torch.int64, torch.int64)
    train, held_out, train_labels, held_out_labels = (
        torch.as_tensor(part, dtype=kind, device=device) for part, kind in zip(parts, kinds, strict=True)
    )
    return train, held_out, train_labels, held_out_labels


def network(params: dict[str, Any]) -> nn.Module:
    """`layers` hidden layers of `width`, ten outputs."""
    from torch import nn

    sizes = [64] + [params["width"]] * params["layers"]
    hidden: list[nn.Module] = []
    for size, next_size in itertools.pairwise(sizes):
        hidden += [nn.Linear(size, next_size), nn.ReLU(), nn.Dropout(params["dropout"])]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))


def descent_of(params: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that the params name."""
    import torch

    how, rate = params["descent"], params["learning_rate"]
    if how["descent"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=how["momentum"])
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=how["weight_decay"])


class Training:
    """A network, its optimiser, and the number of epochs done."""

    def __init__(self, params: dict[str, Any], context: Context) -> None:
        import torch

        torch.manual_seed(context.seed)
        self._rate: float = params["learning_rate"]
        self._model = network(params).to(context.device)
        self._descent = descent_of(params, self._model)
        self._digits = digits(context.device)
        self.epoch = 0

    def train(self) -> None:
        """Pass over the training digits once."""
        import torch
        from torch.nn.functional import cross_entropy

        pixels, _, labels, _ = self._digits
        self._model.train()
        for group in self._descent.param_groups:
            group["lr"] = self._rate / (1 + self.epoch / SETTINGS.half_rate)
        for batch in torch.randperm(len(pixels), device=pixels.device).split(SETTINGS.batch):
            self._descent.zero_grad()
            cross_entropy(self._model(pixels[batch]), labels[batch]).backward()
            self._descent.step()
        self.epoch += 1

    def measured(self) -> dict[str, float]:
        """Cross-entropy and accuracy on the held-out digits."""
        import torch
        from torch.nn.functional import cross_entropy

        _, pixels, _, labels = self._digits
        self._model.eval()
        with torch.no_grad():
            scores = self._model(pixels)
        return {
            "loss": cross_entropy(scores, labels).item(),
            "accuracy": (scores.argmax(dim=1) == labels).float().mean().item(),
            "epochs": self.epoch,
        }

    def save(self, path: Path) -> None:
        """Write the checkpoint completely or not at all."""
        import torch

        state = {"epoch": self.epoch, "model": self._model.state_dict(), "descent": self._descent.state_dict()}
        with replacing(path) as file:
            torch.save(state, file)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint. Raises FileNotFoundError, or any exception, partly loaded, if the file is not
        usable.
        """
        import torch

        state = torch.load(path, map_location=self._digits[0].device, weights_only=True)
        self._model.load_state_dict(state["model"])
        # torch accepts the state of another optimiser, and fails at its first step.
        if state["descent"]["param_groups"][0].keys() != self._descent.param_groups[0].keys():
            raise ValueError("it is of another optimiser")
        self._descent.load_state_dict(state["descent"])
        if type(state["epoch"]) is not int or state["epoch"] < 1:
            raise ValueError("it has no number of epochs")
        self.epoch = state["epoch"]


def checkpoint_of(context: Context) -> Path | None:
    """The trial's checkpoint, or None if no promoted trial could continue from it or there is no disk for it."""
    # Without budgets, only another attempt could use it, which is as fast from the beginning.
    if context.budget is None:
        return None
    try:
        return context.checkpoint_dir / "mlp.pt"
    except OSError as error:
        print(f"mlp: no checkpoints are kept here ({error})", file=sys.stderr)
        return None


def resumed(params: dict[str, Any], context: Context, checkpoint: Path | None, last: int) -> Training:
    """The training of a trial up to epoch `last`: from its checkpoint if that is usable, else from the beginning."""
    training = Training(params, context)
    if checkpoint is None:
        return training
    try:
        training.load(checkpoint)
        if training.epoch > last:
            raise ValueError(f"it is of epoch {training.epoch}, and the trial ends at {last}")
    except FileNotFoundError:
        return training
    except TrialTimeout:
        raise
    except Exception as error:  # half written, or of another version: torch may raise anything
        print(
            f"mlp: started from the beginning, because {checkpoint} is not usable ({type(error).__name__})",
            file=sys.stderr,
        )
        return Training(params, context)
    return training


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """Cross-entropy on held-out digits after the last epoch, which is the trial's budget or `Settings.epochs`."""
    checkpoint = checkpoint_of(context)
    last = max(1, round(context.budget or SETTINGS.epochs))
    training = resumed(params, context, checkpoint, last)
    result = training.measured() if training.epoch else {}
    while training.epoch < last:
        training.train()
        result = training.measured()
        context.report(training.epoch, result["loss"])
        if context.should_stop():
            break
    # Another attempt of the trial may write there, and a disk may be full: the loss counts anyway.
    if checkpoint is not None and not context.is_copy:
        try:
            training.save(checkpoint)
        except (OSError, RuntimeError) as error:  # torch raises the latter if the disk is full
            print(f"mlp: no checkpoint of this trial was kept ({error})", file=sys.stderr)
    return result


if __name__ == "__main__":
    import shadho_celery

    best = shadho_celery.minimize(objective, SPACE, trials=STUDY["trials"], seed=0).best_or_none
    print(f"loss {best.loss:.4f} with {best.params}" if best else "no trial succeeded")
