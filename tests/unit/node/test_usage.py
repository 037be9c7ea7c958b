"""The use of a machine is measured without waiting for the driver of its GPUs."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from shadho_celery.core.hardware import Gpu, GpuUsage, Usage
from shadho_celery.node.heartbeat import Meter

GPUS = [Gpu(name="A100", id="0", uuid="GPU-a"), Gpu(name="A100 MIG", id="MIG-b", uuid="MIG-b"), Gpu(name="x", id="2")]


class Driver(SimpleNamespace):
    """NVIDIA's library with a GPU and a part of one, of which it does not tell how busy it is."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(is_lost=False, used=1, busy=97, may_answer=threading.Event())
        self.may_answer.set()

    def nvmlInit(self) -> None:  # noqa: N802 -- the library's name
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        assert self.may_answer.wait(60)
        if self.is_lost:
            raise self.NVMLError("GPU is lost")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=self.used, total=3)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        if handle.startswith("MIG"):
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=self.busy)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def after(meter: Meter) -> Usage:
    """Return the use of the machine once the driver has answered."""
    meter.look()
    assert meter._asking is not None
    meter._asking.join(60)
    return meter.look()


def test_load_ram_and_gpus_are_measured_as_far_as_they_are_known(driver: Driver) -> None:
    meter = Meter(GPUS)
    found = after(meter)
    assert found.gpus == {"0": GpuUsage(busy=0.97, memory=0.33), "MIG-b": GpuUsage(memory=0.33)}
    assert found.load is not None
    assert found.memory is not None
    assert 0 <= found.memory <= 1
    driver.is_lost = True
    after(meter)
    assert after(meter).gpus == {}


def test_absurd_answers_of_a_driver_do_not_make_the_announcement_invalid(driver: Driver) -> None:
    driver.used, driver.busy = 4, 101
    assert after(Meter(GPUS)).gpus["0"] == GpuUsage(busy=1.0, memory=1.0)


def test_a_driver_that_hangs_delays_nothing_and_its_gpus_are_left_out(driver: Driver) -> None:
    meter = Meter(GPUS)
    after(meter)
    assert meter._asking is not None
    meter._asking.join(60)
    driver.may_answer.clear()
    assert meter.look().gpus
    hanging = meter._asking
    assert [meter.look().gpus, meter.look().gpus, meter._asking] == [{}, {}, hanging]
    driver.may_answer.set()
    hanging.join(60)
    assert after(meter).gpus


def test_a_machine_without_gpus_asks_no_driver() -> None:
    meter = Meter([])
    assert meter.look().gpus == {}
    assert meter._asking is None
