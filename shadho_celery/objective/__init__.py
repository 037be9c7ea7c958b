"""The user's objective: the file that defines it, its arguments, its call and its return value.

`study_file` imports a study file, and `sources` reads and digests its source files. `context` has the objective's
second argument. `call` calls the objective, turns its return value or exception into an `Outcome`, and measures its
peak memory; `result` reads the return value. `command` is a command in place of a function, `process` runs it, and
`printed` reads its output. `script` has the functions for its script, and `toml_study` reads a study without a module.

An objective may raise any exception and return any value: only its own trial fails, unless it ends its process.
"""
