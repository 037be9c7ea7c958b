"""Names of samplers, policies, pruners and the like, each with its module and class.

Help texts and error messages list the names without importing the modules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    "local": "samplers.local:LocalSampler",
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
    "bohb": "fidelity.brackets:Hyperband",
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
#: names in other tools -> the name here, or after "here it is" what to do; each line is of one name or text here. Names
#: are in lower case. A name may be in several lines, of settings and of parts of settings.
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    # arguments and settings
    "objective": ("fn", "func", "function", "trainable", "estimator"),
    "space": ("config", "param_grid", "param_distributions", "param_space", "search_space", "dimensions"),
    "trials": ("n_trials", "max_evals", "max_trials", "num_samples", "n_iter", "n_calls", "get_trials"),
    "seconds": ("timeout", "time_budget_s"),
    "target": ("loss_threshold",),
    "objectives": ("directions",),
    "direction": ("mode",),
    "on_trial": ("callbacks", "callback"),
    "workers": ("n_jobs", "n_workers", "max_concurrent_trials"),
    "seed": ("random_state", "rstate"),
    "sampler": ("algo", "search_alg"),
    "pruner": ("scheduler",),
    "store": ("storage",),
    "study": ("study_name", "name"),
    "name": ("study_name",),
    "enqueue": ("points_to_evaluate", "enqueue_trial"),
    "progress": ("show_progress_bar", "show_progressbar", "verbose"),
    "resume_if_exists": ("load_if_exists",),
    'resume="if-exists"': ("load_if_exists",),
    "workers of minimize, such as workers={'cpu': 4}": ("n_jobs", "n_workers", "max_concurrent_trials"),
    "on_trial, a function in the study file": ("callbacks", "callback"),
    "trials or seconds of run": ("n_trials", "max_evals", "n_iter", "num_samples", "n_calls", "timeout"),
    "not needed, because the study goes on after a trial that fails": ("catch", "catch_eval_exceptions"),
    "not needed, because each trial has its own process on workers": ("gc_after_trial",),
    # functions and attributes
    "run": ("optimize", "fit"),
    "add": ("add_trial", "add_trials"),
    "best": ("best_trial",),
    "front": ("best_trials",),
    "minimize(objective, space, trials=100), or Study(space) to ask and tell": (
        *("create_study", "optimize", "gridsearchcv", "randomizedsearchcv", "bayessearchcv", "tune", "tuner"),
        "gp_minimize",
    ),
    "minimize(objective, space, enqueue=[...]), or enqueue of a Study": ("enqueue_trial",),
    "best of a study": ("best_trial",),
    "front of a study": ("best_trials",),
    "a return from the objective once context.should_stop() is true": ("trialpruned",),
    "a metric: the objective returns {'loss': ..., 'name': ...}": ("set_user_attr", "set_metric_names"),
    "the space, SPACE = {'x': hp.uniform('x', 0, 1)} with hp of hyperopt; the objective reads params['x']": (
        *("suggest_float", "suggest_int", "suggest_categorical", "suggest_uniform", "suggest_loguniform"),
        "suggest_discrete_uniform",
    ),
    # pruners, and ways to give budgets
    "asha": ("successivehalving", "asynchyperband"),
    "median": ("medianstoppingrule",),
    "patience": ("patient",),
    NO_PRUNER: ("nop",),
    "halving": ("sha", "successivehalving", "successive_halving"),
    "bohb": ("hyperbandforbohb",),
    # their settings
    "least": ("min", "min_budget", "min_resource", "min_t", "grace_period"),
    "most": ("max", "max_budget", "max_resource", "max_t"),
    "eta": ("reduction_factor", "factor"),
    "how": ("name", "type", "method", "algorithm", "scheduler"),
    "startup_trials": ("n_startup_trials", "min_samples_required"),
    "warmup_steps": ("n_warmup_steps",),
    "steps": ("patience",),
    "least_gain": ("min_delta",),
    # a trial's context
    "checkpoint_dir": ("get_checkpoint",),
    "trial": ("number", "trial_id"),
}


def elsewhere(name: str, known: Collection[str]) -> str:
    """Return the name here of what other tools call `name`: one that is `known`, else a text; "" if there is none."""
    name = name.replace("-", "_").lower()
    found = [here for here, others in ELSEWHERE.items() if name in others]
    return next(
        (here for here in found if here in known), next((each for each in found if not each.isidentifier()), "")
    )


def named(place: str) -> Any:
    """Import a module and return the class in it. `place` is a value of one of the tables: ``module:class``."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"shadho_celery.{module}"), name)
