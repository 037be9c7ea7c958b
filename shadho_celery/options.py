"""What the command line has asked for, and what holds where it has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shadho_celery.search import DEFAULT_POLICY, DEFAULT_SAMPLER, DEFAULT_SHARES
from shadho_celery.store import DEFAULT_STORE

#: options that a study keeps for those who resume it, by the names they have in STUDY
KEPT = ("trials", "seconds", "target", "sampler", "policy", "shares", "speculate", "weight", "trial_timeout")

_DEFAULTS = {
    "sampler": DEFAULT_SAMPLER,
    "policy": DEFAULT_POLICY,
    "shares": DEFAULT_SHARES,
    "speculate": True,
    "weight": 1.0,
}


@dataclass(kw_only=True)
class Options:
    """The command line, as it was given."""

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
    #: True where broker and Redis are somebody else's
    fleet: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The options to be kept that are given."""
        return {name: getattr(self, name) for name in KEPT if getattr(self, name) is not None}

    def over(self, settings: Mapping[str, Any], earlier: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """What holds: the option, else that of an earlier run, else what the study file says, else the default."""
        return {**dict.fromkeys(KEPT), **_DEFAULTS, **settings, **earlier, **self.given}
