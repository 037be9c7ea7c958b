"""Federated averaging on digits that arrive in two alternating blocks of labels, like users of day and night.

    shadho-celery run tasks.federated_blockcyclic --trials 20       # embedded, or on the fleet
    python -m tasks.federated_blockcyclic         # compares the three methods

A cycle is one block of rounds on the digits 0-4, then one on 5-9. A single model forgets the first while it learns the
second. MM-PSGD keeps one predictor per block: the mean of the global models in that block. MC-PSGD also trains one
chain of models for each block alone, and adds the model that fits the clients better to the mean. Ding et al.,
"Distributed Optimization over Block-Cyclic Data", arXiv 2002.07454. A trial takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hyperopt import hp

# torch and scikit-learn are imported where they are used: the scheduler reads SPACE and needs no training library.
if TYPE_CHECKING:
    from torch import Tensor

    from shadho_celery.context import Context


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: which labels arrive together
    blocks: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    #: clients; each has few labels of every block
    clients: int = 10
    #: cycles through all blocks, unless the trial's budget says otherwise
    cycles: int = 10
    #: rounds of a block, each ended by an average
    rounds: int = 10
    #: hidden units
    width: int = 32
    #: digits of one local step at one client
    batch: int = 8
    #: part of the digits on which accuracy is measured
    held_out: float = 0.25
    #: seed of that split: the same digits for every trial, because losses could not be compared otherwise
    split_seed: int = 0


SETTINGS = Settings()

SPACE = {
    # "mm" and "mc" are MM-PSGD and MC-PSGD; "fedavg" keeps one model, the last.
    "method": hp.choice("method", ["fedavg", "mm", "mc"]),
    "learning_rate": hp.loguniform("learning_rate", np.log(0.02), np.log(1.0)),
    "local_steps": hp.uniformint("local_steps", 1, 10),
}

STUDY = {"trials": 20}


@dataclass(frozen=True, kw_only=True)
class Block:
    """The digits of one block."""

    #: training pixels and labels of the clients: (clients, digits, 64) and (clients, digits)
    pixels: Tensor
    labels: Tensor
    #: held-out pixels (digits, 64) and labels
    test_pixels: Tensor
    test_labels: Tensor

    def accuracy(self, model: Model) -> float:
        """Fraction of the held-out digits that `model` classifies correctly."""
        chosen = model.scores(self.test_pixels[None]).argmax(dim=2)[0]
        return (chosen == self.test_labels).float().mean().item()

    def losses(self, model: Model, chosen: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of each client on its `chosen` digits (clients, batch), or on all of them."""
        import torch
        from torch.nn.functional import cross_entropy

        pixels, labels = self.pixels, self.labels
        if chosen is not None:
            rows = torch.arange(len(labels))[:, None]
            pixels, labels = pixels[rows, chosen], labels[rows, chosen]
        return cross_entropy(model.scores(pixels).transpose(1, 2), labels, reduction="none").mean(dim=1)


@dataclass(frozen=True)
class Model:
    """One hidden layer. The first dimension of each tensor is the number of clients, or 1 for a global model."""

    tensors: tuple[Tensor, ...]

    def scores(self, pixels: Tensor) -> Tensor:
        """(clients, digits, 10) of `pixels` (clients, digits, 64)."""
        inner, inner_bias, outer, outer_bias = self.tensors
        return (pixels @ inner + inner_bias).relu() @ outer + outer_bias

    def trained(self, block: Block, draws: list[Tensor], rate: float) -> Model:
        """The global model after every client took one step per draw on its own, and all models were averaged."""
        import torch

        clients = len(block.labels)
        tensors = [tensor.expand(clients, *tensor.shape[1:]).clone().requires_grad_() for tensor in self.tensors]
        descent = torch.optim.SGD(tensors, lr=rate)
        for chosen in draws:
            descent.zero_grad()
            # Clients share no parameters, so the gradient of the sum contains each client's gradient.
            block.losses(Model(tuple(tensors)), chosen).sum().backward()
            descent.step()
        return Model(tuple(tensor.detach().mean(dim=0, keepdim=True) for tensor in tensors))

    def blended(self, other: Model, share: float) -> Model:
        """This model mixed with `share` of `other`."""
        return Model(tuple(mine.lerp(its, share) for mine, its in zip(self.tensors, other.tensors, strict=True)))


def first_model(generator: Any) -> Model:
    """A global model with random weights and without biases."""
    import torch

    width = SETTINGS.width
    inner = torch.randn(1, 64, width, generator=generator) * (2 / 64) ** 0.5
    outer = torch.randn(1, width, 10, generator=generator) * (2 / width) ** 0.5
    return Model((inner, torch.zeros(1, 1, width), outer, torch.zeros(1, 1, 10)))


def digits() -> list[Block]:
    """One `Block` for each of `Settings.blocks`, with training digits sorted by label and divided among the clients."""
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        (pixels / 16).astype(np.float32), labels, test_size=SETTINGS.held_out, random_state=SETTINGS.split_seed
    )
    blocks = []
    for wanted in SETTINGS.blocks:
        own = np.flatnonzero(np.isin(train_labels, wanted))
        own = own[np.argsort(train_labels[own], kind="stable")]
        # Each client gets one stretch of the sorted digits: one or two labels of a block.
        dealt = own[: len(own) // SETTINGS.clients * SETTINGS.clients].reshape(SETTINGS.clients, -1)
        seen = np.isin(test_labels, wanted)
        parts = (train[dealt], train_labels[dealt], test[seen], test_labels[seen])
        tensors = [torch.as_tensor(part) for part in parts]
        blocks.append(Block(pixels=tensors[0], labels=tensors[1], test_pixels=tensors[2], test_labels=tensors[3]))
    return blocks


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """The fraction of held-out digits that their block's predictor gets wrong: mean over the blocks, after all
    cycles.
    """
    import torch

    generator = torch.Generator().manual_seed(context.seed)
    blocks = digits()
    chain = first_model(generator)
    #: of "mc": a chain for each block, which other blocks do not change
    own_chains = [chain] * len(blocks)
    predictors = [chain] * len(blocks)
    result: dict[str, float] = {}
    for cycle in range(1, int(context.budget or SETTINGS.cycles) + 1):
        for number, block in enumerate(blocks):
            for turn in range(SETTINGS.rounds):
                shape = (params["local_steps"], SETTINGS.clients, SETTINGS.batch)
                draws = list(torch.randint(block.labels.shape[1], shape, generator=generator))
                taken = chain = chain.trained(block, draws, params["learning_rate"])
                if params["method"] == "mc":
                    own = own_chains[number] = own_chains[number].trained(block, draws, params["learning_rate"])
                    taken = min(chain, own, key=lambda model: block.losses(model).mean().item())
                seen = (cycle - 1) * SETTINGS.rounds + turn
                predictors[number] = predictors[number].blended(taken, 1 / (seen + 1))
        models = [chain] * len(blocks) if params["method"] == "fedavg" else predictors
        accuracies = [block.accuracy(model) for block, model in zip(blocks, models, strict=True)]
        result = {"loss": 1 - sum(accuracies) / len(accuracies)}
        result |= {f"accuracy_{number}": accuracy for number, accuracy in enumerate(accuracies)}
        context.report(cycle, result["loss"])
        if context.should_stop():
            break
    return result


def compare(seeds: int) -> None:
    """Print the accuracy of each method in each block, at the best of three learning rates, as means over `seeds`."""
    import torch

    from shadho_celery.context import LocalContext

    torch.set_num_threads(1)  # threads would take longer to meet than these small products take
    print(f"method  learning rate  accuracy on {'  '.join(str(labels) for labels in SETTINGS.blocks)}      mean")
    for method in ("fedavg", "mm", "mc"):
        found = {}
        for rate in (0.03, 0.1, 0.3):
            params = {"method": method, "learning_rate": rate, "local_steps": 5}
            runs = [objective(params, LocalContext(seed=seed)) for seed in range(seeds)]
            found[rate] = np.array(
                [[run[f"accuracy_{block}"] for block in range(len(SETTINGS.blocks))] for run in runs]
            )
        rate, accuracy = max(found.items(), key=lambda item: float(item[1].mean()))
        # Twice the standard error of the mean over seeds.
        around = 2 * accuracy.mean(axis=1).std(ddof=1) / seeds**0.5
        columns = "".join(f"{value:17.3f}" for value in accuracy.mean(axis=0))
        print(f"{method:8s}{rate:13g}{columns}{accuracy.mean():17.3f} +- {around:.3f}")


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=compare.__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    compare(parser.parse_args().seeds)
