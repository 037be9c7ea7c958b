"""A training goes on from its checkpoint, where that is its own, and who was thought dead writes no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from services.training import DATA, PIXELS, descent, loss, network, same
from torch import Tensor, nn

from shadho_celery.context import LocalContext
from shadho_celery.training import Report, gang, replay
from shadho_celery.training.checkpoints import Checkpoints, Superseded


class Killed(BaseException):
    """The process ends at once."""


def die(step: int, _: float) -> None:
    if step == 17:
        raise Killed


def fit(
    context: LocalContext, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any
) -> Report:
    with gang(context, replicas=1) as g:
        chosen = {"data": DATA, "steps": 30, "batch": 10, "checkpoint_every": 5, **settings}
        return g.fit(model, optimizer or descent(model), loss=loss, **chosen)


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[[], LocalContext]:
    """One more attempt of a trial."""
    return lambda: LocalContext(seed=5, checkpoints=tmp_path)


def test_a_training_goes_on_as_if_nothing_had_been_and_says_so(
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
    assert "goes on from step 15" in caplog.text
    assert same(model, whole)
    assert report.log.resumed_from == 15
    assert report.steps == 30
    assert report.log.accepted == {0: 30}
    assert not list(context.checkpoint_dir.iterdir())


def test_a_trial_with_a_budget_goes_on_when_it_is_given_a_greater_one(tmp_path: Path) -> None:
    """It is then a trial of its own, in the folder of the one that it carries on."""
    trained, model = [], network()
    for trial, budget in enumerate((10, 20)):
        model = network()
        context = LocalContext(trial=trial, seed=5, checkpoints=tmp_path, budget=budget)
        trained.append(fit(context, model, steps=budget))
    assert trained[1].log.resumed_from == 10
    again = network()
    list(replay(again, descent(again), DATA, loss, trained[1].log, batch=10, seed=5))
    assert same(again, model)


def test_the_second_training_of_a_trial_does_not_go_on_from_the_first(tmp_path: Path) -> None:
    """Folds, say: they look alike in all but the data."""
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
    ],
    ids=["rate", "optimizer", "average", "micro-batches", "batch", "seed", "labels"],
)
def test_a_training_with_other_settings_or_data_begins_anew(attempt: Callable[[], LocalContext], change: Any) -> None:
    with pytest.raises(Killed):
        fit(attempt(), network(), on_step=die)
    model = network()
    assert fit(attempt(), model, **change(model)).log.resumed_from is None
    with pytest.raises(Killed):
        fit(attempt(), network(), seed=7, on_step=die)
    assert fit(attempt(), network(), seed=7).log.resumed_from == 15


def test_a_training_does_not_go_on_from_one_of_its_trial_that_was_broken_off(
    attempt: Callable[[], LocalContext],
) -> None:
    """Where the first fold diverges, say, and the objective goes on with the second."""
    context = attempt()
    with pytest.raises(Killed):
        fit(context, network(), on_step=die)
    assert fit(context, network()).log.resumed_from is None


def test_a_training_that_had_taken_all_its_steps_still_has_a_loss(tmp_path: Path) -> None:
    """Its result may have been lost on the way."""
    reports = [fit(LocalContext(seed=5, checkpoints=tmp_path, budget=30), network()) for _ in range(2)]
    assert reports[1].log.resumed_from == 30
    assert reports[1].loss == reports[0].loss is not None


def test_a_training_that_is_stopped_before_its_first_report_has_a_loss(attempt: Callable[[], LocalContext]) -> None:
    steps: list[int] = []
    context = attempt()
    context.stopped = lambda: len(steps) >= 3
    report = fit(context, network(), report_every=20, on_step=lambda step, _: steps.append(step))
    assert report.loss == pytest.approx(sum(step.loss for step in report.log.steps) / 3)


def test_what_became_of_every_vector_is_counted_over_all_starts(attempt: Callable[[], LocalContext]) -> None:
    """A share of the dropped that left out those of the first start would be too low."""

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


def test_a_copy_begins_where_its_original_stands_and_leaves_its_files_alone(tmp_path: Path) -> None:
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


def test_a_coordinator_that_was_thought_dead_writes_no_more(tmp_path: Path) -> None:
    old, new = Checkpoints(tmp_path, "x"), Checkpoints(tmp_path, "x")
    first, second = old.claim(None), new.claim(None)
    assert (first.epoch, second.epoch) == (1, 2)
    assert first.token == second.token
    new.save({"step": 1})
    with pytest.raises(Superseded):
        old.save({"step": 2})
    old.remove()
    assert new.load() == {"step": 1}
    assert (tmp_path / "gang-x.json").stat().st_mode & 0o77 == 0


def test_nor_does_it_when_its_successor_has_finished(tmp_path: Path) -> None:
    old, new = Checkpoints(tmp_path, "x"), Checkpoints(tmp_path, "x")
    old.claim(None)
    new.claim(None)
    new.remove()
    with pytest.raises(Superseded):
        old.save({"step": 2})
    assert not list(tmp_path.iterdir())


def test_what_a_start_that_was_killed_has_half_written_is_removed(tmp_path: Path) -> None:
    part = tmp_path / "gang-x.pt.abc.part"
    part.touch()
    Checkpoints(tmp_path, "x").claim(None)
    assert not part.exists()
