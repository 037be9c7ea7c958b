"""A search inside one's own program: `minimize`, `Study`, and hyperopt's own way to call.

May use: all rooms. `search` has `minimize`, `study` is what it returns and a loop of one's own, `progress` a
bar, `hyperopt_api` hyperopt's names, `words` puts errors into Python's words, `interrupts` holds Ctrl-C
back while records change.
Why it is so: arguments are explicit and checked before anything is recorded. It is the same scheduler, sampler and
store as on a fleet, and trials run in this process unless workers are asked for.
"""
