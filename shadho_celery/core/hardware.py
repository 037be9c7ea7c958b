"""A machine, and the compute class that it belongs to."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from msgspec import Struct

#: Classes in the order in which a study expects them to be strong, until their workers have announced hardware.
DEFAULT_CLASSES = ("gpu_large", "gpu_small", "cpu")

#: A GPU with at least this much memory makes its machine `gpu_large`.
LARGE_GPU_BYTES = 16 * 2**30

#: Libraries that start a thread for every core they see unless these say otherwise.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def uses_gpus(compute_class: str) -> bool:
    """Whether workers of `compute_class` drive their machine's GPUs; a class named cpu... leaves them to others."""
    return not compute_class.startswith("cpu")


class Machine(Struct, frozen=True, kw_only=True):
    """The facts of one machine that matter to a search, as its workers announce them."""

    #: its name, or what ``SHADHO_HOST`` says
    host: str = ""
    #: cores this process may use
    cores: int = 1
    #: bytes of RAM
    memory: int = 0
    #: marketing name of the GPUs, "" without one
    gpu_name: str = ""
    #: GPUs this process may use
    gpus: tuple[str, ...] = ()
    #: bytes of the smallest GPU, 0 without one
    gpu_memory: int = 0

    @property
    def compute_class(self) -> str:
        """The class a machine like this belongs to by default: `gpu_large`, `gpu_small` or `cpu`."""
        if not self.gpus:
            return "cpu"
        return "gpu_large" if self.gpu_memory >= LARGE_GPU_BYTES else "gpu_small"

    def gpus_for(self, compute_class: str) -> tuple[str, ...]:
        """The GPUs a worker of `compute_class` drives here."""
        return self.gpus if uses_gpus(compute_class) else ()

    def slots_for(self, compute_class: str, cores_per_trial: int = 1) -> int:
        """Slots by default: one per GPU, else one per `cores_per_trial` cores."""
        return len(self.gpus_for(compute_class)) or max(1, self.cores // max(1, cores_per_trial))

    def slot_environment(self, compute_class: str, slot: int, slots: int) -> dict[str, str]:
        """Variables for the process of slot number `slot` of `slots`: its GPU, and its share of the cores."""
        gpus = self.gpus_for(compute_class)
        threads = str(max(1, self.cores // max(1, slots)))
        visible = gpus[slot % len(gpus)] if gpus else ""
        # CUDA counts GPUs by speed unless told to count them as the driver does, which is where our numbers come from.
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {"CUDA_VISIBLE_DEVICES": visible, **order, **dict.fromkeys(THREAD_VARIABLES, threads)}

    def memory_for(self, compute_class: str) -> int:
        """Bytes that a trial of `compute_class` may use here: of the smallest GPU, else of the RAM."""
        return (self.gpu_memory if uses_gpus(compute_class) else 0) or self.memory


@dataclass(frozen=True, kw_only=True)
class ComputeClass:
    """Machines alike in what matters, as their live workers announce them."""

    #: also the name of the class's queue
    name: str
    #: slots of all live workers
    slots: int
    #: slots that run a trial now, of any study
    busy: int = 0
    #: live workers
    workers: int = 1
    #: slots of the class that this study may fill; others may live on the same fleet
    allowance: float | None = None
    #: trials to keep waiting beyond the slots, so that a freed slot need not wait for the scheduler
    ahead: int = 0
    #: attempts of this study on workers that fell silent: not given up for lost yet, they take no slot of the live ones
    silent: int = 0
    #: bytes a trial may use on the class's smallest machine: of a GPU, else of its RAM; 0 where unknown
    memory: int = 0
    #: bytes of the smallest GPU among the class's machines
    gpu_memory: int = 0
    #: most cores among the class's machines
    cores: int = 0
    #: slots by machine
    hosts: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def share(self) -> float:
        """Slots this study may fill."""
        return self.slots if self.allowance is None else self.allowance


def by_strength(classes: Iterable[ComputeClass], expected: Sequence[str] = DEFAULT_CLASSES) -> list[ComputeClass]:
    """Strongest first: GPU memory, then cores; machines that are equal in both keep the order `expected` names."""
    order = {name: place for place, name in enumerate(expected)}
    return sorted(classes, key=lambda c: (-c.gpu_memory, -c.cores, order.get(c.name, len(order)), c.name))


def detect() -> Machine:
    """The machine this process runs on, as far as it may use it. Never raises: what cannot be read is absent.

    ``SHADHO_CORES`` bounds the cores, for several workers on one machine. ``SHADHO_HOST`` is the name or address by
    which other machines know this one, where its own name does not tell it from others.
    """
    gpus, name, gpu_memory = _nvidia_gpus()
    return Machine(
        host=os.environ.get("SHADHO_HOST") or socket.gethostname(),
        cores=_cores(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu_name=name,
        gpus=gpus,
        gpu_memory=gpu_memory,
    )


def _cores() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = os.environ.get("SHADHO_CORES", "")
    return min(usable, int(told)) if told.isdecimal() and int(told) > 0 else usable


def _nvidia_gpus() -> tuple[tuple[str, ...], str, int]:
    """Indexes of the usable NVIDIA GPUs, the first one's name, and the smallest one's bytes."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), "", 0
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        memory = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
        name = str(pynvml.nvmlDeviceGetName(handles[0])) if handles else ""
    except pynvml.NVMLError:
        return (), "", 0
    finally:
        pynvml.nvmlShutdown()
    indexes = _visible([str(i) for i in range(len(handles))])
    return indexes, name if indexes else "", min((memory[int(i)] for i in indexes if i.isdecimal()), default=0)


def _visible(indexes: list[str]) -> tuple[str, ...]:
    """Those of `indexes` that CUDA_VISIBLE_DEVICES leaves to this process."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return tuple(indexes)
    return tuple(i for i in (part.strip() for part in told.split(",")) if i in indexes)


def own_address(host: str = "192.0.2.1", port: int = 9) -> str:
    """Return the address that this machine has on the way to `host`; 127.0.0.1 where there is no such way."""
    with suppress(OSError):
        family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as probe:
            # Of a datagram socket this sends nothing; it only finds the way.
            probe.connect(where)
            return str(probe.getsockname()[0])
    return "127.0.0.1"
