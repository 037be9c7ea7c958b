"""Command line: the session of one run, options of the connection, terminal views.

May use: every room. `session` opens the parts of a run, warns while it runs, and ends it; `connection_options` are
broker, Redis and signing key; `views` are the live view and the tables.
Why it is so: a user's error is one line with the remedy and exit code 2, without a traceback, and recorded trials stay.
"""
