"""Batches: their examples are a function of seed, step and place alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from shadho_celery.errors import UsageError
from shadho_celery.training.replica.batches import Batches, mixed

DATA = (torch.arange(100), torch.arange(100) * 2)


class Squares(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index**2


def test_a_batch_is_a_function_of_seed_step_and_place() -> None:
    one, other = (Batches(DATA, batch=8, seed=3, places=4) for _ in range(2))
    other.indices(70, 1)
    assert torch.equal(one.indices(5, 2), other.indices(5, 2))
    assert not torch.equal(one.indices(5, 2), one.indices(5, 3))
    assert not torch.equal(one.indices(5, 2), Batches(DATA, batch=8, seed=4, places=4).indices(5, 2))


def test_an_epoch_visits_every_example_once_over_all_places() -> None:
    batches = Batches(DATA, batch=5, seed=0, places=4)
    for epoch in range(3):
        taken = [batches.indices(step, place) for step in range(5 * epoch, 5 * epoch + 5) for place in range(4)]
        assert sorted(torch.cat(taken).tolist()) == list(range(100))


def test_no_place_has_a_shard_of_its_own() -> None:
    batches = Batches(DATA, batch=5, seed=0, places=4)
    seen = {int(i) for step in range(60) for i in batches.indices(step, 3)}
    assert len(seen) > 90


def test_a_batch_may_span_the_end_of_an_epoch() -> None:
    batches = Batches(DATA, batch=30, seed=0)
    taken = torch.cat([batches.indices(step, 0) for step in range(10)])
    for epoch in range(3):
        assert sorted(taken[100 * epoch : 100 * epoch + 100].tolist()) == list(range(100))


def test_micro_batches_are_the_batch_in_parts_and_their_shares_add_up() -> None:
    batches = Batches(DATA, batch=10, seed=0, micro_batches=3)
    parts = list(batches.parts(0, 0))
    assert torch.equal(torch.cat([part[0] for part, _ in parts]), batches.indices(0, 0))
    assert torch.equal(parts[0][0][1], parts[0][0][0] * 2)
    assert [share for _, share in parts] == pytest.approx([0.4, 0.3, 0.3])


def test_a_map_style_dataset_is_collated() -> None:
    batches = Batches(Squares(), batch=4, seed=0)
    (part, share), *rest = batches.parts(0, 0)
    assert share == 1
    assert not rest
    assert torch.equal(part[1], part[0] ** 2)


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (DATA, {"batch": 101}, "100 examples, fewer than a batch of 101"),
        (DATA, {"batch": 0}, "batch is 0"),
        ((torch.ones(3), torch.ones(4)), {"batch": 1}, "differ in length"),
        (DATA, {"batch": 4, "micro_batches": 5}, "micro_batches is 5"),
        (DATA, {"batch": 4, "micro_batches": 0}, "micro_batches is 0"),
    ],
    ids=["too few", "no batch", "unequal", "too many parts", "no parts"],
)
def test_bad_data_are_one_clear_error(data: object, settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Batches(data, seed=0, **settings)


def test_mixed_seeds_differ_where_any_number_does() -> None:
    seeds = {mixed(a, b, c) for a in range(10) for b in range(10) for c in (-1, 0, 2**40)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_batch_of_a_past_epoch_can_be_drawn_again() -> None:
    """A coordinator that resumes from a checkpoint repeats steps that its replicas have done."""
    batches = Batches((torch.arange(20),), batch=4, seed=3)
    first = batches.indices(0, 0).tolist()
    for step in range(40):
        batches.indices(step, 0)
    assert batches.indices(0, 0).tolist() == first


def test_other_data_have_another_digest() -> None:
    x, y = torch.arange(40.0).reshape(20, 2), torch.arange(20)
    digest = Batches((x, y), batch=4, seed=0).digest
    assert Batches((x.clone(), y.clone()), batch=4, seed=0).digest == digest
    for other in ((x, 19 - y), (x[:10], y[:10]), (x.double(), y), (x.reshape(20, 1, 2), y)):
        assert Batches(other, batch=4, seed=0).digest != digest
    assert Batches((x, y), batch=5, seed=0).digest != digest
