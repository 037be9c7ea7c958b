"""Batches: their examples are a function of seed, step and place alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shadho_celery.errors import UsageError
from shadho_celery.training.replica.batches import RETURNS, Batches, Computer, Draws, mixed

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


@pytest.mark.parametrize(("batch", "places"), [(5, 4), (30, 1)])
def test_an_epoch_visits_every_example_once_over_all_places(batch: int, places: int) -> None:
    """A batch may span the end of an epoch."""
    batches = Batches(DATA, batch=batch, seed=0, places=places)
    taken = torch.cat([batches.indices(step, place) for step in range(15) for place in range(places)])
    for epoch in range(3):
        assert sorted(taken[100 * epoch : 100 * epoch + 100].tolist()) == list(range(100))


def test_no_place_has_a_shard_of_its_own() -> None:
    batches = Batches(DATA, batch=5, seed=0, places=4)
    seen = {int(i) for step in range(60) for i in batches.indices(step, 3)}
    assert len(seen) > 90


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
        (DataLoader(Squares(), batch_size=8), {"batch": 4}, "batches have 8 examples, but batch is 4"),
    ],
    ids=["too few", "no batch", "unequal", "too many parts", "no parts", "loader"],
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


class Noisy(Dataset[Tensor]):
    """Examples with a random draw of each library in them."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == self.bad:
            raise ValueError("no such file")
        return torch.tensor([index, torch.rand(()).item(), random.random()])


def pairs(examples: list[Tensor]) -> Tensor:
    return torch.stack(examples + examples)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loader_with_workers_gives_the_batches_of_its_data_set_in_any_order(micro_batches: int) -> None:
    settings = {"batch": 4, "seed": 7, "places": 3, "micro_batches": micro_batches}
    plain = Batches(Noisy(), **settings)
    loaded = Batches(DataLoader(Noisy(), num_workers=2), **settings)
    loaded.load_ahead(1)
    # In order, after a gap, another place, and an earlier step: only some of them are loaded ahead.
    for step, place in ((3, 1), (4, 1), (7, 1), (8, 2), (2, 1), (8, 1)):
        for (one, share), (other, _) in zip(plain.parts(step, place), loaded.parts(step, place), strict=True):
            assert torch.equal(one, other)  # type: ignore[arg-type]
            assert share == 1 / micro_batches
    loaded.close()


def test_a_loaders_collate_function_is_used() -> None:
    ((batch, _),) = Batches(DataLoader(Noisy(), collate_fn=pairs), batch=4, seed=0).parts(0, 0)
    assert batch.shape == (8, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_raises_is_one_clear_error_also_in_a_worker(workers: int) -> None:
    batches = Batches(DataLoader(Noisy(bad=5), num_workers=workers), batch=40, seed=0)
    batches.load_ahead(0)
    with pytest.raises(UsageError, match=r"^the data set failed in a batch of step 0: ValueError: no such file$"):
        list(batches.parts(0, 0))
    batches.close()


def play(draws: Draws, slow: set[int], counted: int, steps: int) -> list[list[int]]:
    """End steps in which the first `counted` of the batches count, slow ones last. Return all steps' numbers."""
    taken = []
    for _ in range(steps):
        numbers = draws.numbers
        taken.append(numbers)
        order = sorted(range(draws.places), key=lambda place: numbers[place] in slow)
        draws.end_step(order[:counted])
    return taken


def test_without_dropped_batches_a_step_takes_the_next_ones() -> None:
    assert play(Draws(2, batch=5, examples=20), set(), 2, 6) == [[2 * step, 2 * step + 1] for step in range(6)]
    skipped = Draws(2, batch=1, examples=4)
    skipped.end_step(())
    assert skipped.waiting == skipped.lost == 0, "a skipped step drops none"


def test_dropped_batches_return_after_their_epoch_in_the_order_of_step_and_place_and_at_most_twice() -> None:
    # An epoch is four steps of three batches; the slow one of each step is dropped.
    draws = Draws(3, batch=1, examples=12)
    taken = play(draws, {1, 5, 6, 10}, 2, 20)
    assert taken[:4] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    # Three of the four fill a step, of which the last is dropped again. The others wait for the next epoch.
    assert taken[4] == [1, 5, 6]
    assert taken[5] == [12, 13, 14]
    assert taken[9] == [10, 6, 14]
    times = Counter(number for step in taken for number in step)
    assert max(times.values()) == 1 + RETURNS


def test_every_batch_counts_once_unless_it_was_dropped_three_times() -> None:
    draws = Draws(4, batch=1, examples=40)
    counted: Counter[int] = Counter()
    generator = random.Random(0)
    for _ in range(400):
        numbers = draws.numbers
        places = generator.sample(range(4), 3)
        counted.update(numbers[place] for place in places)
        draws.end_step(places)
    assert max(counted.values()) == 1
    assert sum(counted.values()) == 1200
    begun = 1 + max(draws.numbers[0] - 1, *counted)
    assert begun - 4 <= len(counted) + draws.lost + draws.waiting <= begun + 4
    assert draws.lost > 0


def test_a_gpu_has_at_most_two_micro_batches_to_do_and_its_losses_are_read_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for CUDA's events notes when the work of a micro-batch was queued and waited for."""
    events: list[str] = []

    class Event:
        def record(self) -> None:
            self.number = sum(each.startswith("queued") for each in events)
            events.append(f"queued {self.number}")

        def synchronize(self) -> None:
            events.append(f"done {self.number}")

    read = Tensor.item
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Tensor, "item", lambda self: events.append("read") or read(self))
    model, data = nn.Linear(1, 1), (torch.arange(12.0)[:, None],)
    batches = Batches(data, batch=12, seed=0, micro_batches=3)
    result = Computer(model, lambda model, batch: model(batch[0]).mean(), batches).backward(0, 0)
    assert events == ["queued 0", "queued 1", "done 0", "queued 2", "done 1", "read", "read", "read"]
    assert result is not None
    assert result[0] == pytest.approx(model(data[0]).mean().detach().numpy())
