"""Embedded mode: a fleet of one machine with no server anywhere: a private Redis and real Celery workers.

May use: core to node. `embedded` is the scheduler's end, `supervisor` the process that owns Redis and the workers,
`plan` the record between the two; `running` finds the fleets of a folder for `status`.
Why it is so: the same code path as on a fleet. The supervisor ends with its scheduler, even after a SIGKILL of that,
and locks the state folder for its life, so that two supervisors never share one.
"""
