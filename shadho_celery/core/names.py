"""Names of samplers, policies, pruners and the like, each with its module and class.

Help texts and error messages list the names without importing the modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

#: name -> module and class, in the order in which help texts show them
SAMPLERS: Mapping[str, str] = {
    "auto": "samplers.auto:AutoSampler",
    "random": "samplers.random:RandomSampler",
    "tpe": "samplers.tpe:TpeSampler",
    "gp": "samplers.gp:GpSampler",
    "qmc": "samplers.qmc:QmcSampler",
    "grid": "samplers.grid:GridSampler",
    "cma": "samplers.cma:CmaSampler",
}
#: samplers that learn in the whole space, and try no point of a finite subspace twice
WHOLE_SAMPLERS = ("auto", "tpe", "gp")
POLICIES: Mapping[str, str] = {
    "cost": "placement.policies:CostPolicy",
    "paper": "placement.paper:PaperPolicy",
    "fifo": "placement.policies:FifoPolicy",
}
SHARES: Mapping[str, str] = {
    "even": "placement.shares:EvenShares",
    "uniform": "placement.shares:UniformShares",
    "promise": "placement.shares:PromiseShares",
    "paper": "placement.shares:PaperShares",
}
#: ways to give trials budgets: `how` of the setting `fidelity`
FIDELITIES: Mapping[str, str] = {
    "auto": "fidelity.trusting:TrustingAsha",
    "halving": "fidelity.brackets:SuccessiveHalving",
    "hyperband": "fidelity.brackets:Hyperband",
    "asha": "fidelity.asha:Asha",
    "dehb": "fidelity.dehb:Dehb",
}
#: settings of pruners
PRUNERS: Mapping[str, str] = {
    "median": "fidelity.pruners:Median",
    "percentile": "fidelity.pruners:Percentile",
    "patience": "fidelity.pruners:Patience",
    "threshold": "fidelity.pruners:Threshold",
    "asha": "fidelity.pruners:Asha",
}
#: function behind `context.launch`, which needs torch
LAUNCH = "ranks.launch:launch"
#: value of the setting `pruner` that stands for no pruner, for a resumed study that had one
NO_PRUNER = "none"


def named(place: str) -> Any:
    """Import a module and return the class in it. `place` is a value of one of the tables: ``module:class``."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"shadho_celery.{module}"), name)
