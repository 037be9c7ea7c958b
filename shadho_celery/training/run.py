"""What every training does after each step, whoever computed it: log, averages, evaluation, reports, checkpoints."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shadho_celery.context import Context
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.training.centre import ModelCentre
from shadho_celery.training.checkpoints import Checkpoints, Claim
from shadho_celery.training.log import Log, Step

logger = logging.getLogger(__name__)

#: what a log counts, beside its steps
COUNTS = ("accepted", "late", "cancelled", "refused")
#: contexts are told of so many steps, in even distances, where nothing else is said
REPORTS = 20


class Diverged(ShadhoError):
    """The training diverged: its loss or gradients are not finite; lower the learning rate or clip the gradients."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done, as it was given to `Gang.fit`."""

    #: steps in all
    steps: int
    #: examples of one replica's gradient
    batch: int
    #: parts of a batch between which a gradient may be given up
    micro_batches: int = 1
    #: of the data's order and of random draws in the model
    seed: int = 0
    #: called with the number of steps done and the last one's loss, after each
    on_step: Callable[[int, float], None] | None = None
    #: loss of the model on data of its own
    evaluate: Callable[[nn.Module], float] | None = None
    #: steps from one report to the next; None for 20 reports in all
    report_every: int | None = None
    #: steps from one checkpoint to the next; 0 for none
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_batches", "seed", "report_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UsageError(f"{name} is {value!r}; give a whole number")
        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; give the number of steps in all, from 1 up")
        if self.report_every is not None and self.report_every < 1:
            raise UsageError(f"report_every is {self.report_every}; give a number of steps from 1 up, or None")
        if self.checkpoint_every < 0:
            raise UsageError(f"checkpoint_every is {self.checkpoint_every}; give a number of steps, or 0 for none")


class Run:
    """One training under way, in the process that owns the model."""

    def __init__(
        self,
        plan: Plan,
        centre: ModelCentre,
        context: Context,
        *,
        setup: str,
        places: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.centre, self.context = plan, centre, context
        self.log = Log(places=places)
        #: steps done; the parameters are those of this step
        self.step = 0
        #: what the last evaluation gave, or the last reports' mean loss
        self.loss: float | None = None
        self._now = now
        self._last = now()
        self._every = plan.report_every or max(1, plan.steps // REPORTS)
        self._checkpoints: Checkpoints | None = None
        # A trial with a budget may be given a greater one, and goes on from where it stood.
        self._keeps = context.budget is not None
        if plan.checkpoint_every:
            # Not the trial's number: one that goes on with a greater budget has another, and the same folder.
            told = (context.gangs, plan.seed, plan.batch, plan.micro_batches, places, setup, centre.settings)
            digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
            self._checkpoints = Checkpoints(context.checkpoint_dir, digest)

    def claim(self, token: str | None) -> Claim | None:
        """Take the training over from whoever had it, and go on from its last checkpoint; None without checkpoints."""
        if self._checkpoints is None:
            return None
        # Beside the attempt that it is a copy of, it begins where that one stands and leaves its files alone.
        claim = None if self.context.is_copy else self._checkpoints.claim(token)
        state = self._checkpoints.load()
        if state is not None:
            self.centre.restore(state["centre"])
            self.step = state["step"]
            self.log.steps = [Step.from_row(row) for row in state["steps"]]
            for name, counts in state["counts"].items():
                getattr(self.log, name).update(counts)
            self.log.resumed_from = self.step
            self.log.notes.append(f"resumed at step {self.step} (epoch {claim.epoch if claim else 1})")
            logger.warning(
                "the training goes on from step %d, as %s has it; remove that to begin anew",
                self.step,
                self._checkpoints.path,
            )
        if claim is None:
            self._checkpoints = None
        return claim

    def listening(self, port: int) -> None:
        """Note the port for a later start."""
        if self._checkpoints is not None:
            self._checkpoints.listening(port)

    def start_clock(self) -> None:
        """The time of the next step counts from now."""
        self._last = self._now()

    @property
    def over(self) -> bool:
        """True once all steps are done or the trial shall stop."""
        return self.step >= self.plan.steps or self.context.should_stop()

    def took(self, slots: tuple[int, ...], loss: float) -> None:
        """A step was taken, and the model has its new parameters; without `slots` it was passed over."""
        now = self._now()
        self.log.steps.append(
            Step(step=self.step, slots=slots, loss=loss, seconds=now - self._last, scale=self.centre.scale)
        )
        self.log.accepted.update(slots)
        self._last = now
        self.step += 1
        if slots:
            self.centre.follow()

    def tell(self) -> None:
        """Let everybody know who wants to: after the step's parameters are on their way, for it may take a while."""
        last = self.step >= self.plan.steps
        if self.plan.on_step is not None:
            self.plan.on_step(self.step, self.log.steps[-1].loss)
        if last or self.step % self._every == 0:
            self.loss = self._evaluated()
            if self.loss is not None:
                self.context.report(self.step, self.loss)
        if self.plan.checkpoint_every and (self.step % self.plan.checkpoint_every == 0 or (last and self._keeps)):
            self.save()

    def save(self) -> None:
        """Write a checkpoint."""
        if self._checkpoints is not None:
            steps = [step.as_row() for step in self.log.steps]
            counts = {name: dict(getattr(self.log, name)) for name in COUNTS}
            self._checkpoints.save({"centre": self.centre.state(), "step": self.step, "steps": steps, "counts": counts})

    def finish(self) -> None:
        """The steps are done: leave the model as it shall be, and no checkpoint unless more steps may follow."""
        if self.loss is None and self.step:
            # Resumed where all steps were done, or stopped before the first report.
            self.loss = self._evaluated()
        self.centre.settle()
        if self._checkpoints is not None and not self._keeps and self.step >= self.plan.steps:
            self._checkpoints.remove()

    def no_gradient(self) -> ShadhoError:
        """The error for a step in which nobody's gradient was finite."""
        if self.step == 0:
            return UsageError(
                "the loss or its gradient is not finite (NaN or infinite) from the first step; "
                "look at the data, the loss function and the learning rate"
            )
        return Diverged(
            f"the training diverged: at step {self.step} no loss or gradient was finite (NaN or infinite); "
            "lower the learning rate or clip the gradients"
        )

    def _evaluated(self) -> float | None:
        """The loss as it is now; without `evaluate` the mean over about the last report's distance, if there is one."""
        if self.plan.evaluate is None:
            losses = [step.loss for step in self.log.steps[-self._every :] if step.slots]
            return math.fsum(losses) / len(losses) if losses else None
        model = self.centre.model
        with self.centre.averaged(), torch.no_grad():
            model.eval()
            try:
                return float(self.plan.evaluate(model))
            finally:
                model.train()
