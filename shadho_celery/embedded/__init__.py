"""Embedded mode: a fleet on one machine without any server: a private Redis and real Celery workers.

May use: core to node. `embedded` is the scheduler's end. `supervisor` is the process that owns Redis and the workers.
`plan` has the record that is sent to the supervisor, and finds the running fleets in a folder for `status`.

The code path is the same as on a fleet. The supervisor ends with its scheduler, even if the scheduler gets a SIGKILL.
It locks the state folder while it lives, so two supervisors never use the same folder.
"""
