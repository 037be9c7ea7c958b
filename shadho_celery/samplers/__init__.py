"""Samplers propose params, and learn from losses: ask and tell, within one subspace.

May use: core, space, store, objective, predictors, study. `base` is the role; a sampler is one file and one line here.
Why it is so: values in, decisions out. A sampler draws nothing but from its seed, so that the trials of a random search
are fixed whatever the machines, and failures teach every sampler alike (`failure_avoidance`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shadho_celery.core.checks import check_name
from shadho_celery.samplers.auto import AutoSampler
from shadho_celery.samplers.base import Sampler
from shadho_celery.samplers.gp import GpSampler
from shadho_celery.samplers.grid import GridSampler
from shadho_celery.samplers.optuna import PREFIX, MakeOptunaSampler
from shadho_celery.samplers.own import MakeOwnSampler
from shadho_celery.samplers.qmc import QmcSampler
from shadho_celery.samplers.random import RandomSampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.space.split import Subspace

#: called with a subspace and the words of its seed
MakeSampler = Callable[[Subspace, Sequence[int]], Sampler]

SAMPLERS: dict[str, MakeSampler] = {
    "auto": AutoSampler,
    "random": RandomSampler,
    "tpe": TpeSampler,
    "gp": GpSampler,
    "qmc": QmcSampler,
    "grid": GridSampler,
}


def find_sampler(name: str | MakeSampler, limit: int | None = None) -> MakeSampler:
    """Return what makes the samplers called `name`, in a study of at most `limit` trials.

    A class of one's own makes its samplers itself. Raises UsageError for an unknown name.
    """
    if not isinstance(name, str):
        return MakeOwnSampler(name)
    if name.startswith(PREFIX):
        return MakeOptunaSampler(name.removeprefix(PREFIX))
    check_name("sampler", name, (*SAMPLERS, f"{PREFIX}NAME"))
    return partial(AutoSampler, limit=limit) if name == "auto" else SAMPLERS[name]


def make_sampler(name: str, subspace: Subspace, entropy: Sequence[int]) -> Sampler:
    """Return the sampler called `name` for `subspace`, seeded with `entropy`. Raises UsageError for an unknown one."""
    return find_sampler(name)(subspace, entropy)
