"""The Celery application."""

from __future__ import annotations

import io
import logging
import os
import warnings
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from celery.exceptions import CPendingDeprecationWarning
from celery.signals import after_setup_logger, celeryd_init
from celery.worker.consumer.consumer import CANCEL_TASKS_BY_DEFAULT
from kombu import Message

from shadho_celery.celery import app
from shadho_celery.fleet.registry import Worker
from shadho_celery.node.logs import ready, tell


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
    assert all(worker.quiet for worker in workers), "no banner"


def test_that_a_worker_is_ready_is_told_at_any_log_level(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("shadho_celery"), "level", logging.CRITICAL)
    tell(ready("cpu@h.7.ab", Worker(compute_class="cpu", slots=2), ["cpu", "cpu,h"], "amqp://me:***@broker"))
    assert caplog.messages == ["cpu@h.7.ab is ready. Class cpu, 2 slots, queues cpu and cpu,h on amqp://me:***@broker"]


def test_celerys_lines_for_each_trial_of_a_lost_connection_and_its_advice_are_not_logged() -> None:
    """Celery's and kombu's own texts: a new version with other words must not go unnoticed."""
    written = io.StringIO()
    logger = logging.Logger("celery.worker.request")
    logger.addHandler(logging.StreamHandler(written))
    after_setup_logger.send("celery", logger=logger, loglevel=logging.INFO)
    message = Message(
        delivery_tag=7, channel=MagicMock(basic_ack=MagicMock(side_effect=ConnectionError("it is closed")))
    )
    message.ack_log_error(logger, (ConnectionError,))
    logger.warning("%s", warnings.formatwarning(CANCEL_TASKS_BY_DEFAULT, CPendingDeprecationWarning, "consumer.py", 1))
    logger.error("something else")
    assert written.getvalue() == "something else\n"


def test_a_worker_of_a_class_with_no_plain_name_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        celeryd_init.send(sender="celery@node", instance=MagicMock(), conf=MagicMock(), options={"queues": "a b"})
    assert ended.value.code == 2
    assert "-Q: 'a b' is no name of a compute class" in capsys.readouterr().err
