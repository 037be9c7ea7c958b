"""Block-cyclic federated averaging: a predictor for each block knows what a single model has forgotten."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shadho_celery.objective.context import LocalContext
from tasks import federated_blockcyclic as task

PARAMS = {"learning_rate": 0.1, "local_steps": 5}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products on many threads wait for one another where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, float]]:
    """Return the result of each method."""
    return {
        method: task.objective({**PARAMS, "method": method}, LocalContext(seed=0)) for method in ("fedavg", "mm", "mc")
    }


@pytest.mark.slow
def test_a_predictor_for_each_block_beats_the_single_model_by_five_points(results: dict[str, dict[str, float]]) -> None:
    assert results["mm"]["loss"] <= results["fedavg"]["loss"] - 0.05


@pytest.mark.slow
def test_a_chain_for_each_block_costs_no_more_than_a_point(results: dict[str, dict[str, float]]) -> None:
    assert results["mc"]["loss"] <= results["mm"]["loss"] + 0.01


@pytest.mark.slow
def test_the_single_model_forgets_the_block_it_saw_first_and_only_that(results: dict[str, dict[str, float]]) -> None:
    found = results["fedavg"]
    assert found["accuracy_0"] < found["accuracy_1"] - 0.1
    assert found["accuracy_1"] > 0.9


def test_blocks_share_no_label_and_clients_hold_few_of_them() -> None:
    low, high = task.digits()
    assert set(low.labels.unique().tolist()) == set(low.test_labels.unique().tolist()) == {0, 1, 2, 3, 4}
    assert set(high.labels.unique().tolist()) == set(high.test_labels.unique().tolist()) == {5, 6, 7, 8, 9}
    for block in (low, high):
        assert len(block.labels) == task.SETTINGS.clients
        assert max(len(labels.unique()) for labels in block.labels) <= 2


@pytest.mark.slow
def test_a_round_is_the_mean_of_what_each_client_learns_by_itself() -> None:
    block = task.digits()[0]
    generator = torch.Generator().manual_seed(0)
    start = task.first_model(generator)
    draws = list(torch.randint(block.labels.shape[1], (3, task.SETTINGS.clients, 4), generator=generator))
    together = start.trained(block, draws, rate=0.2)
    apart = [
        start.trained(
            task.Block(
                pixels=block.pixels[[client]],
                labels=block.labels[[client]],
                test_pixels=block.test_pixels,
                test_labels=block.test_labels,
            ),
            [chosen[[client]] for chosen in draws],
            rate=0.2,
        )
        for client in range(task.SETTINGS.clients)
    ]
    for mean, *each in zip(together.tensors, *(model.tensors for model in apart), strict=True):
        torch.testing.assert_close(mean, torch.stack(each).mean(dim=0))
    assert not torch.equal(together.tensors[0], start.tensors[0])


def test_a_predictor_is_the_plain_mean_of_its_models() -> None:
    models = [task.first_model(torch.Generator().manual_seed(seed)) for seed in range(4)]
    mean = models[0]
    for seen, model in enumerate(models):
        mean = mean.blended(model, 1 / (seen + 1))
    torch.testing.assert_close(mean.tensors[0], torch.stack([model.tensors[0] for model in models]).mean(dim=0))


@pytest.mark.slow
def test_its_budget_is_a_number_of_cycles_its_seed_decides_and_it_stops_when_told_to() -> None:
    seen: list[int] = []
    params = {**PARAMS, "method": "mc"}
    first = task.objective(params, LocalContext(budget=2, seed=1, on_report=lambda step, loss: seen.append(step)))
    assert seen == [1, 2]
    assert first == task.objective(params, LocalContext(budget=2, seed=1))
    assert first != task.objective(params, LocalContext(budget=2, seed=2))
    assert task.objective(params, LocalContext(seed=1, stopped=lambda: True)) == task.objective(
        params, LocalContext(budget=1, seed=1)
    )
