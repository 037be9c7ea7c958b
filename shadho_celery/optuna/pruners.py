"""Optuna's pruners by the names of their classes. Each returns a value for this package's setting `pruner`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shadho_celery.core.names import NO_PRUNER
from shadho_celery.optuna.samplers import Known, maker

_STARTED = {"n_startup_trials": "startup_trials", "n_warmup_steps": "warmup_steps"}
_PRUNERS: Mapping[str, Known] = {
    "MedianPruner": ({"how": "median"}, _STARTED),
    "PercentilePruner": ({"how": "percentile"}, {"percentile": "percentile", **_STARTED}),
    "SuccessiveHalvingPruner": ({"how": "asha", "eta": 4}, {"min_resource": "least", "reduction_factor": "eta"}),
    "HyperbandPruner": ({"how": "asha"}, {"min_resource": "least", "max_resource": "", "reduction_factor": "eta"}),
    "PatientPruner": ({"how": "patience"}, {"wrapped_pruner": "", "patience": "steps", "min_delta": "least_gain"}),
    "ThresholdPruner": ({"how": "threshold"}, {"lower": "lower", "upper": "upper", "n_warmup_steps": "warmup_steps"}),
    "NopPruner": ({"how": NO_PRUNER}, {}),
}


def __getattr__(name: str) -> Any:
    return maker(name, _PRUNERS)
