"""Samplers propose params and learn from losses (ask and tell), within one subspace or in the whole space.

`random` has the protocol `Sampler`. Each sampler is a module of its own and a line of `core.names`; `find_sampler`
finds it by name. `wrapped` has samplers around other samplers, `gaussian_process` the model of `gp`, and `avoidance`
how `gp` and `tpe` avoid failures.

All random draws of a sampler come from its seed, so the trials of a random search do not depend on the machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

from shadho_celery.core.checks import check_name
from shadho_celery.core.names import SAMPLERS, WHOLE_SAMPLERS, named
from shadho_celery.errors import UsageError
from shadho_celery.samplers.optuna import make_optuna_sampler
from shadho_celery.samplers.random import MakeSampler, Sampler, spans_space
from shadho_celery.samplers.wrapped import ByBudget, OwnSampler, Unrepeated
from shadho_celery.space.split import Subspace

#: samplers that learn the losses of each budget separately; samplers of Optuna do so, too
BY_BUDGET = ("tpe", "cma")
#: samplers that learn from all budgets together
OF_ALL_BUDGETS = ("auto", "gp")
#: samplers that cannot learn several losses
OF_ONE_LOSS = ("gp", "cma", "optuna:CmaEsSampler")

#: prefix of the names of Optuna's samplers
OPTUNA = "optuna:"


@dataclass(frozen=True)
class Maker:
    """Factory of samplers.

    It wraps them so that they learn by budget (`ByBudget`) and repeat no point (`Unrepeated`).
    """

    #: creates the sampler itself
    make: MakeSampler
    #: True if it makes one sampler that draws in the whole space
    spans_space: bool
    _: KW_ONLY
    #: budgets whose losses the sampler learns separately, the lowest first; () if it does not distinguish budgets
    budgets: Sequence[float] = ()
    #: True for a `WholeSampler`, which learns in the whole space, and repeats no point of a finite subspace
    is_whole: bool = False

    def __call__(self, subspace: Subspace, entropy: Sequence[int]) -> Sampler:
        """Return a sampler of a subspace, or of the whole space."""
        sampler = self.learner(subspace, entropy)
        return Unrepeated(sampler, subspace, entropy) if self.is_whole else sampler

    def learner(self, subspace: Subspace, entropy: Sequence[int]) -> Sampler:
        """Return the sampler without `Unrepeated`. If `is_whole`, several subspaces may share it, each with an
        `Unrepeated`.
        """
        return ByBudget(self.make, self.budgets, subspace, entropy) if self.budgets else self.make(subspace, entropy)


def find_sampler(
    name: str | MakeSampler, limit: int | None = None, objectives: int = 1, budgets: Sequence[float] = ()
) -> Maker:
    """Return a factory of the samplers called `name`, in a study of at most `limit` trials and this many `objectives`.

    With `budgets`, the lowest first, samplers that learn from losses learn each budget separately. `name` may also be a
    user's own class. Raises UsageError for an unknown name, and for a sampler that does not support several objectives.
    """
    if not isinstance(name, str):
        return Maker(partial(OwnSampler, name), spans_space(name))
    if objectives > 1 and name in OF_ONE_LOSS:
        raise UsageError(f"sampler {name} learns one loss, but this study has several; choose auto or tpe")
    if name.startswith(OPTUNA):
        make = make_optuna_sampler(name.removeprefix(OPTUNA), objectives)
        return Maker(make, spans_space(make), budgets=budgets)
    check_name("sampler", name, (*SAMPLERS, f"{OPTUNA}NAME"))
    make = named(SAMPLERS[name])
    make = partial(make, limit=limit) if name == "auto" else make
    make = partial(make, budgets=budgets) if name in OF_ALL_BUDGETS else make
    return Maker(make, spans_space(make), budgets=budgets if name in BY_BUDGET else (), is_whole=name in WHOLE_SAMPLERS)
