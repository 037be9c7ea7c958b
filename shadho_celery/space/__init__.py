"""The search space: written in hyperopt's language, compiled once.

`compile` is the only module that reads hyperopt's graphs, and makes a `Space`. `domains` are the distributions of
leaves, `split` makes subspaces, `tree` computes the objective's values (`flat` those of a command), `space` determines
when each label is active, and `describe` describes a space as text. `forms` reads short forms of domains.

Users write spaces with hyperopt, and tests compare with it. hyperopt's own evaluation is slow and recursive.
Expressions are therefore compiled once and sampled in vectorised numpy. On the worker, the objective gets the same
values as from `space_eval`.
"""

from shadho_celery.core.system import load_hyperopt_late

# Must run before any module of this room imports hyperopt.
load_hyperopt_late()
