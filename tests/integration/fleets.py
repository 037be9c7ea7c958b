"""A fleet of real workers in a folder of its own, and studies that `shadho_celery.launch` runs on it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import services
from acceptance.commands import Command, Desk, desk, until

from shadho_celery.fleet.registry import Registry, Worker

#: The launch command with less patience for messages that nobody claims.
LAUNCH = """
import sys
from shadho_celery.fleet import dispatch
from shadho_celery.launch import main

dispatch.UNCLAIMED_SECONDS = float(sys.argv.pop(1))
main()
"""


@dataclass(frozen=True)
class Fleet:
    """A broker, a Redis, and a compute class of this test's alone."""

    desk: Desk
    broker: str
    redis: str
    compute_class: str

    def worker(self, slots: int = 1, **environment: str) -> Command:
        words = ("-c", str(slots), "-l", "INFO", "--without-gossip", "--without-mingle")
        return self.desk.worker(self.compute_class, *words, **environment)

    def workers(self, count: int, slots: int = 1) -> list[Command]:
        """So many workers, ready."""
        started = [self.worker(slots) for _ in range(count)]
        until(lambda: all(" ready." in worker.err for worker in started), 60, self.desk.said)
        return started

    def launch(self, study: str, trials: int, *, unclaimed_seconds: float = 30.0, name: str | None = None) -> Command:
        words = [study, "--trials", str(trials), "--seed", "0", "--json", "--study", name or study]
        return self.desk.start(sys.executable, "launch.py", str(unclaimed_seconds), *words)

    def trials(self, name: str) -> list[dict[str, Any]]:
        """The trials of a study, as its store has them."""
        return [trial for trial in self.desk.trials() if trial["name"] == name]

    def busy(self) -> set[int]:
        """Processes of the workers that have something to do, as they announce it themselves every few seconds."""
        with redis.Redis.from_url(self.redis, decode_responses=True) as client:
            living = Registry(client, Worker).living().values()
            return {worker.pid for worker in living if worker.compute_class == self.compute_class and worker.busy}

    def refused(self) -> int:
        """Late results that were refused, of all studies."""
        with redis.Redis.from_url(self.redis, decode_responses=True) as client:
            return sum(int(client.hget(key, "refused") or 0) for key in client.scan_iter("shadho:*:attempts"))

    def ended_well(self, command: Command, name: str, count: int, seconds: float) -> list[dict[str, Any]]:
        """Wait for the end of a study in which exactly `count` trials are to be counted, all of them COMPLETE."""
        command.wait(seconds)
        assert command.code == 0, self.desk.said()
        found = self.trials(name)
        assert Counter(trial["state"] for trial in found) == {"COMPLETE": count}, self.desk.said()
        assert [trial["number"] for trial in found] == list(range(count))
        counted = {"total": count, "complete": count, "failed": 0, "pruned": 0, "cancelled": 0}
        assert command.json()["trials"].items() >= counted.items()
        return found

    def metrics(self, name: str) -> list[Any]:
        """Return the metrics of the trials: the values that the objectives returned beside their losses."""
        return [json.loads(trial["metrics"] or "{}") for trial in self.trials(name)]


@contextlib.contextmanager
def fleet(folder: Path, broker: str, redis_url: str, compute_class: str, **environment: str) -> Iterator[Fleet]:
    """A fleet whose commands work in `folder`; all of them end with the block."""
    folder.mkdir(exist_ok=True)
    with desk(folder) as made:
        made.write("launch.py", LAUNCH)
        made.environment |= {"CELERY_BROKER_URL": broker, "SHADHO_REDIS_URL": redis_url}
        made.environment |= {"SHADHO_IMPORTS": "my_study", **environment}
        yield Fleet(made, broker, redis_url, compute_class)


@contextlib.contextmanager
def on_both(
    folder: Path, redis_server: str, amqp_url: str, compute_class: str, **environment: str
) -> Iterator[list[Fleet]]:
    """A fleet on Redis alone, and one on RabbitMQ. All that runs ends before the first of the two is cleared."""
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as first:
        made: list[Fleet] = []
        for broker in ("redis", "rabbitmq"):
            redis_url = stack.enter_context(services.redis_db(redis_server))
            url = redis_url if broker == "redis" else amqp_url
            made.append(stack.enter_context(fleet(folder / broker, url, redis_url, compute_class, **environment)))
            first.callback(made[-1].desk.close)
        yield made


def on_each(scenario: Callable[[Fleet], None], *fleets: Fleet) -> None:
    """Play a scenario on all of the fleets at once: what takes time in one is mostly waiting."""
    with ThreadPoolExecutor(len(fleets)) as pool:
        list(pool.map(scenario, fleets))
