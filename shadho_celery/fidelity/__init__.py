"""Fidelity: the budgets of trials. Rounds offer trials at low budgets and promote the best; pruners stop trials early.

`ladder` has the settings and the budgets. `rounds` has the base class of the algorithms that offer trials; these are in
`asha`, `brackets` (halving and Hyperband) and `dehb`. `pruners` has the rules that stop trials because of their
reports.

Rounds and pruners get values and return decisions, without I/O. A trial is one evaluation at one budget, so each result
is stored once per rung, and no retry, copy or resumed run is counted twice.
"""
