"""Predictors learn from finished trials: seconds, memory, failures, by subspace, class and params.

May use: core, space, store. `cost_model` is what others ask; `durations` and `neighbours` predict seconds,
`feasibility` failures and memory, `declared_cost` takes the study file's word, `features` turns params into numbers.
Why it is so: speeds must be known from few trials. Log seconds are subspace + class + pair, each shrunk as far as the
trials bear it out; params count only where they have shown that they help. Memory is a fact about params and class.
"""
