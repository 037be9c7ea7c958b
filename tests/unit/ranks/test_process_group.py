"""A process group over the slots of a trial: real processes, real gloo."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from services.cases import cases
from services.ranks import in_slots
from torch import distributed as dist

from shadho_celery import ranks, training
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import LocalContext, RankLost
from shadho_celery.ranks import process_group, rendezvous

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADHO_HOST", "127.0.0.1")


def total(value: float = 1.0) -> float:
    """Return the sum of a number of each rank."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


#: a program that knows nothing but torchrun's variables, and prints the sum of a number of each rank, and its sockets
SCRIPT = """
import psutil, torch
from torch import distributed

distributed.init_process_group("gloo")
total = torch.ones(1)
distributed.all_reduce(total)
opened = psutil.Process().net_connections()
print(total.item(), {each.laddr.ip for each in opened if each.status == psutil.CONN_LISTEN}, end="")
"""


def test_every_rank_takes_part_and_only_rank_0_leaves_the_block(tmp_path: Path) -> None:
    def objective(context: LocalContext) -> tuple[int, int, float, float]:
        with process_group(context, ranks=3) as pg:
            sums = total(pg.rank), total(int(os.environ["RANK"]) + 10 * int(os.environ["WORLD_SIZE"]))
            (tmp_path / f"rank-{pg.rank}").write_text(f"{os.getpid()} {pg.size} {pg.device}")
        assert "RANK" not in os.environ
        assert not dist.is_initialized()
        (tmp_path / f"left-{pg.rank}").touch()
        return pg.rank, pg.size, *sums

    assert in_slots(3, objective, checkpoints=tmp_path) == (0, 3, 3.0, 93.0)
    assert len({(tmp_path / f"rank-{rank}").read_text() for rank in range(3)}) == 3
    assert [path.name for path in tmp_path.glob("left-*")] == ["left-0"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the sockets of its processes")
def test_a_script_that_reads_the_variables_makes_a_group_on_the_address_of_the_ranks(tmp_path: Path) -> None:
    def objective(context: LocalContext) -> None:
        with process_group(context) as pg:
            said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
            (tmp_path / str(pg.rank)).write_text(said)
            total()

    in_slots(2, objective, checkpoints=tmp_path)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2.0 {'127.0.0.1'}"] * 2


class Thread:
    """An object that ends the process if it is collected in another one than its thread's, as torch's store does."""

    def __init__(self) -> None:
        self.process, self.itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os.abort()


def test_a_forked_process_collects_nothing_of_its_parent(tmp_path: Path) -> None:
    def objective(context: LocalContext) -> float:
        with process_group(context):
            gc.collect()
            return total()

    gc.disable()
    try:
        Thread()
        assert in_slots(2, objective, checkpoints=tmp_path) == 2.0
    finally:
        gc.enable()


def test_studies_may_import_process_groups_from_training_too() -> None:
    for name in ranks.__all__:
        assert getattr(training, name) is getattr(ranks, name)


def test_a_trial_may_open_one_group_after_the_other_in_one_slot(tmp_path: Path) -> None:
    context = LocalContext(checkpoints=tmp_path)
    for _ in range(2):
        with process_group(context):
            assert total() == 1.0


@cases(("device", "backend", "warned"), [("cuda", None, True), ("cuda", "gloo", False), ("cpu", None, False)])
def test_a_group_whose_ranks_have_no_gpu_each_says_that_it_runs_on_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device: str, backend: Literal["gloo"] | None, warned: bool
) -> None:
    caplog.clear()
    with process_group(LocalContext(checkpoints=tmp_path, device=device), backend=backend) as pg:
        assert pg.device.type == "cpu"
    assert ("runs on the CPU" in caplog.text) is warned


def hang() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise ArithmeticError("no such file")


def compute() -> None:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(("end", "rest"), [(die, total), (hang, total), (leave, compute)])
def test_a_lost_rank_ends_every_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None], rest: Callable[[], object]
) -> None:
    """It ends those that wait for it in a collective, and those that compute."""
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.5)

    def objective(context: LocalContext) -> None:
        with process_group(context, deadline_seconds=1.0) as pg:
            total()
            if pg.rank == 2:
                end()
            try:
                rest()
            finally:
                (tmp_path / f"ended-{pg.rank}").touch()
                while not (tmp_path / "ended-1").exists():
                    time.sleep(0.01)

    with pytest.raises(RankLost, match=r"rank 2 was silent for 1 s"):
        in_slots(3, objective, checkpoints=tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_a_rank_is_the_error_of_the_trial(tmp_path: Path, rank: int) -> None:
    def objective(context: LocalContext) -> None:
        with process_group(context) as pg:
            total()
            if pg.rank == rank:
                raise ArithmeticError("no such file")
            total()

    says = "^no such file$" if rank == 0 else "^rank 1 failed: ArithmeticError: no such file$"
    with pytest.raises(ArithmeticError if rank == 0 else ShadhoError, match=says):
        in_slots(3, objective, checkpoints=tmp_path)


def test_pruning_reaches_all_ranks_at_one_step(tmp_path: Path) -> None:
    """Rank 0 alone is told. Every rank does the same number of steps, or its last sum would wait for ever."""

    def objective(context: LocalContext) -> None:
        steps = 0
        if context.replica is None:
            context.stopped = lambda: steps >= 5
        with process_group(context) as pg:
            while not pg.should_stop():
                steps += 1
                total()
            (tmp_path / f"steps-{pg.rank}").write_text(str(steps))
            total()

    in_slots(3, objective, checkpoints=tmp_path)
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in range(3)] == ["5", "5", "5"]


def test_every_rank_loads_what_rank_0_saved(tmp_path: Path) -> None:
    def objective(context: LocalContext) -> float:
        with process_group(context) as pg:
            state = pg.load()
            found = -1.0 if state is None else float(state["numbers"].sum())
            assert total(found) == 2 * found
            pg.save({"numbers": torch.full((4,), float(pg.rank + 1))})
        return found

    assert [in_slots(2, objective, checkpoints=tmp_path) for _ in range(2)] == [-1.0, 4.0]


def test_a_copy_of_a_trial_and_a_damaged_checkpoint(tmp_path: Path) -> None:
    with process_group(LocalContext(checkpoints=tmp_path, is_copy=True)) as pg:
        pg.save({"epoch": 1})
        assert pg.load() is None
    (tmp_path / "process-group.pt").write_bytes(b"damaged")
    with (
        pytest.raises(ShadhoError, match=r"process-group.pt cannot be read: it is damaged.*; remove it to start"),
        process_group(LocalContext(checkpoints=tmp_path)) as pg,
    ):
        pg.load()


@pytest.mark.parametrize(
    ("facts", "arguments", "says"),
    [
        ({}, {"ranks": 0}, "ranks is 0; give a whole number from 1 up"),
        ({}, {"ranks": True}, "ranks is True"),
        ({"slots": 2}, {"ranks": 3}, "ranks is 3, but the trial has 2 slots"),
        ({}, {"backend": "mpi"}, "backend is 'mpi'; it must be 'nccl', 'gloo' or None"),
        ({}, {"timeout_seconds": 0}, "timeout_seconds is 0; give a number of seconds above 0"),
        ({}, {"deadline_seconds": float("nan")}, "deadline_seconds is nan"),
        ({"slots": 2, "encrypted": True}, {}, "signing key, but torch neither authenticates.*plain=True"),
        ({}, {"ranks": 2}, r"one rank in each slot of STUDY\['slots'\]; .* call context.launch\(function\)$"),
        ({"slots": 2, "gpus": 2}, {}, r"set STUDY\['gpus'\] and call context.launch"),
        ({}, {"backend": "nccl"}, "NCCL needs a GPU of its own for each rank, but"),
    ],
)
def test_bad_arguments_are_one_line(
    tmp_path: Path, facts: dict[str, object], arguments: dict[str, object], says: str
) -> None:
    with (
        pytest.raises(UsageError, match=says) as caught,
        process_group(LocalContext(checkpoints=tmp_path, **facts), **arguments),  # type: ignore[arg-type]
    ):
        pytest.fail("the block must not begin")
    assert "\n" not in str(caught.value)


def test_a_second_group_within_the_first_is_refused(tmp_path: Path) -> None:
    context = LocalContext(checkpoints=tmp_path)
    with process_group(context), pytest.raises(UsageError, match=r"torch.distributed is in use already"):
        process_group(context)
