"""A trial's ranks are processes of torch's elastic launcher: rank 0 reports, all see one answer, an error ends all."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from shadho_celery.errors import UsageError
from shadho_celery.objective.call import call
from shadho_celery.objective.context import LocalContext, RankLost
from shadho_celery.ranks.launch import RankContext, RankFailed

pytestmark = pytest.mark.timeout(120)


def trains(context: RankContext, factor: float) -> dict[str, Any]:
    """Report until the trial should stop; note what each rank has seen."""
    step = 0
    while step < 100:
        context.report(step, factor * step)
        step += 1
        if context.should_stop():
            break
    (context.checkpoint_dir / str(context.rank)).write_text(f"{step} {context.stop_reason} {context.size}")
    ranks = torch.tensor([float(context.rank)])
    dist.all_reduce(ranks)
    with pytest.raises(ValueError, match="must be a whole number"):
        context.report(0.5, 1.0)  # type: ignore[arg-type]
    return {"loss": ranks.item(), "threads": os.environ["OMP_NUM_THREADS"]}


def fails(context: RankContext, how: str) -> None:
    """Rank 1 fails while the others wait for it."""
    if context.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 1 and how == "signalled":
        os.kill(os.getppid(), signal.SIGTERM)
    elif context.rank == 1 and how == "leaves":
        sys.exit(0)
    elif context.rank == 1:
        raise RuntimeError(how)
    dist.barrier()
    time.sleep(30)


@pytest.mark.slow
def test_all_ranks_stop_at_the_step_at_which_rank_0_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    reports: list[tuple[int, float]] = []
    context = LocalContext(
        gpus=2,
        slots=2,
        checkpoints=tmp_path,
        on_report=lambda step, loss: reports.append((step, loss)),
        stopped=lambda: len(reports) >= 3,
    )
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    assert context.launch(trains, 2.0) == {"loss": 1.0, "threads": "2"}
    assert reports == [(0, 0.0), (1, 2.0), (2, 4.0)]
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3 stopped 2"] * 2
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == (before, handler)
    assert not [thread for thread in threading.enumerate() if thread.name == "rank-reports"]


def takes(context: RankContext, sizes: list[int], how: str) -> None:
    """Use so many bytes in each rank, which are no longer used at the end."""
    len(b"x" * sizes[context.rank])
    dist.barrier()
    time.sleep(0.5)
    fails(context, how) if how else None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peaks of its processes")
@pytest.mark.parametrize("how", ["", "killed"])
def test_the_peaks_of_all_ranks_are_told_of_a_killed_one_too(tmp_path: Path, how: str) -> None:
    told: list[int] = []
    for sizes in ([0, 0], [300_000_000, 500_000_000]):
        context = LocalContext(
            gpus=2, slots=2, checkpoints=tmp_path, on_ranks=lambda host, gpu: told.append(host if not gpu else -1)
        )
        with pytest.raises(RankLost) if how else nullcontext():
            context.launch(takes, sizes, how)
    assert 750_000_000 < told[1] - told[0] < 900_000_000
    assert told[0] > 2 * 20_000_000


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_trial_with_its_traceback(tmp_path: Path) -> None:
    context = LocalContext(gpus=2, slots=2, checkpoints=tmp_path)
    outcome = call(lambda params, context: context.launch(fails, "CUDA out of memory: no room"), dict, context)
    error = str(outcome.error)
    assert "RankFailed: rank 1 failed: RuntimeError: CUDA out of memory: no room" in error
    assert "raise RuntimeError(how)" in error, "the line in the user's function"
    assert outcome.out_of_memory == "gpu"


def returns_a_lock(context: RankContext) -> Any:
    return threading.Lock()


@pytest.mark.slow
def test_a_rank_that_ends_its_process_or_returns_what_cannot_be_sent_is_told(tmp_path: Path) -> None:
    """The others do not wait for it."""
    context = LocalContext(gpus=2, slots=2, checkpoints=tmp_path)
    with pytest.raises(RankFailed, match=r"rank 1 failed: RuntimeError: it called sys\.exit\(0\); return instead"):
        context.launch(fails, "leaves")
    with pytest.raises(RankFailed, match=r"rank 0 failed: .*cannot send what rank 0 returns .*; return plain values"):
        context.launch(returns_a_lock)


@pytest.mark.slow
def test_a_killed_rank_is_lost_and_the_others_end(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match="rank 1 was ended by signal SIGKILL"):
        LocalContext(gpus=4, slots=4, checkpoints=tmp_path).launch(fails, "killed")


@pytest.mark.slow
def test_a_signal_that_ends_the_ranks_but_not_a_trials_process_lets_the_trial_try_again(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(RankLost, match="the ranks were ended by SIGTERM"):
            LocalContext(gpus=2, slots=2, checkpoints=tmp_path).launch(fails, "signalled")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_cannot_be_sent_to_a_process_is_refused(tmp_path: Path) -> None:
    context = LocalContext(checkpoints=tmp_path)
    with pytest.raises(UsageError, match="give a function at the top level"):
        context.launch(lambda context: 0.0)
    with pytest.raises(UsageError, match="give a function at the top level"):
        context.launch(trains, threading.Lock())
    with pytest.raises(UsageError, match="a rank cannot launch ranks"):
        RankContext().launch(trains)


def test_which_rank_has_failed_by_itself_is_found_among_those_that_lost_it() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from shadho_celery.ranks.launch import _failure

    def failure(rank: int, code: int, message: str = "", at: int = 5) -> ProcessFailure:
        made = ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="none")
        made.error_file_data = {"message": {"message": message}} if message else made.error_file_data
        made.timestamp = at
        return made

    lost = failure(0, 1, "RuntimeError: [gloo] Connection closed by peer", at=1)
    for failures, told in (
        ({0: lost, 1: failure(1, -signal.SIGKILL)}, "rank 1 was ended by signal SIGKILL"),
        ({0: lost, 1: failure(1, 1, "ValueError: x")}, "rank 1 failed: ValueError: x"),
        ({0: failure(0, -signal.SIGTERM, at=1), 1: failure(1, 3)}, "rank 1 ended with exit code 3"),
    ):
        assert str(_failure(ChildFailedError("rank", failures))[0]) == told
    assert isinstance(_failure(ChildFailedError("rank", {1: failure(1, 3)}))[0], RankFailed)
