"""Results of a study at any time: its trials, the best one, exported tables, and its deletion.

May use: core, space, store, objective, predictors, study. `study` is a recorded study, `trial` one of its trials,
`report` the results of a study in one record, `schema` its JSON, `values` makes what the objective got, `frame` is
the table, `preferences` the params by which trials went to classes.
Why it is so: reading takes no lock and writes nothing, so that it works while the study runs and on a store that cannot
be written. The command line and Python show the same records.
"""
