"""The names that a command's help shows are those of what there is."""

from __future__ import annotations

from shadho_celery import samplers
from shadho_celery.core.settings import EARLIER_DEFAULTS, IN_FORCE, KEPT, SAMPLERS, StudySettings


def test_the_names_of_samplers_are_those_of_the_samplers_that_there_are() -> None:
    assert tuple(samplers.SAMPLERS) == SAMPLERS


def test_each_setting_that_is_kept_as_it_was_in_force_has_the_default_of_the_versions_that_did_not_keep_it() -> None:
    assert {*IN_FORCE} == {*EARLIER_DEFAULTS} <= {*KEPT}
    assert StudySettings(sampler="tpe").in_force()["sampler"] == "tpe"
    assert StudySettings(**EARLIER_DEFAULTS).in_force() == EARLIER_DEFAULTS
