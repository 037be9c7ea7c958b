"""Optuna's names of the laws of labels."""

from __future__ import annotations

from functools import partial

from shadho_celery.space.schema import choice, number

FloatDistribution = partial(number, "distribution", is_int=False)
IntDistribution = partial(number, "distribution", is_int=True)
CategoricalDistribution = partial(choice, "distribution")
