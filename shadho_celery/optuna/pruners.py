"""Optuna's pruners by the names of their classes. Each is the setting `pruner` of this package."""

from __future__ import annotations

from typing import Any

from shadho_celery.core.names import NO_PRUNER
from shadho_celery.optuna.samplers import maker

_STARTED = {"n_startup_trials": "startup_trials", "n_warmup_steps": "warmup_steps"}
#: class -> its setting, and names of its options here, in the order of Optuna's arguments; "" for one without effect
_HERE: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "MedianPruner": ({"how": "median"}, _STARTED),
    "PercentilePruner": ({"how": "percentile"}, {"percentile": "percentile", **_STARTED}),
    "SuccessiveHalvingPruner": ({"how": "asha", "eta": 4}, {"min_resource": "least", "reduction_factor": "eta"}),
    "HyperbandPruner": ({"how": "asha"}, {"min_resource": "least", "max_resource": "", "reduction_factor": "eta"}),
    "PatientPruner": ({"how": "patience"}, {"wrapped_pruner": "", "patience": "steps", "min_delta": "least_gain"}),
    "ThresholdPruner": ({"how": "threshold"}, {"lower": "lower", "upper": "upper", "n_warmup_steps": "warmup_steps"}),
    "NopPruner": ({"how": NO_PRUNER}, {}),
}


def __getattr__(name: str) -> Any:
    return maker(name, _HERE)
