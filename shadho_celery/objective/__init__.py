"""The user's objective: its study file, its context, its call and its return value.

May use: core, space, store. `study_file` reads a module, `context` is the objective's second argument, `call` calls it
and makes an `Outcome` of every return value and exception, `result` reads the return value, `memory` measures.
Why it is so: an objective may do anything. Short of ending its process it cannot harm more than its own trial.
"""
