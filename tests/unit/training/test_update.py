"""Schedules, warm-up, clipping, weights and loss scales: as in a plain loop, and nothing is forgotten in a restart."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from services.played_gang import PlayedGang
from services.training import DATA, PIXELS, descent, loss, network, same
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, Dataset

from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import LocalContext
from shadho_celery.training import Async, Average, Elastic, Sync, gang, replay
from shadho_celery.training.replica.batches import Batches, mixed
from shadho_celery.training.replica.update import Diverged, LossScale, Update
from shadho_celery.training.strategies import Strategy

STEPS = 40

SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "cosine": lambda rule: CosineAnnealingLR(rule, T_max=STEPS),
    "one cycle": lambda rule: OneCycleLR(rule, max_lr=0.1, total_steps=STEPS),
    "lambda": lambda rule: LambdaLR(rule, lambda step: 0.97**step),
    "plateau": lambda rule: ReduceLROnPlateau(rule, patience=1, factor=0.7),
    "sequential": lambda rule: SequentialLR(
        rule, [LinearLR(rule, total_iters=5), CosineAnnealingLR(rule, T_max=STEPS)], milestones=[5]
    ),
    "chained": lambda rule: ChainedScheduler([LinearLR(rule, total_iters=5), ExponentialLR(rule, 0.95)]),
}


class Killed(Exception):
    """The process dies here."""


@pytest.fixture
def context(tmp_path: Path) -> LocalContext:
    return LocalContext(seed=5, checkpoints=tmp_path)


def two_groups(model: nn.Module) -> Optimizer:
    """Momentum, and another rate for the last layer."""
    first, last = list(model[:-1].parameters()), list(model[-1].parameters())  # type: ignore[index]
    return torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.02}], lr=0.1, momentum=0.9)


def trained(
    context: LocalContext,
    schedule: Callable[[Optimizer], LRScheduler] | None,
    *,
    replicas: int = 1,
    killed_at: int | None = None,
    strategy: Strategy | None = None,
    **settings: Any,
) -> Any:
    """Train a network with two groups of parameters; checkpoints at every 20 steps."""

    def look(step: int, value: float) -> None:
        if step == killed_at:
            raise Killed

    model = network()
    rule = two_groups(model)
    with gang(context, strategy=strategy or Sync(replicas=replicas)) as g:
        g.fit(
            model,
            rule,
            DATA,
            loss,
            steps=STEPS,
            batch=10,
            checkpoint_every=20,
            schedule=None if schedule is None else schedule(rule),
            on_step=look,
            **settings,
        )
    return g, model, rule


def test_cosine_warm_up_and_clipping_are_those_of_a_plain_loop(context: LocalContext) -> None:
    _, model, _ = trained(context, SCHEDULES["cosine"], warmup=10, clip=0.5)
    plain = network()
    rule = two_groups(plain)
    schedule = CosineAnnealingLR(rule, T_max=STEPS)
    batches = Batches(DATA, batch=10, seed=5)
    for step in range(STEPS):
        torch.manual_seed(mixed(5, step, 0, 1))  # dropout
        chosen = batches.indices(step, 0)
        rule.zero_grad()
        cross_entropy(plain(PIXELS[chosen]), DATA[1][chosen]).backward()
        clip_grad_norm_(plain.parameters(), 0.5)
        rates = [group["lr"] for group in rule.param_groups]
        for group in rule.param_groups:
            group["lr"] *= min(1.0, (step + 1) / 10)
        rule.step()
        for group, rate in zip(rule.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule.step()
    assert same(model, plain)


def tokens(batch: Any) -> float:
    """A weight that differs from batch to batch."""
    return float(batch[1].sum()) + 1.0


@pytest.mark.parametrize(
    ("schedule", "more", "replicas"),
    [
        *[(schedule, {}, 1) for schedule in SCHEDULES.values()],
        pytest.param(SCHEDULES["cosine"], {"scale_with_replicas": True, "weight": tokens}, 2, marks=pytest.mark.slow),
    ],
    ids=[*SCHEDULES, "two replicas"],
)
def test_a_training_that_was_killed_and_resumed_equals_an_uninterrupted_one_and_its_replay(
    tmp_path: Path, schedule: Callable[[Optimizer], LRScheduler], more: dict[str, Any], replicas: int
) -> None:
    settings: dict[str, Any] = {"warmup": 8, "clip": 1.0, **more}

    def start(folder: str, killed_at: int | None = None) -> Any:
        """Train with a context of its own, as a trial's attempt has."""
        context = LocalContext(seed=5, checkpoints=tmp_path / folder)
        return trained(context, schedule, replicas=replicas, killed_at=killed_at, **settings)

    whole, model, rule = start("a")
    with pytest.raises(Killed):
        start("b", 25)
    resumed, again, other = start("b")
    assert resumed.log.resumed_from == 20
    assert same(model, again)
    assert [group["lr"] for group in rule.param_groups] == [group["lr"] for group in other.param_groups]
    assert rule.param_groups[0]["lr"] != 0.1
    replayed = network()
    rule = two_groups(replayed)
    list(replay(replayed, rule, DATA, loss, whole.log, batch=10, seed=5, schedule=schedule(rule), **settings))
    assert same(model, replayed)


def test_linear_scaling_multiplies_learning_rates_by_the_number_of_replicas(context: LocalContext) -> None:
    rates = []

    class Rule(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    model = network()
    with gang(context, replicas=2) as g:
        g.fit(model, Rule(model.parameters(), lr=0.1), DATA, loss, steps=3, batch=10, scale_with_replicas=True)
    assert rates == [0.2] * 3


def moved(folder: Path, strategy: Strategy, law: Callable[[int], float]) -> list[bool]:
    """Train by local steps with a learning rate by step; return whether the parameters changed in each step."""
    model = nn.Linear(8, 2)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = [model.weight.detach().clone()]
    with gang(LocalContext(checkpoints=folder), strategy=strategy) as g:
        g.fit(
            model,
            rule,
            DATA,
            loss,
            steps=8,
            batch=10,
            schedule=LambdaLR(rule, law),
            on_step=lambda step, value: seen.append(model.weight.detach().clone()),
        )
    return [not torch.equal(before, after) for before, after in itertools.pairwise(seen)]


@pytest.mark.parametrize("strategy", [Average(replicas=2, tau=2), Elastic(replicas=2)], ids=["average", "elastic"])
def test_local_steps_follow_the_schedule(tmp_path: Path, strategy: Strategy) -> None:
    assert moved(tmp_path / "a", strategy, lambda step: 0.0) == [False] * 8
    assert any(moved(tmp_path / "b", strategy, lambda step: 1.0))


def test_local_steps_of_a_round_have_the_rate_of_its_step(tmp_path: Path) -> None:
    strategy = Average(replicas=2, tau=2)
    assert moved(tmp_path, strategy, lambda step: float(step < 3)) == [True] * 3 + [False] * 5


def test_a_learning_rate_goes_to_any_step() -> None:
    """A replica whose coordinator resumes from a checkpoint goes back."""
    rates = []
    for steps in ([7], [12, 7], [3, 9, 2, 7]):
        rule = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        update = Update(rule, CosineAnnealingLR(rule, T_max=20), warmup=10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in steps:
                update.go_to(step)
        rates.append((rule.param_groups[0]["lr"], update.factor))
    assert len(set(rates)) == 1
    assert rates[0][1] == 0.8


def test_an_update_that_was_sent_to_a_spawned_replica_steps_without_a_warning() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, update = pickle.loads(pickle.dumps((model, Update(optimizer, LambdaLR(optimizer, halved)))))
    for _ in range(2):
        model(torch.ones(1, 1)).backward()
        update.apply(list(model.parameters()))
        update.advance()
    assert update.optimizer.param_groups[0]["lr"] == 0.25


def halved(step: int) -> float:
    return 0.5**step


def test_micro_batches_and_replicas_are_weighed_by_what_they_count() -> None:
    """Two gradients of unequal numbers of tokens make that of all their tokens together."""
    lengths = torch.arange(1, 21)
    data = (torch.randn(20, 20, generator=torch.Generator().manual_seed(0)), lengths)

    def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        mask = torch.arange(20)[None, :] < batch[1][:, None]
        return ((batch[0] - model.bias)[mask] ** 2).mean()

    def played(replicas: int, batch: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        played = PlayedGang(
            Sync(replicas=replicas),
            model,
            lambda model: torch.optim.SGD([model.bias], lr=0.1),
            data,
            mean,
            seconds=lambda place, step: 1.0,
            steps=1,
            batch=batch,
            weight=lambda batch: float(batch[1].sum()),
        )
        played.train()
        return model.bias.detach()

    torch.testing.assert_close(played(1, 20), played(2, 10))
    torch.testing.assert_close(played(1, 20), played(4, 5))


@pytest.mark.parametrize(
    ("weigh", "message"),
    [
        (lambda batch: -1.0, "weight\\(batch\\) returned -1"),
        (lambda batch: batch[1], "weight\\(batch\\) returned tensor"),
        (lambda batch: 0.0, "is 0"),
    ],
    ids=["negative", "many", "zero"],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_that_are_no_numbers_or_all_zero_are_one_clear_error(
    context: LocalContext, weigh: Callable[[Any], float], message: str, replicas: int
) -> None:
    with pytest.raises(ShadhoError, match=f"{message}|are 0"):
        trained(context, None, replicas=replicas, weight=weigh)


def halves(model: nn.Module, batch: Any) -> Tensor:
    """A loss in half precision, whose gradient overflows at great scales."""
    return cross_entropy(model(batch[0]), batch[1]).half()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_overflow_halves_the_scale_and_is_no_fault_of_a_replica(tmp_path: Path, replicas: int) -> None:
    def run(folder: str, killed_at: int | None = None) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=9)
        context = LocalContext(seed=5, checkpoints=tmp_path / folder)

        def look(step: int, value: float) -> None:
            if step == killed_at:
                raise Killed

        model = network()
        with gang(context, replicas=replicas) as g:
            g.fit(
                model,
                descent(model),
                DATA,
                halves,
                steps=STEPS,
                batch=10,
                scaler=scaler,
                checkpoint_every=20,
                on_step=look,
            )
        return g.log, model, scaler

    log, model, scaler = run("a")
    assert [step.loss_scale for step in log.steps[:6]] == [2.0**k for k in (20, 19, 18, 17, 16, 15)]
    assert [step.accepted for step in log.steps[:5]] == [()] * 5
    assert log.refused["overflow"] >= 5 * replicas
    assert log.refused["not finite"] == 0
    assert max(step.loss_scale for step in log.steps[6:]) == 2.0**16
    assert scaler.get_scale() < 2.0**20
    with pytest.raises(Killed):
        run("b", 25)
    resumed, again, other = run("b")
    assert resumed.resumed_from == 20
    assert same(model, again)
    assert other.state_dict() == scaler.state_dict()
    replayed = network()
    list(replay(replayed, descent(replayed), DATA, halves, log, batch=10, seed=5))
    assert same(model, replayed)


def test_gradients_that_overflow_at_any_scale_are_a_divergence() -> None:
    scale = LossScale(torch.amp.GradScaler("cpu", init_scale=2.0))
    scale.overflowed = True
    scale.advance()
    assert scale.value == 1.0
    scale.overflowed = True
    with pytest.raises(Diverged, match="overflow"):
        scale.advance()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loop_of_ones_own_has_the_same_guarantees(tmp_path: Path, replicas: int) -> None:
    """Here the sign of the gradient is what counts, which `fit` cannot do."""

    def body(model: nn.Module, rule: Optimizer, schedule: LRScheduler, steps: Any, killed_at: int = -1) -> None:
        for step in steps:
            if step == killed_at:
                raise Killed
            for parameter in model.parameters():
                parameter.grad.sign_()  # type: ignore[union-attr]
            rule.step()
            schedule.step()

    def parts() -> tuple[nn.Module, Optimizer, LRScheduler]:
        model = network()
        rule = descent(model, rate=0.01)
        return model, rule, CosineAnnealingLR(rule, T_max=STEPS)

    def run(folder: str, killed_at: int = -1) -> Any:
        model, rule, schedule = parts()
        with gang(LocalContext(seed=5, checkpoints=tmp_path / folder), replicas=replicas) as g:
            steps = g.steps(
                model, rule, DATA, loss, steps=STEPS, batch=10, keep={"schedule": schedule}, checkpoint_every=20
            )
            body(model, rule, schedule, steps, killed_at)
        return g, model

    whole, model = run("a")
    assert whole.report.steps == STEPS
    with pytest.raises(Killed):
        run("b", 25)
    resumed, again = run("b")
    assert resumed.log.resumed_from == 20
    assert same(model, again)
    replayed, rule, schedule = parts()
    body(replayed, rule, schedule, replay(replayed, rule, DATA, loss, whole.log, batch=10, seed=5, by_hand=True))
    assert same(model, replayed)


def test_dropped_batches_return_and_the_replay_is_exact() -> None:
    def seconds(place: int, step: int) -> float:
        return 1.0 + 0.01 * place + (3.0 if (7 * step + place) % 10 == 0 else 0.0)

    model = network()
    played = PlayedGang(Sync(replicas=3, backups=1), model, descent, DATA, loss, seconds=seconds, steps=60, batch=10)
    report = played.train()
    assert report.log.dropped_batches > 0
    again = network()
    list(replay(again, descent(again), DATA, loss, report.log, batch=10, seed=0))
    assert same(model, again)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0}, "clip is 0; give a maximum norm"),
        ({"clip": -1.0}, "clip is -1"),
        ({"clip": float("nan")}, "clip is nan"),
        ({"warmup": -1}, "warmup is -1"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"schedule": CosineAnnealingLR}, "constructed with the gang's own optimizer"),
        ({"schedule": lambda rule: CosineAnnealingLR(descent(network()), T_max=3)}, "gang's own optimizer"),
        (
            {"schedule": lambda rule: OneCycleLR(rule, 0.1, total_steps=20)},
            "OneCycleLR ends at step 20 of 40",
        ),
        ({"scaler": 1024.0}, "scaler is 1024.0; give a torch.amp.GradScaler"),
        ({"weight": 2}, "weight is 2; give a function of a batch"),
        ({"shedule": None}, "fit has no argument shedule; did you mean schedule?"),
    ],
)
def test_wrong_settings_of_an_update_are_one_clear_error(
    context: LocalContext, settings: dict[str, Any], message: str
) -> None:
    model = network()
    rule = descent(model)
    if isinstance(schedule := settings.get("schedule"), FunctionType):
        settings = {"schedule": schedule(rule)}
    with pytest.raises(UsageError, match=message), gang(context, replicas=1) as g:
        g.fit(model, rule, DATA, loss, steps=STEPS, batch=10, **settings)


def test_a_loss_that_raises_in_the_replicas_is_named_with_its_line(context: LocalContext) -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise KeyError("target")

    line = broken.__code__.co_firstlineno + 1
    model = network()
    with (
        pytest.raises(ShadhoError, match=rf"the loss raised at test_update\.py:{line}: KeyError: 'target'\)"),
        gang(context, replicas=2) as g,
    ):
        g.fit(model, descent(model), DATA, broken, steps=1, batch=10)


def test_a_warm_up_that_is_longer_than_the_training_is_said(
    context: LocalContext, caplog: pytest.LogCaptureFixture
) -> None:
    trained(context, None, replicas=1, warmup=1000)
    assert "the warm-up of 1000 steps is longer" in caplog.text


def test_a_schedule_that_is_stepped_by_hand_as_well_is_one_clear_error(context: LocalContext) -> None:
    model = network()
    rule = descent(model)
    schedule = CosineAnnealingLR(rule, T_max=9)
    with pytest.raises(UsageError, match="changed by hand as well"), gang(context, replicas=1) as g:
        g.fit(
            model,
            rule,
            DATA,
            loss,
            steps=9,
            batch=10,
            schedule=schedule,
            on_step=lambda step, value: schedule.step(),
        )


def test_what_local_steps_cannot_do_is_one_clear_error(tmp_path: Path) -> None:
    context = LocalContext(checkpoints=tmp_path)
    needed = {"scale_with_replicas": True, "weight": tokens, "scaler": torch.amp.GradScaler("cpu")}
    for name, value in needed.items():
        with pytest.raises(UsageError, match=f"{name} needs a strategy that averages gradients"):
            trained(context, None, strategy=Average(replicas=2), **{name: value})
    with pytest.raises(UsageError, match="ReduceLROnPlateau needs the loss"):
        trained(context, SCHEDULES["plateau"], strategy=Elastic(replicas=2))
    model = network()
    with (
        pytest.raises(UsageError, match="a loop of your own needs"),
        gang(context, strategy=Average(replicas=2)) as g,
    ):
        g.steps(model, descent(model), DATA, loss, steps=1)
    with pytest.raises(UsageError, match="has no state_dict"), gang(context, strategy=Async(replicas=2)) as g:
        g.steps(model, descent(model), DATA, loss, steps=1, keep={"rate": 0.1})  # type: ignore[dict-item]


class Table(Dataset[tuple[Tensor, Tensor]]):
    """The data as a data set, which may fail at one example."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise ValueError("no such file")
        return PIXELS[index], DATA[1][index]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_gang_with_a_loader_with_workers_trains_as_without_one(tmp_path: Path, replicas: int) -> None:
    def run(name: str, data: Any) -> nn.Module:
        model = network()
        with gang(LocalContext(seed=5, checkpoints=tmp_path / name), replicas=replicas) as g:
            g.fit(model, descent(model), data, loss, steps=12, batch=10)
        assert not g.processes.alive()
        return model

    assert same(run("a", DATA), run("b", DataLoader(Table(), num_workers=1)))


def test_a_loader_that_raises_in_a_worker_of_a_replica_ends_the_training_with_its_error(context: LocalContext) -> None:
    model = network()
    data = DataLoader(Table(bad=3), num_workers=1)
    message = r"^replica \d ended at step \d+: UsageError: the data set failed in a batch of step \d+: ValueError: no "
    with pytest.raises(ShadhoError, match=message), gang(context, replicas=2) as g:
        g.fit(model, descent(model), data, loss, steps=40, batch=10)
