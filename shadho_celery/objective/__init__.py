"""The user's objective: the file that defines it, its arguments, its call and its return value.

`study_file` imports a study file, `toml_study` reads one in TOML, `by_value` has functions that a program sends to its
workers, and `sources` digests source files. `context` has the objective's second argument. `suggest` has the trial of
a study without a space, which its objective asks for values. `call` calls the objective, turns its return value or
exception into an `Outcome`, and measures its peak memory. `result` reads the return value.
`command`, `process` and `printed` run a command as the objective. A command's script may use `script` or
`shadho_worker`.

An objective may raise any exception and return any value: only its own trial fails, unless it ends its process.
"""
