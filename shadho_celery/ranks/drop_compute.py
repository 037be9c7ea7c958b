"""DropCompute: a slow rank stops its step at a deadline, and the gradient is the mean over all computed micro-batches.

Giladi et al., *DropCompute: simple and more robust distributed synchronous training via compute variance reduction*,
arXiv 2306.10598. Each rank computes the gradients of its micro-batches until the deadline tau (algorithm 1). The sums
of the gradients and the numbers of micro-batches are all-reduced. Unlike in the paper, the deadline must keep a given
share of the micro-batches. It is chosen again if it later keeps fewer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shadho_celery.core.checks import check_seconds, check_whole
from shadho_celery.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shadho_celery.ranks.launch import RankContext
    from shadho_celery.ranks.process_group import ProcessGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DropCompute:
    """Yields the micro-batches of each step until a deadline. Every rank must create one, with a model of the same
    shape.

    ::

        drop = DropCompute(pg, model)  # in a function of context.launch: DropCompute(context, model)
        for parts in micro_batches_of_each_step:
            optimizer.zero_grad()
            for part in drop.parts(parts):
                loss(model, part).backward()
            drop.reduce()
            optimizer.step()

    After `record` steps without a deadline, the deadline is chosen that keeps at least the share `keep` of the
    micro-batches and processes most of them per second. `deadline` sets a deadline in seconds instead. The first
    micro-batch of a step always counts. Raises UsageError for arguments that are not valid.
    """

    def __init__(
        self,
        pg: ProcessGroup | RankContext,
        model: nn.Module,
        *,
        keep: float = 0.8,
        record: int = 20,
        deadline: float | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 < keep <= 1:
            raise UsageError(f"keep is {keep!r}; give the share of micro-batches that must count, above 0 and up to 1")
        check_whole(1, record=record)
        check_seconds(deadline=deadline)
        self._device, self._size, self._now = torch.device(pg.device), pg.size, now
        self._unsynced = model.no_sync if isinstance(model, DistributedDataParallel) else nullcontext
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        if not isinstance(model, DistributedDataParallel):
            # Give every rank the same initial model, as DistributedDataParallel does.
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), 0)
        self._keep, self._record, self._given = keep, record, deadline
        #: seconds after the beginning of a step after which no further micro-batch begins; None while times are
        #: recorded
        self.deadline = deadline
        #: number of micro-batches of all ranks that have counted, and of all micro-batches, since the deadline was
        #: chosen
        self.kept = self.offered = 0
        #: for each recorded step: the seconds after which each micro-batch ended, and the seconds of the rest of the
        #: step
        self._ends: list[list[float]] = []
        self._rest: list[float] = []
        self._count = self._of = 0
        self._has_warned = False

    @property
    def share(self) -> float:
        """Share of the micro-batches that have counted since the deadline was chosen; 1 before the first."""
        return self.kept / self.offered if self.offered else 1.0

    def parts(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the micro-batches of one step until the deadline. Every rank must give the same number of `batches`."""
        batches = [*batches]
        if not batches:
            raise UsageError("a step needs at least one micro-batch in each rank")
        ends: list[float] = []
        began, self._of = self._now(), len(batches)
        with self._unsynced():
            for number, batch in enumerate(batches):
                if number and self.deadline is not None and self._now() - began >= self.deadline:
                    break
                yield batch
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                ends.append(self._now() - began)
        if self._given is not None and ends[0] >= self._given and not self._has_warned and len(batches) > 1:
            self._has_warned = True
            logger.warning(
                "the deadline of %g s is less than a micro-batch takes (%.3g s), so only the first one of a step "
                "counts; give a longer one, or none",
                self._given,
                ends[0],
            )
        self._count = len(ends)
        if self.deadline is None and (not self._ends or len(self._ends[0]) == len(ends)):
            # Do not record a step of another length, such as the last step of an epoch.
            self._ends.append(ends)

    def reduce(self) -> int:
        """Replace each gradient by the mean over the micro-batches of all ranks. Return their number."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        # The number of computed micro-batches, and the number of all.
        numbers = torch.tensor([self._count, self._of], dtype=torch.float64, device=self._device)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(numbers)
        waited = self._now()
        dist.all_reduce(flat)
        kept, offered = (int(number) for number in numbers.tolist())
        if offered != self._size * self._of:
            raise UsageError(
                f"the ranks have {offered} micro-batches in all, but this one has {self._of} and there are "
                f"{self._size} ranks; give each rank the same number in each step"
            )
        flat /= kept
        for gradient, mean in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        if self.deadline is None:
            self._rest.append(self._now() - waited)
        self._learn(kept, offered)
        return kept

    def _learn(self, kept: int, offered: int) -> None:
        """Count a step. Choose the deadline once enough steps are recorded. If it keeps too few micro-batches, record
        again.
        """
        if self.deadline is not None:
            self.kept, self.offered = self.kept + kept, self.offered + offered
            if self._given is None and self.offered >= 5 * self._record * offered and self.share < self._keep:
                logger.info(
                    "the deadline keeps %.0f %% of the micro-batches; times are recorded again", 100 * self.share
                )
                self._restart(None)
        elif len(self._ends) >= self._record:
            ends, rest = self._gathered()
            self._restart(best_deadline(ends, rest, self._keep))

    def _restart(self, deadline: float | None) -> None:
        self.deadline, self.kept, self.offered = deadline, 0, 0
        self._ends.clear()
        self._rest.clear()

    def _gathered(self) -> tuple[NDArray[np.float64], float]:
        """Return the recorded times of all ranks, and the mean seconds of the rest of a step. The results are equal in
        all ranks.
        """
        own = torch.tensor(self._ends, dtype=torch.float64, device=self._device)
        every = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(every, own)
        rest = torch.tensor(self._rest, dtype=torch.float64, device=self._device).mean()
        dist.all_reduce(rest)
        return torch.stack(every, 1).cpu().numpy(), rest.item() / self._size


def best_deadline(ends: NDArray[np.float64], rest: float, keep: float) -> float:
    """Return the deadline that keeps at least the share `keep` of the micro-batches and processes most of them per
    second.

    `ends` are the seconds after which micro-batches ended, by step, rank and micro-batch. `rest` is the mean seconds of
    the rest of a step. A micro-batch begins when the previous one ends, and counts if it begins before the deadline. A
    step takes as long as its slowest rank (equation 6 of the paper, with recorded times instead of a normal
    distribution). The result is infinite if no deadline is better than having none.
    """
    begins = np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    # Only the times at which micro-batches begin make a difference. Quantiles of them are enough candidates.
    candidates = np.unique(np.quantile(begins[..., 1:], np.linspace(0, 1, 201))) if ends.shape[-1] > 1 else ()
    best, rate = math.inf, ends.size / (ends.max(axis=(1, 2)) + rest).sum()
    for candidate in candidates:
        counts = begins < candidate
        counts[..., 0] = True
        kept = counts.sum()
        seconds = (np.where(counts, ends, 0.0).max(axis=(1, 2)) + rest).sum()
        if kept >= keep * ends.size and kept / seconds > rate:
            best, rate = float(candidate), kept / seconds
    return best
