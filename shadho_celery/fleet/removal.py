"""Removal of a deleted study from the fleet: its keys in Redis and its messages in the queues."""

from __future__ import annotations

from collections.abc import Sequence

from shadho_celery.errors import ServiceError
from shadho_celery.transport import broker, urls
from shadho_celery.transport.channel import SchedulerChannel, WorkerChannel
from shadho_celery.transport.redis import connect, refusals
from shadho_celery.transport.refused_messages import remove_refused


def remove(study: str, numbers: int, classes: Sequence[str]) -> int:
    """Stop the trials of a study that was deleted from the store, and delete its messages. Return the number of deleted
    messages.

    `study` is its key. It had no trials from `numbers` on. `classes` are those that got its trials. Raises ServiceError
    if Redis cannot be used, or if a scheduler runs the study from another copy of the store.
    """
    with connect(urls.url(urls.REDIS)) as client:
        with refusals():
            where = SchedulerChannel(client, study).remove(numbers)
        if where:
            raise ServiceError(f"the scheduler on {where} runs the study from another copy of the store")
        return remove_refused(broker.configured(), classes, WorkerChannel(client).are_refused)
