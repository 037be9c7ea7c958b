"""The U-Nets: the pictures are fixed, every network trains, checkpoints go on, and the baseline is said and drawn."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hyperopt.pyll.stochastic import sample
from services.cases import cases

import shadho_celery
from shadho_celery.context import LocalContext
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from tasks import unet

#: pictures and epochs of which a training takes a part of a second
SMALL = unet.Settings(epochs=3, size=16, train=8, held_out=4, shown=2)
GOOD: dict[str, Any] = {
    "network": {"network": "medium", "depth": 2, "growth": 1.5},
    "filters": 4,
    "kernel": 3,
    "activation": "relu",
    "normalisation": "batch",
    "learning_rate": 1e-2,
    "descent": {"descent": "adamw", "weight_decay": 1e-4},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(unet, "SETTINGS", SMALL)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)


@dataclass
class Trial:
    """A trial's contexts, one an attempt, and the steps and losses that all of them report."""

    folder: Path
    seed: int = 0
    reports: list[tuple[int, float]] = field(default_factory=list)

    def attempt(self, *, epochs: float | None = None, stop_after: int = 1000, is_copy: bool = False) -> LocalContext:
        return LocalContext(
            seed=self.seed,
            budget=epochs,
            checkpoints=self.folder,
            is_copy=is_copy,
            on_report=lambda step, loss: self.reports.append((step, loss)),
            stopped=lambda: len(self.reports) >= stop_after,
        )

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.reports]


@pytest.fixture(name="trial")
def _trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path / "trial")


def test_the_same_seed_draws_the_same_pictures_and_another_seed_others() -> None:
    first, again, other = (unet.picture(np.random.default_rng(seed), 64) for seed in (0, 0, 1))
    assert all(map(np.array_equal, first, again))
    assert not any(map(np.array_equal, first, other))


def test_pictures_are_grey_and_masks_are_cells_and_background() -> None:
    train, train_masks, held_out, held_out_masks = unet.pictures(unet.Settings())
    assert train.shape == train_masks.shape == (unet.Settings().train, 1, 64, 64)
    assert held_out.shape == held_out_masks.shape == (unet.Settings().held_out, 1, 64, 64)
    assert train.dtype == train_masks.dtype == np.float32
    assert train.min() >= 0
    assert train.max() <= 1
    assert set(np.unique(train_masks)) == {0, 1}
    assert 0.1 < train_masks.mean() < 0.4
    assert train[train_masks == 1].mean() > train[train_masks == 0].mean() + 0.1
    assert not any(np.array_equal(each, other) for each in train for other in held_out)


def test_a_line_of_background_keeps_touching_cells_apart() -> None:
    owner = np.array([[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 0, 2]])
    assert unet._separated(owner).tolist() == [
        [True, False, True, True],
        [False, False, True, True],
        [True, True, False, True],
    ]


@cases("network", ["shallow", "medium", "deep"])
@cases("kernel", [3, 5])
@cases("normalisation", ["none", "batch", "layer"])
def test_every_network_gives_a_score_for_each_pixel(network: str, kernel: int, normalisation: str) -> None:
    depth = {"shallow": 1, "medium": 2, "deep": 3}[network]
    params = {**GOOD, "kernel": kernel, "normalisation": normalisation}
    params["network"] = {"network": network, "depth": depth, "growth": 1.3}
    model = unet.network(params, seed=0)
    assert model(torch.zeros(2, 1, 16, 24)).shape == (2, 1, 16, 24)
    assert sum(isinstance(part, torch.nn.MaxPool2d) for part in model.modules()) == depth


def test_the_seed_alone_decides_the_first_weights() -> None:
    first, again, other = (
        torch.cat([weights.flatten() for weights in unet.network(GOOD, seed).parameters()]) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_dice_loss_is_zero_for_the_mask_one_half_for_half_of_it_and_near_one_for_nothing() -> None:
    masks = torch.zeros(2, 1, 8, 8)
    masks[:, :, :4] = 1
    half = masks.clone()
    half[:, :, :2] = 0
    assert unet.dice_loss(masks, masks).item() == 0
    assert unet.dice_loss(half, masks).item() == pytest.approx(1 - 33 / 49)
    assert unet.dice_loss(torch.zeros_like(masks), masks).item() == pytest.approx(1 - 1 / 33)
    assert unet.dice_loss(torch.zeros_like(masks), torch.zeros_like(masks)).item() == 0


def test_it_learns_and_reports_every_epoch(trial: Trial) -> None:
    result = unet.objective(GOOD, trial.attempt(epochs=12))
    assert trial.steps == list(range(1, 13))
    assert trial.reports[-1][1] == result["loss"] < trial.reports[0][1] - 0.1
    assert result["epochs"] == 12
    assert result["parameters"] == sum(weights.numel() for weights in unet.network(GOOD, 0).parameters())
    assert 0.5 < result["dice"] <= 1


def test_without_a_budget_it_trains_for_all_epochs(trial: Trial) -> None:
    assert unet.objective(GOOD, trial.attempt())["epochs"] == SMALL.epochs


def test_it_stops_after_the_epoch_in_which_it_is_told_to_and_keeps_that_epochs_weights(trial: Trial) -> None:
    assert unet.objective(GOOD, trial.attempt(epochs=9, stop_after=2))["epochs"] == 2
    assert torch.load(trial.folder / "unet.pt")["epoch"] == 2


@pytest.mark.parametrize(
    "descent", [{"descent": "sgd", "momentum": 0.9}, GOOD["descent"]], ids=lambda descent: descent["descent"]
)
def test_a_later_attempt_goes_on_where_the_checkpoint_is_and_ends_as_one_attempt_would(
    trial: Trial, descent: dict[str, Any]
) -> None:
    params = {**GOOD, "descent": descent}
    unet.objective(params, trial.attempt(epochs=2))
    result = unet.objective(params, trial.attempt(epochs=4))
    assert trial.steps == [1, 2, 3, 4]
    assert result == unet.objective(params, LocalContext(budget=4, checkpoints=trial.folder / "other"))


def test_an_attempt_after_the_last_epoch_measures_what_is_there(trial: Trial) -> None:
    first = unet.objective(GOOD, trial.attempt())
    assert unet.objective(GOOD, trial.attempt()) == first
    assert len(trial.reports) == SMALL.epochs


def test_checkpoints_are_written_at_rungs_and_at_the_end_only(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    monkeypatch.setattr(unet.Training, "save", lambda training, folder: saved.append(training.epoch))
    unet.objective(GOOD, trial.attempt(epochs=11))
    assert saved == [1, 3, 9, 11]


def test_a_copy_leaves_the_checkpoints_to_the_other_attempt(trial: Trial) -> None:
    unet.objective(GOOD, trial.attempt(is_copy=True))
    assert not list(trial.folder.iterdir())


SGD = {**GOOD, "descent": {"descent": "sgd", "momentum": 0.9}}


@pytest.mark.parametrize(
    ("damage", "before", "after"),
    [
        ("half", GOOD, GOOD),
        ("empty", GOOD, GOOD),
        ("other content", GOOD, GOOD),
        ("more epochs", GOOD, GOOD),
        ("other shape", {**GOOD, "filters": 8}, GOOD),
        # torch loads the state of AdamW into SGD, which then lacks its momentum.
        ("other optimiser", GOOD, SGD),
        *[(epoch, GOOD, GOOD) for epoch in (None, "3", -5, True)],
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_a_checkpoint_that_is_no_good_is_ignored_and_said(
    trial: Trial, damage: object, before: Any, after: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trial.folder / "unet.pt"
    unet.objective(before, trial.attempt(epochs=3 if damage == "more epochs" else 1))
    if damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other content":
        torch.save({"epoch": 1}, path)
    elif damage in {None, "3", -5, True}:
        torch.save({**torch.load(path, weights_only=True), "epoch": damage}, path)
    trial.reports.clear()
    result = unet.objective(after, trial.attempt(epochs=2))
    assert trial.steps == [1, 2]
    assert result == unet.objective(after, LocalContext(budget=2, checkpoints=trial.folder / "other"))
    said = capsys.readouterr().err
    start = f"unet: started from the beginning, because the checkpoint in {trial.folder} is not usable ("
    assert said.startswith(start + ("ValueError: it is of another optimiser)" if after is SGD else ""))


def test_without_a_disk_it_trains_and_says_that_it_keeps_no_checkpoint(
    trial: Trial, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    result = unet.objective(GOOD, LocalContext(budget=1, checkpoints=tmp_path / "file" / "folder"))
    assert "unet: no checkpoints are kept here" in capsys.readouterr().err
    assert result == unet.objective(GOOD, LocalContext(budget=1, checkpoints=trial.folder))


def test_a_checkpoint_of_a_slot_without_a_gpu_goes_on_in_mixed_precision(trial: Trial) -> None:
    """Played on the CPU, where it is otherwise never switched on."""
    unet.objective(GOOD, trial.attempt(epochs=1))
    training = unet.Training(GOOD, 0, "cpu")
    training.is_mixed, training.scaler = True, torch.amp.GradScaler("cpu")
    training.load(trial.folder)
    train, train_masks, held_out, masks = map(torch.from_numpy, unet.pictures(SMALL))
    training.train(train, train_masks)
    training.train(train, train_masks)
    assert training.epoch == 3
    assert training.measured(held_out, masks)["loss"] < trial.reports[0][1]


def test_a_training_that_diverges_has_a_loss_near_one(trial: Trial) -> None:
    params = {**GOOD, "normalisation": "none", "learning_rate": 1e30, "descent": {"descent": "sgd", "momentum": 0.9}}
    assert 0.9 < unet.objective(params, trial.attempt())["loss"] <= 1


def test_every_draw_of_the_space_trains(trial: Trial) -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for place in range(12):
        drawn = sample(unet.SPACE, rng=rng)
        seen |= {drawn["network"]["network"], drawn["descent"]["descent"]}
        unet.objective(drawn, LocalContext(budget=1, checkpoints=trial.folder / str(place)))
    assert seen == {"shallow", "medium", "deep", "sgd", "adamw"}


def test_depths_and_ways_of_descending_are_subspaces() -> None:
    assert {subspace.name for subspace in split(compile_space(unet.SPACE))} == {
        f"network={network},descent={descent}"
        for network in ("shallow", "medium", "deep")
        for descent in ("sgd", "adamw")
    }


def search(trials: int = 3) -> None:
    """A study with the objective and `on_trial`; the baseline is trained as in a study of workers."""
    shadho_celery.minimize(unet.objective, unet.SPACE, trials=trials, seed=0, on_trial=unet.on_trial, progress=False)


@pytest.fixture(name="three")
def _three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unet, "STUDY", {"trials": 3})


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_after_the_last_trial_the_baseline_is_said_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, of the group dev")
    search()
    assert [thread.name for thread in threading.enumerate() if thread.name == "unet-baseline"] == []
    line = capsys.readouterr().err.splitlines()[-1]
    assert " of 3 complete models beat the baseline (dice loss 0." in line
    assert Path("unet.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(Path(".shadho/checkpoints").glob("*/baseline/unet.pt"))) == 1


def test_the_count_is_that_of_all_complete_models_however_the_study_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is not the best counts as well; without a limit on trials none is known to be the last."""
    monkeypatch.setattr(unet.Comparison, "_train", lambda self: self._baseline.set_result({"loss": 0.5}))
    monkeypatch.setattr(unet.Comparison, "_draw", lambda *_: None)
    losses = iter([0.3, 0.6, 0.4, 0.45])
    shadho_celery.minimize(lambda _: next(losses), unet.SPACE, early_stop=3, seed=0, on_trial=unet.on_trial)
    assert "unet: 3 of 4 complete models beat the baseline" in capsys.readouterr().err.splitlines()[-1]


def test_the_columns_are_picture_truth_and_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(unet, "draw", lambda columns, path: drawn.append(list(columns)))
    monkeypatch.setattr(unet, "STUDY", {"trials": 3})
    search()
    baseline, best = drawn[-1]
    assert baseline.startswith("baseline (0.")
    assert best.startswith("trial ")


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_weights_that_lie_on_another_machine_leave_a_column_out_and_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, of the group dev")
    monkeypatch.setattr(unet.Training, "load", _only_the_baseline(unet.Training.load))
    search()
    assert "unet: unet.png lacks trial " in capsys.readouterr().err
    assert Path("unet.png").exists()


def _only_the_baseline(load: Any) -> Any:
    def loaded(training: unet.Training, folder: Path) -> None:
        load(training, folder if folder.name == "baseline" else folder / "elsewhere")

    return loaded


@pytest.mark.usefixtures("three")
def test_without_matplotlib_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    search()
    said = capsys.readouterr().err
    assert said.count("unet: no unet.png, because matplotlib is missing: pip install matplotlib") == 1
    assert not Path("unet.png").exists()


def test_weights_of_another_epoch_than_the_trials_last_are_refused(trial: Trial) -> None:
    unet.objective(GOOD, trial.attempt(epochs=1))
    assert unet.found(GOOD, trial.folder, 1).shape == (2, 1, 16, 16)
    with pytest.raises(ValueError, match="epoch 1"):
        unet.found(GOOD, trial.folder, 3)
