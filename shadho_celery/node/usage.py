"""Measures the use of a worker's machine by all processes: load, RAM and GPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from shadho_celery.core.hardware import Gpu, GpuUsage, Usage
from shadho_celery.core.system import NoThread, start_thread


class Meter:
    """Measures the use of this machine and of a worker's GPUs."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = [gpu for gpu in gpus if gpu.uuid]
        self._found: dict[str, GpuUsage] = {}
        #: thread that asks the driver of the GPUs; None before the first `look`
        self._asking: threading.Thread | None = None

    def look(self) -> Usage:
        """Return the use of the machine. The use of its GPUs is that at the previous call.

        The driver is asked in a thread, because it may hang. Its GPUs are then left out.
        """
        import psutil

        load = memory = None
        with suppress(OSError, psutil.Error):
            load, memory = round(os.getloadavg()[0], 1), _part(psutil.virtual_memory().percent / 100)
        if self._asking is not None and self._asking.is_alive():
            return Usage(load=load, memory=memory)
        found = self._found
        if self._gpus:
            with suppress(NoThread):
                self._asking = threading.Thread(target=self._ask, name="shadho-gpus", daemon=True)
                start_thread(self._asking)
        return Usage(load=load, memory=memory, gpus=found)

    def _ask(self) -> None:
        """Ask the driver. It is opened at the first call and stays open, because opening it may take seconds."""
        import pynvml

        found = {}
        for gpu in self._gpus:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                told = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found[gpu.id] = GpuUsage(memory=(memory := _part(told.used / max(1, told.total))))
                # The driver does not tell this of a part of a GPU (MIG).
                busy = _part(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
                found[gpu.id] = GpuUsage(busy=busy, memory=memory)
        self._found = found


def _part(told: float) -> float:
    """Return a part of a whole, rounded. An announcement with a part below 0 or above 1 would be refused as a whole."""
    return min(1.0, max(0.0, round(told, 2)))
