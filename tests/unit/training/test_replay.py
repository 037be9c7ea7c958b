"""Replay of a log gives the trained parameters; N = 1 without backups is plain training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import LambdaType
from typing import Any

import numpy as np
import pytest
import torch
from services.training import DATA, PIXELS, descent, loss, network, same
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shadho_celery.errors import UsageError
from shadho_celery.objective.context import LocalContext
from shadho_celery.training import Async, Average, Sync, gang, replay
from shadho_celery.training.coordinator.centre import Mean, ModelCentre
from shadho_celery.training.coordinator.run import Diverged
from shadho_celery.training.plan import Plan
from shadho_celery.training.replica.batches import Batches, mixed
from shadho_celery.training.report import Log, Step


@pytest.fixture
def context(tmp_path: Path) -> LocalContext:
    return LocalContext(seed=5, checkpoints=tmp_path)


def replayed(log: Log, **settings: Any) -> nn.Module:
    model = network()
    list(replay(model, descent(model), DATA, loss, log, batch=10, seed=5, **settings))
    return model


def test_one_replica_and_no_backups_is_plain_training_bit_for_bit(context: LocalContext) -> None:
    plain = network()
    optimizer = descent(plain)
    batches = Batches(DATA, batch=10, seed=5)
    for step in range(30):
        torch.manual_seed(mixed(5, step, 0, 1))  # dropout
        chosen = batches.indices(step, 0)
        optimizer.zero_grad()
        cross_entropy(plain(PIXELS[chosen]), DATA[1][chosen]).backward()
        optimizer.step()
    model = network()
    with gang(context, replicas=1) as g:
        report = g.fit(model, descent(model), DATA, loss, steps=30, batch=10)
    assert same(model, plain)
    assert report.steps == 30
    assert same(replayed(g.log), plain)


def test_a_local_training_leaves_the_state_of_the_random_generator(context: LocalContext) -> None:
    model = network()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with gang(context, replicas=1) as g:
        g.fit(model, descent(model), DATA, loss, steps=3, batch=10)
    assert torch.equal(torch.rand(3), expected)


def test_a_step_is_the_mean_of_its_gradients_and_of_their_batch_statistics() -> None:
    log = Log(places=3, steps=[Step(step=0, accepted=(2, 0), loss=1.0, seconds=0.0, scale=0.5)])
    model, by_hand = network(), network()
    list(replay(model, descent(model), DATA, loss, log, batch=10, seed=5))
    batches = Batches(DATA, batch=10, seed=5, places=3)
    start = {name: value.clone() for name, value in by_hand.state_dict().items()}
    gradients, statistics = [], []
    for place in (2, 0):
        by_hand.load_state_dict(start)
        by_hand.zero_grad()
        torch.manual_seed(mixed(5, 0, place, 1))
        chosen = batches.indices(0, place)
        cross_entropy(by_hand(PIXELS[chosen]), DATA[1][chosen]).backward()
        gradients.append([p.grad.clone() for p in by_hand.parameters()])
        statistics.append(by_hand.state_dict()["1.running_mean"].clone())
    by_hand.load_state_dict(start)
    for parameter, one, other in zip(by_hand.parameters(), *gradients, strict=True):
        parameter.data -= 0.1 * 0.5 * (one + other) / 2
    for here, there in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(here, there)
    torch.testing.assert_close(model.state_dict()["1.running_mean"], sum(statistics) / 2)


def test_a_mean_depends_on_the_places_and_not_on_the_order_in_which_vectors_arrive() -> None:
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(7, 3), scale=10.0 ** np.arange(-3, 4)[:, None]).astype(np.float32)
    for places in (range(7), (0, 2, 3), (6, 1), (5,)):
        means = set()
        for _ in range(20):
            mean = Mean(np.zeros(3, dtype=np.float32), np.zeros(1, dtype=np.float32), 7)
            order = generator.permutation(places).tolist()
            for place in order:
                mean.add(place, vectors[place].copy(), vectors[place, :1].copy(), place, 1.0 + place)
            weights = [1.0 + place for place in places]
            assert mean.take() == (tuple(order), pytest.approx(np.average(list(places), weights=weights)))
            np.testing.assert_allclose(mean.vector, np.average(vectors[list(places)], axis=0, weights=weights), 1e-5)
            means.add((mean.vector.tobytes(), mean.buffers.tobytes()))
        assert len(means) == 1


def test_only_whole_logs_of_sync_can_be_replayed() -> None:
    model = network()
    gap = Log(steps=[Step(step=3, accepted=(0,), loss=0.0, seconds=0.0)])
    with pytest.raises(UsageError, match="does not begin at the first step"):
        replay(model, descent(model), DATA, loss, gap, batch=10)
    with pytest.raises(UsageError, match="cannot be replayed"):
        replay(model, descent(model), DATA, loss, gang(LocalContext(), strategy=Async(replicas=2)).log, batch=10)


def test_a_model_has_its_averaged_parameters_in_evaluation_and_at_the_end(context: LocalContext) -> None:
    seen: list[Tensor] = []
    model = nn.Linear(8, 1, bias=False)
    own = [model.weight.detach().clone()]

    def evaluate(it: nn.Module) -> float:
        assert not it.training
        seen.append(it.weight.detach().clone())
        return 1.5

    def note(step: int, value: float) -> None:
        own.append(model.weight.detach().clone())

    reports: list[tuple[int, float]] = []
    context.on_report = lambda step, value: reports.append((step, value))
    with gang(context, replicas=1) as g:
        report = g.fit(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DATA,
            lambda m, b: m(b[0]).square().mean(),
            steps=4,
            batch=10,
            ema=0.5,
            evaluate=evaluate,
            on_step=note,
            report_every=2,
        )
    average = own[0]
    for weight in own[1:]:
        average = 0.5 * average + 0.5 * weight
    torch.testing.assert_close(seen[-1], average)
    torch.testing.assert_close(model.weight.detach(), average)
    assert reports == [(2, 1.5), (4, 1.5)]
    assert report.loss == 1.5


def test_without_an_evaluation_the_mean_training_loss_is_reported(context: LocalContext) -> None:
    reports: list[tuple[int, float]] = []
    context.on_report = lambda step, value: reports.append((step, value))
    model = network()
    with gang(context, replicas=1) as g:
        report = g.fit(model, descent(model), DATA, loss, steps=10, batch=10, report_every=5)
    losses = [step.loss for step in report.log.steps]
    assert reports[0] == (5, pytest.approx(sum(losses[:5]) / 5))
    assert reports[1] == (10, pytest.approx(sum(losses[5:]) / 5))


def test_a_training_ends_at_its_goal_and_keeps_no_checkpoint(context: LocalContext, tmp_path: Path) -> None:
    model, values = network(), iter([0.5, 0.3, 0.2, 0.1])
    with gang(context, replicas=1) as g:
        report = g.fit(
            model,
            descent(model),
            DATA,
            loss,
            steps=100,
            batch=10,
            evaluate=lambda _: next(values),
            report_every=5,
            goal=0.2,
            checkpoint_every=5,
        )
    assert (report.steps, report.loss) == (15, 0.2)
    assert not list(tmp_path.glob("gang-*"))


@pytest.mark.parametrize(("slots", "asked"), [(3, 1), (5, 0)])
def test_backups_that_do_not_fit_the_slots_of_the_trial_take_idle_ones(tmp_path: Path, slots: int, asked: int) -> None:
    calls: list[int] = []

    def call(address: str, token: str, backups: int) -> None:
        calls.append(backups)
        raise InterruptedError

    context = LocalContext(slots=slots, checkpoints=tmp_path, on_call_replicas=call)
    model = network()
    with pytest.raises(InterruptedError), gang(context, replicas=2, backups=2, host="127.0.0.1") as g:
        g.fit(model, descent(model), DATA, loss, steps=1, batch=10)
    assert calls == [asked]


def test_a_parameter_that_the_loss_does_not_use_stays_as_it_is_in_training_and_replay(context: LocalContext) -> None:
    """Plain training does so too, with or without weight decay."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.used, self.unused = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    def rule(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    model, again = Two(), Two()
    with gang(context, replicas=1) as g:
        g.fit(model, rule(model), DATA, loss, steps=5, batch=10)
    list(replay(again, rule(again), DATA, loss, g.log, batch=10, seed=5))
    assert same(again, model)
    assert same(model.unused, Two().unused)


def test_a_training_stops_with_its_trial(context: LocalContext) -> None:
    stop = threading.Event()
    context.stopped = stop.is_set
    model = network()
    with gang(context, replicas=1) as g:
        report = g.fit(
            model, descent(model), DATA, loss, steps=100, batch=10, on_step=lambda step, _: step == 7 and stop.set()
        )
    assert report.steps == 7


def test_a_loss_that_is_nan_from_the_first_step_is_one_clear_error(context: LocalContext) -> None:
    model = network()
    with pytest.raises(UsageError, match="from the first step"), gang(context, replicas=1) as g:
        g.fit(model, descent(model), DATA, lambda m, b: loss(m, b) * torch.nan, steps=5, batch=10)


def test_a_batch_without_a_finite_gradient_is_skipped_and_three_in_a_row_are_an_error(
    context: LocalContext,
) -> None:
    calls = []

    def at_times(bad: Callable[[int], bool]) -> Callable[..., Tensor]:
        calls.clear()

        def compute(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            calls.append(1)
            return loss(model, batch) * (torch.nan if bad(len(calls)) else 1)

        return compute

    model = network()
    with gang(context, replicas=1) as g:
        report = g.fit(model, descent(model), DATA, at_times(lambda n: n in {3, 4}), steps=10, batch=10)
    assert [step.step for step in report.log.steps if not step.accepted] == [2, 3]
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert same(replayed(report.log), model)
    with pytest.raises(Diverged), gang(context, replicas=1) as g:
        g.fit(model, descent(model), DATA, at_times(lambda n: n > 3), steps=10, batch=10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": 2, "backups": -1}, "backups is -1"),
        ({"replicas": 2, "strategy": Sync(replicas=3)}, "strategy is for 3"),
        ({}, "needs replicas"),
        ({"strategy": Average}, "Average\\(replicas=4\\)"),
        ({"replicas": 2, "codec": 2}, "codec is 2"),
        ({"replicas": 2, "on_few": "fial"}, "on_few is 'fial'"),
        ({"replicas": 2, "port": 70000}, "port is 70000"),
        ({"replicas": 2, "deadline_seconds": 0}, "deadline_seconds is 0"),
        ({"replicas": 2, "grace_seconds": float("nan")}, "grace_seconds is nan"),
    ],
    ids=str,
)
def test_wrong_arguments_of_a_gang_are_one_clear_error(
    context: LocalContext, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        gang(context, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 201}, "fewer than a batch"),
        ({"steps": 0}, "steps is 0"),
        ({"ema": 1.0}, "ema is 1"),
        ({"report_every": 0}, "report_every"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"batch": 10.0}, "batch is 10.0"),
        ({"loss": nn.CrossEntropyLoss()}, "function of \\(model, batch\\)"),
        ({"data": (PIXELS.numpy(), DATA[1].numpy())}, "torch.as_tensor"),
        ({"data": {"x": PIXELS}}, "data is a dict"),
        ({"data": iter(PIXELS)}, "give tensors of equal length"),
        ({"optimizer": torch.optim.SGD}, "optimizer is SGD"),
        # Made in the test: to make an optimizer imports a third of torch.
        ({"optimizer": lambda: torch.optim.LBFGS(nn.Linear(1, 1).parameters())}, "optimizer is LBFGS"),
        ({"optimizer": lambda: torch.optim.SGD(nn.Linear(1, 1).parameters())}, "none of the model's parameters"),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_wrong_arguments_of_fit_are_one_clear_error_before_any_process_starts(
    context: LocalContext, settings: dict[str, Any], message: str, replicas: int
) -> None:
    model = network()
    given = {"optimizer": descent(model), "data": DATA, "loss": loss, "model": model, "steps": 5, "batch": 10}
    settings = {name: value() if isinstance(value, LambdaType) else value for name, value in settings.items()}
    with pytest.raises(UsageError, match=message), gang(context, replicas=replicas) as g:
        g.fit(**{**given, **settings})
    assert not g.processes.children


def test_a_gang_trains_once(context: LocalContext) -> None:
    model = network()
    with gang(context, replicas=1) as g:
        g.fit(model, descent(model), DATA, loss, steps=1, batch=10)
        with pytest.raises(UsageError, match="once"):
            g.fit(model, descent(model), DATA, loss, steps=1, batch=10)


def test_the_learning_rate_is_scaled_for_the_step_only() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    centre = ModelCentre(Plan(model, torch.optim.SGD(model.parameters(), lr=1.0), DATA, loss, steps=1), 1)
    centre.scale = 0.25
    gradient = centre.shape.vector()
    gradient[:] = 1
    centre.descend(gradient)
    assert model.weight.item() == -0.25
    assert centre.optimizer.param_groups[0]["lr"] == 1.0
