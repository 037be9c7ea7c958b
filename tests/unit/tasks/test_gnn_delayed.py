"""The cut graph: sums exchanged at once change nothing; late and by turns, they cost a fraction and little accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from shadho_celery.objective.context import LocalContext
from tasks import gnn_delayed as task

PARAMS = {"width": 32, "learning_rate": 0.01}
SEEDS = range(2)
NEVER = 10**6


@cache
def train(delay: int, parts: int = task.SETTINGS.parts, seed: int = 0) -> tuple[dict[str, Any], torch.Tensor]:
    return task.train({**PARAMS, "delay": delay}, LocalContext(seed=seed), parts)


def errors(delay: int) -> float:
    return fmean(train(delay, seed=seed)[0]["loss"] for seed in SEEDS)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products on many threads wait for one another where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def at_once() -> float:
    return errors(0)


def test_without_delay_four_parts_compute_what_one_does() -> None:
    whole, scores = train(0, parts=1)
    cut, cut_scores = train(0, parts=4)
    torch.testing.assert_close(cut_scores, scores, rtol=0, atol=1e-5)
    assert cut["train_loss"] == pytest.approx(whole["train_loss"], abs=1e-5)
    assert whole["bytes"] == 0 < cut["bytes"]


@pytest.mark.slow
def test_a_delay_of_five_sends_a_fifth_of_the_bytes_and_costs_less_than_a_point(at_once: float) -> None:
    assert errors(5) <= at_once + 0.01
    assert train(5)[0]["bytes"] == pytest.approx(train(0)[0]["bytes"] / 5, rel=0.02)


@pytest.mark.slow
def test_parts_that_never_hear_of_each_other_are_worse_by_more_than_a_point(at_once: float) -> None:
    assert errors(NEVER) > at_once + 0.03


def test_the_bytes_are_a_row_to_the_root_and_one_back_for_every_other_copy() -> None:
    cut = task.copies(task.stochastic_block_graph(), 4)
    leaves = len(cut.vertex) - task.SETTINGS.vertices
    # Features in the first layer; the hidden units' sums and their gradients in the second.
    row = 4 * (task.SETTINGS.features + 2 * PARAMS["width"])
    assert train(0)[0]["bytes"] == task.SETTINGS.epochs * leaves * 2 * row


@pytest.mark.parametrize("parts", [1, 4])
def test_a_cut_has_every_edge_once_and_one_root_for_every_vertex(parts: int) -> None:
    graph = task.stochastic_block_graph()
    cut = task.copies(graph, parts)
    assert sorted(cut.vertex[cut.root].tolist()) == list(range(task.SETTINGS.vertices))
    # Put together, the parts' neighbours are the graph's: a vertex's mean over itself and those it has edges to.
    size = task.SETTINGS.vertices
    target, source = cut.vertex[cut.neighbours.indices()]
    found = torch.zeros(size, size).index_put_((target, source), cut.neighbours.values(), accumulate=True)
    expected = np.eye(size, dtype=np.float32)
    expected[graph.edges[0], graph.edges[1]] = expected[graph.edges[1], graph.edges[0]] = 1
    torch.testing.assert_close(found, torch.as_tensor(expected / expected.sum(axis=1, keepdims=True)))


def test_parts_have_about_as_many_edges_each() -> None:
    graph = task.stochastic_block_graph()
    loads = np.bincount(task.cut(graph, 4, np.random.default_rng(0)))
    assert loads.max() <= 1.1 * loads.mean()


def test_what_is_heard_was_sent_at_the_last_turn() -> None:
    """With a delay of 2, a vertex's copies hear at epoch 4 what was sent at 2, and at epoch 5 still that."""
    graph = task.stochastic_block_graph()
    cut = task.copies(graph, 4)
    exchange = task.Exchange(cut=cut, delay=2)
    even = cut.shared & (cut.vertex % 2 == 0)
    heard = [exchange.others(torch.full((len(cut.vertex), 1), float(epoch)), epoch).clone() for epoch in range(6)]
    count = torch.bincount(cut.vertex)[cut.vertex]
    others = (count[even] - 1)[:, None].float()
    for epoch, sent in ((1, 0), (2, 0), (3, 0), (4, 2), (5, 2)):
        torch.testing.assert_close(heard[epoch][even], sent * others)
    assert not heard[5][~cut.shared].any()


def test_its_budget_is_a_number_of_epochs_its_seed_decides_and_it_stops_when_told_to() -> None:
    params = {**PARAMS, "delay": 2}
    first = task.objective(params, LocalContext(budget=3, seed=1))
    assert first["epochs"] == 3
    assert first == task.objective(params, LocalContext(budget=3, seed=1))
    assert first != task.objective(params, LocalContext(budget=3, seed=2))
    assert task.objective(params, LocalContext(stopped=lambda: True))["epochs"] == 1
