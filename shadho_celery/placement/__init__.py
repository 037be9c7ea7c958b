"""Placement: which trial a free slot takes, how long it will last, and how many trials each subspace gets.

`policies` has the policies `cost` and `fifo`, and `paper` has SHADHO's own policy. `pool` has two parts of `cost`: the
trials drawn ahead, and the choice of promoted trials. `shares` divides trials among subspaces. `model` predicts seconds
and memory from `durations`, `effects` and `budgets`; `memory` tells which classes have enough memory. `widths` chooses
numbers of slots. `copies` repeats late trials, records placements and pauses declined trials. `bound` has the linear
programs. Under `cost`, a free slot takes a trial that its class runs fast in comparison with other classes. The
throughput comes near the bound of a linear program. On machines that differ only in speed, `cost` is the same as first
come, first served. Speeds are learned from few trials: log seconds are a sum of effects, and an effect with little
evidence is closer to 0.
"""
