"""The user's objective: the file that defines it, its arguments, its call and its return value.

`study_file` reads a module, and `by_value` a function that a program sends to its workers. `context` is the objective's
second argument. `call` calls the objective and turns every return value and exception into an `Outcome`. `result` reads
the return value, and `memory` measures peaks.

An objective may raise any exception and return any value: only its own trial fails, unless it ends its process.
"""
