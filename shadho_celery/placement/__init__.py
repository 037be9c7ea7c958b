"""Placement: which trial a free slot takes, how long it will last, and how many trials each subspace gets.

`policies` has the policies `cost` and `fifo`, and `paper` has SHADHO's own policy. `pool` and `promotions` are parts of
`cost`: the trials drawn ahead, and the promoted trials. `shares` divides trials among subspaces. `model` predicts
seconds and `memory` what fits; `widths` chooses numbers of slots, `copies` repeats late trials.

A free slot takes the trials that its class runs comparatively fast (MaxWeight over backlogs, prices of classes), which
comes near the bound of the linear program. On machines that differ only in speed, nothing is better than first come,
first served. Speeds are learned from few trials: log seconds are a sum of effects, each estimated closer to 0 the less
evidence there is.
"""
