"""Predictors learn from finished trials: seconds, memory, failures, by subspace, class and params.

May use: core, space, store. Others ask `cost_model`; `durations` and `neighbours` predict seconds,
`feasibility` failures and memory, `declared_cost` reads the study file's costs, `features` turns params into numbers.
Why it is so: speeds must be known from few trials. Log seconds are subspace + class + pair, each shrunk as far as the
trials bear it out; params count only once they have shown that they help. Memory is a fact about params and class.
"""
