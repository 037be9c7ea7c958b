"""Placement: which trial a free slot takes, and how many trials each subspace gets.

May use: core, space, store, objective, predictors, study. `base` is the role of a policy, `policies` has `cost` and
`fifo`, `paper` SHADHO's own policy. `pool` and `promotions` are parts of `cost`: trials drawn ahead to choose from, and
promoted trials. `shares` deals trials out to subspaces.
Why it is so: machines differ, and not only in speed. A free slot of a class takes work that the class is comparatively
good at (MaxWeight over backlogs, prices of classes), near the linear program's bound; on machines that differ only in
speed the bound is first come, first served.
"""
