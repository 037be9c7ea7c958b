"""Placement: which subspace a free slot works on, and how many trials each subspace gets.

May use: core, space, store, objective, predictors, study. `policies` has the role and the policies `cost` and `fifo`,
`paper` SHADHO's own, `shares` deals trials out to subspaces.
Why it is so: machines differ, and not only in speed. A free slot of a class takes work that the class is comparatively
good at (MaxWeight over backlogs), and reaches .99 of the linear program's bound; on machines that differ only in speed
the bound is first come, first served.
"""
