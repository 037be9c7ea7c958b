"""What deploy/ says: read here as text; tests/integration/test_services.py gives it to real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())


def settings(path: Path, separator: str | None) -> dict[str, str]:
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.split(separator, 1) for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, value in pairs}


@pytest.mark.parametrize("name", ["rabbitmq", "redis"])
def test_a_service_is_healthy_when_it_says_so_and_listens_on_this_machine_only(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["ports"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize("name", ["rabbitmq", "redis"])
def test_what_a_service_mounts_exists(name: str) -> None:
    sources = [volume.split(":")[0] for volume in COMPOSE["services"][name]["volumes"]]
    files = [source for source in sources if source.startswith(".")]
    assert files
    assert all((DEPLOY / source).is_file() for source in files)
    assert all(source in COMPOSE["volumes"] for source in sources if source not in files)


def test_rabbitmq_lets_a_trial_run_for_two_weeks() -> None:
    conf = settings(DEPLOY / "rabbitmq" / "rabbitmq.conf", "=")
    assert int(conf["consumer_timeout"]) == 14 * 24 * 3600 * 1000


def test_redis_keeps_what_it_accepted() -> None:
    conf = settings(DEPLOY / "redis" / "redis.conf", None)
    assert (conf["appendonly"], conf["maxmemory-policy"]) == ("yes", "noeviction")
