"""`status` shows what workers and studies have announced, as of then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from services.cases import cases
from services.golden import check

from shadho_celery.cli import status
from shadho_celery.cli.group import commands
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.fleet.drains import Drain
from shadho_celery.fleet.registry import Progress, RunningTrial, Share, StudyWants, Worker
from shadho_celery.fleet.state import FleetState

NOW = 1000.0
GPUS = Machine(host="a", cards=(Gpu(id="0", name="A100", memory=80 * 2**30, uuid="GPU-a"),))
#: of the trial 44 a worker has announced, 4 s ago, that it had run for a second
TRIALS = [RunningTrial(number=44, started_at=NOW - 5.0)]
TRIALS += [RunningTrial(number=number, started_at=NOW - 64.0) for number in range(9)]
FLEET = FleetState(
    workers={
        "cpu@h.1.a": Worker(
            compute_class="cpu",
            key="0a0a",
            keys=("0a0a",),
            machine=Machine(host="h"),
            slots=12,
            busy=11,
            ended=7,
            imports=["m"],
            codes={"m": CodeVersion(digest="12ab")},
            studies={
                "k": Share(name="slow [red]", slots=10, trials=TRIALS),
                "l": Share(slots=1, trials=[RunningTrial(number=3, started_at=NOW - 400.0, rank=1, expected=900.0)]),
            },
        ),
        "cpu@h.2.b": Worker(
            compute_class="cpu", machine=Machine(host="h"), slots=2, draining=True, drained=True, accepts_code=True
        ),
        "gpu_large@a.3.c": Worker(
            compute_class="gpu_large", machine=GPUS, slots=1, quarantined=True, codes={"m": CodeVersion(digest="")}
        ),
    },
    studies={
        "k": StudyWants(
            owner="anna@lab",
            name="slow [red]",
            key="1b2c",
            keys=("1b2c", "0a0a"),
            progress=Progress(state="paused", ended=3, limit=40, running=10, waiting=1),
            weight=2.5,
            wants={"cpu": 3.0},
            wanted_slots={"cloud": 3},
        ),
        "l": StudyWants(),
    },
    refused=1,
    drained={"cpu@h": Drain(by="me@here", at=NOW, sequence=1), "lost@h": None},
    depths={"cpu": {"cpu": 4, "cpu.h": None}, "cloud": {"cloud": None}, "gpu_large": {"gpu_large": 0}},
    ages={"cpu@h.1.a": 4.0, "cpu@h.2.b": 0.0, "k": 1.0},
)


@pytest.mark.parametrize("name", ["text", "json"])
def test_what_is_announced_is_a_golden_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text in square brackets is no style, and a trial does not seem to have run since the worker announced it."""
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TZ", "UTC")
    status.time.tzset()
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: NOW))
    monkeypatch.setattr("shadho_celery.fleet.state.read_fleet", lambda control=None: FLEET)
    fleet = ["--broker", "amqp://h", "--redis", "redis://h/0"]
    shown = CliRunner().invoke(commands, ["status", *fleet, *["--json"] * (name == "json")])
    assert shown.exit_code == 0, shown.output
    check(f"status_{name}", shown.output.replace(', "', ',\n"') if name == "json" else shown.output)


@cases(
    "facts, state",
    [
        ({}, "serving"),
        ({"quarantined": True}, "quarantined"),
        ({"quarantined": True, "draining": True}, "draining"),
        ({"quarantined": True, "draining": True, "drained": True, "busy": 1}, "draining"),
        ({"quarantined": True, "draining": True, "drained": True}, "drained"),
    ],
)
def test_a_worker_has_one_state(facts: dict[str, Any], state: str) -> None:
    assert Worker(**facts).state == state
