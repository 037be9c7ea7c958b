"""The user's objective: its study file, its context, its call and its return value.

May use: core, space, store. `study_file` reads a module. `context` is the objective's second argument. `call` calls the
objective and turns every return value and exception into an `Outcome`. `result` reads the return value, and `memory`
measures peaks.

An objective may do anything. Unless it ends its process, it can only damage its own trial.
"""
