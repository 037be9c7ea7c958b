"""Runner: the isolated process of a slot, in which its trials run.

`runner` is the worker's end, and `trial_process` its handle of a live process. `protocol` has the records of the pipe
between both. `child` is the code inside the process; after a trial, `process_state` restores its state.
`reaper` is its parent process, which kills the process tree (`process_tree`). `starting` starts the
reaper, by a fork of the prepared process `fork_server` or in a new interpreter. `output` writes the logs of trials.

A trial must not affect its worker, so the process is not a fork of the worker. It runs many trials, so modules are
imported once. Short trials of one message are sent to it together. This room also implements time limits, cancelling,
captured output and the detection of exhausted memory.
"""
