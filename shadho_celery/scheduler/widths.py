"""Width of a trial: its number of slots of one class, as set in the study file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shadho_celery.core.checks import short
from shadho_celery.core.settings import SlotsSetting
from shadho_celery.core.trial import MAX_SLOTS, Params
from shadho_celery.errors import UsageError
from shadho_celery.space.split import Subspace

#: function from drawn params to the number of slots
Width = Callable[[Params], int]

#: number of draws from each subspace with which the setting is tested before the study starts
SAMPLES = 8


def make_width(slots: SlotsSetting, subspaces: Sequence[Subspace], name: str = "slots") -> Width:
    """Return the setting called `name`, slots or gpus, as a function of drawn params. Raises UsageError unless it gives
    whole numbers from 1 to MAX_SLOTS.
    """
    space = subspaces[0].space
    if isinstance(slots, int):
        width = _count(slots, name)
        return lambda params: width

    def width_of(params: Params) -> int:
        try:
            values = space.evaluate(params)
            if callable(slots):
                return _count(slots(values), name)
            if not isinstance(values, Mapping) or slots not in values:
                raise UsageError(
                    f"STUDY['{name}'] is {slots!r}, which is not a key of the params; give a number or a function"
                )
            return _count(values[slots], name)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"STUDY['{name}'] failed: {type(error).__name__}: {error}; see {dict(params)}") from error

    generator = np.random.default_rng(0)
    for subspace in subspaces:
        for params in subspace.sample(generator, SAMPLES):
            width_of(params)
    return width_of


def widest(width: Width, subspaces: Sequence[Subspace]) -> int:
    """Return the largest width, estimated from some draws of each subspace. Raises UsageError like `make_width`."""
    generator = np.random.default_rng(1)
    return max(width(params) for subspace in subspaces for params in subspace.sample(generator, 8 * SAMPLES))


def _count(value: object, name: str) -> int:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_SLOTS:
        raise UsageError(
            f"STUDY['{name}'] gives {short(value, 60)}; a trial takes a whole number of {name} from 1 to {MAX_SLOTS}"
        )
    return number
