"""Runner: the isolated process of a slot, in which its trials run.

`runner` is the worker's end, and `trial_process` its handle of a live process. `protocol` has the records of the pipe
between both. `child` is the code inside the process, and `cleanup` resets the process after a trial. `reaper` is the
parent process that kills the process tree. `starting` starts the reaper, by a fork of the prepared process
`fork_server` or in a new interpreter. `output` writes the logs of trials.

A trial must not affect its worker. The process is not a fork of the worker, and has nothing of it. It runs many trials,
so modules are imported once. Short trials of one message are sent to it together and run one after another. Time
limits, cancelling, captured output and the detection of exhausted memory are implemented here.
"""
