"""Fidelity decides how much of its budget a trial gets: rounds promote trials, pruners stop them early.

`rounds` has the base of algorithms that offer trials at budgets, `brackets` halving and Hyperband; `asha` and `dehb`
have one algorithm each. `pruners` has the protocol of rules that judge reports, and the rules. `ladder` has the
budgets.

Rounds and pruners get values and return decisions, without I/O. A trial is one evaluation at one budget, so each result
is stored once per rung, and no retry, copy or resumed run is counted twice.
"""
