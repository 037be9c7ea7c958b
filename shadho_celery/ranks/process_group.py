"""Process group: torch.distributed with one rank in each slot of a trial, for DistributedDataParallel and similar
programs.

::

    with process_group(context) as pg:
        model = DistributedDataParallel(model.to(pg.device))
        ...

The objective runs in every rank. A trial with several slots calls for the other ranks through the queue of its class;
the workers that get these messages run the same objective. A trial with one slot has one rank. Ranks other than 0 leave
the objective at the end of the block, so that only rank 0 returns a loss.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch has no list of its stores

from shadho_celery.core.addresses import LOOPBACK, interface_variables, listen, make_token, own_address
from shadho_celery.core.checks import check_seconds, check_whole
from shadho_celery.core.files import replacing
from shadho_celery.core.system import overridden
from shadho_celery.core.trial import ReplicaSeat
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import Context, RankLost, ReplicaDone, TrialStopped
from shadho_celery.ranks.rendezvous import (
    LOST_CONNECTION,
    End,
    Rendezvous,
    Watch,
    connections,
    describe,
    open_store,
    version_of,
)

logger = logging.getLogger(__name__)

#: seconds that the other ranks have to leave their `with` block after rank 0 has left its block
LEAVE_SECONDS = 30.0
#: name of the checkpoint within the trial's folder
CHECKPOINT = "process-group.pt"


class ProcessGroup:
    """torch's default process group with one rank in each slot of a trial. Use it as a context manager.

    `ranks`, if it is given, must be the number of the trial's slots. For several ranks in one slot, or on the GPUs of
    one worker, call `context.launch`. The default `backend` is NCCL if each rank has a GPU of its own, else gloo on the
    CPU.

    Rank 0 waits `start_seconds` for the other ranks, but the scheduler gives up an incomplete group earlier. A
    collective may take `timeout_seconds`. A rank without a heartbeat for `deadline_seconds` counts as lost; then every
    rank ends, and the trial is tried again.

    torch does not authenticate the connections. Therefore, on a fleet with a signing key, trials with several slots
    need ``plain=True``. Raises UsageError for arguments that are not valid.
    """

    def __init__(
        self,
        context: Context,
        ranks: int | None = None,
        *,
        backend: Literal["nccl", "gloo"] | None = None,
        plain: bool = False,
        start_seconds: float = 3600.0,
        timeout_seconds: float = 1800.0,
        deadline_seconds: float = 15.0,
    ) -> None:
        self.context = context
        #: True if the other ranks are called for through the queue of the trial's class
        self._calls = context.slots > context.gpus
        if backend not in (None, "nccl", "gloo"):
            raise UsageError(f"backend is {backend!r}; it must be 'nccl', 'gloo' or None")
        check_seconds(start_seconds=start_seconds, timeout_seconds=timeout_seconds, deadline_seconds=deadline_seconds)
        check_whole(1, ranks=ranks)
        if not self._calls and (context.gpus > 1 or (ranks or 1) > 1):
            raise UsageError(
                "a process group has one rank in each slot of STUDY['slots']; for several ranks in one slot, or on the "
                "GPUs of one worker, set STUDY['gpus'] and call context.launch(function)"
            )
        if self._calls and ranks not in (None, context.slots):
            raise UsageError(f"ranks is {ranks}, but the trial has {context.slots} slots, each with one rank")
        if self._calls and context.encrypted and not plain:
            raise UsageError(
                "the fleet has a signing key, but torch neither authenticates nor encrypts the connections of a "
                "process group; give plain=True if you trust the network between the workers, or use a gang"
            )
        if dist.is_initialized():
            raise UsageError("torch.distributed is in use already; end the group before the next one")
        #: rank of this process, from 0
        self.rank = 0 if context.replica is None else context.replica.rank
        #: number of ranks
        self.size = context.slots if self._calls else 1
        #: device of this rank: its GPU with NCCL, else the CPU
        self.device = torch.device("cpu")
        self._wanted, self._start_seconds = backend, start_seconds
        self._timeout, self._deadline = timeout_seconds, deadline_seconds
        self._version = version_of(sys._getframe(1).f_code)
        self._rendezvous: Rendezvous | None = None
        self._watch: Watch | None = None
        #: restores the environment variables at the end
        self._until_closed = ExitStack()

    def __enter__(self) -> ProcessGroup:
        seat = self.context.replica
        self.context.gangs += 1
        try:
            if seat is not None:
                self._join(seat)
            else:
                self._assemble()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def should_stop(self) -> bool:
        """Return the value of ``context.should_stop()`` in rank 0. All ranks must call this at the same step."""
        flag = torch.tensor([self.rank == 0 and self.context.should_stop()], dtype=torch.uint8)
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def save(self, state: dict[str, Any]) -> None:
        """In rank 0, replace the trial's checkpoint by `state`: tensors, numbers and texts, also in dicts and lists.

        Other ranks, and a speculative copy of the trial, save nothing.
        """
        if self.rank == 0 and not self.context.is_copy:
            with replacing(self.context.checkpoint_dir / CHECKPOINT, mode=0o600) as file:
                torch.save(state, file)

    def load(self) -> dict[str, Any] | None:
        """Return the state that rank 0 has last saved, or None. The result is the same in all ranks, which must all
        call this.

        Only rank 0 needs access to the file. Raises ShadhoError in every rank if it cannot be read.
        """
        path = self.context.checkpoint_dir / CHECKPOINT
        content = b""
        if self.rank == 0 and path.exists():
            content = path.read_bytes()
        length = torch.tensor([len(content)])
        dist.broadcast(length, 0)
        if not length.item():
            return None
        data = torch.frombuffer(bytearray(content or int(length)), dtype=torch.uint8)
        dist.broadcast(data, 0)
        try:
            state: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), "cpu", weights_only=True)
        except Exception as error:
            raise ShadhoError(
                f"the checkpoint {path} cannot be read: it is damaged, or contains more than tensors, numbers, "
                "texts, lists and dicts; remove it to start from the first step"
            ) from error
        return state

    def _assemble(self) -> None:
        """Become rank 0. In a trial with several slots, call for the other ranks."""
        host = own_address() if self._calls else LOOPBACK
        server = listen(host, for_others=self._calls)
        token, port = make_token(), server.getsockname()[1]
        store = open_store(0, host, port, server)
        if self._calls:
            self.context.call_replicas(f"{host}:{port}", token, 0, is_last=True)
        self._meet(store, token, host)
        if self._calls:
            self.context.gang_assembled()

    def _join(self, seat: ReplicaSeat) -> None:
        """Become the rank for which this seat was published."""
        master, _, port = seat.address.rpartition(":")
        self._meet(open_store(self.rank, master, int(port)), seat.token, own_address(master))

    def _meet(self, store: TCPStore, token: str, host: str) -> None:
        """Meet the other ranks through the store, and initialise torch's process group."""
        self._rendezvous = meeting = Rendezvous(store, token, self.rank, self.size, self._stop_waiting)
        meeting.take_place()
        # The thread gets a connection of its own, because a request blocks its connection.
        own = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._watch = Watch(Rendezvous(own, token, self.rank, self.size, self._stop_waiting), self._deadline)
        terms = meeting.meet(self._version, self._gpu(), self._wanted, self._start_seconds, host)
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": 0, "MASTER_PORT": store.port}
        # Prevent that NCCL's watchdog ends the process, and that rank 0 of a script that reads these variables listens
        # on all addresses.
        names = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        names |= {"MASTER_ADDR": store.host} | {name: str(number) for name, number in numbers.items()}
        self._until_closed.enter_context(overridden(names | interface_variables(host)))
        if terms.backend == "nccl":
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)
        elif self.context.device == "cuda" and self._wanted is None and not self.rank:
            logger.warning(
                "the process group runs on the CPU, because not each of its %d ranks has a GPU of its own; give fewer "
                "slots, or backend='gloo' if this is intended",
                self.size,
            )
        before = connections()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if terms.backend == "nccl" else "gloo",
            store=meeting.store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self._timeout),
        )
        self._watch.opened = connections() - before

    def _gpu(self) -> str | None:
        """Return a name that identifies this rank's own GPU, or None."""
        if (self.context.device != "cuda" and self._wanted != "nccl") or not torch.cuda.device_count():
            return None
        return f"{socket.gethostname()}/{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"

    def _stop_waiting(self) -> None:
        """Raise an exception if the trial was stopped while its ranks join."""
        if self.context.should_stop():
            raise TrialStopped("the trial was stopped while its ranks joined") if self.rank == 0 else ReplicaDone

    def _leave(self, error: BaseException | None) -> None:
        """Leave the group. Ranks other than 0 then raise ReplicaDone, unless `error` is an error of their own.

        Rank 0 raises the reason why the group has ended, if that is not `error`.
        """
        if self._watch is not None:
            self._watch.pacify()
        end = self._end_of(error)
        try:
            if self.rank == 0 and error is None and self._rendezvous is not None:
                self._await_others(self._rendezvous)
        finally:
            self._close(is_broken=error is not None)
        if self.rank and (error is None or end is not None):
            raise ReplicaDone from None
        if self.rank == 0 and end is not None:
            if end.is_loss:
                raise RankLost(end.reason) from error
            raise ShadhoError(end.reason) from error

    def _end_of(self, error: BaseException | None) -> End | None:
        """Return why the group has ended. If this rank's own `error` is the cause, tell the other ranks and return
        None.
        """
        meeting, watch = self._rendezvous, self._watch
        if meeting is None or watch is None:
            return None
        try:
            if error is None:
                if self.rank:
                    meeting.leave()
                return None
            if isinstance(error, RankLost):
                return watch.end or End(reason=str(error), is_loss=True)
            end = watch.end
            if end is None and _is_of_connection(error):
                # A connection to a rank was lost. Missing heartbeats will show which rank is gone.
                end = watch.wait(self._deadline + 3.0)
                if end is None:
                    lost = f"rank {self.rank} has lost its connection to another rank: {describe(error)}"
                    end = meeting.end(End(reason=lost, is_loss=True))
            if end is None and not isinstance(error, ReplicaDone):
                meeting.end(End(reason=f"rank {self.rank} failed: {describe(error)}", is_loss=False))
        except RuntimeError as gone:
            # Rank 0, which has the store, has ended.
            return End(reason=f"rank 0 has ended ({describe(gone)})", is_loss=True)
        return end

    def _await_others(self, meeting: Rendezvous) -> None:
        """Wait until the other ranks have left their `with` blocks. Their failures no longer affect the trial."""
        until = time.monotonic() + LEAVE_SECONDS
        rest = set(range(1, self.size))
        while rest and time.monotonic() < until and (self._watch is None or self._watch.end is None):
            rest = {rank for rank in rest if not meeting.has_left(rank)}
            time.sleep(0.02)
        if rest:
            logger.warning("ranks %s did not leave the block of the process group with rank 0", sorted(rest))

    def _close(self, *, is_broken: bool) -> None:
        try:
            if self._watch is not None:
                self._watch.close()
        finally:  # even if the trial is interrupted in the lines above
            if dist.is_initialized() and not (is_broken and self.device.type == "cuda"):
                dist.destroy_process_group()
        # The store closes when its last reference is gone.
        self._rendezvous = self._watch = None
        self._until_closed.close()


#: the name with which objectives create a process group
process_group = ProcessGroup


def _is_of_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and bool(LOST_CONNECTION.search(str(error)))
    )
