"""A small neural network on handwritten digits: it reports its loss after every epoch, and stops when told to.

    python -m shadho_celery.launch tasks.mlp                    # embedded, or on the fleet
    python -m shadho_celery.launch tasks.mlp --pruner asha      # bad networks are stopped after a few epochs
    python -m tasks.mlp                                         # alone, in this process

On a slot with a GPU it trains there. A trial takes a few seconds. With budgets, of epochs, a promoted trial goes on
from the checkpoint of the one before it.
"""

from __future__ import annotations

import itertools
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hyperopt import hp

# torch and scikit-learn are imported where they are used: the scheduler reads SPACE and needs no training library.
if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shadho_celery.context import Context


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: passes over the training digits where the trial's budget does not say otherwise
    epochs: int = 27
    #: digits per gradient step
    batch: int = 32
    #: epochs after which the learning rate is half of the first one, and falls on: with a constant one the last loss
    #: depends on the last steps, differs much between seeds, and has little to do with the first ones
    half_rate: float = 3.0
    #: share of the digits the loss is taken on
    held_out: float = 0.25
    #: seed of that split: the same digits for every trial, or losses could not be compared
    split_seed: int = 0


SETTINGS = Settings()

SPACE = {
    "width": hp.choice("width", [32, 64, 128, 256]),
    "layers": hp.uniformint("layers", 1, 3),
    "dropout": hp.uniform("dropout", 0.0, 0.5),
    "learning_rate": hp.loguniform("learning_rate", np.log(1e-4), np.log(1e-1)),
    # Two subspaces: each way of descending has a parameter of its own.
    "descent": hp.choice(
        "descent",
        [
            {"descent": "sgd", "momentum": hp.uniform("momentum", 0.0, 0.99)},
            {"descent": "adamw", "weight_decay": hp.loguniform("weight_decay", np.log(1e-6), np.log(1e-1))},
        ],
    ),
}

# Twenty trials of two subspaces are the sampler's beginning, which looks at no loss.
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


class Checkpoint:
    """Network and optimiser after an epoch, in the trial's folder; a file that cannot be read counts as none."""

    def __init__(self, context: Context, model: nn.Module, descent: torch.optim.Optimizer) -> None:
        self._path = context.checkpoint_dir / "mlp.pt"
        self._parts: dict[str, nn.Module | torch.optim.Optimizer] = {"model": model, "descent": descent}
        self._device = context.device

    def load(self) -> int:
        """Continue from the file if there is one; return the number of epochs that are behind it."""
        import torch

        try:
            found = torch.load(self._path, map_location=self._device, weights_only=True)
            for name, part in self._parts.items():
                part.load_state_dict(found[name])
            return int(found["epoch"])
        except (OSError, EOFError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError):
            # Missing, half written, or of another version of this file.
            return 0

    def save(self, epoch: int) -> None:
        """Write it whole or not at all."""
        import torch

        written = self._path.with_suffix(f".{os.getpid()}")
        torch.save({name: part.state_dict() for name, part in self._parts.items()} | {"epoch": epoch}, written)
        written.replace(self._path)


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """Cross-entropy on held-out digits after the last epoch, which is the trial's budget or `Settings.epochs`."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(context.seed)
    train, held_out, train_labels, held_out_labels = digits(context.device)
    model = network(params).to(context.device)
    descent = descent_of(params, model)
    # Without budgets nothing follows a trial but another attempt at it, which is as quick from the beginning.
    checkpoint = None if context.budget is None else Checkpoint(context, model, descent)
    result: dict[str, float] = {}
    behind = checkpoint.load() if checkpoint is not None else 0
    last = int(context.budget or SETTINGS.epochs)
    for epoch in range(min(behind, last - 1) + 1, last + 1):
        model.train()
        for group in descent.param_groups:
            group["lr"] = params["learning_rate"] / (1 + (epoch - 1) / SETTINGS.half_rate)
        for batch in torch.randperm(len(train), device=context.device).split(SETTINGS.batch):
            descent.zero_grad()
            cross_entropy(model(train[batch]), train_labels[batch]).backward()
            descent.step()
        model.eval()
        with torch.no_grad():
            scores = model(held_out)
        result = {
            "loss": cross_entropy(scores, held_out_labels).item(),
            "accuracy": (scores.argmax(dim=1) == held_out_labels).float().mean().item(),
            "epochs": epoch,
        }
        context.report(epoch, result["loss"])
        if context.should_stop():
            break
    if checkpoint is not None:
        checkpoint.save(epoch)
    return result


if __name__ == "__main__":
    import shadho_celery

    best = shadho_celery.minimize(objective, SPACE, trials=STUDY["trials"], seed=0).best
    print(f"loss {best.loss:.4f} with {best.params}" if best else "no trial succeeded")
