"""The watch of a rank ends what the rank waits for, whatever carries its tensors."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from services.cases import cases
from torch import distributed as dist
from torch.distributed import distributed_c10d

from shadho_celery.ranks import rendezvous
from shadho_celery.ranks.rendezvous import End, Watch

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
