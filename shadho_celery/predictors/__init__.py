"""Predictors learn from finished trials: seconds, memory, failures, by subspace, class and params.

May use: core, space, store. Others ask `cost_model`; `durations`, `param_effects` and `neighbours` predict seconds,
`feasibility` failures and memory, `declared_cost` reads the study file's costs, `features` turns params into numbers,
`likeness` compares them.
Why it is so: speeds must be known from few trials. Log seconds are subspace + class + pair + functions of params, each
shrunk as far as the trials bear it out. Memory is a fact about params and class.
"""
