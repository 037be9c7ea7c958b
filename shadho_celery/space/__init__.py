"""The search space, which users write with hyperopt, compiled to a `Space`.

`compile` is the only module that reads hyperopt's graphs. `tree` computes the objective's values, and `space` draws
params and knows when a label is active. `domains` has distributions, `split` subspaces, `points` known points, and
`features` params as numbers. `describe` and `literals` make texts, `flat` makes plain values for commands, and `forms`
makes spaces from short forms. `schema` has the labels of a space that is not declared. `stored` has the form of spaces
and values in a store.

hyperopt's own evaluation is slow and recursive, so a space is compiled once and sampled with vectorised numpy. The
objective gets the same values as from hyperopt's `space_eval`.
"""
