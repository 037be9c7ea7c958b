"""An interval is as long as it was, whatever happens to the time of day; a record carries the time of day."""

from __future__ import annotations

import pytest
from services.clocks import MachineTime

from shadho_celery.core.system import ManualClock, SystemClock


@pytest.mark.parametrize("step", [-3600.0, -600.0, 86400.0])
def test_an_interval_does_not_change_with_the_time_of_day(machine_time: MachineTime, step: float) -> None:
    clock = SystemClock()
    began = clock.now()
    clock.sleep(2.0)
    machine_time.set_by(step)
    assert clock.now() - began == 2.0


def test_records_carry_the_time_of_day(machine_time: MachineTime) -> None:
    clock = SystemClock()
    before = clock.wall()
    machine_time.set_by(-600.0)
    assert clock.wall() == before - 600.0 == machine_time.time()


def test_both_readings_of_a_manual_clock_are_the_same() -> None:
    clock = ManualClock(5.0)
    clock.sleep(2.0)
    assert (clock.now(), clock.wall()) == (7.0, 7.0)
