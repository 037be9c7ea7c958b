"""Runner: the isolated process of a slot, in which its trials run.

May use: core, space, objective. `runner` is the worker's end, with its handle of a live process,
`protocol` the records of their pipe, `child` the code inside the process, `cleanup` the reset after a trial, and
`reaper` the parent process that kills its process tree.

A trial must not affect its worker. The process is a fresh interpreter, not daemonic. It is reused, so imports are paid
once. Short trials of one message are sent to it together and run one after another. Time limits, cancelling, captured
output and the detection of exhausted memory are implemented here.
"""
