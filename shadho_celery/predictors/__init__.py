"""Predictors learn from finished trials: seconds, memory and failures, by subspace, class and params.

May use: core, space, store. Other rooms use `cost_model`. `durations`, `param_effects` and `neighbours` predict
seconds, `feasibility` predicts failures and memory. `declared_cost` reads the study file's costs. `features` converts
params to numbers, and `likeness` compares them.

Speeds must be learned from few trials. Log seconds are the sum of effects of subspace, class, pair and params, each
shrunk in proportion to the evidence. Memory depends on params and class.
"""
