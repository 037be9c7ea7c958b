"""The Celery application."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from celery.signals import celeryd_init

from shadho_celery.celery import app


def test_two_workers_of_equal_host_name_and_process_id_have_different_node_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RabbitMQ refuses a second worker of the same node name its control queue."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    workers = [SimpleNamespace(hostname="celery@host", app=app) for _ in range(2)]
    for worker in workers:
        conf = SimpleNamespace(worker_concurrency=1, imports=(), task_queues=(), get=lambda name, default=(): default)
        celeryd_init.send("celery@host", instance=worker, conf=conf, options={"queues": "cpu"})
    first, second = (worker.hostname for worker in workers)
    assert first != second
    assert first.startswith("cpu-7-")
    assert first.endswith("@host")
