"""A process group in the slot of one trial: real processes, real gloo."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest
import torch
from hyperopt import hp
from services.cases import cases
from torch import distributed as dist

from shadho_celery import minimize, ranks, training
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import Context, LocalContext, RankLost
from shadho_celery.ranks import process_group

pytestmark = pytest.mark.timeout(120)


def total(value: float = 1.0) -> float:
    """Return the sum of a number of each rank."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def test_every_rank_takes_part_and_only_rank_0_leaves_the_block_and_reports(tmp_path: Path) -> None:
    reports: list[tuple[int, float]] = []
    context = LocalContext(checkpoints=tmp_path, on_report=lambda step, loss: reports.append((step, loss)))
    with process_group(context, ranks=3) as pg:
        inside = os.getpid()
        ranks, variables = total(pg.rank), total(int(os.environ["RANK"]) + 10 * int(os.environ["WORLD_SIZE"]))
        context.report(1, float(pg.rank))
        (tmp_path / f"rank-{pg.rank}").write_text(f"{inside} {pg.size} {pg.device}")
    assert (pg.rank, pg.size, ranks, variables) == (0, 3, 3.0, 93.0)
    assert inside == os.getpid()
    assert reports == [(1, 0.0)]
    assert len({(tmp_path / f"rank-{rank}").read_text() for rank in range(3)}) == 3
    assert "RANK" not in os.environ
    assert not dist.is_initialized()
    for rank in (1, 2):
        # It has ended, and was waited for.
        process = int((tmp_path / f"rank-{rank}").read_text().split()[0])
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the sockets of its processes")
def test_a_script_that_reads_the_variables_makes_a_group_on_the_loopback(tmp_path: Path) -> None:
    with process_group(LocalContext(checkpoints=tmp_path), ranks=2) as pg:
        own = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
        assert not [key for key in own.list_keys() if "/cpu//" in key], "the ranks meet in a file of their user"
        total()
        said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
        (tmp_path / str(pg.rank)).write_text(said)
        total()
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2.0 {'127.0.0.1'}"] * 2


class Thread:
    """An object that ends the process if it is collected in another one than its thread's, as torch's store does."""

    def __init__(self) -> None:
        self.process, self.itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os.abort()


def test_a_forked_rank_collects_nothing_of_its_parent(tmp_path: Path) -> None:
    gc.disable()
    try:
        Thread()
        with process_group(LocalContext(checkpoints=tmp_path), ranks=2):
            gc.collect()
            ranks = total()
    finally:
        gc.enable()
    assert ranks == 2.0


def test_studies_may_import_process_groups_from_training_too() -> None:
    for name in ranks.__all__:
        assert getattr(training, name) is getattr(ranks, name)


def test_a_trial_may_open_one_group_after_the_other_in_one_slot(tmp_path: Path) -> None:
    context = LocalContext(checkpoints=tmp_path)
    sums = []
    for size in (1, 2):
        with process_group(context, ranks=size):
            sums.append(total())
    assert sums == [1.0, 2.0]


@cases(("device", "backend", "warned"), [("cuda", None, True), ("cuda", "gloo", False), ("cpu", None, False)])
def test_a_group_whose_ranks_have_no_gpu_each_says_that_it_runs_on_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, device: str, backend: Literal["gloo"] | None, warned: bool
) -> None:
    caplog.clear()
    with process_group(LocalContext(checkpoints=tmp_path, device=device), ranks=1, backend=backend) as pg:
        assert pg.device.type == "cpu"
    assert ("runs on the CPU" in caplog.text) is warned


@cases(("backend", "is_refused"), [(None, True), ("gloo", False)])
def test_a_rank_that_was_forked_after_the_first_use_of_cuda_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Literal["gloo"] | None, is_refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    first = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != first)
    context = LocalContext(checkpoints=tmp_path, device="cuda")
    says = r"rank 1 failed: UsageError: a forked rank .*is_available\(\) counts as use: open the group first"
    with (
        pytest.raises(ShadhoError, match=says) if is_refused else nullcontext(),
        process_group(context, backend=backend) as pg,
    ):
        assert (pg.size, pg.device.type, total()) == (2, "cpu", 2.0)


def hang() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise ArithmeticError("no such file")


def train(folder: Path, ranks: int, culprit: int, end: Callable[[], None], rest: Callable[[], object] = total) -> None:
    """Train until one rank, the culprit, ends in some way. The others go on with the rest."""
    with process_group(LocalContext(checkpoints=folder), ranks=ranks, deadline_seconds=3) as pg:
        (folder / f"pid-{pg.rank}").write_text(str(os.getpid()))
        total()
        if pg.rank == culprit:
            end()
        rest()


def compute() -> None:
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (die, "rank 2 was ended by signal SIGKILL"),
        (hang, "rank 2 was silent for 3 s"),
        (leave, "rank 2 was silent for 3 s"),
    ],
    ids=["killed", "stopped", "exits"],
)
@pytest.mark.parametrize("rest", [total, compute])
def test_a_lost_rank_ends_every_other_one(
    tmp_path: Path, end: Callable[[], None], says: str, rest: Callable[[], object]
) -> None:
    """It ends those that wait for it in a collective, and those that compute."""
    with pytest.raises(RankLost, match=says):
        train(tmp_path, 3, 2, end, rest)
    for rank in (1, 2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)


#: trains without end; each rank tells its process
ENDLESS = """
import os
import sys
from pathlib import Path
import torch
from torch import distributed as dist
from shadho_celery.context import LocalContext
from shadho_celery.ranks import process_group

with process_group(LocalContext(checkpoints=Path(sys.argv[1])), ranks=3) as pg:
    Path(sys.argv[1], f"pid-{pg.rank}").write_text(str(os.getpid()))
    while True:
        dist.all_reduce(torch.ones(1))
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(process: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_ranks_end_where_the_trials_process_is_killed(tmp_path: Path) -> None:
    files = [tmp_path / f"pid-{rank}" for rank in range(3)]
    with subprocess.Popen([sys.executable, "-c", ENDLESS, tmp_path], stderr=subprocess.DEVNULL) as parent:
        try:
            until(lambda: all(file.exists() and file.read_text() for file in files))
            ranks = [int(file.read_text()) for file in files]
            assert ranks[0] == parent.pid
            assert all(map(runs, ranks))
        finally:
            parent.kill()
    until(lambda: not any(map(runs, ranks)))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_a_rank_is_the_error_of_the_trial(
    tmp_path: Path, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    says = "^no such file$" if rank == 0 else "^rank 1 failed: ArithmeticError: no such file$"
    kind = ArithmeticError if rank == 0 else ShadhoError
    with pytest.raises(kind, match=says):
        train(tmp_path, 3, rank, fail)
    assert ("ArithmeticError: no such file" in capfd.readouterr().err) == (rank == 1), "its traceback is shown"


def test_pruning_reaches_all_ranks_at_one_step(tmp_path: Path) -> None:
    """Rank 0 alone is told. Every rank does the same number of steps, or its last sum would wait for ever."""
    steps = 0
    context = LocalContext(checkpoints=tmp_path, stopped=lambda: steps >= 5)
    with process_group(context, ranks=3) as pg:
        while not pg.should_stop():
            steps += 1
            total()
        (tmp_path / f"steps-{pg.rank}").write_text(str(steps))
        total()
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in range(3)] == ["5", "5", "5"]


def test_every_rank_loads_what_rank_0_saved(tmp_path: Path) -> None:
    for attempt in range(2):
        with process_group(LocalContext(checkpoints=tmp_path), ranks=2) as pg:
            state = pg.load()
            found = -1.0 if state is None else float(state["numbers"].sum())
            assert total(found) == 2 * found
            pg.save({"numbers": torch.full((4,), float(pg.rank + 1)), "epoch": attempt})
        assert found == (-1.0, 4.0)[attempt]


def test_a_copy_of_a_trial_and_a_damaged_checkpoint(tmp_path: Path) -> None:
    with process_group(LocalContext(checkpoints=tmp_path, is_copy=True)) as pg:
        pg.save({"epoch": 1})
        assert pg.load() is None
    (tmp_path / "process-group.pt").write_bytes(b"damaged")
    with (
        pytest.raises(ShadhoError, match=r"process-group.pt cannot be read: it is damaged.*; remove it to start"),
        process_group(LocalContext(checkpoints=tmp_path), ranks=2) as pg,
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
        ({}, {"backend": "nccl", "ranks": 2}, "NCCL needs a GPU of its own for each rank, but"),
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
    with process_group(context, ranks=1), pytest.raises(UsageError, match=r"torch.distributed is in use already"):
        process_group(context, ranks=1)


def test_a_trial_that_loses_a_rank_is_tried_again_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt of each trial loses a rank after its first checkpoint."""
    monkeypatch.chdir(tmp_path)

    def objective(params: dict[str, float], context: Context) -> dict[str, float]:
        with process_group(context, ranks=2) as pg:
            state = pg.load()
            if state is None:
                pg.save({"x": params["x"]})
                total()
                if pg.rank:
                    die()
                total()
            found = -1.0 if state is None else state["x"]
        return {"loss": found, "attempt": context.attempt}

    study = minimize(objective, {"x": hp.uniform("x", 0, 1)}, trials=2, seed=0)
    assert [trial.metrics["attempt"] for trial in study.trials] == [2, 2]
    assert [trial.loss for trial in study.trials] == [trial.params["x"] for trial in study.trials]
