"""Samplers by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shadho_celery.errors import UsageError
from shadho_celery.samplers.base import Sampler
from shadho_celery.samplers.random import RandomSampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.space.split import Subspace

SAMPLERS: dict[str, Callable[[Subspace, Sequence[int]], Sampler]] = {
    "random": RandomSampler,
    "tpe": TpeSampler,
}


def make_sampler(name: str, subspace: Subspace, entropy: Sequence[int]) -> Sampler:
    """The sampler called `name` for `subspace`, seeded with `entropy`; UsageError for an unknown name."""
    check(name)
    return SAMPLERS[name](subspace, entropy)


def check(name: str) -> None:
    """Raise UsageError for a name that no sampler has."""
    if name not in SAMPLERS:
        raise UsageError(f"there is no sampler {name!r}; choose one of {', '.join(SAMPLERS)}")
