"""Whatever ends the supervisor of an embedded fleet, its Redis ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import redis
import services

from shadho_celery.embedded.embedded import Plan, server_path

CODE = """
import sys
from shadho_celery.embedded import supervisor
sys.platform = sys.argv[1]
supervisor.main()
"""


def close(supervisor: subprocess.Popen[bytes]) -> None:
    assert supervisor.stdin is not None
    supervisor.stdin.close()


def kill(supervisor: subprocess.Popen[bytes]) -> None:
    supervisor.kill()


@pytest.mark.parametrize("platform", sorted({sys.platform, "darwin"}))
@pytest.mark.parametrize("end", [close, kill])
def test_no_process_outlives_the_supervisor(
    tmp_path: Path, end: Callable[[subprocess.Popen[bytes]], None], platform: str
) -> None:
    """Also where the system does not kill the children of a process that dies, as on macOS."""
    socket = str(tmp_path / "redis.sock")
    plan = Plan(server=server_path(), directory=str(tmp_path), socket=socket, workers={}, imports=[], cores={}, lock=2)
    command = [sys.executable, "-c", CODE, platform]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as supervisor:
        assert supervisor.stdin is not None
        supervisor.stdin.write(msgspec.json.encode(plan) + b"\n")
        supervisor.stdin.flush()
        client = redis.Redis(unix_socket_path=socket)
        services.wait_until(lambda: answers(client))
        found = psutil.Process(supervisor.pid).children(recursive=True)
        assert int(client.info()["process_id"]) in {process.pid for process in found}
        client.close()
        try:
            end(supervisor)
            supervisor.wait(10)
            services.wait_until(lambda: not any(is_alive(process) for process in found))
        finally:
            for process in filter(is_alive, found):
                os.kill(process.pid, signal.SIGKILL)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
