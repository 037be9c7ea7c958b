"""Workers that are started before their study is read."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import hyperopt  # noqa: F401 -- it is imported
import pytest
from msgspec.structs import replace
from services.cases import cases

from shadho_celery.core import hardware
from shadho_celery.core.hardware import Gpu
from shadho_celery.core.settings import StudySettings
from shadho_celery.session import workers
from shadho_celery.session.workers import start_early


def test_ctrl_c_waits_until_the_supervisor_can_end_what_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has its plan, it would leave the link to its socket."""
    made: list[dict[str, int]] = []

    def embedded(_: Path, workers: dict[str, int], *__: object, **___: object) -> None:
        signal.raise_signal(signal.SIGINT)
        made.append(workers)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "studied_early.py").touch()
    monkeypatch.setattr(workers, "Embedded", embedded)
    assert start_early("studied_early", {}, {"cpu": 1}) is None, "hyperopt is imported, so it would gain nothing"
    monkeypatch.delitem(sys.modules, "hyperopt")
    assert start_early("no_such_study", {}, {"cpu": 1}) is None
    assert made == []
    with pytest.raises(KeyboardInterrupt):
        start_early("studied_early", {}, {"cpu": 1})
    assert made == [{"cpu": 1}]


@cases("widest", [1, 2, 3])
def test_a_machine_with_fewer_gpus_than_a_gang_has_slots_says_that_the_gang_runs_without(widest: int) -> None:
    said: list[str] = []
    machine = replace(hardware.detect(), cards=(hardware.Gpu(name="T4", memory=8 << 30),) * 2, cores=8)
    settings = StudySettings()
    slots = workers.default_workers(machine, settings, widest, is_demo=False, say=said.append)
    assert slots[machine.compute_class] == 2
    assert slots["cpu"] == (6 if widest == 1 else widest)
    assert ["takes 3 slots, but this machine has 2 GPUs" in line for line in said] == [True] * (widest > 2)


CARDS = tuple(
    Gpu(id=str(number), name=name, memory=gib << 30)
    for number, (name, gib) in enumerate([("A100", 80), ("T4", 15), ("A100", 80), ("V100", 32)])
)


@pytest.mark.parametrize(
    ("widest", "slots", "visible"),
    [
        (
            1,
            {"gpu_large": 2, "gpu_small": 1, "gpu_large_2": 1, "cpu": 4},
            {"gpu_large": "0,2", "gpu_small": "1", "gpu_large_2": "3"},
        ),
        (
            2,
            {"gpu_large": 2, "gpu_small": 1, "gpu_large_2": 1, "cpu": 2},
            {"gpu_large": "0,2", "gpu_small": "1", "gpu_large_2": "3"},
        ),
        (3, {"gpu_small": 4, "cpu": 3}, {}),
    ],
)
def test_each_kind_of_gpu_is_a_class_unless_only_all_together_have_a_trials_slots(
    widest: int, slots: dict[str, int], visible: dict[str, str]
) -> None:
    machine = hardware.Machine(cores=8, cards=CARDS)
    found = workers.default_workers(machine, StudySettings(), widest, is_demo=False, say=lambda _: None)
    assert found == slots
    assert workers.visible_gpus(machine, found) == visible


def test_workers_of_ones_own_choice_use_the_gpus_of_their_class_if_they_suffice() -> None:
    machine = hardware.Machine(cores=8, cards=CARDS)
    assert workers.visible_gpus(machine, {"gpu_large": 1, "gpu_small": 2, "gpu": 4}) == {"gpu_large": "0,2"}
    assert workers.visible_gpus(hardware.Machine(cards=CARDS[::2]), {"gpu_large": 2}) == {}
