"""Samplers propose params and learn from losses (ask and tell), within one subspace or in the whole space.

May use: core, space, store, objective, predictors, study. `base` has the protocol. A sampler is one file and one line
of `core.names`.

A sampler takes values and returns proposals. All its random draws come from its seed, so the trials of a random search
do not depend on the machines. All samplers learn from failures in the same way (`failure_avoidance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shadho_celery.core.checks import check_name
from shadho_celery.core.names import SAMPLERS, WHOLE_SAMPLERS, named
from shadho_celery.core.settings import words
from shadho_celery.errors import UsageError
from shadho_celery.samplers.base import MakeSampler, Sampler
from shadho_celery.samplers.by_budget import MakeByBudget
from shadho_celery.samplers.optuna import make_optuna_sampler
from shadho_celery.samplers.own import MakeOwnSampler
from shadho_celery.samplers.unrepeated import MakeUnrepeated
from shadho_celery.space.split import Subspace

#: samplers that learn the losses of each budget separately, as those of other libraries do
BY_BUDGET = ("auto", "tpe", "gp", "cma")
#: samplers that cannot learn several losses
OF_ONE_LOSS = ("gp", "cma", "optuna:CmaEsSampler")

#: prefix of the names of Optuna's samplers
OPTUNA = "optuna:"


def find_sampler(
    name: str | MakeSampler, limit: int | None = None, objectives: int = 1, budgets: Sequence[float] = ()
) -> MakeSampler:
    """Return a factory of the samplers called `name`, in a study of at most `limit` trials and this many `objectives`.

    With `budgets`, the lowest first, samplers that learn from losses do so separately by budget. A user's own class is
    its own factory. Raises UsageError for an unknown name, and for a sampler that does not support several objectives.
    """
    if not isinstance(name, str):
        return MakeOwnSampler(name)
    if objectives > 1 and name in OF_ONE_LOSS:
        raise UsageError(f"sampler {name} learns one loss, but this study has several; choose auto or tpe")
    if name.startswith(OPTUNA):
        make = make_optuna_sampler(name.removeprefix(OPTUNA), objectives)
        return MakeByBudget(make, budgets) if budgets else make
    check_name(words("sampler"), name, (*SAMPLERS, f"{OPTUNA}NAME"))
    make = named(SAMPLERS[name])
    make = partial(make, limit=limit) if name == "auto" else make
    make = MakeByBudget(make, budgets) if budgets and name in BY_BUDGET else make
    return MakeUnrepeated(make) if name in WHOLE_SAMPLERS else make


def make_sampler(name: str, subspace: Subspace, entropy: Sequence[int]) -> Sampler:
    """Return the sampler called `name` for `subspace`, seeded with `entropy`. Raises UsageError for an unknown one."""
    return find_sampler(name)(subspace, entropy)
