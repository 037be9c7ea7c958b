"""The names that a command's help shows are those of what there is."""

from __future__ import annotations

from shadho_celery import samplers
from shadho_celery.core.settings import SAMPLERS


def test_the_names_of_samplers_are_those_of_the_samplers_that_there_are() -> None:
    assert tuple(samplers.SAMPLERS) == SAMPLERS
