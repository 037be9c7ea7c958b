"""How often the fleet is looked at; what is found is integration's business."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from shadho_celery.fleet.in_flight import InFlight
from shadho_celery.fleet.lease_monitor import LOOK_SECONDS, READ_PER_SECOND, LeaseMonitor


@pytest.mark.parametrize(("workers", "seconds"), [(10, LOOK_SECONDS), (3 * READ_PER_SECOND, 3.0)])
def test_a_large_fleet_is_looked_at_less_often(workers: int, seconds: float) -> None:
    """Reading ten thousand announcements and leases every second would take a third of a processor."""
    channel = MagicMock(**{"ended_leases.return_value": [], "leased.return_value": []})
    fleet = MagicMock(announced=range(workers))
    monitor = LeaseMonitor(channel, fleet, InFlight(), MagicMock(), 0.0)
    for moment in (0.0, seconds - 0.01, seconds):
        monitor.look(moment)
    assert [call.args[0] for call in fleet.look.call_args_list] == [0.0, seconds]
    channel.extend_leases.assert_not_called()
