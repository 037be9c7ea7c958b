"""Placement: which trial a free slot takes, how long it will last, and how many trials each subspace gets.

`policies` has the policies `cost` and `fifo`, and `paper` has SHADHO's own policy. `pool` has two parts of `cost`:
`Pool` with the trials drawn ahead, and `Promotions` for promoted trials. `shares` divides trials among subspaces.
`model` predicts seconds and memory, from the predictors in `durations`, `effects` and `budgets`. `memory` tells whether
a class has enough memory for a trial. `widths` chooses numbers of slots. `copies` starts copies of late trials, records
what placement knew, and pauses declined trials. `bound` has the linear programs.

Under `cost`, a free slot takes a trial that its class runs fast in comparison with the other classes (`CostPolicy`).
The throughput comes near the maximum that the linear program gives. On machines that differ only in speed, no policy is
better than first come, first served. Speeds are learned from few trials: log seconds are a sum of effects, and an
effect with little evidence is estimated closer to 0.
"""
