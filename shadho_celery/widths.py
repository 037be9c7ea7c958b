"""How many slots a trial takes, as its study file says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shadho_celery.errors import UsageError
from shadho_celery.space.compile import Space
from shadho_celery.space.split import Subspace, split

#: a number, a key of the params as the objective gets them, or a function of those
Slots = int | str | Callable[[Any], int]

#: drawn params -> slots
Width = Callable[[Mapping[str, Any]], int]

#: params of each subspace that a study file's word is tried on before the study begins
SAMPLES = 8

#: more slots than any gang has replicas
MOST = 1024


def make_width(slots: Slots, space: Space, subspaces: Sequence[Subspace]) -> Width:
    """`slots` as a function of drawn params. Raises UsageError where it gives no whole number from 1 up."""
    if isinstance(slots, int):
        width = _whole(slots)
        return lambda params: width
    read = slots if callable(slots) else _by_key(slots)

    def width_of(params: Mapping[str, Any]) -> int:
        try:
            return _whole(read(space.evaluate(params)))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"STUDY['slots'] failed: {type(error).__name__}: {error}; see {dict(params)}") from error

    generator = np.random.default_rng(0)
    for subspace in subspaces:
        for params in subspace.sample(generator, SAMPLES):
            width_of(params)
    return width_of


def widest(slots: Slots, space: Space) -> int:
    """The most slots that trials take, as far as some draws of each subspace show. Raises UsageError as above."""
    subspaces = split(space)
    width = make_width(slots, space, subspaces)
    generator = np.random.default_rng(1)
    return max(width(params) for subspace in subspaces for params in subspace.sample(generator, 8 * SAMPLES))


def _by_key(key: str) -> Callable[[Any], Any]:
    def read(params: Any) -> Any:
        if not isinstance(params, Mapping) or key not in params:
            raise UsageError(f"STUDY['slots'] is {key!r}, which is no key of the params; give a number or a function")
        return params[key]

    return read


def _whole(value: Any) -> int:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST:
        raise UsageError(f"STUDY['slots'] gives {value!r}; a trial takes a whole number of slots from 1 to {MOST}")
    return number
