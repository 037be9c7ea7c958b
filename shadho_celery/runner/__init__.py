"""Runner: the isolated process of a slot, in which its trials run.

May use: core, space, objective. `runner` is the worker's end, `process` the parent's handle of a live process,
`protocol` the records of their pipe, `child` the code inside, `cleanup` its reset after a trial, `reaper` the process
above it that kills its process tree.
Why it is so: nothing that a trial does may reach its worker. A process is a fresh interpreter, not daemonic, and used
again: imports are paid once. Short trials of one message are sent to it together, and run one after another. Time
limits, cancelling, captured output and out-of-memory detection live here.
"""
