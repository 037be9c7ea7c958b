"""Devices of a worker: its slots, with the GPUs and cores that each has, and the process that runs trials in it.

Attempts take all the slots that they need or none, in the order in which their messages arrived. They may share GPUs as
far as their memory fits. An attempt whose memory is not known has its GPU alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from shadho_celery.core.addresses import HOST_VARIABLE
from shadho_celery.core.hardware import Machine, thread_variables
from shadho_celery.core.threads import NoThread, start_thread
from shadho_celery.core.units import counted
from shadho_celery.fleet.registry import Worker
from shadho_celery.runner.runner import Runner

log = logging.getLogger(__name__)

#: seconds between two checks whether an attempt still waits for slots
CHECK_SECONDS = 1.0

#: bytes of GPU memory that a process takes beside those that are measured: the context of CUDA, and its libraries
CONTEXT_BYTES = 2**30
#: number of the latest attempts whose median memory is expected of the next ones
RECENT = 8


class Gpu:
    """A GPU that attempts share as far as their memory fits."""

    def __init__(self, memory: int, slots: int) -> None:
        """`memory` are its bytes, and `slots` the greatest number of attempts at a time."""
        self.memory = memory
        self._slots = slots
        #: bytes of the attempt in each taken slot; None if it has the GPU alone
        self.taken: dict[int, int | None] = {}
        #: slots whose process may have a context of CUDA
        self.begun: set[int] = set()
        #: taken slots whose attempt has not been alone
        self.shared: set[int] = set()

    def left(self, slot: int) -> int:
        """Return the bytes that another attempt may take in a free slot; negative if there are none."""
        if None in self.taken.values():
            return -1
        used = sum(each or 0 for each in self.taken.values())
        return self.memory - used - CONTEXT_BYTES * len(self.begun | {slot})

    def open(self, typical: int) -> int:
        """Return the number of attempts that may run at a time: those that do, and more of `typical` bytes each."""
        if None in self.taken.values():
            return len(self.taken)
        left = self.memory - sum([(each or 0) + CONTEXT_BYTES for each in self.taken.values()])
        more = max(left // (typical + CONTEXT_BYTES), 0 if self.taken else 1)
        return min(self._slots, len(self.taken) + more)

    def take(self, slot: int, need: int | None) -> None:
        """Note that an attempt has a slot."""
        self.taken[slot] = need
        self.begun.add(slot)
        self.shared.discard(slot)
        if len(self.taken) > 1:
            self.shared |= self.taken.keys()

    def put(self, slot: int) -> None:
        """Note that a slot is free."""
        self.taken.pop(slot, None)


class FreeSlots:
    """The slots of a worker that run nothing. Its methods may be called from any thread."""

    def __init__(self, count: int, cards: int = 0, memories: Sequence[int] = ()) -> None:
        """Slots have the numbers from 0 to `count` - 1. Slot i has GPU i modulo `cards`, if there are any.

        With `memories`, the bytes of each GPU, attempts share GPUs as far as their memory fits.
        """
        self.count = count
        self.cards = cards
        self.gpus = [Gpu(memory, len(range(card, count, cards))) for card, memory in enumerate(memories)]
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._free = set(range(count))
        #: tickets of the attempts that wait, with the number of slots that each needs
        self._waiting: deque[tuple[object, int]] = deque()
        self._changed = threading.Condition()

    @property
    def is_any(self) -> bool:
        """True if a slot is free and no attempt waits for it."""
        with self._changed:
            return self._open() > self.count - len(self._free) and not self._waiting

    @property
    def open(self) -> int:
        """Number of slots that attempts may have at a time: all, unless the memory of shared GPUs limits it."""
        with self._changed:
            return self._open()

    @property
    def kept(self) -> int:
        """Number of free slots that are kept for an attempt that waits for more."""
        with self._changed:
            return min(len(self._free), sum(number for _, number in self._waiting))

    def take(self, number: int, is_wanted: Callable[[], bool] = lambda: True, *, need: int | None = None) -> list[int]:
        """Wait until `number` slots are free, and take them. While an attempt waits, later ones wait behind it.

        `need` are the bytes of GPU memory that the attempt takes; None if it needs its GPUs alone. `is_wanted` is
        called every CHECK_SECONDS meanwhile. Once it returns False, the result is an empty list.
        """
        ticket = object()
        with self._changed:
            self._waiting.append((ticket, number))
        try:
            while True:
                with self._changed:
                    chosen = self._changed.wait_for(lambda: self._chosen(ticket, number, need), CHECK_SECONDS)
                    if chosen:
                        self._note(chosen, need)
                        return chosen
                if not is_wanted():
                    return []
        finally:
            with self._changed:
                self._waiting.remove((ticket, number))
                self._changed.notify_all()

    def put(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        with self._changed:
            self._free.update(slots)
            for slot in slots if self.gpus else ():
                self.gpus[slot % self.cards].put(slot)
            self._changed.notify_all()

    def beside(self, taken: Sequence[int]) -> list[int]:
        """Return the other slots of the GPUs that an attempt has alone. Their processes must not keep GPU memory."""
        with self._changed:
            alone = [gpu for gpu in self.gpus if None in [gpu.taken.get(slot, 0) for slot in taken]]
            others = [slot for gpu in alone for slot in gpu.begun.difference(taken)]
            for gpu in alone:
                gpu.begun.intersection_update(taken)
        return others

    def was_shared(self, slot: int) -> bool:
        """Return whether the attempt in a slot has shared its GPU."""
        return bool(self.gpus) and slot in self.gpus[slot % self.cards].shared

    def _open(self) -> int:
        if not self.gpus:
            return self.count
        if self._waiting:
            wanted = sum(number for _, number in self._waiting)
            return min(self.count, self.count - len(self._free) + wanted)
        typical = sorted(self._recent)[len(self._recent) // 2] if self._recent else max(gpu.memory for gpu in self.gpus)
        return sum(gpu.open(typical) for gpu in self.gpus)

    def _note(self, chosen: Sequence[int], need: int | None) -> None:
        self._free.difference_update(chosen)
        for slot in chosen if self.gpus else ():
            gpu = self.gpus[slot % self.cards]
            self._recent.append(gpu.memory if need is None else need)
            is_alone = len(chosen) > 1 or need is None or gpu.left(slot) < need
            gpu.take(slot, None if is_alone else need)

    def _chosen(self, ticket: object, number: int, need: int | None) -> list[int]:
        """Return free slots for the attempt with a ticket, or [] while there are too few, or too little GPU memory."""
        if self._waiting[0][0] is not ticket or len(self._free) < number:
            return []
        if not self.gpus:
            return self._spread(self._free, number)
        if number == 1 and need is not None:
            # The lowest free slot of each GPU, to use its process again. On the emptiest GPU an attempt is fastest.
            first = {slot % self.cards: slot for slot in sorted(self._free, reverse=True)}
            left, card = max((self.gpus[card].left(slot), -card) for card, slot in first.items())
            if left >= need:
                return [first[-card]]
        idle = [card for card, gpu in enumerate(self.gpus) if not gpu.taken][:number]
        if len(idle) < min(number, self.cards):
            return []
        return self._spread({slot for slot in self._free if slot % self.cards in idle}, number)

    def _spread(self, free: Collection[int], number: int) -> list[int]:
        """Return some of the free slots: those with the lowest numbers, on different GPUs if that is possible."""
        chosen: list[int] = []
        left = sorted(free)
        for _ in range(number):
            used = {slot % self.cards for slot in chosen} if self.cards else set()
            best = next((slot for slot in left if self.cards and slot % self.cards not in used), left[0])
            left.remove(best)
            chosen.append(best)
        return sorted(chosen)


class CoreShare:
    """Number of threads that each trial on a worker gets, from its share of the host's cores."""

    def __init__(self, machine: Machine, slots: int) -> None:
        self._machine = machine
        #: number of slots on the host that share its cores, threads of a trial, and both as last logged
        self._sharing = slots
        self.threads = machine.threads(slots)
        self._said = self._sharing, self.threads
        #: number of slots and other workers at the last `follow`
        self._seen: tuple[int, Collection[Worker]] | None = None

    def follow(self, slots: int, neighbours: Collection[Worker]) -> bool:
        """Divide the cores among this worker's slots and its `neighbours`. Return whether the threads have changed."""
        if self._seen is not None and slots == self._seen[0] and neighbours is self._seen[1]:
            return False
        self._seen = slots, neighbours
        before, others = self.threads, [(each.machine, each.slots) for each in neighbours]
        self._sharing = slots + sum(slots for machine, slots in others if not machine.is_limited)
        self.threads = self._machine.threads(slots, others)
        return self.threads != before

    def tell(self) -> None:
        """Log how the cores are divided, unless that was already logged."""
        if self._said != (self._sharing, self.threads) and not self._machine.is_limited:
            self._said = self._sharing, self.threads
            log.info("%s on this host: %s a trial", counted(self._sharing, "slot"), counted(self.threads, "thread"))


class Devices:
    """The slots' GPUs, cores and processes. The methods may be called from any thread."""

    def __init__(
        self,
        machine: Machine,
        compute_class: str,
        count: int,
        make_runner: Callable[[Mapping[str, str]], Runner],
        *,
        address: str,
        shares_gpus: bool,
    ) -> None:
        """`make_runner` makes the runner of a slot from the environment variables of its process.

        With `shares_gpus`, trials share GPUs as far as their memory fits, in `count` slots at most. `address` is the
        one by which the fleet's other machines reach this machine.
        """
        gpus = machine.gpus_for(compute_class)
        self.free = FreeSlots(count, len(gpus), [gpu.memory for gpu in gpus] if shares_gpus else [])
        #: number of slots that this worker announces at its start
        self.slots = self.free.open
        self._machine, self._compute_class, self._address = machine, compute_class, address
        self._core_share = CoreShare(machine, self.slots)
        #: number of slots whose GPUs and cores the process of each slot has
        self.widths = [1] * count
        self.runners = [make_runner(self._variables([slot])) for slot in range(count)]

    def start(self) -> None:
        """Start the slots' processes. If one cannot be started, `Runner.run` will give the error to the trial."""
        for runner in self.runners[: self.free.open]:
            with suppress(OSError):
                runner.start()

    def close(self) -> list[threading.Thread]:
        """End the processes, in threads that are returned, because each takes a few hundredths of a second."""
        killers = []
        for runner in self.runners:
            killer = threading.Thread(target=runner.close)
            try:
                start_thread(killer)
                killers.append(killer)
            except NoThread:
                runner.close()
        return killers

    @contextmanager
    def given(self, taken: Sequence[int]) -> Iterator[None]:
        """Give an attempt the slots that it has taken, for a `with` block, and then free them."""
        try:
            for other in self.free.beside(taken):
                self.runners[other].kill()
            self._widen(taken)
            yield
        finally:
            self._widen(taken[:1])
            self.free.put(taken)

    def share_cores(self, neighbours: Collection[Worker]) -> None:
        """Give each slot's next trial its share of the cores, divided with the other workers of the host."""
        if self._core_share.follow(self.free.open, neighbours):
            for runner, width in zip(self.runners, self.widths, strict=True):
                runner.set_threads(self._core_share.threads * width)

    def tell(self) -> None:
        """Log how the cores are divided, unless that was already logged."""
        self._core_share.tell()

    def _widen(self, taken: Sequence[int]) -> None:
        """Give the process of the first of these slots the GPUs and cores of all of them.

        With GPUs, this needs another process, and the processes of the other slots end, because they may still hold
        memory of their GPUs.
        """
        slot, width = taken[0], len(taken)
        if self.widths[slot] == width:
            return
        self.widths[slot] = width
        threads = self._core_share.threads * width
        if not self.free.cards:
            self.runners[slot].set_threads(threads)
            return
        self.runners[slot].equip(self._variables(taken) | thread_variables(threads))
        for other in taken[1:]:
            self.runners[other].kill()

    def _variables(self, taken: Sequence[int]) -> dict[str, str]:
        """Return the environment variables of the process of a trial that takes these slots."""
        variables = self._machine.slot_environment(self._compute_class, taken, self.slots)
        return {**variables, HOST_VARIABLE: self._address}
