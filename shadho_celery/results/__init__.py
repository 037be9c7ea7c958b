"""Results of a study, also while it runs: its trials, the best trial, exported tables, and its deletion.

`study` is a recorded study, `trial` one of its trials, `report` the results of a study in one record, `schema` its
JSON. `frame` makes the table of trials, `preferences` finds the params by which trials were placed on classes. Why it
is so: reading takes no lock and writes nothing, so that it works while the study runs and on a store that cannot be
written. The command line and Python show the same records.
"""
