"""Placement: which trial a free slot takes, and how many trials each subspace gets.

May use: core, space, store, objective, predictors, study. `base` has the protocol of a policy. `policies` has the
policies `cost` and `fifo`, and `paper` has SHADHO's own policy. `pool` and `promotions` are parts of `cost`: the trials
drawn ahead, and the promoted trials. `shares` divides trials among subspaces.
Why it is so: machines differ, and not only in speed. A free slot takes the trials that its class runs comparatively
fast (MaxWeight over backlogs, prices of classes), which comes near the bound of the linear program for the best
placement. On machines that differ only in speed, nothing is better than first come, first served.
"""
