"""Optuna's names for the laws of labels. A law is the distribution from which a label's values are drawn."""

from __future__ import annotations

from functools import partial

from shadho_celery.space.schema import choice, number

FloatDistribution = partial(number, "distribution", is_int=False)
IntDistribution = partial(number, "distribution", is_int=True)
CategoricalDistribution = partial(choice, "distribution")
