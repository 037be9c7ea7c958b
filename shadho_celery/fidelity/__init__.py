"""Fidelity decides how much of its budget a trial gets: rounds promote trials, pruners stop them early.

May use: core, space, store, objective, predictors, study. `rounds` is the role of what asks for trials at budgets, with
one algorithm a file; `pruners` is the role of what judges reports; `ladder` has the budgets.
Why it is so: ask and tell, values in and decisions out. A trial is one evaluation at one budget, so that a study's "one
result a trial" is one result on each rung, and a retry, a copy or a resumption counts nothing twice.
"""
