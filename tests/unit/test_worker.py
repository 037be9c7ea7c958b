"""A machine with GPUs of several kinds gets a worker for each, with its own environment."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from shadho_celery import worker
from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.worker import Workers, workers_of

GIB = 2**30
CARDS = (
    Gpu(id="0", name="A100", memory=80 * GIB),
    Gpu(id="1", name="T4", memory=15 * GIB),
    Gpu(id="2", name="A100", memory=80 * GIB),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHADHO_METRICS_PORT", "SHADHO_HEARTBEAT_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_each_kind_has_its_class_by_memory_and_its_own_gpus() -> None:
    assert workers_of(Machine(cards=CARDS)) == [
        ("gpu_large", {"CUDA_VISIBLE_DEVICES": "0,2"}),
        ("gpu_small", {"CUDA_VISIBLE_DEVICES": "1"}),
    ]
    assert len(workers_of(Machine(cards=CARDS[::2]))) == 1
    assert workers_of(Machine()) == []


def test_kinds_of_one_class_are_still_two_workers() -> None:
    cards = (CARDS[0], Gpu(id="1", name="V100", memory=32 * GIB))
    assert [name for name, _ in workers_of(Machine(cards=cards))] == ["gpu_large", "gpu_large"]


def test_workers_divide_limited_cores_and_have_their_own_ports_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADHO_METRICS_PORT", "9000")
    monkeypatch.setenv("SHADHO_HEARTBEAT_FILE", "/tmp/alive")
    (_, first), (_, second) = workers_of(Machine(cards=CARDS, cores=6, is_limited=True))
    assert first == {"CUDA_VISIBLE_DEVICES": "0,2", "SHADHO_CORES": "4"}
    assert second == {
        "CUDA_VISIBLE_DEVICES": "1",
        "SHADHO_CORES": "2",
        "SHADHO_METRICS_PORT": "9001",
        "SHADHO_HEARTBEAT_FILE": "/tmp/alive.1",
    }


SCRIPT = """
import os, sys, time
if "CODE" in os.environ:
    sys.exit(int(os.environ["CODE"]))
time.sleep(60)
"""


@pytest.mark.parametrize(("code", "expected"), [("0", 128 + 9), ("3", 3)])
def test_a_worker_that_fails_ends_the_others_and_one_that_ends_well_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, expected: int
) -> None:
    """The processes stand for workers. The second one is killed after some time, if it was not ended before."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(worker, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    workers, sleep, naps = Workers([]), time.sleep, iter(range(10))

    def nap(seconds: float) -> None:
        sleep(seconds)
        if code == "0" and next(naps, None) is None:
            workers.pass_on(9)

    monkeypatch.setattr("time.sleep", nap)
    assert workers.serve([("b", {}), ("a", {"CODE": code})]) == expected
