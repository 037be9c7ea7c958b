"""The search space: hyperopt's language, compiled once.

May use: core. `compile` is the only reader of hyperopt's graphs and makes a `Space`; `domains` are the laws of leaves,
`split` makes subspaces, `tree` computes the objective's values, `blocks` knows when each label is active, `describe`
puts a space into words.
Why it is so: hyperopt is the language and the oracle in tests. Its evaluation is slow and recursive, so expressions are
compiled once and sampled in vectorised numpy, and reach the objective as `space_eval` gives them, on the worker.
"""

from shadho_celery.core.late_import import OF_HYPEROPT, load_late

# Before any module of this room imports hyperopt.
load_late(OF_HYPEROPT)
