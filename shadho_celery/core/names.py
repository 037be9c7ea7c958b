"""Tables of the names of samplers, policies, shares, pruners and the like, each with its module and class.

With these tables, help texts and error messages can list the names without importing the modules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

#: by name: module and class, in the order of help texts
SAMPLERS: Mapping[str, str] = {
    "auto": "samplers.auto:AutoSampler",
    "random": "samplers.random:RandomSampler",
    "tpe": "samplers.tpe:TpeSampler",
    "gp": "samplers.gp:GpSampler",
    "qmc": "samplers.qmc:QmcSampler",
    "grid": "samplers.grid:GridSampler",
    "cma": "samplers.cma:CmaSampler",
}
#: samplers that learn from the trials of all subspaces together, and repeat no point of a finite subspace
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
#: algorithms that give trials budgets, by the value `how` of the setting `fidelity`
FIDELITIES: Mapping[str, str] = {
    "auto": "fidelity.brackets:TrustingHyperband",
    "halving": "fidelity.brackets:SuccessiveHalving",
    "hyperband": "fidelity.brackets:Hyperband",
    "asha": "fidelity.asha:Asha",
    "dehb": "fidelity.dehb:Dehb",
}
#: classes with the settings of pruners
PRUNERS: Mapping[str, str] = {
    "median": "fidelity.pruners:Median",
    "percentile": "fidelity.pruners:Percentile",
    "patience": "fidelity.pruners:Patience",
    "threshold": "fidelity.pruners:Threshold",
    "asha": "fidelity.pruners:Asha",
}
#: function behind `context.launch`, which needs torch
LAUNCH = "ranks.launch:launch"
#: function that runs a command as a trial; its module is imported when a trial runs
RUN_COMMAND = "objective.process:run"
#: by suffix of the file: classes of studies that are described by a file other than a Python module
FORMS: Mapping[str, str] = {".toml": "objective.toml_study:TomlStudy", ".pickle": "objective.by_value:ByValue"}
#: suffix of the file of a function that is sent by value
BY_VALUE = ".pickle"
#: value of the setting `pruner` that means no pruner, also for a resumed study that had one; the same for trackers
NO_PRUNER = NO_TRACK = "none"
#: tools that show ended trials; the class fills the role `session.tracking.Tracker`
TRACKERS: Mapping[str, str] = {
    "mlflow": "integrations.mlflow:MlflowTracker",
    "wandb": "integrations.wandb:WandbTracker",
    "tensorboard": "integrations.tensorboard:TensorboardTracker",
}
#: by this package's name, or by a text that can follow "here it is": the names of the same thing in other tools, in
#: lower case. A name of another tool may be in several lines; `elsewhere` chooses by the `known` names
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    # arguments and settings
    "objective": ("fn", "func", "trainable", "estimator"),
    "space": ("config", "param_grid", "param_distributions", "param_space", "search_space", "dimensions"),
    "trials": ("n_trials", "max_evals", "num_samples", "n_iter", "n_calls", "get_trials"),
    "seconds": ("timeout", "time_budget_s"),
    "objectives": ("directions",),
    'objectives of a Study or of minimize, such as {"error": "minimize"}': ("directions",),
    "direction": ("mode",),
    "on_trial": ("callbacks", "callback"),
    "workers": ("n_jobs", "max_concurrent_trials"),
    "seed": ("random_state", "rstate"),
    "store": ("storage",),
    "study": ("study_name", "name"),
    "name": ("study_name",),
    "enqueue": ("points_to_evaluate", "enqueue_trial"),
    "resume_if_exists": ("load_if_exists",),
    'resume="if-exists"': ("load_if_exists",),
    "trials and seconds of run or minimize": ("n_trials", "timeout", "max_evals", "num_samples", "n_iter"),
    'workers of minimize, such as {"cpu": 4}': ("n_jobs", "max_concurrent_trials"),
    "on_trial, a function in the study file or an argument of run": ("callbacks", "callback"),
    "fidelity": ("rungs",),
    "a part of the setting pruner or fidelity": ("scheduler", "min_resource", "max_resource", "reduction_factor"),
    "not needed, because the study goes on after a trial that fails": ("catch",),
    # functions and attributes
    "run": ("optimize", "fit"),
    "add": ("add_trial", "add_trials"),
    "best": ("best_trial",),
    "best_loss": ("best_value",),
    "dataframe": ("trials_dataframe",),
    "front": ("best_trials",),
    "best or front of a study": ("best_trial", "best_trials"),
    "enqueue of a Study, or an argument of minimize": ("enqueue_trial",),
    "minimize(objective, space), or shadho_celery.optuna.create_study()": ("create_study", "optimize"),
    "minimize(objective, space), or a Study to ask and tell": ("tune", "tuner"),
    "minimize(objective, space), to try every point with sampler='grid'": ("gridsearchcv", "randomizedsearchcv"),
    "a return from the objective, once context.should_stop() is true": ("trialpruned",),
    "params['x'], with SPACE = {'x': hp.uniform('x', 0, 1)}; without a space the objective gets a trial": ("suggest",),
    # pruners, and ways to give budgets
    "asha": ("successivehalving", "asynchyperband"),
    "median": ("medianstoppingrule",),
    "patience": ("patient",),
    NO_PRUNER: ("nop",),
    "halving": ("sha", "successivehalving", "successive_halving"),
    "hyperband": ("hyperbandforbohb", "bohb"),
    # settings of pruners and budgets
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
    "should_stop": ("should_prune",),
    "trial": ("number", "trial_id"),
}


def elsewhere(name: str, known: Collection[str]) -> str:
    """Return what this package calls the `name` of another tool: a `known` name, else a text; "" if it is not listed.

    `name` may also be a known name in another form, such as MedianPruner for median.
    """
    name = "suggest" if name.startswith("suggest_") else name.replace("-", "_").lower()
    name = name.removesuffix("pruner").removesuffix("scheduler") or name
    if name in known:
        return name
    found = [here for here, others in ELSEWHERE.items() if name in others]
    return next(
        (here for here in found if here in known), next((each for each in found if not each.isidentifier()), "")
    )


def named(place: str) -> Any:
    """Import a module and return a class or function of it. `place` is a value of a table: ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"shadho_celery.{module}"), name)
