"""Options of the command line, as they were given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shadho_celery.core.settings import KEPT, StudySettings
from shadho_celery.store.sql import DEFAULT_STORE


@dataclass(kw_only=True)
class Options:
    """The command line; None where an option was not given."""

    study: str
    trials: int | None = None
    seconds: float | None = None
    target: float | None = None
    seed: int | None = None
    sampler: str | None = None
    policy: str | None = None
    shares: str | None = None
    name: str | None = None
    resume: bool = False
    store: str = DEFAULT_STORE
    #: slots by class of the embedded workers; empty for the default
    workers: Mapping[str, int] = field(default_factory=dict)
    #: False where late trials are not to be copied to idle slots
    speculate: bool | None = None
    weight: float | None = None
    #: seconds after which a trial is stopped
    trial_timeout: float | None = None
    as_json: bool = False
    #: True where broker and Redis are named
    fleet: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are given, and so kept for a later run."""
        return {name: getattr(self, name) for name in KEPT if getattr(self, name) is not None}

    def over(self, stated: Mapping[str, Any], earlier: Mapping[str, Any] = MappingProxyType({})) -> StudySettings:
        """Return the settings in force: the option, else an earlier run's, else the study file's, else the default."""
        return StudySettings().over({**stated, **earlier, **self.given})
