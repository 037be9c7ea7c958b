"""Fidelity decides how much of its budget a trial gets: rounds promote trials, pruners stop them early.

May use: core, space, store, objective, predictors, study. `rounds` is the role of algorithms that ask for trials at
budgets; `brackets` has halving and Hyperband, `asha`, `trusting` and `dehb` an algorithm each. `pruners` is the role of
rules that judge reports. `ladder` has the budgets.

Both are asked and told: values in, decisions out. A trial is one evaluation at one budget, so each result is stored
once per rung, and a retry, a copy or a resumed run counts nothing twice.
"""
