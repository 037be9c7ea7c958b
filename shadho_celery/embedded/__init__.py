"""Embedded mode: a fleet on one machine that brings its own Redis and real Celery workers, so it needs no other server.

`embedded` is the scheduler's end, with the record that is sent to the supervisor; it also finds the running fleets in a
folder for the command `status`. `supervisor` is the process that owns Redis and the workers.

Studies run the same code as on a fleet. The supervisor ends with its scheduler, even if the scheduler is killed, but
the scheduler does not wait for that. While the supervisor lives, it locks the state folder, so that a new run in the
same folder waits for it. A fleet may be started before its study (`is_early`); if the study does not begin, the
supervisor removes the folder.
"""
