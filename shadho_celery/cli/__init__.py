"""Command line: options, the session of one run, terminal views.

May use: every room. `session` opens what a run needs and ends it, `options` is the command line as given,
`connection_options` broker, Redis and signing key, `views` the live view and the tables, `warnings` what a person
should know while a study runs.
Why it is so: a user's error is one line with the remedy and exit code 2, no traceback, and what is recorded stays.
"""
