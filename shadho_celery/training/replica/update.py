"""Step of an optimizer with a schedule of learning rates, warm-up and clipping; and the scale of the loss."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shadho_celery.core.checks import check_whole
from shadho_celery.errors import ShadhoError, UsageError

#: a training has diverged if its loss scale falls below this: then gradients overflow even without scaling
MIN_LOSS_SCALE = 1.0


class Diverged(ShadhoError):
    """The training diverged: its loss or gradients are not finite. Lower the learning rate or clip the gradients."""


class Update:
    """Step of an optimizer, with a schedule of learning rates, warm-up and clipping.

    `schedule` is a torch scheduler of the optimizer. It is stepped at each step, also if the step was skipped because
    no gradient was finite. ReduceLROnPlateau gets the mean training loss of the step. In the first `warmup` steps, the
    learning rates rise in proportion to the number of the step. `clip` is the maximum norm of the gradient. `rate` is a
    factor on all learning rates. Raises UsageError for settings that are not valid.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: LRScheduler | None = None,
        *,
        warmup: int = 0,
        clip: float | None = None,
        rate: float = 1.0,
    ) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
            raise UsageError(
                f"optimizer is {kind}; give one that steps along a gradient, such as SGD(model.parameters())"
            )
        if schedule is not None and getattr(schedule, "optimizer", None) is not optimizer:
            raise UsageError(
                f"schedule is {schedule!r}; give a torch scheduler that was constructed with the gang's own optimizer, "
                "such as CosineAnnealingLR(optimizer, T_max=steps)"
            )
        check_whole(0, warmup=warmup)
        if clip is not None and not (isinstance(clip, int | float) and 0 < clip < math.inf):
            raise UsageError(f"clip is {clip!r}; give a maximum norm of the gradient above 0, or None for no clipping")
        self.optimizer, self.schedule = optimizer, schedule
        self._warmup, self._clip, self._rate = warmup, clip, rate
        #: number of steps done
        self.done = 0
        self._start = (copy.deepcopy(schedule.state_dict()) if schedule is not None else None, self._rates())
        self._seen = self._position()

    @property
    def settings(self) -> str:
        """The settings as text. A checkpoint can be used only if they are equal."""
        state = self._start[0]
        described = None if state is None else (type(self.schedule).__name__, sorted(state.items()))
        return f"{described} {self._warmup} {self._clip} {self._rate}"

    def apply(self, parameters: Iterable[Tensor], scale: float = 1.0) -> None:
        """Take one step of the optimizer along the parameters' gradients, with learning rates multiplied by `scale`."""
        if self._clip is not None:
            clip_grad_norm_(parameters, self._clip)
        factor = scale * self.factor
        rates = self._rates() if factor != 1.0 else []
        for group, rate in zip(self.optimizer.param_groups, rates, strict=bool(rates)):
            group["lr"] = rate * factor
        try:
            self.optimizer.step()
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=bool(rates)):
                group["lr"] = rate

    @property
    def factor(self) -> float:
        """Factor on the learning rates in the current step, from warm-up and linear scaling."""
        return self._rate * (min(1.0, (self.done + 1) / self._warmup) if self._warmup else 1.0)

    def advance(self, loss: float = math.nan) -> None:
        """End a step with this mean loss: step the schedule. Raises UsageError if the user's code stepped it too."""
        if self.schedule is not None:
            if self._position() != self._seen:
                raise UsageError(
                    "the schedule or the learning rate was changed by hand as well; the gang steps its schedule after "
                    "each step: remove schedule.step() from on_step, or leave schedule= out"
                )
            with warnings.catch_warnings():
                # Ignore torch's warnings about the order of calls. A step may be skipped, a replica that joins late
                # steps only the schedule, and in a spawned replica the optimizer is a copy that the schedule has not
                # marked.
                for message in ("Detected call of `lr_scheduler.step", "Seems like `optimizer.step"):
                    warnings.filterwarnings("ignore", message=message)
                if not isinstance(self.schedule, ReduceLROnPlateau):
                    self.schedule.step()
                elif math.isfinite(loss):
                    self.schedule.step(loss)
            self._seen = self._position()
        self.done += 1

    def go_to(self, done: int) -> None:
        """Set the learning rates to their values after `done` steps. The schedule must not depend on the loss."""
        if done < self.done:
            state, rates = self._start
            self.restore({"done": 0, "schedule": copy.deepcopy(state)})
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self._seen = self._position()
        while self.done < done:
            self.advance()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"done": self.done, "schedule": None if self.schedule is None else self.schedule.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint. The learning rates are restored with the optimizer's state."""
        self.done = state["done"]
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self._seen = self._position()

    def _rates(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _position(self) -> tuple[object, ...]:
        rates = (rate.item() if isinstance(rate, torch.Tensor) else rate for rate in self._rates())
        return (getattr(self.schedule, "last_epoch", None), *rates)


class LossScale:
    """Scale of the loss for gradients in half precision. It follows the rule and the settings of a torch GradScaler.

    Replicas compute gradients of the scaled loss, and divide them by the scale. After a step in which a gradient
    overflowed, the scale is reduced. After `growth_interval` steps in a row without an overflow, the scale is
    increased.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise UsageError(f"scaler is {scaler!r}; give a torch.amp.GradScaler, or None")
        self._scaler = scaler
        #: the scaler's ``state_dict()``; empty without a scaler, or if the scaler is disabled
        self.state: dict[str, Any] = scaler.state_dict() if scaler is not None else {}
        #: True if a gradient of the current step overflowed
        self.overflowed = False

    @property
    def value(self) -> float:
        """Factor on the loss; 1 without a scaler."""
        return float(self.state.get("scale", 1.0))

    @property
    def in_use(self) -> bool:
        """True if the loss is scaled."""
        return bool(self.state)

    def advance(self) -> None:
        """End a step: reduce or increase the scale if that is due. Raises Diverged if the scale falls below
        MIN_LOSS_SCALE.
        """
        if not self.state:
            return
        state, self.state = self.state, dict(self.state)
        if self.overflowed:
            self.state |= {"scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
        elif state["_growth_tracker"] + 1 == state["growth_interval"]:
            self.state |= {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
        else:
            self.state["_growth_tracker"] += 1
        self.overflowed = False
        if self.value < MIN_LOSS_SCALE:
            raise Diverged("the training diverged: gradients overflow even if the loss is not scaled; check the loss")

    def restore(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint."""
        self.state = dict(state)

    def keep(self) -> None:
        """Write the state into the user's scaler."""
        if self._scaler is not None and self.state:
            self._scaler.load_state_dict(self.state)
