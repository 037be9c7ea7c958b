"""A broker and a Redis with real workers, and a study's executor there without its scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import services
from acceptance.commands import Command, Desk, desk, until
from services.told import ToldExecutor

from shadho_celery.fleet import dispatch, gangs
from shadho_celery.fleet import executor as queue_executor
from shadho_celery.fleet.broker import Publisher
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.scheduler.executors import Executor

BROKERS = ["redis", "rabbitmq"]


@dataclass(frozen=True)
class Place:
    """A broker and a Redis, and a folder with the study `my_study` from which workers are started."""

    desk: Desk
    broker: str
    redis: str

    def publisher(self) -> Publisher:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CELERY_BROKER_URL", self.broker)
            return Publisher.configured()

    @contextmanager
    def executor(self, study: str, **options: Any) -> Iterator[ToldExecutor]:
        with (
            connect(self.redis) as client,
            closing(ToldExecutor(client, self.publisher(), study, "my_study", **options)) as made,
        ):
            yield made

    def live(self) -> dict[tuple[str, str], str]:
        """Names of the live workers by class and machine."""
        with connect(self.redis) as client:
            living = Registry(client, Worker).living()
            return {(each.compute_class, each.machine.host): name for name, each in living.items()}

    def worker(self, compute_class: str, slots: int = 1, host: str = "", **environment: str) -> Command:
        """Start a worker on a machine, by default this one; wait until it is announced."""
        environment |= {"SHADHO_HOST": host} if host else {}
        started = self.desk.worker(compute_class, "-c", str(slots), "-l", "INFO", **environment)
        until(
            lambda: any(name == compute_class and where.endswith(host) for name, where in self.live()),
            60,
            self.desk.said,
        )
        return started


@contextmanager
def placed(
    kind: str, redis_server: str, amqp_server: tuple[str, Callable[..., str]], folder: Path, study: str
) -> Iterator[Place]:
    """Yield the place of a broker of this kind, with a Redis database of its own and without a worker."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(services.redis_db(redis_server))
        url = redis_url if kind == "redis" else stack.enter_context(services.amqp_vhost(*amqp_server))
        here = stack.enter_context(desk(folder))
        here.environment |= {"CELERY_BROKER_URL": url, "SHADHO_REDIS_URL": redis_url, "SHADHO_IMPORTS": "my_study"}
        here.write("my_study.py", study)
        yield Place(here, url, redis_url)


def look_every(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dispatch, queue_executor, gangs):
        monkeypatch.setattr(module, "LOOK_SECONDS", seconds)


def poll_until(executor: Executor, enough: Callable[[list[Any]], object], seconds: float = 20.0) -> list[Any]:
    events: list[Any] = []
    deadline = time.monotonic() + seconds
    while not enough(events):
        assert time.monotonic() < deadline, events
        events += executor.poll(0.2)
    return events
