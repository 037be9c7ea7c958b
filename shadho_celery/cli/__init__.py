"""Command line: the group of commands, options, terminal views, results.

May use: every room but program. `main` and `group` are the console command, `run` shows one run and prints its end;
`connection_options` are broker, Redis and signing key; `live` is the view of a run, `tables` are those of a study's
report; `results`, `export`, `remove` and `status` are commands, with what they share in `result_options`.
Why it is so: a user's error is one line with the remedy and exit code 2, without a traceback, and recorded trials stay.
A command's help imports none of what the command needs.
"""
