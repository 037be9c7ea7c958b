"""Predictors of a trial's seconds, memory and failure by subspace, class and params, learned from finished trials.

May use: core, space, store. Other rooms use `cost_model`. `durations`, `budgets` and `param_effects` are
the parts of its one model of seconds, `neighbours` predicts memory, and `feasibility` failures and memory.
`declared_cost` reads the study file's costs. `features` converts params to numbers and compares them.

Speeds must be learned from few trials. Log seconds are a sum of effects of the subspace, the class, the pair of both,
and the params. Each effect is estimated closer to 0 the less evidence there is. Memory depends on params and class.
"""
