"""The command line: commands, their options, views of a run, and tables of results.

May use: every room but program. `main` and `group` are the console command. `run` shows one run, and prints its results
at the end. `connection_options` has the options for broker, Redis and signing key. `live` is the view of a run, and
`tables` shows the report of a study. `results`, `export`, `remove` and `status` are commands, which share
`result_options`.
Why it is so: a user's error is shown in one line with the remedy, without a traceback, and the exit code is 2. Recorded
trials are kept. The help of a command is fast, because it does not import what the command needs to run.
"""
