"""Checkpoints: a training resumes from its own one only, and a superseded coordinator writes none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from services.training import DATA, PIXELS, descent, loss, network, same
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from shadho_celery.errors import ShadhoError
from shadho_celery.objective.context import LocalContext
from shadho_celery.training import Quantize, Report, gang, replay
from shadho_celery.training.coordinator.centre import ModelCentre
from shadho_celery.training.coordinator.run import Checkpoints, Run, Superseded
from shadho_celery.training.plan import Plan
from shadho_celery.training.report import Log


class Killed(BaseException):
    """Stand-in for the sudden end of the process."""


def die(step: int, _: float) -> None:
    if step == 17:
        raise Killed


def fit(
    context: LocalContext, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any
) -> Report:
    with gang(context, replicas=1) as g:
        chosen = {"data": DATA, "steps": 30, "batch": 10, "checkpoint_every": 5, **settings}
        return g.fit(model, optimizer or descent(model), loss=loss, **chosen)


def scheduled(model: nn.Module, steps: int) -> dict[str, Any]:
    """Return an optimizer and a schedule for it."""
    optimizer = descent(model)
    return {"optimizer": optimizer, "schedule": CosineAnnealingLR(optimizer, T_max=steps)}


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[[], LocalContext]:
    """Return a function that makes the context of one more attempt of a trial."""
    return lambda: LocalContext(seed=5, checkpoints=tmp_path)


def test_a_resumed_training_has_the_same_result_and_a_warning(
    attempt: Callable[[], LocalContext], caplog: pytest.LogCaptureFixture
) -> None:
    whole, model = network(), network()
    context = attempt()
    fit(context, whole, ema=0.9)
    assert not list(context.checkpoint_dir.iterdir())
    with pytest.raises(Killed):
        fit(attempt(), network(), ema=0.9, on_step=die)
    assert not caplog.records
    report = fit(attempt(), model, ema=0.9)
    assert "resumes at step 15" in caplog.text
    assert same(model, whole)
    assert report.log.resumed_from == 15
    assert report.steps == 30
    assert report.log.accepted == {0: 30}
    assert not list(context.checkpoint_dir.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "codec"), [(3, None), (4, None), (3, Quantize(4))], ids=["3", "4", "quantised"])
def test_a_gang_that_was_killed_and_resumed_equals_an_uninterrupted_one_to_the_bit(
    tmp_path: Path, replicas: int, codec: Quantize | None
) -> None:
    """The gradients of a step arrive in another order in each training, and in each step."""

    def trained(name: str, turn: int, on_step: Any = None) -> tuple[nn.Module, Report]:
        model = network()
        context = LocalContext(seed=5, checkpoints=tmp_path / name)
        with gang(
            context, replicas, codec=codec, delay=lambda place, draw: 0.01 * ((place + turn * draw) % replicas)
        ) as g:
            settings = {"steps": 30, "batch": 10, "checkpoint_every": 5}
            return model, g.fit(model, descent(model), DATA, loss, on_step=on_step, **settings)

    whole, first = trained("whole", 0)
    with pytest.raises(Killed):
        trained("resumed", 1, on_step=die)
    model, second = trained("resumed", 1)
    assert second.log.resumed_from == 15
    assert [step.accepted for step in first.log.steps] != [step.accepted for step in second.log.steps]
    assert same(model, whole)


def test_a_promoted_trial_resumes_from_the_checkpoint_of_its_origin(tmp_path: Path) -> None:
    """A promoted trial has another number, and the folder of its origin."""
    trained, model = [], network()
    for trial, budget in enumerate((10, 20)):
        model = network()
        context = LocalContext(trial=trial, seed=5, checkpoints=tmp_path, budget=budget)
        trained.append(fit(context, model, steps=budget))
    assert trained[1].log.resumed_from == 10
    again = network()
    list(replay(again, descent(again), DATA, loss, trained[1].log, batch=10, seed=5))
    assert same(again, model)


def test_the_second_training_of_a_trial_does_not_resume_from_the_first(tmp_path: Path) -> None:
    """Folds, for example: only their data are different."""
    labels = 1 - DATA[1]
    for attempt in (1, 2):
        context = LocalContext(seed=5, checkpoints=tmp_path, budget=30, attempt=attempt)
        first, second = network(), network()
        reports = [fit(context, first), fit(context, second, data=(PIXELS, labels))]
        assert [report.log.resumed_from for report in reports] == [None if attempt == 1 else 30] * 2
        assert not same(first, second)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: {"optimizer": descent(model, 0.001)},
        lambda model: {"optimizer": torch.optim.Adam(model.parameters())},
        lambda model: {"ema": 0.9},
        lambda model: {"micro_batches": 2},
        lambda model: {"batch": 20},
        lambda model: {"seed": 6},
        lambda model: {"data": (PIXELS, 1 - DATA[1])},
        lambda model: {"clip": 0.5},
        lambda model: {"warmup": 3},
        lambda model: scheduled(model, 30),
    ],
    ids=["rate", "optimizer", "average", "micro-batches", "batch", "seed", "labels", "clip", "warm-up", "schedule"],
)
def test_a_training_with_other_settings_or_data_starts_from_the_first_step(
    attempt: Callable[[], LocalContext], change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        fit(attempt(), network(), on_step=die)
    model = network()
    assert fit(attempt(), model, **change(model)).log.resumed_from is None
    assert "is of other arguments, model or data" in caplog.text
    with pytest.raises(Killed):
        fit(attempt(), network(), seed=7, on_step=die)
    assert fit(attempt(), network(), seed=7).log.resumed_from == 15


def test_a_training_resumes_with_the_dropped_batches_that_wait(tmp_path: Path) -> None:
    def make() -> Run:
        model = network()
        plan = Plan(model, descent(model), DATA, loss, steps=100, batch=10)
        log = Log(replicas=3, places=3)
        return Run(plan, ModelCentre(plan, 3), LocalContext(checkpoints=tmp_path), log, digest="", examples=200)

    first = make()
    first.claim()
    for _ in range(61):
        first.record_step((0, 1), 1.0)
    first.save()
    second = make()
    second.claim()
    assert second.draws.numbers == first.draws.numbers
    assert second.draws.waiting == first.draws.waiting > 0
    assert second.draws.lost == first.draws.lost > 0


def test_a_training_does_not_resume_from_an_unfinished_one_before_it_in_the_trial(
    attempt: Callable[[], LocalContext],
) -> None:
    """Example: the first fold diverges, and the objective continues with the second."""
    context = attempt()
    with pytest.raises(Killed):
        fit(context, network(), on_step=die)
    assert fit(context, network()).log.resumed_from is None


def test_a_training_that_is_resumed_after_its_last_step_has_a_loss(tmp_path: Path) -> None:
    """The result of the first attempt may have been lost."""
    reports = [fit(LocalContext(seed=5, checkpoints=tmp_path, budget=30), network()) for _ in range(2)]
    assert reports[1].log.resumed_from == 30
    assert reports[1].loss == reports[0].loss is not None


def test_a_training_that_is_stopped_before_its_first_report_has_a_loss(attempt: Callable[[], LocalContext]) -> None:
    steps: list[int] = []
    context = attempt()
    context.stopped = lambda: len(steps) >= 3
    report = fit(context, network(), report_every=20, on_step=lambda step, _: steps.append(step))
    assert report.loss == pytest.approx(sum(step.loss for step in report.log.steps) / 3)


def test_vectors_are_counted_over_all_starts_of_a_training(attempt: Callable[[], LocalContext]) -> None:
    """Otherwise the share of dropped vectors would be too low."""

    def spoil(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(1)
        return loss(model, batch) * (torch.nan if len(seen) == 3 else 1)

    seen: list[int] = []
    model = network()
    with pytest.raises(Killed), gang(attempt(), replicas=1) as g:
        g.fit(model, descent(model), DATA, spoil, steps=30, batch=10, checkpoint_every=5, on_step=die)
    report = fit(attempt(), network())
    assert report.log.refused == {"not finite": 1}
    assert report.log.accepted == {0: 29}


def test_a_speculative_copy_starts_from_the_checkpoint_of_its_original_and_leaves_its_files_alone(
    tmp_path: Path,
) -> None:
    original = LocalContext(seed=5, checkpoints=tmp_path)
    copied: list[Report] = []

    def start_copy(step: int, _: float) -> None:
        if step == 17:
            copy = LocalContext(seed=5, checkpoints=tmp_path, attempt=2, is_copy=True)
            copied.append(fit(copy, network()))

    report = fit(original, network(), on_step=start_copy)
    assert copied[0].log.resumed_from == 15
    assert copied[0].steps == report.steps == 30
    assert report.log.resumed_from is None


def test_a_superseded_coordinator_cannot_write(tmp_path: Path) -> None:
    old, new = Checkpoints(tmp_path, "x"), Checkpoints(tmp_path, "x")
    first, second = old.claim(), new.claim()
    assert (first.epoch, second.epoch) == (1, 2)
    assert first.token == second.token
    new.save({"step": 1})
    with pytest.raises(Superseded):
        old.save({"step": 2})
    old.remove()
    assert new.load() == {"step": 1}
    assert (tmp_path / "gang-x.json").stat().st_mode & 0o77 == 0


def test_a_superseded_coordinator_cannot_write_after_its_successor_has_finished(tmp_path: Path) -> None:
    old, new = Checkpoints(tmp_path, "x"), Checkpoints(tmp_path, "x")
    old.claim()
    new.claim()
    new.remove()
    with pytest.raises(Superseded):
        old.save({"step": 2})
    assert not list(tmp_path.iterdir())


def test_the_next_claim_removes_half_written_files(tmp_path: Path) -> None:
    part = tmp_path / ".gang-x.pt.abc.part"
    part.touch()
    Checkpoints(tmp_path, "x").claim()
    assert not part.exists()


@pytest.mark.parametrize(
    ("claim", "field"),
    [
        ("{}", "epoch"),
        ('{"epoch": 0, "token": "t", "owner": "o"}', "epoch"),
        ('{"epoch": 1, "token": 5, "owner": "o"}', "token"),
        ('{"epoch": 1, "token": "t", "owner": "o", "port": 70000}', "port"),
    ],
)
def test_a_claim_with_a_wrong_field_is_one_clear_error_that_names_the_field(
    tmp_path: Path, claim: str, field: str
) -> None:
    (tmp_path / "gang-x.json").write_text(claim)
    with pytest.raises(ShadhoError, match=f"gang-x.json cannot be read .*{field}.*; remove it"):
        Checkpoints(tmp_path, "x").claim()
