"""The user's function: its study file, its context, the call, and what it returned.

May use: core, space, store. `study_file` reads a module, `context` is what the objective is given, `call` calls it and
makes an `Outcome` of whatever it does, `result` reads what it returned, `memory` measures.
Why it is so: an objective may do anything. Short of ending its process it cannot harm more than its own trial.
"""
