"""A U-Net that finds cells in pictures: SHADHO's second experiment, small enough for a laptop.

    shadho-celery run tasks.unet                   # embedded, or on the fleet; draws unet.png
    shadho-celery run tasks.unet --demo            # three simulated classes; shows which depth ran on which class
    python -m tasks.unet                                        # alone, in this process: a few trials, no picture

The pictures are generated: touching cells in uneven light. During the search, the scheduler's process trains a
baseline: a smaller version of the network of Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image
Segmentation", MICCAI 2015. Each new best model is compared with it. 30 trials take a few minutes on two cores. Source:
Kinnison et al., "SHADHO: Massively Scalable Hardware-Aware Distributed Hyperparameter Optimization", WACV 2018.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hyperopt import hp

from shadho_celery.context import LocalContext, TrialTimeout
from shadho_celery.core.files import CHECKPOINTS, replacing

# torch and matplotlib are imported where they are used: the scheduler reads SPACE and needs neither for that.
if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import Tensor, nn

    from shadho_celery.context import Context
    from shadho_celery.results.study import RunningStudy
    from shadho_celery.results.trial import TrialResult

    Picture = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is fixed in every trial."""

    #: passes over the training pictures, unless the trial's budget says otherwise
    epochs: int = 27
    #: pixels of a picture's side; it must be divisible by 8
    size: int = 64
    #: pictures to train on
    train: int = 256
    #: pictures on which the loss is measured
    held_out: int = 32
    #: seed of all pictures: the same for every trial, because losses could not be compared otherwise
    pictures_seed: int = 0
    #: seed of the baseline, which is the same in every study
    baseline_seed: int = 0
    #: pictures per gradient step
    batch: int = 4
    #: held-out pictures in unet.png
    shown: int = 4


SETTINGS = Settings()

#: file in a trial's folder of checkpoints
CHECKPOINT = "unet.pt"
#: epochs after which a checkpoint is written: those at which `asha` and a ladder of rungs decide
RUNGS = frozenset(3**rung for rung in range(20))
#: states of a trial that counts against the limit of trials
ENDED = ("COMPLETE", "PRUNED", "FAILED")

# One node, shared by the networks that have it: ratio of the filters of two neighbouring levels.
GROWTH = hp.uniform("growth", 1.0, 2.0)

SPACE = {
    # Three subspaces of different cost: a network of depth 3 halves the picture three times.
    "network": hp.choice(
        "network",
        [
            {"network": "shallow", "depth": 1, "growth": 2.0},
            {"network": "medium", "depth": 2, "growth": GROWTH},
            {"network": "deep", "depth": 3, "growth": GROWTH},
        ],
    ),
    "filters": hp.choice("filters", [4, 8, 16, 24]),
    "kernel": hp.choice("kernel", [3, 5]),
    "activation": hp.choice("activation", ["relu", "leaky_relu", "silu"]),
    "normalisation": hp.choice("normalisation", ["none", "batch", "layer"]),
    "learning_rate": hp.loguniform("learning_rate", np.log(1e-4), np.log(1e-1)),
    # Times two subspaces: each optimiser has its own parameter.
    "descent": hp.choice(
        "descent",
        [
            {"descent": "sgd", "momentum": hp.uniform("momentum", 0.5, 0.99)},
            {"descent": "adamw", "weight_decay": hp.loguniform("weight_decay", np.log(1e-6), np.log(1e-1))},
        ],
    ),
}

# After one epoch most networks do not detect any cell, so they are first judged after three.
STUDY: dict[str, Any] = {"trials": 30, "pruner": {"how": "asha", "least": 3}}

#: The paper's network with depth 3 and 8 filters instead of 4 and 64, padded convolutions, and the loss of all trials.
#: The paper gives the momentum but no learning rate: of .001, .003, .01 and .03, this one gave the best loss without
#: diverging.
BASELINE: dict[str, Any] = {
    "network": {"network": "deep", "depth": 3, "growth": 2.0},
    "filters": 8,
    "kernel": 3,
    "activation": "relu",
    "normalisation": "none",
    "learning_rate": 1e-2,
    "descent": {"descent": "sgd", "momentum": 0.99},
}


def picture(rng: np.random.Generator, size: int) -> tuple[Picture, Picture]:
    """A grey picture in 0..1 and its mask: 1 in cells, with a line of 0 between touching cells."""
    y, x = np.mgrid[:size, :size].astype(float)
    grey = np.full((size, size), 0.2)
    nearest, owner = np.ones((size, size)), np.zeros((size, size), int)
    place = rng.uniform(0, size, 2)
    for cell in range(1, rng.integers(6, 13)):
        # Most cells are placed beside the one before, because the line between two cells is hard to find.
        turn, beside = rng.uniform(0, 2 * np.pi), rng.random() < 0.7
        place = place + 12 * np.array([np.cos(turn), np.sin(turn)]) if beside else rng.uniform(0, size, 2)
        place = place % size
        distance = _distance(x - place[0], y - place[1], rng.uniform(5, 9, 2), rng.uniform(0, np.pi))
        mine = distance < nearest
        grey[mine] = 0.2 + rng.uniform(0.15, 0.5) * (1 - 0.5 * distance[mine] ** 4)
        nearest[mine], owner[mine] = distance[mine], cell
    for _ in range(rng.integers(2, 6)):
        # Dirt: as bright as a cell, but small, and not a cell.
        across, down = rng.uniform(0, size, 2)
        grey[_distance(x - across, y - down, rng.uniform(1, 2.5, 2), 0.0) < 1] = rng.uniform(0.4, 0.8)
    turn, strength = rng.uniform(0, 2 * np.pi), rng.uniform(0.2, 0.6)
    grey *= 1 + strength * ((np.cos(turn) * x + np.sin(turn) * y) / size - (np.cos(turn) + np.sin(turn)) / 2)
    padded = np.pad(grey, 1, mode="edge")
    blurred = sum(padded[i : i + size, j : j + size] for i in range(3) for j in range(3)) / 9
    noisy = blurred + rng.normal(0, 0.08, (size, size))
    return noisy.clip(0, 1).astype(np.float32), _separated(owner).astype(np.float32)


def _distance(x: Any, y: Any, radii: Any, turn: float) -> Any:
    """Distance from the centre of an ellipse: 1 on its rim."""
    along, across = np.cos(turn) * x + np.sin(turn) * y, np.cos(turn) * y - np.sin(turn) * x
    return np.hypot(along / radii[0], across / radii[1])


def _separated(owner: Any) -> Any:
    """Return the mask of the cells, without pixels that have another cell to the right or below."""
    after = np.pad(owner, ((0, 1), (0, 1)))
    right, below = after[:-1, 1:], after[1:, :-1]
    touches = ((right > 0) & (right != owner)) | ((below > 0) & (below != owner))
    return (owner > 0) & ~touches


@cache
def pictures(settings: Settings) -> tuple[Picture, Picture, Picture, Picture]:
    """Training pictures and their masks, held-out pictures and their masks, each of shape (number, 1, size, size)."""
    rng = np.random.default_rng(settings.pictures_seed)
    drawn = [picture(rng, settings.size) for _ in range(settings.train + settings.held_out)]
    grey, mask = (np.stack(part)[:, None] for part in zip(*drawn, strict=True))
    return grey[: settings.train], mask[: settings.train], grey[settings.train :], mask[settings.train :]


def network(params: dict[str, Any], seed: int) -> nn.Module:
    """A U-Net from pictures to scores, which are above 0 for cells. Its initial weights depend on `seed`."""
    import torch
    from torch import nn

    depth, growth = params["network"]["depth"], params["network"]["growth"]
    filters = [round(params["filters"] * growth**level) for level in range(depth + 1)]

    class Level(nn.Module):
        """Filters for one size of the picture, and all the levels below it."""

        def __init__(self, inputs: int, level: int) -> None:
            super().__init__()
            own = filters[level]
            self.down = _convolutions(inputs, own, params)
            self.below: nn.Module | None = None
            if level < depth:
                rise = nn.ConvTranspose2d(filters[level + 1], own, 2, stride=2)
                self.below = nn.Sequential(nn.MaxPool2d(2), Level(own, level + 1), rise)
                self.up = _convolutions(2 * own, own, params)

        def forward(self, inputs: Tensor) -> Tensor:
            across: Tensor = self.down(inputs)
            if self.below is None:
                return across
            found: Tensor = self.up(torch.cat([across, self.below(across)], dim=1))
            return found

    model = nn.Sequential(Level(1, 0), nn.Conv2d(filters[0], 1, 1))
    # He's weights, as in the paper. They have their own generator, because the baseline's thread shares torch's.
    generator = torch.Generator().manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu", generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return model


def _convolutions(inputs: int, outputs: int, params: dict[str, Any]) -> nn.Sequential:
    """Two convolutions that keep the picture's size."""
    from torch import nn

    activation = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "silu": nn.SiLU}[params["activation"]]
    parts: list[nn.Module] = []
    for channels in (inputs, outputs):
        parts.append(nn.Conv2d(channels, outputs, params["kernel"], padding=params["kernel"] // 2))
        if params["normalisation"] == "batch":
            parts.append(nn.BatchNorm2d(outputs))
        elif params["normalisation"] == "layer":
            parts.append(nn.GroupNorm(1, outputs))
        parts.append(activation())
    return nn.Sequential(*parts)


def dice_loss(chances: Tensor, masks: Tensor) -> Tensor:
    """1 - Dice, averaged over pictures: 0 for the mask itself, near 1 without overlap.

    The 1 in numerator and denominator keeps a picture without cells finite. Source: Milletari et al., "V-Net", 3DV
    2016.
    """
    both, sizes = (part.sum(dim=(1, 2, 3)) for part in (chances * masks, chances + masks))
    return (1 - (2 * both + 1) / (sizes + 1)).mean()


class Training:
    """A U-Net, its optimiser, and the number of epochs done; `descent` is from torch.optim."""

    def __init__(self, params: dict[str, Any], seed: int, device: str) -> None:
        import torch

        self.seed, self.device, self.epoch = seed, device, 0
        self.model = network(params, seed).to(device)
        rate, descent = params["learning_rate"], params["descent"]
        self.descent: torch.optim.Optimizer
        if descent["descent"] == "sgd":
            self.descent = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=descent["momentum"])
        else:
            self.descent = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=descent["weight_decay"])
        # Half precision only on GPUs: on a CPU it saves neither time nor memory.
        self.is_mixed = device == "cuda"
        self.scaler = torch.amp.GradScaler(device, enabled=self.is_mixed)

    def train(self, grey: Tensor, masks: Tensor) -> None:
        """Train for one epoch, on batches shuffled by seed and epoch, so that a continued trial sees the same order."""
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits

        self.epoch += 1
        self.model.train()
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(grey))
        for batch in torch.from_numpy(order).to(grey.device).split(SETTINGS.batch):
            self.descent.zero_grad()
            with torch.autocast(self.device, enabled=self.is_mixed):
                scores = self.model(grey[batch])
            scores = scores.float()
            # Dice alone hardly changes a network that does not detect any cell yet; cross-entropy does.
            loss = dice_loss(scores.sigmoid(), masks[batch]) + binary_cross_entropy_with_logits(scores, masks[batch])
            self.scaler.scale(loss).backward()
            self.scaler.step(self.descent)
            self.scaler.update()

    def chances(self, grey: Tensor) -> Tensor:
        """Each pixel's probability of being in a cell; 0 if the training has diverged to NaN."""
        import torch

        self.model.eval()
        with torch.no_grad():
            scores: Tensor = self.model(grey)
        return scores.sigmoid().nan_to_num(0.0)

    def measured(self, grey: Tensor, masks: Tensor) -> dict[str, float]:
        """Soft Dice loss; as metrics, the Dice of pixels that are more likely cell than not, and sizes."""
        chances = self.chances(grey)
        return {
            "loss": dice_loss(chances, masks).item(),
            "dice": 1 - dice_loss((chances > 0.5).float(), masks).item(),
            "epochs": self.epoch,
            "parameters": sum(weights.numel() for weights in self.model.parameters()),
        }

    def save(self, folder: Path) -> None:
        """Write the checkpoint so that it is complete or absent at any time."""
        import torch

        state: dict[str, Any] = {"epoch": self.epoch, "model": self.model.state_dict()}
        state |= {"descent": self.descent.state_dict(), "scaler": self.scaler.state_dict()}
        with replacing(folder / CHECKPOINT) as file:
            torch.save(state, file)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint. Raises FileNotFoundError, or any exception, partly loaded, if the file is not
        usable.
        """
        import torch

        state = torch.load(folder / CHECKPOINT, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        # torch accepts the state of another optimiser, and fails at its first step.
        if state["descent"]["param_groups"][0].keys() != self.descent.param_groups[0].keys():
            raise ValueError("it is of another optimiser")
        self.descent.load_state_dict(state["descent"])
        # Empty if a slot without a GPU has written it; a slot with one then starts with a new scale.
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if type(state["epoch"]) is not int or state["epoch"] < 1:
            raise ValueError("it has no number of epochs")
        self.epoch = state["epoch"]


def folder_of(context: Context) -> Path | None:
    """The trial's folder of checkpoints, or None if there is no disk for it."""
    try:
        return context.checkpoint_dir
    except OSError as error:
        print(f"unet: no checkpoints are kept here ({error})", file=sys.stderr)
        return None


def resumed(params: dict[str, Any], context: Context, folder: Path | None, epochs: int) -> Training:
    """The training of a trial of `epochs` epochs: from its checkpoint if that is usable, else from the beginning."""
    training = Training(params, context.seed, context.device)
    if folder is None:
        return training
    try:
        training.load(folder)
        if training.epoch > epochs:
            raise ValueError(f"it is of epoch {training.epoch}, and the trial ends at {epochs}")
    except FileNotFoundError:
        return training
    except TrialTimeout:
        raise
    except Exception as error:  # a full disk or a file of older code: torch may raise anything
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        print(
            f"unet: started from the beginning, because the checkpoint in {folder} is not usable ({said})",
            file=sys.stderr,
        )
        return Training(params, context.seed, context.device)
    return training


def objective(params: dict[str, Any], context: Context) -> dict[str, float]:
    """Soft Dice loss on held-out pictures after the last epoch, which is the trial's budget or `Settings.epochs`."""
    import torch

    if context.device == "cpu":
        # A slot is one core: with more threads, the slots would slow each other down.
        torch.set_num_threads(1)
    train, train_masks, held_out, held_out_masks = (
        torch.from_numpy(part).to(context.device) for part in pictures(SETTINGS)
    )
    folder = folder_of(context)
    epochs = max(1, round(context.budget or SETTINGS.epochs))
    training = resumed(params, context, folder, epochs)
    result = training.measured(held_out, held_out_masks) if training.epoch else {}
    while training.epoch < epochs:
        training.train(train, train_masks)
        result = training.measured(held_out, held_out_masks)
        context.report(training.epoch, result["loss"])
        # A trial stopped by its time limit keeps its loss, so its weights are needed too.
        is_over = context.should_stop() or training.epoch == epochs
        if folder is not None and (is_over or training.epoch in RUNGS) and not context.is_copy:
            save(training, folder)
        if is_over:
            break
    return result


def save(training: Training, folder: Path) -> None:
    """Write the checkpoint if the disk allows it: the loss counts without one too."""
    try:
        training.save(folder)
    except (OSError, RuntimeError) as error:  # torch raises the latter if the disk is full
        print(f"unet: no checkpoint of epoch {training.epoch} was kept ({error})", file=sys.stderr)


class Comparison:
    """A study's models compared with the baseline, whose training starts here in a thread of the scheduler's
    process.
    """

    def __init__(self, study: RunningStudy) -> None:
        self._folder = CHECKPOINTS / study.key / "baseline"
        self._baseline: Future[dict[str, float]] = Future()
        self._said: set[str] = set()
        self._drawn: int | None = None
        # Not a daemon, which Python cannot end properly while it is inside torch. It checks for the end after each
        # epoch.
        threading.Thread(target=self._train, name="unet-baseline").start()

    def _train(self) -> None:
        main, seed = threading.main_thread(), SETTINGS.baseline_seed
        context = LocalContext(seed=seed, checkpoints=self._folder, stopped=lambda: not main.is_alive())
        try:
            self._baseline.set_result(objective(BASELINE, context))
        except Exception as error:
            self._baseline.set_exception(error)

    def tell(self, study: RunningStudy) -> None:
        """Print and draw the state of the study: at each complete trial, and at the last trial, which waits for the
        baseline.

        Raises what the training of the baseline has raised.
        """
        is_last = study.count(*ENDED) >= (study.settings.get("trials") or STUDY["trials"])
        if not (is_last or self._baseline.done()):
            return
        baseline, best = self._baseline.result()["loss"], study.best_or_none
        if best is None or best.loss is None:
            return
        losses = [trial.loss for trial in study.trials if trial.state == "COMPLETE" and trial.loss is not None]
        self._say(
            f"unet: {sum(loss < baseline for loss in losses)} of {len(losses)} complete models beat the baseline "
            f"(dice loss {baseline:.3f}): best {best.loss:.3f} (trial {best.number})"
        )
        if best.number != self._drawn:
            self._drawn = best.number
            self._draw(study, best)

    def _draw(self, study: RunningStudy, best: TrialResult) -> None:
        columns = {f"baseline ({self._baseline.result()['loss']:.3f})": found(BASELINE, self._folder)}
        folder = CHECKPOINTS / study.key / str(best.number)
        try:
            columns[f"trial {best.number} ({best.loss:.3f})"] = found(best.values, folder, best.metrics.get("epochs"))
        except Exception as error:  # torch may raise anything for a damaged file
            what = f"no usable weights in {folder} on this machine: {type(error).__name__}"
            self._say(f"unet: unet.png lacks trial {best.number} ({what})")
        try:
            draw(columns, Path("unet.png"))
        except ModuleNotFoundError as error:
            self._say(f"unet: no unet.png, because {error.name} is missing: pip install matplotlib")

    def _say(self, line: str) -> None:
        """Print a line once."""
        if line not in self._said:
            self._said.add(line)
            print(line, file=sys.stderr)


#: the study's comparison, started at its first trial
_comparison = cache(Comparison)


def on_trial(study: RunningStudy, trial: TrialResult) -> None:
    """Compare the study with the baseline."""
    _comparison(study).tell(study)


def found(params: dict[str, Any], folder: Path, epochs: float | None = None) -> Picture:
    """Return the masks that the model of a checkpoint predicts. Raises ValueError if it is not of epoch `epochs`."""
    import torch

    training = Training(params, 0, "cpu")
    training.load(folder)
    if epochs not in {None, training.epoch}:
        raise ValueError(f"they are those of epoch {training.epoch}")
    chances: Picture = training.chances(torch.from_numpy(pictures(SETTINGS)[2][: SETTINGS.shown])).numpy()
    return chances


def draw(columns: dict[str, Picture], path: Path) -> None:
    """Draw held-out pictures, their masks, and the masks found, by title: one row per picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    _, _, grey, masks = pictures(SETTINGS)
    columns = {"picture": grey, "truth": masks, **columns}
    figure = Figure(figsize=(2.2 * len(columns), 2.2 * SETTINGS.shown), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(SETTINGS.shown, len(columns), squeeze=False)
    for across, (title, shown) in zip(grid.T, columns.items(), strict=True):
        across[0].set_title(title)
        for axes, each in zip(across, shown, strict=False):
            axes.imshow(each[0], cmap="gray", vmin=0, vmax=1)
            axes.set_axis_off()
    figure.suptitle("cells found in held-out pictures (Dice loss in brackets: lower is better)")
    with replacing(path) as file:
        figure.savefig(file)


if __name__ == "__main__":
    import shadho_celery

    search = shadho_celery.minimize(objective, SPACE, trials=8, pruner=STUDY["pruner"], seed=0)
    best = search.best_or_none
    print(f"dice loss {best.loss:.4f} with {best.params}" if best else "no trial succeeded")
