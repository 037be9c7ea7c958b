"""Gangs of real processes: they train what one process would, under kills, and leave no process behind."""

from __future__ import annotations

import json
import logging
import multiprocessing.resource_tracker
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.gangs import BATCH, DATA, descent, loss, network, replayed, same
from torch import nn

from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import LocalContext
from shadho_celery.training import Async, Average, Elastic, Gang, Quantize, Report, Sync, gang, replay
from shadho_celery.training.replica.processes import Processes
from shadho_celery.training.strategies import Strategy

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("no_orphans"), pytest.mark.slow]

#: where processes find the package and this folder
PATHS = f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}"

Fit = Callable[..., tuple[nn.Module, Report, Gang]]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """Train the small network in a gang on this machine."""

    def train(
        replicas: int | None = None, backups: int = 0, *, steps: int = 30, **settings: Any
    ) -> tuple[nn.Module, Report, Gang]:
        given = {name: settings.pop(name) for name in ("micro_batches", "evaluate") if name in settings}
        act = settings.pop("act", lambda step, g: None)
        model = network()
        with gang(LocalContext(checkpoints=tmp_path), replicas, backups, **settings) as g:
            report = g.fit(
                model,
                descent(model),
                DATA,
                loss,
                steps=steps,
                batch=BATCH,
                on_step=lambda step, _: act(step, g),
                **given,
            )
        return model, report, g

    return train


@pytest.mark.parametrize(("replicas", "backups", "parts"), [(1, 1, 1), (2, 0, 1), (3, 2, 3)])
def test_a_gang_trains_what_one_process_makes_of_its_log(fit: Fit, replicas: int, backups: int, parts: int) -> None:
    torch.set_num_threads(1)
    model, report, _ = fit(replicas, backups, micro_batches=parts)
    assert report.steps == 30
    assert all(len(set(step.accepted)) == replicas for step in report.log.steps)
    again = network()
    list(replay(again, descent(again), DATA, loss, report.log, batch=BATCH, micro_batches=parts))
    assert same(again, model)
    assert report.bytes_in > 0 < report.bytes_out


def test_replicas_that_are_killed_at_random_times_cost_no_step_and_leave_no_half_gradient(fit: Fit) -> None:
    chance = random.Random(0)
    victims = chance.sample(range(5), 3)

    def act(step: int, g: Gang) -> None:
        if step == 1:
            until(lambda: g.present() == 5)
        if step in {3, 6, 9}:
            victim = g.processes.children[victims.pop()]
            threading.Timer(chance.uniform(0, 0.03), victim.kill).start()
            time.sleep(0.1)
        if step == 30:
            until(lambda: g.present() == 2)

    model, report, _ = fit(3, 2, steps=40, act=act)
    assert report.steps == 40
    assert sum("left at step" in note for note in report.log.notes) == 3
    assert same(replayed(report.log), model)


def test_a_gang_with_too_few_left_goes_on_with_its_learning_rate_in_proportion(fit: Fit) -> None:
    def act(step: int, g: Gang) -> None:
        if step == 5:
            g.processes.children[1].kill()

    model, report, _ = fit(2, act=act)
    assert report.log.steps[-1].scale == 0.5
    assert len(report.log.steps[-1].accepted) == 1
    assert same(replayed(report.log), model)


def test_a_gang_that_may_not_shrink_says_who_is_missing(fit: Fit) -> None:
    def act(step: int, g: Gang) -> None:
        g.processes.children[0].kill()

    with pytest.raises(ShadhoError, match="1 of 2 replicas are left"):
        fit(2, act=act, on_few="fail", steps=1000)


def test_a_replica_that_hangs_is_gone_after_the_deadline(fit: Fit) -> None:
    def act(step: int, g: Gang) -> None:
        if step == 3:
            os.kill(g.processes.children[0].pid or 0, signal.SIGSTOP)

    _, report, g = fit(2, act=act, deadline_seconds=4)
    assert report.steps == 30
    assert any("nothing heard" in note for note in report.log.notes)
    assert g.processes.alive() == 0


def test_garbage_on_the_port_disturbs_nobody(fit: Fit) -> None:
    def act(step: int, g: Gang) -> None:
        if step in {2, 4}:
            host, _, port = (g.address or "").partition(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(100))

    _, report, _ = fit(2, act=act, steps=60)
    assert report.steps == 60
    assert report.log.refused["broken frame"] == 2


def test_a_late_joiner_contributes_within_three_steps(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Given a gang of two of which one died, when another comes, then it has a part in one of the next three steps.

    The context is told once that the gang is complete: when both of its first replicas are admitted.
    """
    torch.set_num_threads(1)
    called: list[tuple[str, str]] = []
    present: list[int] = []

    def start(rank: int) -> None:
        address, token = called[0]
        processes.append(run("replica", address, token, rank, 2, 0))

    def call(address: str, token: str, backups: int) -> None:
        called.append((address, token))
        start(1)

    context = LocalContext(
        checkpoints=tmp_path,
        slots=2,
        on_call_replicas=call,
        on_gang_assembled=lambda: present.append(g.present()),
    )
    model = network()
    with gang(context, 2, host="127.0.0.1", grace_seconds=0.0) as g:

        def note(step: int, _: float) -> None:
            if step == 3:
                processes[0].kill()
                start(7)
            # Wait for it with the training, however long it takes to start.
            if step == 6:
                until(lambda: g.present() == 2)

        report = g.fit(model, descent(model), DATA, loss, steps=20, batch=BATCH, on_step=note)
    assert processes[1].wait(timeout=60) == 0
    assert present == [2]
    first = next(step.step for step in report.log.steps if step.step >= 6 and 1 in step.accepted)
    told = next(int(note.rpartition(" ")[2]) for note in report.log.notes if "replica 7 joined" in note)
    assert first <= told + 3
    assert report.log.steps[-1].scale == 1
    assert same(replayed(report.log), model)


def can_connect(host: str, port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection((host, port), timeout=10):
        return True
    return False


def listening() -> set[tuple[str, int]]:
    """Return the addresses and ports on which this process listens. Another one may use the same port elsewhere.

    The system's own list of connections may miss some of them while others end.
    """
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        if not link.is_socket():
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as copy:
            if copy.family is socket.AF_INET and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(copy.getsockname())
    return found


@pytest.mark.parametrize("listens", [None, "127.0.0.3", "0.0.0.0"])
def test_a_coordinator_listens_only_on_the_address_that_it_announces(
    listens: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: list[subprocess.Popen[str]]
) -> None:
    """Unless SHADHO_LISTEN names another one, as behind a NAT."""
    torch.set_num_threads(1)
    monkeypatch.delenv("SHADHO_LISTEN", raising=False)
    if listens:
        monkeypatch.setenv("SHADHO_LISTEN", listens)
    heard: dict[str, bool] = {}

    def call(address: str, token: str, backups: int) -> None:
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.2"
        open_at = {ip for ip, number in listening() if number == int(port)}
        for each in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            heard[each] = bool(open_at & {each, "0.0.0.0"}) and can_connect(each, int(port))
        processes.append(run("replica", f"{listens or host}:{port}", token, 1, 2, 0))

    model = network()
    monkeypatch.setenv("SHADHO_HOST", "127.0.0.2")
    with gang(LocalContext(checkpoints=tmp_path, slots=2, on_call_replicas=call), 2) as g:
        assert g.fit(model, descent(model), DATA, loss, steps=3, batch=BATCH).steps == 3
    assert heard == {each: listens == "0.0.0.0" or each == (listens or "127.0.0.2") for each in heard}


@pytest.mark.parametrize("host", ["192.0.2.1", "node7"])
def test_a_coordinator_that_does_not_have_its_announced_address_says_how_to_listen_on_another(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one whose name is a loopback address on the machine itself, as on Debian."""
    monkeypatch.delenv("SHADHO_LISTEN", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1" if name == "node7" else name)
    model = network()
    context = LocalContext(checkpoints=tmp_path, slots=2, on_call_replicas=lambda *call: pytest.fail("called"))
    with pytest.raises(UsageError, match=rf"{host}.*; set SHADHO_LISTEN to"), gang(context, 2, host=host) as g:
        g.fit(model, descent(model), DATA, loss, steps=3, batch=BATCH)


def run(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "integration.gangs", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_coordinator_that_is_killed_goes_on_from_its_checkpoint_with_the_replicas_that_outlived_it(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    call = tmp_path / "call"
    first = run("coordinator", tmp_path, 2, 60, call)
    processes.append(first)
    until(call.exists)
    address, token = json.loads(call.read_text())
    outlives = run("replica", address, token, 1, 2, 0)
    processes.append(outlives)
    assert first.stdout is not None
    for line in first.stdout:
        if int(line) >= 13:
            break
    first.kill()
    second = run("coordinator", tmp_path, 2, 60, call)
    processes.append(second)
    told, _ = second.communicate(timeout=200)
    ended = json.loads(told.splitlines()[-1])
    assert ended["resumed"] >= 10
    assert ended == {"resumed": ended["resumed"], "steps": 60, "places": [0, 1], "replays": True}
    assert outlives.wait(timeout=60) == 0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "strategy",
    [Sync(replicas=2, backups=1), Async(replicas=2), Average(replicas=2), Elastic(replicas=2)],
    ids=["sync", "async", "average", "elastic"],
)
def test_a_loss_that_is_nan_everywhere_is_one_clear_error(tmp_path: Path, strategy: Strategy) -> None:
    model = network()
    context = LocalContext(checkpoints=tmp_path)
    with pytest.raises(UsageError, match="from the first step"), gang(context, strategy=strategy) as g:
        g.fit(model, descent(model), DATA, lambda m, b: loss(m, b) * torch.nan, steps=5, batch=BATCH)


def test_one_bad_batch_does_not_stay_in_a_replica_that_averages(tmp_path: Path) -> None:
    """Neither in its parameters nor in its momentum."""

    def spoilt(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return loss(model, batch) * (torch.nan if len(calls) == 3 else 1)

    calls: list[int] = []
    model = network()
    with gang(LocalContext(checkpoints=tmp_path), strategy=Average(replicas=2, tau=4)) as g:
        report = g.fit(model, descent(model), DATA, spoilt, steps=20, batch=BATCH)
    assert report.log.refused == {}
    assert report.log.accepted == {0: 20, 1: 20}


@pytest.mark.parametrize("on_few", ["wait", "shrink"])
def test_what_a_replicas_loss_raises_is_told_here_and_not_waited_for(tmp_path: Path, on_few: str) -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise LookupError("no such column")

    model = network()
    context = LocalContext(checkpoints=tmp_path)
    with pytest.raises(ShadhoError, match="LookupError: no such column"), gang(context, 2, on_few=on_few) as g:
        g.fit(model, descent(model), DATA, broken, steps=5, batch=BATCH)


def test_a_gang_ends_when_the_trial_is_told_to_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    model = network()
    with gang(LocalContext(checkpoints=tmp_path, stopped=stop.is_set), 2) as g:
        report = g.fit(
            model,
            descent(model),
            DATA,
            loss,
            steps=10**6,
            batch=BATCH,
            on_step=lambda step, _: step == 5 and stop.set(),
        )
    assert report.steps == 5


def test_replicas_do_not_outlive_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    """The fixture `no_orphans` looks for them."""
    code = (
        "from integration.gangs import *\n"
        "m = network()\n"
        f"with gang(LocalContext(checkpoints=Path({str(tmp_path)!r})), 2) as g:\n"
        "    g.fit(m, descent(m), DATA, loss, steps=10**6, batch=BATCH, on_step=lambda s, _: print(s, flush=True))\n"
    )
    environment = {**os.environ, "PYTHONPATH": PATHS}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()


def test_spawned_replicas_train_the_same(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)
    torch.set_num_threads(1)
    monkeypatch.setattr(Processes, "method", "spawn")
    model, report, _ = fit(2, steps=5)
    assert same(replayed(report.log), model)
    # Python's own helper, which would live as long as this process.
    multiprocessing.resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def test_a_slow_replica_is_cancelled_and_warned_of(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, report, _ = fit(1, 1, delay=lambda place, draw: 30.0 if place == 0 else 0.0)
    assert report.log.accepted[1] == 30
    # It may join some steps late.
    assert report.log.cancelled[0] + report.log.late[0] >= 20
    assert any("replica 0: only 0%" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        (Sync(replicas=2), Quantize(4)),
        (Async(replicas=2), None),
        (Average(replicas=2, tau=2, delay=1), None),
        (Elastic(replicas=2, alpha=0.3), None),
    ],
    ids=["4 bits", "async", "average", "elastic"],
)
def test_every_strategy_and_codec_learns_over_the_same_bus(fit: Fit, strategy: Any, codec: Any) -> None:
    losses: list[float] = []

    def evaluate(model: nn.Module) -> float:
        losses.append(loss(model, DATA).item())
        return losses[-1]

    _, report, _ = fit(strategy=strategy, codec=codec, steps=60, evaluate=evaluate)
    assert report.steps == 60
    assert losses[-1] < losses[0]
