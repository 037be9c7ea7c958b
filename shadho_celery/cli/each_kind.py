"""One worker for each kind of GPU of a machine: the processes, which end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from shadho_celery.cli.messages import say
from shadho_celery.core.hardware import Machine
from shadho_celery.core.system import HEARTBEAT_FILE
from shadho_celery.metrics import server
from shadho_celery.node import stay
from shadho_celery.runner.process_tree import PR_SET_PDEATHSIG, prctl

COMMAND = (sys.executable, "-m", "shadho_celery.worker")

#: seconds between two checks whether a worker has ended
CHECK_SECONDS = 0.2


def workers_of(machine: Machine) -> list[tuple[str, dict[str, str]]]:
    """Return the compute class of the worker of each kind of GPU, and the environment variables of its process.

    With several workers, those after the first one have their own ports of metrics and heartbeat files, numbered.
    """
    kinds = enumerate(machine.kinds())
    return [(own.compute_class, dict(_environment(number, own, machine))) for number, own in kinds]


def _environment(number: int, own: Machine, machine: Machine) -> Iterator[tuple[str, str]]:
    yield "CUDA_VISIBLE_DEVICES", own.visible
    if machine.is_limited:
        yield "SHADHO_CORES", str(max(1, machine.cores * len(own.cards) // len(machine.cards)))
    port, file = os.environ.get(server.PORT, ""), os.environ.get(HEARTBEAT_FILE)
    if number and port.isdecimal() and int(port):
        yield server.PORT, str(int(port) + number)
    if number and file:
        yield HEARTBEAT_FILE, f"{file}.{number}"


class Workers:
    """The workers of one machine. A signal to this process is passed to all of them."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments` are options of each worker."""
        self._arguments = arguments
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_ending = False

    def serve(self, each: Sequence[tuple[str, Mapping[str, str]]]) -> int:
        """Run a worker for each class and environment. Return 0, or the exit code of the first one that failed.

        If one fails, the others end too, after their running trials. One that ends well leaves the others alone: it may
        have been idle for too long.
        """
        for number in {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, *stay.Stay.configured().signals}:
            signal.signal(number, self.pass_on)
        for name, environment in each:
            process = subprocess.Popen(
                [*COMMAND, "--class", name, *self._arguments],
                env={**os.environ, **environment},
                # Ctrl-C in the terminal would otherwise reach a worker twice, which means that it ends at once.
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 -- this process has one thread
            )
            self._processes.append(process)
        code = 0
        while None in [process.poll() for process in self._processes]:
            code = code or self._failed()
            if code and not self._is_ending:
                say(f"a worker of this machine has ended with exit code {code}, so the others end too", err=True)
                self.pass_on(signal.SIGTERM)
            time.sleep(CHECK_SECONDS)
        return code or self._failed()

    def pass_on(self, number: int, _: object = None) -> None:
        """Send a signal to the workers."""
        self._is_ending |= number != signal.SIGHUP
        for process in self._processes:
            process.send_signal(number)

    def _failed(self) -> int:
        """Return the exit code of a worker that failed, as shells show it, or 0."""
        code = next((process.returncode for process in self._processes if process.returncode), 0)
        return 128 - code if code < 0 else code


def _end_with_parent() -> None:
    """Let Linux end this worker at once, its trials given back, when the process that started it is killed."""
    prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)
