"""Hosts: the live workers that share the cores of one host, in Redis.

Key: ``shadho:host:POOL`` (set of the workers' names; it expires unless one of them renews it). Their announcements
describe them, see `registry`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from shadho_celery.core.hardware import Machine
from shadho_celery.transport import registry
from shadho_celery.transport.redis import Redis, is_spoilt
from shadho_celery.transport.registry import Registry, Worker
from shadho_celery.transport.signing import UNSIGNED, Signer


class Host:
    """The host of one worker."""

    def __init__(self, client: Redis, name: str, machine: Machine, signer: Signer = UNSIGNED) -> None:
        """Use the worker's `name`, and the `machine` that it announces."""
        self._client = client
        self._name = name
        self._pool = machine.pool
        self._index = f"shadho:host:{machine.pool}"
        self._workers = Registry(client, Worker, signer, index=self._index)

    def join(self) -> None:
        """Make this worker, which has announced itself, visible to the others for the next ANNOUNCE_SECONDS."""
        if self._pool:
            with self._repairing(), self._client.pipeline(transaction=False) as pipe:
                pipe.sadd(self._index, self._name)
                pipe.pexpire(self._index, int(registry.ANNOUNCE_SECONDS * 1000))
                pipe.execute()

    def leave(self) -> None:
        """Make this worker invisible to the others."""
        if self._pool:
            with self._repairing():
                self._client.srem(self._index, self._name)

    def neighbours(self) -> dict[str, Worker]:
        """Return the other live workers of the host by name."""
        living: dict[str, Worker] = {}
        if self._pool:
            with self._repairing():
                living = self._workers.living()
        return {name: each for name, each in living.items() if name != self._name and each.machine.pool == self._pool}

    @contextmanager
    def _repairing(self) -> Iterator[None]:
        """Remove a key of a wrong type, which no scheduler would repair, and ignore the error."""
        try:
            yield
        except redis.ResponseError as error:
            if not is_spoilt(error):
                raise
            self._client.delete(self._index)
