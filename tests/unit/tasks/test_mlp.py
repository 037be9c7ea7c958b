"""The network: it learns, reports every epoch, keeps to its budget and its seed, and stops when told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hyperopt.pyll.stochastic import sample

from shadho_celery.context import LocalContext
from tasks import mlp


@dataclass
class StubContext:
    """Of a trial's context, what tasks/mlp.py uses."""

    checkpoint_dir: Path = Path("never")
    budget: float | None = None
    seed: int = 0
    device: str = "cpu"
    stop_after: int = 1000
    is_copy: bool = False
    reports: list[tuple[int, float]] = field(default_factory=list)

    def report(self, step: int, loss: float) -> None:
        self.reports.append((step, loss))

    def should_stop(self) -> bool:
        return len(self.reports) >= self.stop_after


def params(**changes: Any) -> dict[str, Any]:
    good = {"width": 64, "layers": 1, "dropout": 0.1, "learning_rate": 5e-3}
    return {**good, "descent": {"descent": "adamw", "weight_decay": 1e-4}, **changes}


@pytest.mark.slow
def test_it_learns_and_reports_every_epoch() -> None:
    context = StubContext()
    result = mlp.objective(params(), context)
    assert [step for step, _ in context.reports] == list(range(1, mlp.SETTINGS.epochs + 1))
    assert context.reports[-1][1] == result["loss"] < context.reports[0][1]
    assert result["loss"] < 0.2
    assert result["accuracy"] > 0.95


def test_its_budget_is_a_number_of_epochs(tmp_path: Path) -> None:
    context = StubContext(budget=2.0, checkpoint_dir=tmp_path)
    assert mlp.objective(params(), context)["epochs"] == len(context.reports) == 2


def test_it_stops_after_the_epoch_in_which_it_is_told_to() -> None:
    context = StubContext(stop_after=3)
    assert mlp.objective(params(), context)["epochs"] == 3


def test_the_learning_rate_falls_with_the_epochs_whatever_was_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = mlp.descent_of
    monkeypatch.setattr(mlp, "descent_of", lambda params, model: made.append(real(params, model)) or made[-1])
    for budget in (1, 1 + mlp.SETTINGS.half_rate):
        mlp.objective(params(learning_rate=0.01), StubContext(budget=budget, checkpoint_dir=tmp_path))
    assert [descent.param_groups[0]["lr"] for descent in made] == pytest.approx([0.01, 0.005])


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_trains_the_same_network(seed: int, tmp_path: Path) -> None:
    def trained(folder: str, seed: int) -> dict[str, float]:
        (tmp_path / folder).mkdir()
        return mlp.objective(params(), StubContext(budget=2, seed=seed, checkpoint_dir=tmp_path / folder))

    assert trained("a", seed) == trained("b", seed) != trained("c", seed + 1)


def test_a_promoted_trial_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    first, second = (StubContext(budget=budget, checkpoint_dir=tmp_path) for budget in (2, 6))
    begun = mlp.objective(params(), first)
    ended = mlp.objective(params(), second)
    assert [step for step, _ in second.reports] == [3, 4, 5, 6]
    assert second.reports[0][1] < first.reports[0][1]
    assert ended["loss"] < begun["loss"]
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.pt"]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Loss of a training from the beginning."""
    folder = tmp_path_factory.mktemp("fresh")
    return mlp.objective(params(), StubContext(budget=2, checkpoint_dir=folder))["loss"]


@pytest.mark.parametrize("content", [b"", b"half of a file", None])
def test_a_checkpoint_that_cannot_be_read_or_is_missing_counts_as_none(
    content: bytes | None, tmp_path: Path, fresh: float
) -> None:
    if content is not None:
        (tmp_path / "mlp.pt").write_bytes(content)
    context = StubContext(budget=2, checkpoint_dir=tmp_path)
    assert mlp.objective(params(), context)["loss"] == fresh
    assert [step for step, _ in context.reports] == [1, 2]


@pytest.mark.parametrize(
    "changed",
    [
        {"descent": {"a": 1}},
        {"descent": {"state": {}, "param_groups": []}},
        {"model": None},
        {"epoch": None},
        {"epoch": "3"},
        {"epoch": float("inf")},
        {"epoch": -5},
        {"epoch": True},
    ],
    ids=str,
)
def test_of_a_checkpoint_of_another_version_nothing_is_used(
    changed: dict[str, Any], tmp_path: Path, fresh: float, capsys: pytest.CaptureFixture[str]
) -> None:
    mlp.objective(params(), StubContext(budget=1, checkpoint_dir=tmp_path))
    state = torch.load(tmp_path / "mlp.pt", weights_only=True)
    torch.save({**state, **changed}, tmp_path / "mlp.pt")
    context = StubContext(budget=2, checkpoint_dir=tmp_path)
    assert mlp.objective(params(), context)["loss"] == fresh
    assert [step for step, _ in context.reports] == [1, 2]
    assert "started from the beginning" in capsys.readouterr().err


def test_a_checkpoint_of_another_optimiser_is_no_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of AdamW, whose state torch loads into SGD, which then lacks its momentum."""
    mlp.objective(params(), StubContext(budget=1, checkpoint_dir=tmp_path))
    other = params(descent={"descent": "sgd", "momentum": 0.9})
    fresh, found = (StubContext(budget=2, checkpoint_dir=folder) for folder in (tmp_path / "new", tmp_path))
    fresh.checkpoint_dir.mkdir()
    assert mlp.objective(other, found) == mlp.objective(other, fresh)
    assert "started from the beginning" in capsys.readouterr().err


def test_a_checkpoint_of_more_epochs_than_the_budget_is_no_good(
    tmp_path: Path, fresh: float, capsys: pytest.CaptureFixture[str]
) -> None:
    mlp.objective(params(), StubContext(budget=3, checkpoint_dir=tmp_path))
    assert mlp.objective(params(), StubContext(budget=2, checkpoint_dir=tmp_path))["loss"] == fresh
    assert "started from the beginning" in capsys.readouterr().err


@pytest.mark.parametrize("content", [[1, 2], None, torch.zeros(3)], ids=["list", "None", "tensor"])
def test_a_checkpoint_that_is_something_else_counts_as_none(content: Any, tmp_path: Path, fresh: float) -> None:
    torch.save(content, tmp_path / "mlp.pt")
    assert mlp.objective(params(), StubContext(budget=2, checkpoint_dir=tmp_path))["loss"] == fresh


def test_without_a_disk_it_trains_and_says_that_it_keeps_no_checkpoint(
    tmp_path: Path, fresh: float, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    context = LocalContext(budget=2, checkpoints=tmp_path / "file" / "folder")
    assert mlp.objective(params(), context)["loss"] == fresh
    assert "no checkpoints are kept here" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_costs_no_loss(
    tmp_path: Path, fresh: float, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mlp.pt").mkdir()
    assert mlp.objective(params(), StubContext(budget=2, checkpoint_dir=tmp_path))["loss"] == fresh
    assert "no checkpoint of this trial was kept" in capsys.readouterr().err


def test_a_second_attempt_measures_what_the_first_one_has_trained(tmp_path: Path) -> None:
    first, second = (StubContext(budget=2, checkpoint_dir=tmp_path) for _ in range(2))
    assert mlp.objective(params(), first) == mlp.objective(params(), second)
    assert second.reports == []


def test_a_copy_leaves_the_files_as_they_are_and_a_budget_below_1_is_an_epoch(tmp_path: Path) -> None:
    assert mlp.objective(params(), StubContext(budget=0.5, checkpoint_dir=tmp_path, is_copy=True))["epochs"] == 1
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_of_another_network_counts_as_none(tmp_path: Path) -> None:
    mlp.objective(params(width=32), StubContext(budget=1, checkpoint_dir=tmp_path))
    context = StubContext(budget=2, checkpoint_dir=tmp_path)
    mlp.objective(params(), context)
    assert [step for step, _ in context.reports] == [1, 2]


def test_every_draw_of_the_space_trains(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    descents = set()
    for number in range(6):
        drawn = sample(mlp.SPACE, rng=rng)
        descents.add(drawn["descent"]["descent"])
        (tmp_path / str(number)).mkdir()
        mlp.objective(drawn, StubContext(budget=1, checkpoint_dir=tmp_path / str(number)))
    assert descents == {"sgd", "adamw"}
