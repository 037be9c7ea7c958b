"""A worker divides its host's cores anew when other workers come and go, and says so once."""

from __future__ import annotations

import logging

import pytest

from shadho_celery.core.hardware import Machine
from shadho_celery.fleet.registry import Worker
from shadho_celery.node.heartbeat import CoreShare

MACHINE = Machine(cores=4, processors="f", pool="p")
LIMITED = Machine(cores=1, processors="f", pool="p", is_limited=True)


def test_threads_follow_the_slots_of_the_host_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    share = CoreShare(MACHINE, 1)
    changes = []
    for neighbours in (
        [],
        [Worker(machine=MACHINE, slots=1)],
        [Worker(machine=MACHINE, slots=1, busy=1)],
        [Worker(machine=MACHINE, slots=1), Worker(machine=LIMITED, slots=5)],
        [],
    ):
        changes.append((share.follow(1, neighbours), share.threads))
        for _ in range(2):
            share.tell()
    assert changes == [(False, 4), (True, 2), (False, 2), (True, 1), (True, 4)]
    assert [record.getMessage() for record in caplog.records] == [
        "2 slots on this host: 2 threads a trial",
        "2 slots on this host: 1 thread a trial",
        "1 slot on this host: 4 threads a trial",
    ]


def test_a_worker_with_a_limit_keeps_its_cores_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    share = CoreShare(LIMITED, 1)
    assert not share.follow(1, [Worker(machine=MACHINE, slots=8)])
    share.tell()
    assert (share.threads, caplog.records) == (1, [])
