"""Embedded mode: a fleet of one machine with no server anywhere: a private Redis and real Celery workers.

May use: core to node. `embedded` is the scheduler's end, `supervisor` the process that owns Redis and the workers,
`plan` what both agree on.
Why it is so: the same code path as on a fleet. The supervisor ends with its scheduler, however that dies, and holds a
lock on the state folder for its life, so that two never share one.
"""
