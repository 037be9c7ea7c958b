"""Replica processes on this machine. They are forked if that is safe, else spawned, and they end with their parent."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import sys
import warnings
from collections import Counter
from collections.abc import MutableSequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Literal

import torch
from torch import nn

from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.call import gpu_peak
from shadho_celery.ranks.children import begin_child, end_children
from shadho_celery.training.replica.replica import Workload, serve

#: seconds that replicas have to exit before they are killed
LEAVE_SECONDS = 2.0


class Processes:
    """Replica processes of one gang on this machine."""

    def __init__(self) -> None:
        self.children: list[BaseProcess] = []
        #: for each replica with a GPU: the GPU, and the peak of the bytes that the replica has used on it
        self._peaks: list[tuple[torch.device, MutableSequence[int]]] = []

    @property
    def method(self) -> Literal["fork", "spawn"]:
        """Start method of the next process. It may change, because CUDA may be used only after the gang was
        constructed.
        """
        return "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() else "spawn"

    @property
    def gpu_peak(self) -> int:
        """Maximum over the GPUs of the replicas' peak memory in bytes; 0 without a GPU."""
        cards = Counter[torch.device]()
        for device, peak in self._peaks:
            cards[device] += peak[0]
        return max(cards.values(), default=0)

    def start(self, seat: ReplicaSeat, workload: Workload, server: socket.socket) -> None:
        """Start a replica. A fork closes its copy of the listening socket `server`. Raises UsageError if it cannot be
        spawned.
        """
        process: BaseProcess
        # A daemonic process may not have children, but a DataLoader's workers are children.
        daemon = workload.computer.batches.loader is None
        try:
            if self.method == "fork":
                process = get_context("fork").Process(target=_run, args=(seat, workload, server), daemon=daemon)
            else:
                spawn = get_context("spawn")
                device = own_device(workload.computer.model, seat.rank)
                own = _copy(workload, on_cpu=device is not None)
                # Use shared memory, because a replica that is killed cannot send its peak at its end.
                peak = spawn.RawArray("q", 1)
                if device is not None:
                    self._peaks.append((device, peak))
                process = spawn.Process(target=_run, args=(seat, own, None, device, peak), daemon=daemon)
            with warnings.catch_warnings():
                # Newer versions of Python warn about a fork in a process with threads. This child takes no lock that
                # another thread may hold: it has one torch thread and its own sockets, and exits without clean-up.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            # pickle raises these errors for a lambda or a local function.
            raise UsageError(
                f"the replica cannot be sent to a spawned process, which is needed if CUDA is in use: {error}; "
                "define the loss and the classes of data and model by `def` or `class` at the top level of a module"
            ) from error
        self.children.append(process)

    def alive(self) -> int:
        """Return the number of processes that have not ended."""
        return sum(child.is_alive() for child in self.children)

    def close(self) -> None:
        """Wait up to LEAVE_SECONDS for the processes to exit. Kill the processes that are left then."""
        end_children(self.children, LEAVE_SECONDS)


def _copy(workload: Workload, *, on_cpu: bool) -> Workload:
    """Return a copy for a spawned process, because tensors that are sent to a process share their memory with it.

    A replica on another GPU would open the memory on the sender's GPU. With `on_cpu`, model and optimizer state are
    therefore moved to the CPU.
    """
    batches = workload.computer.batches
    own = copy.deepcopy(workload, {id(batches): batches})
    if on_cpu:
        own.computer.model.cpu()
        _follow_model(own)
    return own


def own_device(model: nn.Module, rank: int) -> torch.device | None:
    """Return the GPU of a replica on this machine. The GPUs are used in turn, beginning with that of the model.

    Returns None if the model is on the CPU or on several devices, and then stays there.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or (device := devices.pop()).type != "cuda":
        return None
    return torch.device("cuda", ((device.index or 0) + rank) % torch.cuda.device_count())


def move(workload: Workload, device: torch.device) -> None:
    """Move the model, the optimizer's state, and data that are on a GPU to the GPU `device`."""
    torch.cuda.set_device(device)
    workload.computer.model.to(device)
    _follow_model(workload)
    workload.computer.batches.move(device)


def _follow_model(workload: Workload) -> None:
    """Move the optimizer's state to the device of the model."""
    optimizer = workload.update.optimizer
    optimizer.load_state_dict(optimizer.state_dict())


def _run(
    seat: ReplicaSeat,
    workload: Workload,
    inherited: socket.socket | None,
    device: torch.device | None = None,
    peak: MutableSequence[int] | None = None,
) -> None:
    """Run a replica in a new process. `inherited` is the listening socket of a fork, `device` the GPU of a spawned
    process.

    The peak of its GPU memory is written to `peak`.
    """

    def note() -> None:
        if peak is not None:
            peak[0] = gpu_peak()

    begin_child(os.getppid(), note)
    if inherited is not None:
        inherited.close()
    if device is not None:
        move(workload, device)
    try:
        serve(seat, workload)
    except ShadhoError as error:
        sys.exit(f"replica: {error}")
    finally:
        note()
