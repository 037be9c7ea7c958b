"""The cut graph: sums exchanged at once change nothing; late and by turns, they cost a fraction and little accuracy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from statistics import fmean

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shadho_celery.objective.context import LocalContext
from tasks import gnn_delayed as task

PARAMS = {"width": 32, "learning_rate": 0.01}
SEEDS = range(2)
NEVER = 10**6

# Each training starts processes: seconds, or a minute where the machine is busy.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_launch")]


@cache
def train(delay: int, parts: int = task.SETTINGS.parts, seed: int = 0) -> task.Learned:
    learned = LocalContext(gpus=parts, slots=parts).launch(task.spread, {**PARAMS, "delay": delay}, seed)
    assert isinstance(learned, task.Learned)
    return learned


def errors(delay: int) -> float:
    return fmean(train(delay, seed=seed).epochs[-1][0] for seed in SEEDS)


def sent(delay: int) -> int:
    found = train(delay).sent
    assert found is not None
    return found


@pytest.mark.slow
def test_without_delay_four_processes_compute_what_one_does() -> None:
    whole, cut = train(0, parts=1), train(0)
    assert whole.scores is not None
    np.testing.assert_allclose(cut.scores, whole.scores, rtol=0, atol=1e-5)
    np.testing.assert_allclose(cut.epochs, whole.epochs, rtol=0, atol=1e-5)
    assert whole.sent == 0 < sent(0)


@pytest.mark.slow
def test_a_delay_of_five_sends_a_fifth_of_the_bytes_and_costs_less_than_a_point() -> None:
    assert errors(5) <= errors(0) + 0.01
    assert sent(5) == pytest.approx(sent(0) / 5, rel=0.02)


@pytest.mark.slow
def test_parts_that_never_hear_of_each_other_are_worse_by_more_than_a_point() -> None:
    assert errors(NEVER) > errors(0) + 0.03


@pytest.mark.slow
def test_the_bytes_are_those_of_an_all_reduce_of_a_row_for_every_shared_vertex() -> None:
    parts = task.parts_of(task.stochastic_block_graph(), 4)
    # Features in the first layer; the hidden units' sums and their gradients in the second.
    row = 4 * (task.SETTINGS.features + 2 * PARAMS["width"])
    assert sent(0) == task.SETTINGS.epochs * 2 * (4 - 1) * len(parts[0].shared) * row


@pytest.mark.parametrize("parts", [1, 4])
def test_a_cut_has_every_edge_once_and_one_root_for_every_vertex(parts: int) -> None:
    graph = task.stochastic_block_graph()
    size = task.SETTINGS.vertices
    cut = task.parts_of(graph, parts)
    assert sorted(torch.cat([part.vertex[part.root] for part in cut]).tolist()) == list(range(size))
    # Put together, the parts' neighbours are the graph's: a vertex's mean over itself and those it has edges to.
    found = torch.zeros(size, size)
    for part in cut:
        target, source = part.vertex[part.neighbours.indices()]
        found.index_put_((target, source), part.neighbours.values(), accumulate=True)
    expected = np.eye(size, dtype=np.float32)
    expected[graph.edges[0], graph.edges[1]] = expected[graph.edges[1], graph.edges[0]] = 1
    torch.testing.assert_close(found, torch.as_tensor(expected / expected.sum(axis=1, keepdims=True)))
    copies = torch.bincount(torch.cat([part.vertex for part in cut]))
    for part in cut:
        assert part.shared.tolist() == torch.nonzero(copies > 1)[:, 0].tolist()


def test_parts_have_about_as_many_edges_each() -> None:
    graph = task.stochastic_block_graph()
    loads = np.bincount(task.cut(graph, 4, np.random.default_rng(0)))
    assert loads.max() <= 1.1 * loads.mean()


def test_what_is_heard_was_sent_at_the_last_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a delay of 2, a vertex's copies hear at epoch 4 what was sent at 2, and at epoch 5 still that."""
    parts = task.parts_of(task.stochastic_block_graph(), 4)
    # The parts exchange one after the other: a sum is complete by the time at which a part waits for it.
    given: dict[int, list[torch.Tensor]] = defaultdict(list)
    epoch = 0

    class Work:
        def __init__(self, epoch: int, tensor: torch.Tensor) -> None:
            self.sums, self.tensor = given[epoch], tensor
            self.sums.append(tensor.clone())

        def wait(self) -> None:
            self.tensor.copy_(torch.stack(self.sums).sum(dim=0))

    all_reduce: Callable[..., Work] = lambda tensor, async_op: Work(epoch, tensor)  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: len(parts))
    exchanges = [task.Exchange(part=part, delay=2) for part in parts]
    copies = torch.bincount(torch.cat([part.vertex for part in parts]))
    for epoch, sent_at in enumerate((None, None, 0, 0, 2, 2)):
        for part, exchange in zip(parts, exchanges, strict=True):
            heard = exchange.others(torch.full((len(part.vertex), 1), float(epoch + 1)), epoch)
            even = torch.isin(part.vertex, part.shared[part.shared % 2 == 0])
            expected = torch.zeros(int(even.sum()), 1)
            if sent_at is not None:
                expected = (copies[part.vertex[even]] - 1)[:, None] * float(sent_at + 1)
            torch.testing.assert_close(heard[even], expected)
            assert not heard[~torch.isin(part.vertex, part.shared)].any()


@pytest.mark.slow
def test_its_budget_is_a_number_of_epochs_its_seed_decides_and_it_stops_when_told_to() -> None:
    params = {**PARAMS, "delay": 2}
    slots = task.SETTINGS.parts
    first, again, other = (
        task.objective(params, LocalContext(gpus=slots, slots=slots, budget=3, seed=seed)) for seed in (1, 1, 2)
    )
    assert first["epochs"] == 3
    assert first == again != other
    seen: list[int] = []
    context = LocalContext(
        gpus=slots, slots=slots, on_report=lambda epoch, loss: seen.append(epoch), stopped=lambda: bool(seen)
    )
    assert task.objective(params, context)["epochs"] == 1
