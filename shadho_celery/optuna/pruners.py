"""Optuna's pruners by the names of their classes. Each is the setting `pruner` of this package."""

from __future__ import annotations

from typing import Any

from shadho_celery.core.names import NO_PRUNER
from shadho_celery.errors import UsageError

#: setting `pruner` of a study
Pruner = dict[str, Any] | str


def MedianPruner(n_startup_trials: int = 5, n_warmup_steps: int = 0, interval_steps: int = 1) -> Pruner:  # noqa: N802
    """Return the pruner median. Every report is judged, whatever `interval_steps` is."""
    return {"how": "median", "startup_trials": max(1, n_startup_trials), "warmup_steps": n_warmup_steps}


def PercentilePruner(  # noqa: N802
    percentile: float, n_startup_trials: int = 5, n_warmup_steps: int = 0, interval_steps: int = 1
) -> Pruner:
    """Return the pruner percentile. Every report is judged, whatever `interval_steps` is."""
    started = {"startup_trials": max(1, n_startup_trials), "warmup_steps": n_warmup_steps}
    return {"how": "percentile", "percentile": percentile, **started}


def SuccessiveHalvingPruner(  # noqa: N802
    min_resource: int | str = "auto",
    reduction_factor: int = 4,
    min_early_stopping_rate: int = 0,
    bootstrap_count: int = 0,
) -> Pruner:
    """Return the pruner asha, which judges a trial at its steps `min_resource` times powers of `reduction_factor`."""
    least = 1 if isinstance(min_resource, str) else min_resource
    return {"how": "asha", "eta": reduction_factor, "least": least * reduction_factor**min_early_stopping_rate}


def HyperbandPruner(  # noqa: N802
    min_resource: int = 1, max_resource: int | str = "auto", reduction_factor: int = 3, bootstrap_count: int = 0
) -> Pruner:
    """Return the pruner asha, of Hyperband's brackets the one that prunes most."""
    return SuccessiveHalvingPruner(min_resource, reduction_factor)


def PatientPruner(wrapped_pruner: Pruner | None, patience: int, min_delta: float = 0.0) -> Pruner:  # noqa: N802
    """Return the pruner patience. Raises UsageError for another pruner within it."""
    if wrapped_pruner is not None:
        raise UsageError("PatientPruner has no other pruner within it here; give None, or the other pruner alone")
    return {"how": "patience", "steps": max(1, patience), "least_gain": min_delta}


def ThresholdPruner(  # noqa: N802
    lower: float | None = None, upper: float | None = None, n_warmup_steps: int = 0, interval_steps: int = 1
) -> Pruner:
    """Return the pruner threshold."""
    ends = {name: end for name, end in (("lower", lower), ("upper", upper)) if end is not None}
    return {"how": "threshold", **ends, "warmup_steps": n_warmup_steps}


def NopPruner() -> Pruner:  # noqa: N802
    """Return the setting for no pruner."""
    return NO_PRUNER


_NAMES = [each.__name__ for each in (MedianPruner, PercentilePruner, SuccessiveHalvingPruner, HyperbandPruner)]
_NAMES += [each.__name__ for each in (PatientPruner, ThresholdPruner, NopPruner)]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"there is no pruner {name} here; choose one of {', '.join(_NAMES)}")
