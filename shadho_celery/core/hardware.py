"""Hardware of a machine: its GPUs, its CPU cores and its compute class; and the state of compute classes."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shadho_celery.core.checks import short
from shadho_celery.core.trial import Clean, Memory, Name, Price
from shadho_celery.errors import UsageError

#: default classes, the strongest first. This order is used for classes with equal hardware
DEFAULT_CLASSES = ("gpu_large", "gpu_small", "cpu")

#: format of the name of a compute class. The name is also the name of its queue, and is used in commands and in lists
#: that are separated by commas
CLASS_NAME = r"\A\w[\w.+-]{0,59}\Z"
#: this format in words
CLASS_NAME_FORM = "up to 60 letters, digits and the characters _ . - +, the first one a letter, a digit or _"

#: a machine is `gpu_large` if its smallest GPU has at least this number of bytes
LARGE_GPU_BYTES = 16 * 2**30

#: environment variables that limit the threads of numerical libraries, which by default start one per core
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

#: environment variable with the number of slots of each GPU; AUTO means as many trials as fit into its memory
SLOTS_PER_GPU, AUTO = "SHADHO_SLOTS_PER_GPU", "auto"

#: maximum number of slots of a GPU with AUTO
MOST_PER_GPU = 8

#: environment variable with the device of a slot's trials, as torch names it
DEVICE = "SHADHO_DEVICE"

#: environment variable in which SLURM gives a job the number of its cores on the machine
SLURM_CORES = "SLURM_CPUS_ON_NODE"

#: Linux: file with the id of the running kernel; file with this process's control groups; folder with the limits of
#: groups
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")

_Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def check_class_name(name: object, where: str) -> None:
    """Raise UsageError unless `name` is valid for a compute class.

    `where` is the place of the name, for the message.
    """
    if not isinstance(name, str) or re.match(CLASS_NAME, name) is None:
        raise UsageError(f"{where}: {short(name, 80)} is no name of a compute class; use {CLASS_NAME_FORM}")


def uses_gpus(compute_class: str) -> bool:
    """Return whether workers of `compute_class` use GPUs: True unless its name begins with cpu."""
    return not compute_class.startswith("cpu")


class Gpu(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU of a machine."""

    name: Name
    #: bytes of memory, which it may share with the processors; 0 if unknown
    memory: _Bytes = 0
    #: its index, or the id of the part of a GPU (MIG), as in ``CUDA_VISIBLE_DEVICES``; "" if unknown
    id: Name = ""
    #: torch's name of this kind of device: cuda or mps
    device: Name = "cuda"
    #: globally unique id; "" if unknown
    uuid: Name = ""

    @property
    def kind(self) -> tuple[str, int]:
        """Pair of its name and its GiB of memory. A worker has GPUs of one kind."""
        return self.name, round(self.memory / 2**30)

    def is_same(self, other: Gpu) -> bool:
        """Return whether this and `other` are the same GPU, which two processes of a machine have detected."""
        return self.uuid == other.uuid if self.uuid and other.uuid else self.id == other.id


def kinds_of(gpus: Iterable[Gpu]) -> list[tuple[Gpu, ...]]:
    """Return the GPUs in groups of equal kinds, in the order of the first GPU of each group."""
    groups: dict[tuple[str, int], list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.kind, []).append(gpu)
    return [tuple(group) for group in groups.values()]


def gpus_text(gpus: Iterable[Gpu]) -> str:
    """Return a text with the number, name and memory of each kind of GPU; "" if there are none."""
    groups = [(len(group), *group[0].kind) for group in kinds_of(gpus)]
    return ", ".join(f"{count} x {name}{f' ({gib} GiB)' if gib else ''}" for count, name, gib in groups)


class Machine(Struct, frozen=True, kw_only=True):
    """Facts about one machine, as its workers announce them."""

    #: name of the machine, or the value of ``SHADHO_HOST``. Its length is limited, because it is part of the names of
    #: its workers, and each of these must be a `Name`
    host: Annotated[Clean, Meta(max_length=175)] = ""
    #: number of cores that this process may use
    cores: Annotated[int, Meta(ge=0, le=10**6)] = 1
    #: bytes of RAM that this process may use
    memory: _Bytes = 0
    #: GPUs that this process may use
    cards: Annotated[tuple[Gpu, ...], Meta(max_length=1000)] = ()
    #: processors on which this process may run, as a hexadecimal number with one bit for each. Workers with the same
    #: `pool` share a processor if both may run on it
    processors: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,4096}\Z")] = "0"
    #: digest of the running kernel and of the control group whose CPU quota limits this process; "" if it is not known.
    #: Processes that share cores have equal digests. Host names are not used, because they may differ between
    #: containers on one machine, and be equal on different machines
    pool: Name = ""
    #: True if ``SHADHO_CORES`` limits the cores, or an allocation of SLURM that does not bind processes to them
    is_limited: bool = False

    @property
    def gpu_memory(self) -> int:
        """Bytes of memory of the smallest GPU; 0 without a GPU."""
        return min((gpu.memory for gpu in self.cards), default=0)

    @property
    def compute_class(self) -> str:
        """Default compute class of the machine: `gpu_large`, `gpu_small` or `cpu`."""
        if not self.cards:
            return "cpu"
        return "gpu_large" if self.gpu_memory >= LARGE_GPU_BYTES else "gpu_small"

    @property
    def visible(self) -> str:
        """Value of ``CUDA_VISIBLE_DEVICES`` with which a worker sees only these GPUs."""
        return ",".join(gpu.id for gpu in self.cards)

    def kinds(self) -> list[Machine]:
        """Return a copy for each kind of GPU, with only the GPUs of this kind; [] without a GPU."""
        return [msgspec.structs.replace(self, cards=cards) for cards in kinds_of(self.cards)]

    def by_class(self) -> dict[str, Machine]:
        """Return by compute class a copy for each kind of GPU, with only the GPUs of this kind; {} without a GPU.

        Kinds with the same default class get numbers, such as ``gpu_large`` and ``gpu_large_2``.
        """
        found: dict[str, Machine] = {}
        for own in self.kinds():
            name = own.compute_class
            numbered = (f"{name}_{number}" for number in count(2))
            found[name if name not in found else next(each for each in numbered if each not in found)] = own
        return found

    def gpus_for(self, compute_class: str) -> tuple[Gpu, ...]:
        """Return the GPUs that a worker of `compute_class` uses on this machine."""
        return self.cards if uses_gpus(compute_class) else ()

    def slots_for(self, compute_class: str, cores_per_trial: int = 1) -> int:
        """Return the default number of slots: `slots_per_gpu` for each GPU; without GPUs, one per `cores_per_trial`
        cores.

        With AUTO, a GPU has as many slots as the machine has cores for each GPU, at most MOST_PER_GPU. Raises
        UsageError if the environment has an invalid number of slots per GPU.
        """
        if gpus := len(self.gpus_for(compute_class)):
            return gpus * (slots_per_gpu() or max(1, min(MOST_PER_GPU, self.cores // gpus)))
        return max(1, self.cores // max(1, cores_per_trial))

    def threads(self, slots: int, neighbours: Iterable[tuple[Machine, int]] = ()) -> int:
        """Return the number of threads of a trial in one of the worker's `slots` slots.

        `neighbours` are the other workers of the machine, each as its facts and its number of slots.

        All slots that may use a processor share it equally. A worker with ``SHADHO_CORES`` uses this number of cores
        alone, and the other workers share the remaining cores.
        """
        mine = _bits(self.processors)
        others = [(each, count, _bits(each.processors)) for each, count in neighbours if each.pool == self.pool]
        if self.is_limited or not (others and mine):
            return max(1, self.cores // max(1, slots))
        threads = 0.0
        for processor in mine:
            here = [(each, count, len(theirs)) for each, count, theirs in others if processor in theirs]
            taken = sum(each.cores / of for each, _, of in here if each.is_limited)
            sharing = sum(count / of for each, count, of in here if not each.is_limited)
            threads += max(0.0, self.cores / len(mine) - taken) / (max(1, slots) + len(mine) * sharing)
        # A sum of fractions may be slightly less than the exact integer.
        return max(1, int(threads + 1e-6))

    def slot_environment(self, compute_class: str, taken: Sequence[int], slots: int) -> dict[str, str]:
        """Return the environment variables for the process of a trial: its GPUs, and its number of threads.

        `taken` are the numbers of the trial's slots, from 0, and `slots` is the worker's number of slots.
        """
        found = self.gpus_for(compute_class)
        gpus = [gpu.id for gpu in found if gpu.device == "cuda"]
        # If slots share a GPU, its id must not be repeated.
        visible = ",".join(dict.fromkeys(gpus[slot % len(gpus)] for slot in taken)) if gpus else ""
        # The indexes of GPUs are those of the driver. By default, CUDA would number GPUs by speed.
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        device = found[0].device if found else "cpu"
        variables = {"CUDA_VISIBLE_DEVICES": visible, **order, DEVICE: device}
        return variables | thread_variables(self.threads(slots) * len(taken))


def thread_variables(threads: int | str) -> dict[str, str]:
    """Return the environment variables that set the number of threads of numerical libraries."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def _bits(digits: str) -> set[int]:
    """Return the positions of the bits that are set in a hexadecimal number."""
    number = int(digits, 16)
    return {index for index in range(number.bit_length()) if number >> index & 1}


#: a part of a whole, such as of memory
_Part = Annotated[float, Meta(ge=0, le=1)]


class GpuUsage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Use of a GPU by all processes. Facts that its driver does not tell are None."""

    #: part of the last second in which it was busy
    busy: _Part | None = None
    #: part of its memory that is in use
    memory: _Part | None = None


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Use of a machine by all processes. Numbers are rounded, so that announcements of idle machines rarely change."""

    #: mean number of processes that run or wait for a processor, over a minute; None if it is not known
    load: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    #: part of the RAM that is in use; None if it is not known
    memory: _Part | None = None
    #: by id: the worker's GPUs, as far as their driver answers
    gpus: Annotated[dict[Name, GpuUsage], Meta(max_length=1000)] = {}


@dataclass(frozen=True, kw_only=True)
class ComputeClass:
    """State of a compute class, which is a group of similar machines, as its live workers announce it.

    An instance may also describe one machine of a class, see `machines`.
    """

    #: name of the class, and of its queue
    name: str
    #: number of slots of all live workers
    slots: int
    #: number of slots that run trials of any study
    busy: int = 0
    #: number of live workers
    workers: int = 1
    #: number of slots, with a fraction, that this study may use beside other studies on the fleet; None for all slots
    allowance: float | None = None
    #: number of slots that this study may use now in addition to its share rounded down; 0 while it is the turn of
    #: other studies; None if it may use its share rounded up
    turn: int | None = None
    #: maximum number of slots that the limit of the study's user leaves to this study now; None without a limit
    most: int | None = None
    #: number of trials to queue in addition to the number of slots, so that a slot need not wait for the scheduler
    ahead: int = 0
    #: number of slots of this study's attempts on workers that are silent or being drained, which are not in `slots`
    silent: int = 0
    #: bytes of RAM of the machine with the least RAM; 0 if unknown
    memory: int = 0
    #: bytes of memory of the smallest GPU of the class; 0 without a GPU
    gpu_memory: int = 0
    #: number of cores of the machine with the most cores
    cores: int = 0
    #: number of slots by machine
    hosts: Mapping[str, int] = field(default_factory=dict, hash=False)
    #: by machine: id of the storage of its checkpoints; machines with equal ids share a storage. It is "" if it is not
    #: known, or if the workers of the machine have different ids
    storages: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: names of the live workers
    names: frozenset[str] = frozenset()
    #: number of slots by worker, if this is a machine with several workers; otherwise {}
    by_worker: Mapping[str, int] = field(default_factory=dict, hash=False)
    #: number of slots of the largest worker, if all slots of a trial must be on one worker; 0 if they may be on several
    widest: int = 0
    #: the machines of the class, each as an instance with the name of the class, if all slots of a trial must be on one
    #: worker; otherwise ()
    machines: tuple[ComputeClass, ...] = ()
    #: True if trials share a GPU as long as their predicted GPU memory fits
    shares_gpus: bool = False
    #: name of the machine, if this is a machine of a class
    host: str | None = None

    @property
    def room(self) -> int:
        """Maximum number of slots that one trial can have."""
        return self.widest or self.slots

    @property
    def key(self) -> tuple[str, str | None]:
        """Pair of the name of the class, and the name of the machine; None instead of the latter if this is a class."""
        return self.name, self.host

    @property
    def targets(self) -> Sequence[ComputeClass]:
        """The machines of the class, each with the limits of the class; the class itself if `machines` is empty."""
        # No trials are queued ahead on a machine, because each trial is sent to a machine with free slots for it.
        limits: dict[str, Any] = {"allowance": self.share, "turn": self.turn, "most": self.most, "silent": self.silent}
        return [replace(each, **limits) for each in self.machines] or [self]

    @property
    def share(self) -> float:
        """Number of slots, with a fraction, that this study may use."""
        return self.slots if self.allowance is None else self.allowance

    @property
    def limit(self) -> int:
        """Maximum number of slots that this study may use now."""
        fair = math.ceil(self.share) if self.turn is None else math.floor(self.share) + self.turn
        return fair if self.most is None else min(fair, self.most)

    def bytes_of(self, memory: Memory) -> int:
        """Return the least bytes of a kind of memory on the machines of the class."""
        return self.gpu_memory if memory is Memory.GPU else self.memory


def by_strength(classes: Iterable[ComputeClass], expected: Sequence[str] = DEFAULT_CLASSES) -> list[ComputeClass]:
    """Return the classes, the strongest first: sorted by GPU memory, then by cores, then by the order `expected`."""
    order = {name: index for index, name in enumerate(expected)}
    return sorted(classes, key=lambda c: (-c.gpu_memory, -c.cores, order.get(c.name, len(order)), c.name))


def shortages(outgrown: str | None, memories: str | None) -> list[tuple[str, Memory]]:
    """Return the compute classes on which a trial ran out of memory, each with the kind of memory.

    The arguments are the fields `outgrown` and `outgrown_memory` of a trial.
    """
    if not outgrown or not memories:
        return []
    return [*zip(outgrown.split(","), map(Memory, memories.split(",")), strict=False)]


def detect() -> Machine:
    """Return the resources of this machine that the process may use. Never raises: facts that cannot be read are left
    out.

    ``SHADHO_CORES`` reserves this number of cores for the worker, instead of a share of the machine's cores. SLURM
    limits cores and memory.
    ``SHADHO_HOST`` is the name or address of this machine for other machines, if its own name is ambiguous.
    """
    cards = _nvidia_gpus() or _apple_gpu()
    return msgspec.structs.replace(usable_cores(), host=own_host(), memory=usable_memory(), cards=cards)


def price() -> float | None:
    """Return the price of a slot of this machine per hour, from ``SHADHO_PRICE``; None if it is not set.

    Raises UsageError unless it is a number from 0.
    """
    told = os.environ.get("SHADHO_PRICE", "")
    try:
        return msgspec.convert(told, Price, strict=False) if told else None
    except msgspec.ValidationError:
        raise UsageError(
            f"--price, SHADHO_PRICE: {short(told, 60)} is not a price; give the money that a slot costs an hour, "
            "such as 2.40"
        ) from None


def slots_per_gpu() -> int | None:
    """Return the number of slots of each GPU from the environment: 1 by default, None for AUTO.

    Raises UsageError for another text.
    """
    told = os.environ.get(SLOTS_PER_GPU) or "1"
    if told == AUTO:
        return None
    if not (told.isascii() and told.isdecimal() and len(told) < 4 and int(told)):
        form = "give a number from 1 to 999, or auto: as many as their measured GPU memory allows"
        raise UsageError(f"--slots-per-gpu, {SLOTS_PER_GPU}: {short(told, 60)} is not allowed; {form}")
    return int(told)


def own_host() -> str:
    """Return the name of this machine: ``SHADHO_HOST``, or its host name."""
    return os.environ.get("SHADHO_HOST") or socket.gethostname()


def ram_bytes() -> int:
    """Return the bytes of RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory() -> int:
    """Return the bytes of RAM that this process may use: all, or the limit of a control group or of SLURM. Never
    raises.
    """
    limits = [ram_bytes(), 2**20 * (_told("SLURM_MEM_PER_NODE") or _told("SLURM_MEM_PER_CPU") * _told(SLURM_CORES))]
    for folder in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min(limit for limit in limits if limit > 0)


def _told(variable: str) -> int:
    """Return the number in an environment variable; 0 if there is none, or an absurd one."""
    told = os.environ.get(variable, "")
    # Python refuses to convert thousands of digits.
    return int(told) if told.isdecimal() and len(told) < 10 else 0


def usable_cores() -> Machine:
    """Return the facts about the cores that this process may use. Never raises."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    # A quota above the number of processors limits nothing.
    quotas = [(quota, group) for quota, group in _quotas() if quota < len(processors)]
    quota, group = min(quotas, default=(len(processors), ""))
    usable = max(1, math.ceil(quota))
    # Where SLURM binds processes to their cores, the affinity has the right number.
    allocated = _told(SLURM_CORES)
    limit = _told("SHADHO_CORES") or (allocated if allocated < len(processors) else 0)
    pool = hashlib.blake2b(f"{_running_system()} {group}".encode(), digest_size=8).hexdigest()
    bits = f"{sum(1 << number for number in processors):x}"
    return Machine(cores=min(usable, limit or usable), processors=bits, pool=pool, is_limited=bool(limit))


def _running_system() -> str:
    """Return the id of the running kernel, which is the same in all containers on it; if it has none, the host name."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _quotas() -> Iterator[tuple[float, str]]:
    """Yield each CPU quota that applies to this process, in cores, with an id of its control group."""
    for folder in _control_groups("cpu"):
        with suppress(OSError, ValueError):
            if (quota := _quota(folder)) > 0:
                # The id is the inode, because a container sees its own group under another path, but with the same
                # inode.
                yield quota, str(folder.stat().st_ino)


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups, of either version, by which a controller may limit this process."""
    lines: list[str] = []
    with suppress(OSError):
        lines = _OWN_GROUPS.read_text().splitlines()
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or controller in controllers.split(","):
            root = _GROUPS / (controller if controllers else "")
            folder = root / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _quota(folder: Path) -> float:
    """Return the CPU quota of a control group in cores. Raises OSError or ValueError if it has none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except FileNotFoundError:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota) / max(1, int(period))


def _nvidia_gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that ``CUDA_VISIBLE_DEVICES`` names, by default all; () if the driver fails.

    Instead of a GPU that is divided (MIG), its parts are returned, because CUDA can only use these.
    """
    import pynvml

    def gpu(handle: Any, number: str, uuid: str) -> Gpu:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        return Gpu(name=str(pynvml.nvmlDeviceGetName(handle)), memory=memory, id=number, uuid=uuid)

    def is_divided(handle: Any) -> bool:
        with suppress(pynvml.NVMLError):
            return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
        return False

    def parts_of(handle: Any) -> Iterator[Gpu]:
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            # There may be fewer parts than this maximum.
            with suppress(pynvml.NVMLError):
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                uuid = str(pynvml.nvmlDeviceGetUUID(part))
                yield gpu(part, uuid, uuid)

    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    parts = [part.strip() for part in (told or "").split(",")]
    try:
        with ExitStack() as opened:
            pynvml.nvmlInit()
            opened.callback(pynvml.nvmlShutdown)
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            whole = [gpu(each, str(i), str(pynvml.nvmlDeviceGetUUID(each))) for i, each in enumerate(handles)]
            known = {
                card: [*parts_of(handle)] if is_divided(handle) else [card]
                for card, handle in zip(whole, handles, strict=True)
            }
            if told is None:
                return tuple(chain.from_iterable(known.values()))
            named: list[Gpu] = []
            for part in parts:
                if part.startswith("MIG-"):
                    with suppress(pynvml.NVMLError):
                        named.append(gpu(pynvml.nvmlDeviceGetHandleByUUID(part), part, part))
                # As in CUDA, the beginning of a UUID suffices.
                is_uuid = part.startswith("GPU-")
                found = [each for each in known if each.id == part or (is_uuid and each.uuid.startswith(part))]
                named += known[found[0]] if len(found) == 1 else []
            return tuple(dict.fromkeys(named))
    except pynvml.NVMLError:
        return ()


def _apple_gpu() -> tuple[Gpu, ...]:
    """Return the GPU of an Apple computer.

    Its memory is three quarters of the RAM, the maximum that Metal recommends.
    """
    if (sys.platform, platform.machine()) != ("darwin", "arm64"):
        return ()
    name = ""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return (Gpu(name=name or "Apple GPU", memory=ram_bytes() * 3 // 4, id="mps", device="mps"),)
