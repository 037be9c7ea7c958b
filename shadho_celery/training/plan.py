"""Plan of a training: the arguments of `Gang.fit` and `Gang.steps` as a record, and a decorator that creates it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from shadho_celery.core.checks import check_whole
from shadho_celery.core.settings import refuse_unknown
from shadho_celery.errors import UsageError
from shadho_celery.training.replica.batches import Batches, Data, Loss, Weight, check_loss


class Stateful(Protocol):
    """An object whose state is saved in the checkpoint, such as a torch scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@dataclass(frozen=True)
class Plan:
    """Arguments of `Gang.fit` and `Gang.steps`: the parts of a training, and its settings.

    Raises UsageError for settings that are not valid.
    """

    #: the model to train, and an optimizer of its parameters
    model: nn.Module
    optimizer: Optimizer
    #: tensors of equal first dimension, a map-style Dataset, or a DataLoader, of which only the data set, the collate
    #: function and the workers are used
    data: Data
    #: loss(model, batch) returns the mean loss of a batch of `batch` examples, a scalar tensor
    loss: Loss
    _: KW_ONLY
    #: number of steps in all, including those before a restart
    steps: int
    #: number of examples in the batch of each replica
    batch: int = 32
    #: number of parts of a batch; a gradient may be abandoned between them
    micro_batches: int = 1
    #: seed of the order of the data and of random numbers in the model; None for the trial's seed
    seed: int | None = None
    #: called after each step with the number of steps done and the loss of the step
    on_step: Callable[[int, float], None] | None = None
    #: evaluate(model) returns the loss that is reported; None for the mean training loss since the last report
    evaluate: Callable[[nn.Module], float] | None = None
    #: the training ends once the reported loss is at most this; None to take all steps
    goal: float | None = None
    #: steps between two reports; None for 20 reports in all
    report_every: int | None = None
    #: steps between two checkpoints; 0 for none
    checkpoint_every: int = 100
    #: decay of an exponential moving average of the parameters, which is evaluated and finally put into the model
    ema: float | None = None
    #: torch scheduler of the optimizer, which is stepped after each step, also during the warm-up
    schedule: LRScheduler | None = None
    #: number of first steps in which the learning rates rise linearly
    warmup: int = 0
    #: maximum norm of a gradient
    clip: float | None = None
    #: True to multiply the learning rates by the number of replicas (Goyal et al., arXiv 1706.02677)
    scale_with_replicas: bool = False
    #: weight(batch) is the weight of a batch's loss in the mean of a step, such as its number of tokens
    weight: Weight | None = None
    #: torch GradScaler with the settings and the state of the loss scale, for gradients in half precision
    scaler: GradScaler | None = None
    #: objects whose `state_dict` is saved in the checkpoint, by name
    keep: Mapping[str, Stateful] | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)
        if self.weight is not None and not callable(self.weight):
            raise UsageError(f"weight is {self.weight!r}; give a function of a batch, which returns its weight")
        check_whole(1, steps=self.steps)
        check_whole(1, other="or None", report_every=self.report_every)
        check_whole(0, checkpoint_every=self.checkpoint_every)
        check_whole(seed=self.seed)
        # Unlike other schedules, OneCycleLR raises an error beyond its last step.
        if isinstance(self.schedule, OneCycleLR) and self.schedule.total_steps < self.steps:
            raise UsageError(
                f"the schedule OneCycleLR ends at step {self.schedule.total_steps} of {self.steps}; "
                f"construct it with total_steps={self.steps}"
            )

    def batches(self, places: int, seed: int) -> Batches:
        """Return the stream of batches of `places` replicas. Raises UsageError for data that are not valid."""
        return Batches(self.data, batch=self.batch, seed=seed, places=places, micro_batches=self.micro_batches)


P = ParamSpec("P")
Caller = TypeVar("Caller")
Result = TypeVar("Result")


def taking(
    record: Callable[P, Plan],
) -> Callable[[Callable[[Caller, Plan], Result]], Callable[Concatenate[Caller, P], Result]]:
    """Return a decorator for a method with a record as its argument. Callers give the record's fields as arguments
    instead.
    """
    parameters = inspect.signature(record).parameters.values()

    def decorate(method: Callable[[Caller, Plan], Result]) -> Callable[Concatenate[Caller, P], Result]:
        @wraps(method)
        def call(self: Caller, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            return method(self, record(*args, **kwargs))

        # `help` shows this signature.
        own, _ = inspect.signature(method).parameters.values()
        vars(call)["__signature__"] = inspect.Signature([own, *parameters])
        return refuse_unknown(call)

    return decorate
