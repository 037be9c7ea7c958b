"""Devices of a worker: the GPUs, cores and process of each of its slots, and which slots are free.

An attempt takes all the slots that it needs at once. Attempts take slots in the order in which their messages arrived.
They may share a GPU if its memory suffices. An attempt whose GPU memory is not known does not share its GPU.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from shadho_celery.core.addresses import HOST_VARIABLE
from shadho_celery.core.hardware import Machine, thread_variables
from shadho_celery.core.system import NoThread, start_thread
from shadho_celery.core.units import counted
from shadho_celery.fleet.registry import Worker
from shadho_celery.runner.runner import Runner

log = logging.getLogger(__name__)

#: seconds between two checks whether an attempt that waits for slots is still wanted
CHECK_SECONDS = 1.0

#: bytes of GPU memory that a process takes in addition to the measured ones, for the CUDA context and libraries
CONTEXT_BYTES = 2**30
#: the next attempts are expected to take the median GPU memory of this many latest attempts
RECENT = 8


class Gpu:
    """A GPU that several attempts may share if its memory suffices for all."""

    def __init__(self, memory: int, slots: int) -> None:
        """`memory` is in bytes. At most `slots` attempts run on the GPU at a time."""
        self.memory = memory
        self._slots = slots
        #: taken slot -> bytes that its attempt needs; None if the attempt must not share the GPU
        self.taken: dict[int, int | None] = {}
        #: slots whose process may have a CUDA context on this GPU
        self.begun: set[int] = set()
        #: taken slots whose attempt has shared the GPU
        self.shared: set[int] = set()

    def left(self, slot: int) -> int:
        """Return the bytes that an attempt in this free slot may take; negative if no attempt fits."""
        if None in self.taken.values():
            return -1
        used = sum(each or 0 for each in self.taken.values())
        return self.memory - used - CONTEXT_BYTES * len(self.begun | {slot})

    def open(self, typical: int) -> int:
        """Return the number of attempts that may run at a time: the running attempts, and as many more as fit if each
        takes `typical` bytes.
        """
        if None in self.taken.values():
            return len(self.taken)
        left = self.memory - sum([(each or 0) + CONTEXT_BYTES for each in self.taken.values()])
        more = max(left // (typical + CONTEXT_BYTES), 0 if self.taken else 1)
        return min(self._slots, len(self.taken) + more)

    def take(self, slot: int, need: int | None) -> None:
        """Record that an attempt that needs `need` bytes, or the whole GPU if None, has taken a slot."""
        self.taken[slot] = need
        self.begun.add(slot)
        self.shared.discard(slot)
        if len(self.taken) > 1:
            self.shared |= self.taken.keys()


class FreeSlots:
    """The free slots of a worker, and the attempts that wait for slots. Any thread may call the methods."""

    def __init__(self, count: int, cards: int = 0, memories: Sequence[int] = ()) -> None:
        """Slots have the numbers from 0 to `count` - 1. Slot i has GPU i modulo `cards`, unless `cards` is 0.

        With `memories`, the bytes of each GPU, attempts may share a GPU if its memory suffices.
        """
        self.count = count
        self.cards = cards
        self.gpus = [Gpu(memory, len(range(card, count, cards))) for card, memory in enumerate(memories)]
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._free = set(range(count))
        #: (ticket, number of needed slots) of each waiting attempt, the first one first; a ticket is a unique object
        self._waiting: deque[tuple[object, int]] = deque()
        self._changed = threading.Condition()

    @property
    def is_any(self) -> bool:
        """True if an attempt could take a slot at once."""
        with self._changed:
            return self._open() > self.count - len(self._free) and not self._waiting

    @property
    def open(self) -> int:
        """Number of slots that attempts may take at a time: all slots, or fewer if the memory of shared GPUs limits
        them.
        """
        with self._changed:
            return self._open()

    @property
    def kept(self) -> int:
        """Number of free slots that are reserved for attempts that wait for more slots."""
        with self._changed:
            return min(len(self._free), sum(number for _, number in self._waiting))

    def take(self, number: int, is_wanted: Callable[[], bool] = lambda: True, *, need: int | None = None) -> list[int]:
        """Wait until `number` slots are free, and take them. Attempts that come later wait behind this one.

        `need` is the GPU memory of the attempt in bytes; None if it must not share its GPUs. While this waits, it calls
        `is_wanted` every CHECK_SECONDS. Returns the slots, or an empty list once `is_wanted` returns False.
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
        """Free slots that `take` has returned."""
        with self._changed:
            self._free.update(slots)
            for slot in slots if self.gpus else ():
                self.gpus[slot % self.cards].taken.pop(slot, None)
            self._changed.notify_all()

    def beside(self, taken: Sequence[int]) -> list[int]:
        """Return the idle slots of the GPUs that the attempt in the slots `taken` has for itself.

        Their processes may still hold GPU memory, so they must be killed.
        """
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
        """Return free slots for the attempt with this ticket, or [] if too few are free or another attempt is ahead."""
        if self._waiting[0][0] is not ticket or len(self._free) < number:
            return []
        if not self.gpus:
            return self._spread(self._free, number)
        if number == 1 and need is not None:
            # Consider the lowest free slot of each GPU, because its process probably exists already. Choose the slot on
            # the GPU with the most free memory, because the attempt is fastest there.
            first = {slot % self.cards: slot for slot in sorted(self._free, reverse=True)}
            left, card = max((self.gpus[card].left(slot), -card) for card, slot in first.items())
            if left >= need:
                return [first[-card]]
        idle = [card for card, gpu in enumerate(self.gpus) if not gpu.taken][:number]
        if len(idle) < min(number, self.cards):
            return []
        return self._spread({slot for slot in self._free if slot % self.cards in idle}, number)

    def _spread(self, free: Collection[int], number: int) -> list[int]:
        """Return `number` of the free slots: the lowest ones, on different GPUs if possible."""

        def order(slot: int) -> tuple[int, int]:
            return sum(other % self.cards == slot % self.cards for other in free if other < slot), slot

        return sorted(sorted(free, key=order if self.cards else None)[:number])


class Devices:
    """The GPUs, cores and processes of a worker's slots. Any thread may call the methods."""

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
        """`make_runner` creates the runner of a slot. Its argument are the environment variables of the slot's process.

        With `shares_gpus`, trials share GPUs if the memory suffices, in at most `count` slots. `address` is the address
        at which the fleet's other machines reach this one.
        """
        gpus = machine.gpus_for(compute_class)
        self.free = FreeSlots(count, len(gpus), [gpu.memory for gpu in gpus] if shares_gpus else [])
        #: number of slots that this worker announces when it starts
        self.slots = self.free.open
        self._machine, self._compute_class, self._address = machine, compute_class, address
        #: number of slots that share the host's cores, and number of threads of a trial; `_said`: both as last logged
        self._sharing, self._threads = self.slots, machine.threads(self.slots)
        self._said = self._sharing, self._threads
        #: by slot: the number of slots whose GPUs and cores its process has
        self.widths = [1] * count
        self.runners = [make_runner(self._variables([slot])) for slot in range(count)]

    def start(self) -> None:
        """Start the slots' processes. If a process cannot be started now, `Runner.run` tries again and reports the
        error.
        """
        for runner in self.runners[: self.free.open]:
            with suppress(OSError):
                runner.start()

    def close(self) -> list[threading.Thread]:
        """End the processes in threads, because each takes a few hundredths of a second. Return the threads."""
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
        """Give an attempt the GPUs and cores of the slots that it has taken, for a `with` block, then free them."""
        try:
            for other in self.free.beside(taken):
                self.runners[other].kill()
            self._widen(taken)
            yield
        finally:
            self._widen(taken[:1])
            self.free.put(taken)

    def share_cores(self, neighbours: Collection[Worker]) -> None:
        """Divide the cores among the workers of this host, and set the number of threads of each slot's next trial."""
        slots, others, before = self.free.open, [(each.machine, each.slots) for each in neighbours], self._threads
        self._sharing = slots + sum(count for machine, count in others if not machine.is_limited)
        self._threads = self._machine.threads(slots, others)
        for runner, width in zip(self.runners, self.widths, strict=True) if self._threads != before else ():
            runner.set_threads(self._threads * width)

    def tell(self) -> None:
        """Log how the cores are divided, unless that was already logged."""
        if self._said != (self._sharing, self._threads) and not self._machine.is_limited:
            self._said = self._sharing, self._threads
            log.info("%s on this host: %s a trial", counted(self._sharing, "slot"), counted(self._threads, "thread"))

    def _widen(self, taken: Sequence[int]) -> None:
        """Give the process of the first of these slots the GPUs and cores of all of them.

        If there are GPUs, this needs a new process, and the processes of the other slots are killed, because they may
        still hold GPU memory.
        """
        slot, width = taken[0], len(taken)
        if self.widths[slot] == width:
            return
        self.widths[slot] = width
        threads = self._threads * width
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
