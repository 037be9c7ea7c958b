"""Progress of one training in the coordinator's process: log, moving average, evaluation, reports and checkpoints.

Each start of a coordinator claims the files of the checkpoint, with an epoch one higher than the last claim's. A
coordinator that was assumed dead but is not finds the later claim before it writes, and ends.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from shadho_celery.core.addresses import make_token
from shadho_celery.core.files import PART, replacing
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.objective.context import Context
from shadho_celery.training.coordinator.centre import ModelCentre
from shadho_celery.training.plan import Plan
from shadho_celery.training.replica.batches import Draws
from shadho_celery.training.replica.update import Diverged
from shadho_celery.training.report import Log, Step


class Superseded(ShadhoError):
    """Another coordinator has taken over this training. This one ends and has written nothing since."""


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record of the latest start of a coordinator, in a file beside the checkpoint."""

    #: number of the start, from 1
    epoch: Annotated[int, Meta(ge=1)]
    #: secret of the gang. It stays the same from start to start, so that replicas can reconnect to the next coordinator
    token: str = field(default_factory=make_token)
    #: port on which the coordinator listens; 0 before it is known
    port: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    #: random name of the start
    owner: str = field(default_factory=lambda: secrets.token_hex(8))


class Checkpoints:
    """Files of one training in a trial's folder: the checkpoint and the claim. Their names contain a digest of its
    settings.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        #: file with the training's state
        self.path = folder / f"gang-{digest}.pt"
        self._claims = folder / f"gang-{digest}.json"
        self._claim: Claim | None = None

    def other(self) -> Path | None:
        """Return the checkpoint of a training with other settings in the same folder, or None."""
        others = (path for path in self.path.parent.glob("gang-*.pt") if path != self.path)
        return min(others, default=None)

    def claim(self) -> Claim:
        """Claim the training for this coordinator. The token and the port of the last start, if any, are used again."""
        last = self._read_claim()
        for part in self.path.parent.glob(f".{self.path.stem}.*{PART}"):
            # Remove files that a coordinator has left because it was killed while it wrote.
            part.unlink(missing_ok=True)
        self._claim = Claim(epoch=last.epoch + 1, token=last.token, port=last.port) if last else Claim(epoch=1)
        self._write_claim(self._claim)
        return self._claim

    def record_port(self, port: int) -> None:
        """Record the port on which this coordinator listens."""
        assert self._claim is not None
        self._claim = replace(self._claim, port=port)
        self._write_claim(self._claim)

    def save(self, state: dict[str, Any]) -> None:
        """Save the state atomically. Raises Superseded if another coordinator has claimed the training."""
        self._raise_if_superseded()
        with _replacing(self.path) as file:
            torch.save(state, file)
            # Check again, because writing takes long, and another coordinator may have claimed the training meanwhile.
            self._raise_if_superseded()

    def load(self) -> dict[str, Any] | None:
        """Return the saved state, or None if there is none. Raises ShadhoError if it cannot be read."""
        if not self.path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ShadhoError(
                f"the checkpoint {self.path} cannot be read ({error}); remove it to start from the first step"
            ) from error
        return state

    def remove(self) -> None:
        """Remove the files of a finished training, unless another coordinator has claimed it."""
        if self._read_claim() == self._claim:
            for path in (self.path, self._claims):
                path.unlink(missing_ok=True)

    def _raise_if_superseded(self) -> None:
        # If there is no claim, a coordinator that took over has finished and removed it.
        last = self._read_claim()
        if self._claim is None or last is None or last.owner != self._claim.owner:
            raise Superseded

    def _read_claim(self) -> Claim | None:
        try:
            return msgspec.json.decode(self._claims.read_bytes(), type=Claim)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ShadhoError(
                f"{self._claims} cannot be read ({error}); remove it to start from the beginning"
            ) from error

    def _write_claim(self, claim: Claim) -> None:
        with _replacing(self._claims) as file:
            file.write(msgspec.json.encode(claim))


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """Yield a new file. It replaces `target` at the end of the `with` block, unless the block raises an error."""
    try:
        # Only the owner may read the file, because a claim contains the token.
        with replacing(target, mode=0o600) as file:
            yield file
    except FileNotFoundError:
        if not target.parent.exists():
            raise
        # Another coordinator has removed the new file when it claimed the training.
        raise Superseded from None


logger = logging.getLogger(__name__)

#: number of reports in a whole training, if `report_every` is not given
REPORTS = 20
#: a training has diverged if this many steps in a row had no finite gradient
MAX_NOT_FINITE = 3


class Run:
    """Progress of one training in the coordinator's process: records steps, reports losses and saves checkpoints."""

    def __init__(
        self,
        plan: Plan,
        centre: ModelCentre,
        context: Context,
        log: Log,
        *,
        digest: str,
        examples: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Dropped batches return at the end of each epoch of `examples` examples; 0 means never."""
        self.plan, self.centre, self.context, self.log = plan, centre, context, log
        #: seed of the order of the data, and of random numbers in the model
        self.seed = context.seed if plan.seed is None else plan.seed
        #: batches of the current step
        self.draws = Draws(log.places, batch=plan.batch, examples=examples)
        #: number of steps done, which is the number of the current step
        self.step = 0
        #: value of the last evaluation, or mean training loss of the last report
        self.loss: float | None = None
        self._now = now
        self._last = now()
        self._skipped = 0
        self._every = plan.report_every or max(1, plan.steps // REPORTS)
        self._checkpoints: Checkpoints | None = None
        # A trial with a budget may be promoted to a greater budget. Its training then continues from this checkpoint.
        self._keeps_checkpoint = context.budget is not None
        if plan.checkpoint_every:
            # The name does not contain the trial's number: a promoted trial has another number, but the same folder.
            name = hashlib.sha256(f"{digest}:{centre.settings}".encode()).hexdigest()[:16]
            self._checkpoints = Checkpoints(context.checkpoint_dir, name)

    def claim(self) -> Claim:
        """Claim the training for this process, and restore its checkpoint if there is one."""
        claim = Claim(epoch=1)
        if self._checkpoints is None:
            return claim
        if not self.context.is_copy:
            claim = self._checkpoints.claim()
        state = self._checkpoints.load()
        if state is not None:
            self.centre.restore(state["centre"])
            self.step = state["step"]
            self.log.steps = [Step(*row) for row in state["steps"]]
            for step in self.log.steps:
                self.draws.end_step(step.accepted)
            for name, counts in state["counts"].items():
                getattr(self.log, name).update(counts)
            self.log.resumed_from = self.step
            self.log.notes.append(f"resumed at step {self.step} (epoch {claim.epoch})")
            logger.warning(
                "the training resumes at step %d from the checkpoint %s; remove that file to start from the first step",
                self.step,
                self._checkpoints.path,
            )
        elif self.context.gangs == 1 and (other := self._checkpoints.other()):
            logger.warning(
                "the training starts from the first step: the checkpoint %s is of other arguments, model or data", other
            )
        if self.context.is_copy:
            # A speculative copy starts from the checkpoint of the trial's other attempt, and must not change the files.
            self._checkpoints = None
        return claim

    def record_port(self, port: int) -> None:
        """Record the coordinator's port, for the next start."""
        if self._checkpoints is not None:
            self._checkpoints.record_port(port)

    def start_clock(self) -> None:
        """Start to measure the time of the next step."""
        self._last = self._now()

    @property
    def is_over(self) -> bool:
        """True if the training must end: it is complete, or the trial must stop."""
        return self.is_complete or self.context.should_stop()

    @property
    def is_complete(self) -> bool:
        """True if all steps are done, or the goal is reached."""
        goal = self.plan.goal
        return self.step >= self.plan.steps or (goal is not None and self.loss is not None and self.loss <= goal)

    def record_step(self, places: tuple[int, ...], loss: float, staleness: int = 0) -> None:
        """Record a step that was applied to the model. It was the mean of the vectors of `places`."""
        self._record(places, loss, staleness)
        self._skipped = 0
        self.centre.update_average()

    def refuse(self, loss: float) -> bool:
        """Count a gradient that is not finite. Return True if only the scaled loss has overflowed."""
        is_overflow = self.centre.loss_scale.in_use and math.isfinite(loss)
        self.log.refused["overflow" if is_overflow else "not finite"] += 1
        self.centre.loss_scale.overflowed |= is_overflow
        return is_overflow

    def skip_step(self) -> None:
        """Record a step without a finite gradient: the parameters stay the same, and the next step has other batches.

        Raises UsageError at the first step, and Diverged at the third such step in a row. An overflow raises neither.
        """
        if self.centre.loss_scale.overflowed:
            self._record((), math.nan)
            return
        self._skipped += 1
        if self.step == 0:
            raise UsageError(
                "the loss or its gradient is not finite (NaN or infinite) from the first step; "
                "check the data, the loss function and the learning rate"
            )
        if self._skipped >= MAX_NOT_FINITE:
            raise Diverged(
                f"the training diverged: at step {self.step} no loss or gradient was finite (NaN or infinite); "
                "lower the learning rate or clip the gradients"
            )
        self._record((), math.nan)

    def _record(self, places: tuple[int, ...], loss: float, staleness: int = 0) -> None:
        now = self._now()
        self.log.steps.append(
            Step(
                step=self.step,
                accepted=places,
                loss=loss,
                seconds=now - self._last,
                scale=self.centre.scale,
                staleness=staleness,
                loss_scale=self.centre.loss_scale.value,
            )
        )
        self.log.accepted.update(places)
        self.draws.end_step(places)
        self.centre.end_step(loss)
        self._last = now
        self.step += 1

    def after_step(self) -> None:
        """Call `on_step`. Report the loss and save a checkpoint if that is due.

        This may take long, so call it after the new parameters were queued for the replicas.
        """
        last = self.step >= self.plan.steps
        if self.plan.on_step is not None:
            self.plan.on_step(self.step, self.log.steps[-1].loss)
        if last or self.step % self._every == 0:
            self.loss = self._current_loss()
            # In a study with several objectives, a report needs all of them, and this is the loss of the training only.
            if self.loss is not None and len(getattr(self.context, "objectives", None) or ()) < 2:
                self.context.report(self.step, self.loss)
        every = self.plan.checkpoint_every
        if every and (self.step % every == 0 or (self.is_complete and self._keeps_checkpoint)):
            self.save()

    def save(self) -> None:
        """Write a checkpoint."""
        if self._checkpoints is not None:
            steps = [tuple(step) for step in self.log.steps]
            counts = {name: dict(count) for name, count in vars(self.log).items() if isinstance(count, Counter)}
            self._checkpoints.save({"centre": self.centre.state(), "step": self.step, "steps": steps, "counts": counts})

    def finish(self) -> None:
        """Put the averaged parameters into the model. Remove the checkpoint of a complete training, unless the trial
        has a budget.
        """
        if self.loss is None and self.step:
            # No loss was reported: the training was resumed after its last step, or stopped before its first report.
            self.loss = self._current_loss()
        self.centre.keep_average()
        self.log.dropped_batches = self.draws.lost + self.draws.waiting
        if self._checkpoints is not None and not self._keeps_checkpoint and self.is_complete:
            self._checkpoints.remove()

    def _current_loss(self) -> float | None:
        """Return the loss that `evaluate` computes. Without `evaluate`, return the mean training loss since the last
        report, or None.
        """
        if self.plan.evaluate is None:
            losses = [step.loss for step in self.log.steps[-self._every :] if step.accepted]
            return math.fsum(losses) / len(losses) if losses else None
        model = self.centre.model
        with self.centre.averaged(), torch.no_grad():
            model.eval()
            try:
                return float(self.plan.evaluate(model))
            finally:
                model.train()
