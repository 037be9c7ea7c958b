"""A perceptron on handwritten digits, trained by DistributedDataParallel in a process group.

    shadho-celery run tasks.ddp --trials 2    # a rank in each of the trial's slots: embedded, or on the fleet
    python -m tasks.ddp                       # alone: one rank

The search covers the learning rate and the number of ranks. A batch has the same number of digits for any number of
ranks. A trial takes a few seconds. It saves a checkpoint after each epoch, from which a later attempt continues.
"""

from __future__ import annotations

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

    #: epochs, unless the trial's budget says otherwise
    epochs: int = 12
    #: digits per step of all ranks together
    batch: int = 96
    #: part of the digits on which the loss is measured
    held_out: float = 0.25
    #: seed of that split: the same digits for every trial, because losses could not be compared otherwise
    split_seed: int = 0


SETTINGS = Settings()

SPACE = {
    "learning_rate": hp.loguniform("learning_rate", np.log(1e-2), np.log(5e-1)),
    "ranks": hp.choice("ranks", [2, 3]),
}

STUDY = {"trials": 8, "slots": "ranks"}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        torch.as_tensor(part, dtype=kind) for part, kind in zip(parts, kinds, strict=True)
    )
    return train, held_out, train_labels, held_out_labels


def network(seed: int) -> nn.Module:
    """One hidden layer: ten scores for a digit."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def objective(params: dict[str, Any], context: Context) -> dict[str, Any]:
    """Cross-entropy on held-out digits after the last epoch."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from shadho_celery.ranks import process_group

    torch.set_num_threads(1)  # in such a small network, more threads would wait for one another
    train, held_out, train_labels, held_out_labels = digits()
    data = TensorDataset(train, train_labels)
    with process_group(context, ranks=params["ranks"]) as pg:
        model = DistributedDataParallel(network(context.seed).to(pg.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=params["learning_rate"], momentum=0.9)
        first, loss = 0, float("nan")
        if (state := pg.load()) is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first, loss = state["epoch"], state["loss"]
        sampler: DistributedSampler[Any] = DistributedSampler(data, pg.size, pg.rank, seed=context.seed % 2**32)
        loader = DataLoader(data, batch_size=SETTINGS.batch // pg.size, sampler=sampler)
        epochs = int(context.budget or SETTINGS.epochs)
        for epoch in range(first, epochs):
            sampler.set_epoch(epoch)
            for pixels, labels in loader:
                optimizer.zero_grad()
                cross_entropy(model(pixels.to(pg.device)), labels.to(pg.device)).backward()
                optimizer.step()
            with torch.no_grad():
                # Without DistributedDataParallel, because only rank 0 needs the loss.
                scores = model.module(held_out.to(pg.device)).cpu()
            loss = cross_entropy(scores, held_out_labels).item()
            context.report(epoch, loss)
            pg.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1, "loss": loss}
            )
            if pg.should_stop():
                break
        accuracy = (model.module(held_out.to(pg.device)).argmax(dim=1).cpu() == held_out_labels).float().mean().item()

    # From here on only the trial continues: the other ranks have left with the block.
    return {"loss": loss, "accuracy": accuracy, "ranks": pg.size, "resumed_at": first}


if __name__ == "__main__":
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from shadho_celery.context import LocalContext

    with TemporaryDirectory() as folder:
        result = objective({"learning_rate": 0.1, "ranks": 1}, LocalContext(checkpoints=Path(folder)))
    print(f"loss {result['loss']:.4f}, accuracy {result['accuracy']:.3f}")
