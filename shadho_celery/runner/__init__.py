"""Runner: the isolated process of a slot, in which its trials run.

`runner` is the worker's end, and `trial_process` is the worker's handle of a live process. `protocol` has the records
that both send over a pipe. `child` is the code inside the process, and `process_state` restores the process's state
after a trial. `reaper` is the parent of the process, and kills its process tree (`process_tree`). `starting` starts the
reaper, by a fork of the prepared process `fork_server` or in a new interpreter. `output` writes the logs of trials.

A trial must not affect its worker, so the process is not a fork of the worker. It runs many trials, so that modules are
imported once. Short trials of one message are sent to it together. This package also implements time limits,
cancelling, captured output and the detection of exhausted memory.
"""
