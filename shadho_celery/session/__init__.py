"""Opening of a study, and a run of it on workers, for the command line and for Python.

May use: every room but cli, program and training. `opening` opens a study for every way to run one. `session` runs a
study on workers, and `workers` starts those of this machine, before the file of a new study is imported. The room does
not print: it gets a function that shows a line, and a view.
"""
