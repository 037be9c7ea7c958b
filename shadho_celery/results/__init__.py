"""Results of a study, also while it runs: its trials, the best trial, exported tables, and its deletion.

`study` has a recorded study and its JSON, and `trial` its trials, attempts and workers. `report` has all results
of a study in one record, and finds the params by which trials were placed on classes. `frame` makes the table of
trials, and `warm_start` reads trials for a new study.

Reading takes no lock and writes nothing, so it works while the study runs, and on a store that cannot be written. The
command line and Python show the same records.
"""
