"""A trial's ranks are processes: rank 0 reports, all see one answer, the end of one ends all, others have no part."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch import distributed as dist

from shadho_celery.errors import UsageError
from shadho_celery.objective.call import call
from shadho_celery.objective.context import LocalContext, RankLost
from shadho_celery.ranks import launch
from shadho_celery.ranks.launch import RankContext, RankFailed

pytestmark = pytest.mark.timeout(120)

if os.environ.get("RANK", "none") in os.environ.get("RANKS_THAT_EXIT_AT_IMPORT", ""):
    os._exit(0)


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
    if context.rank == 1 and how == "leaves":
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
@pytest.mark.usefixtures("forked_launch")
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
@pytest.mark.usefixtures("forked_launch")
def test_a_rank_that_ends_its_process_or_returns_what_cannot_be_sent_is_told(tmp_path: Path) -> None:
    """The others do not wait for it."""
    context = LocalContext(gpus=2, slots=2, checkpoints=tmp_path)
    with pytest.raises(RankFailed, match=r"rank 1 failed: RuntimeError: it called sys\.exit\(0\); return instead"):
        context.launch(fails, "leaves")
    with pytest.raises(RankFailed, match=r"rank 0 failed: .*cannot send what rank 0 returns .*; return plain values"):
        context.launch(returns_a_lock)


EARLY = "ended with exit code 0 before it returned"


def ends(context: RankContext, rank: int | None, how: str) -> None:
    """End the process of one rank, or of all. A child of it goes on, with all that it had open."""
    if rank in (None, context.rank):
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        if how.startswith("SIG"):
            os.kill(os.getpid(), signal.SIGRTMIN + 3 if how == "SIGRTMIN+3" else signal.Signals[how])
        if how == "closes all":
            os.closerange(3, 1000)
            how = "4"
        os._exit(int(how))
    dist.barrier()
    time.sleep(300)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_launch")
def test_a_rank_that_ends_without_a_result_ends_its_trial_which_tells_how(tmp_path: Path) -> None:
    """A killed one lets the trial try again, one that exits does not, whatever its code is and before which call."""
    killed, unnamed = "rank 1 was ended by signal SIGKILL", f"rank 0 was ended by signal {signal.SIGRTMIN + 3}"
    for rank, how, kind, says in (
        (None, "0", RankFailed, f"rank [01] {EARLY}"),
        (0, "0", RankFailed, f"rank 0 {EARLY}"),
        (1, "3", RankFailed, "rank 1 ended with exit code 3 before it returned"),
        (1, "closes all", RankFailed, "rank 1 ended with exit code 4 before it returned"),
        (1, "SIGKILL", RankLost, killed),
        (0, "SIGRTMIN+3", RankLost, unnamed),
    ):
        with pytest.raises(kind, match=f"^{says}$"):
            LocalContext(gpus=2, slots=2, checkpoints=tmp_path).launch(ends, rank, how)


@pytest.mark.slow
def test_a_rank_that_ends_while_it_imports_the_function_ends_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at_import, says in (("1", f"rank 1 {EARLY}"), ("01", f"rank [01] {EARLY}")):
        monkeypatch.setenv("RANKS_THAT_EXIT_AT_IMPORT", at_import)
        with pytest.raises(RankFailed, match=f"^{says}$"):
            LocalContext(gpus=2, slots=2, checkpoints=tmp_path).launch(trains, 1.0)


#: a program that knows nothing but torchrun's variables
SCRIPT = """
import os, torch
from torch import distributed

distributed.init_process_group("gloo")
assert int(os.environ["LOCAL_RANK"]) == distributed.get_rank()
assert int(os.environ["LOCAL_WORLD_SIZE"]) == int(os.environ["WORLD_SIZE"]) == distributed.get_world_size()
total = torch.tensor([1.0 + distributed.get_rank()])
distributed.all_reduce(total)
print(total.item())
distributed.destroy_process_group()
"""


class Pickled:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "a stranger's code has run")


def listeners(process: psutil.Process) -> set[str]:
    return {each.laddr.ip for each in process.net_connections() if each.status == psutil.CONN_LISTEN}


def attacked(context: RankContext, folder: Path) -> list[object]:
    """Run a script. Then write to the store that it has used, as any user of the machine may."""
    me = psutil.Process()
    [store_file] = folder.glob("shadho-ranks-*/store")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    found = [listeners(me) | listeners(me.parents()[0]), store_file.parent.stat().st_mode & 0o077, store.list_keys()]
    dist.barrier()
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    dist.barrier()
    for key in (*store.list_keys(), "torch.rendezvous.trial-0.1", "torch.rendezvous.trial"):
        store.set(key, pickle.dumps(Pickled(folder / "written")))
    found += [done.stdout, done.stderr]
    dist.barrier()
    context.report(1, 0.5)
    context.should_stop()
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the sockets of its processes")
def test_ranks_listen_on_the_loopback_alone_and_what_others_write_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that reads the variables of torchrun runs in them. The ranks themselves meet in a file of their user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [name for name in psutil.net_if_addrs() if name != "lo"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[0] if others else "lo")
    context = LocalContext(gpus=2, slots=2, checkpoints=tmp_path / "checkpoints")
    assert context.launch(attacked, tmp_path) == [{"127.0.0.1"}, 0, [], "3.0\n", ""]
    assert not (tmp_path / "written").exists()
    assert not [*tmp_path.glob("shadho-ranks-*")]


def makes_its_own_group(context: RankContext) -> float:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


@pytest.mark.slow
def test_a_function_may_replace_its_group_by_one_of_the_variables(tmp_path: Path) -> None:
    assert LocalContext(gpus=2, slots=2, checkpoints=tmp_path).launch(makes_its_own_group) == 2.0


def test_what_cannot_be_sent_to_a_process_is_refused(tmp_path: Path) -> None:
    context = LocalContext(checkpoints=tmp_path)
    with pytest.raises(UsageError, match="give a function at the top level"):
        context.launch(lambda context: 0.0)
    with pytest.raises(UsageError, match="give a function at the top level"):
        context.launch(trains, threading.Lock())
    with pytest.raises(UsageError, match="a rank cannot launch ranks"):
        RankContext().launch(trains)


def test_which_rank_has_failed_by_itself_is_found_among_those_that_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CAUSE_SECONDS", 0.0)
    lost = (RankFailed, "rank 0 failed: RuntimeError: [gloo] Connection closed by peer", "")
    for own, says in (
        ((RankLost, "rank 1 was ended by signal SIGKILL", ""), "rank 1 was ended by signal SIGKILL"),
        ((RankFailed, "rank 1 failed: ValueError: x", ""), "rank 1 failed: ValueError: x"),
        (None, "rank 0 failed: RuntimeError: .gloo. Connection closed by peer"),
    ):
        ranks: Any = [Mock(failed=lost, returned=()), Mock(failed=own, returned=())]
        with pytest.raises(RankLost if own and own[0] is RankLost else RankFailed, match=says):
            launch._await(ranks, LocalContext())
