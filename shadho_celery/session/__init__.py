"""A study opened and run, from the command line or from Python.

May use: every room but cli, program and training. `opening` opens a study, in one place for all; `session` runs one on
workers and prints nothing: it is given what says a line, and a view.
"""
