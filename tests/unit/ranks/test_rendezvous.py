"""Ranks that join in a store: each in a thread, as another process would; their watch ends what they wait for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from services.cases import cases
from torch import distributed as dist
from torch.distributed import (
    TCPStore,  # type: ignore[attr-defined]  # torch has no list of its stores
    distributed_c10d,
)

from shadho_celery.core.addresses import LOOPBACK
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import RankLost
from shadho_celery.ranks import rendezvous
from shadho_celery.ranks.rendezvous import REQUEST, Card, End, Rendezvous, Terms, Watch, reach, version_of

CARD = Card(address="", version="Python 3")


@contextmanager
def ranks(size: int) -> Iterator[list[Rendezvous]]:
    """Yield each rank's view of one store."""
    master = TCPStore(LOOPBACK, 0, None, True, REQUEST, wait_for_workers=False)
    yield [Rendezvous(master.clone(), "token", rank, size, lambda: None) for rank in range(size)]


def met(views: list[Rendezvous], *cards: Card, backend: Any = None, seconds: float = 30.0) -> list[Terms | Exception]:
    """Let each rank that has a card meet the others. Return what each of them gets."""
    got: dict[int, Terms | Exception] = {}

    def meet(rank: int) -> None:
        try:
            got[rank] = views[rank].meet(cards[rank].version, cards[rank].gpu, backend, seconds, LOOPBACK)
        except Exception as error:
            got[rank] = error
            views[rank].end(End(reason=str(error), is_loss=False))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(len(cards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [got[rank] for rank in range(len(cards))]


def test_all_ranks_get_the_same_terms() -> None:
    with ranks(2) as views:
        first, second = met(views, CARD, CARD)
    assert isinstance(first, Terms)
    assert first == second
    assert first.backend == "gloo"
    assert len({*first.addresses}) == 2


def test_a_rank_that_never_joins_is_named() -> None:
    with ranks(3) as views:
        first, second = met(views, CARD, CARD, seconds=0.5)
    for error in (first, second):
        assert isinstance(error, ShadhoError)
        assert "rank 2 of 3 did not join within 0.5 s; " in str(error)


def test_a_rank_that_joins_twice_is_refused_and_the_first_one_stays() -> None:
    with ranks(2) as views:
        views[1].take_place()
        with pytest.raises(ShadhoError, match=r"an earlier process has the place of rank 1, .* tried again"):
            views[1].take_place()
        assert views[0].ended() is None


def test_a_rank_of_another_version_is_refused_with_both_versions() -> None:
    with ranks(2) as views:
        first, _ = met(views, CARD, Card(address="", version="Python 2"))
    assert isinstance(first, UsageError)
    assert "is of another version than rank 0: Python 2, not Python 3; " in str(first)


def test_the_version_depends_on_the_calling_code() -> None:
    def one() -> int:
        return len("x")

    def other() -> int:
        return sum([1])

    assert version_of(one.__code__) == version_of(one.__code__) != version_of(other.__code__)


@pytest.mark.parametrize(
    ("gpus", "cause"),
    [(("a", None), "rank 1 of 2 has none"), ((None, None), "ranks 0, 1 of 2 have none"), (("a", "a"), "share one GPU")],
)
def test_nccl_needs_a_gpu_for_each_rank(
    gpus: tuple[str | None, ...], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    cards = [Card(address="", version="Python 3", gpu=gpu) for gpu in gpus]
    with ranks(2) as views:
        first, _ = met(views, *cards, backend="nccl")
    assert isinstance(first, UsageError)
    assert cause in str(first)
    with ranks(2) as views:
        terms, _ = met(views, *cards)
    assert isinstance(terms, Terms)
    assert terms.backend == "gloo"


def test_nccl_is_chosen_if_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    with ranks(2) as views:
        terms, _ = met(views, *(Card(address="", version="Python 3", gpu=gpu) for gpu in "ab"))
    assert isinstance(terms, Terms)
    assert terms.backend == "nccl"


def test_ranks_that_cannot_reach_one_another_are_named_with_both_addresses_and_on_one_machine_one_has_ended() -> None:
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    for own, remedy in (("10.0.0.1:5", "open the ports "), (LOOPBACK, "rank 0 has ended")):
        said = rf"rank 1 at {own} cannot reach rank 0 at {LOOPBACK}:{port} \(.*refused\); {remedy}"
        with pytest.raises(ShadhoError, match=said):
            reach("rank 1", own, "rank 0", f"{LOOPBACK}:{port}")


def test_the_first_end_counts_and_ends_the_waiting_of_the_others() -> None:
    with ranks(2) as views:
        first = views[1].end(End(reason="rank 1 was lost", is_loss=True))
        assert views[0].end(End(reason="something else", is_loss=False)) == first
        [error] = met(views, CARD)
    assert isinstance(error, RankLost)
    assert str(error) == "rank 1 was lost"


pytestmark = pytest.mark.timeout(60)


def test_torch_does_not_name_a_backend_of_several_by_itself() -> None:
    """With a backend for each kind of device, `get_backend` returns all, so it is never equal to one of them."""
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() != "gloo"
        assert distributed_c10d.get_backend_config() == "cpu:gloo,cuda:gloo"
    finally:
        dist.destroy_process_group()


@cases(("backends", "is_aborted"), [("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)])
def test_the_calls_of_nccl_are_aborted_at_the_end_of_the_group(
    monkeypatch: pytest.MonkeyPatch, backends: str, is_aborted: bool
) -> None:
    abort = Mock()
    monkeypatch.setattr(distributed_c10d, "get_backend_config", lambda: backends)
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", abort)
    shut = threading.Event()
    monkeypatch.setattr(rendezvous, "shut", lambda opened: shut.set())
    other: Any = Mock(rank=0, size=1)
    other.ended.return_value = end = End(reason="rank 1 was ended by signal SIGKILL", is_loss=True)
    watched = Watch(other, deadline=30.0)
    assert watched.wait(20.0) == end
    assert shut.wait(20.0)
    watched.close()
    assert abort.called is is_aborted
