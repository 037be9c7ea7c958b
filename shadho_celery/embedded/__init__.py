"""Embedded mode: a fleet on one machine without any server: a private Redis and real Celery workers.

`embedded` is the scheduler's end. `supervisor` is the process that owns Redis and the workers. `plan` has the record
that is sent to the supervisor, and finds the running fleets in a folder for `status`.

The code path is the same as on a fleet. The supervisor ends with its scheduler, even if the scheduler gets a SIGKILL.
The scheduler does not wait for that end. The supervisor locks the state folder while it lives, so two supervisors never
use the same folder: the next one waits. A fleet may be started before its study (`is_early`); if the study does not
begin, the supervisor removes the folder.
"""
