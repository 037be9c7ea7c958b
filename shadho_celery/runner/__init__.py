"""Runner: each slot has a process in which its trials run, apart from the worker.

May use: core, space, objective. `runner` is the worker's end, `process` a live process as its parent holds it,
`protocol` the records of their pipe, `child` what runs inside, `cleanup` what it undoes after a trial, `reaper` the
process above it that lets nothing of it stay behind.
Why it is so: nothing that a trial does may reach its worker. A process is a fresh interpreter, not daemonic, and used
again: imports are paid once. Time limits, cancelling, captured output and the detection of want of memory live here.
"""
