"""The command line: commands, their options, live views of a running study, and tables of results.

`group` is the console command. `run` runs a study and prints its report at the end, `live` shows the running study, and
`tables` formats the report. `shared_options` has the base class of all commands, and the options that several commands
have. `interrupts` ends a command without a traceback. A user's error is shown in one line with the remedy, and the exit
code is 2. The help of a command is fast, because a command imports large libraries only when it runs.
"""
