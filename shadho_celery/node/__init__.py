"""Node: the worker's side of the queues, with its slots, leases, heartbeat and consumer.

`slots` runs the attempts in messages, in the slots that `devices` manages. `leases` claims and finishes the attempts of
a message, and renews the leases of running attempts every second. `heartbeat` announces the worker. `consumer`
pauses and resumes messages. `shutdown` ends the worker at a signal. `logs` answers requests for trials' logs and
folders, and writes the worker's own log. `code` decides which code may run, `stay` when the worker ends by itself.

Threads of the Celery worker drive the slots; each slot's process runs the trials. An attempt is claimed before it runs,
so a message that is delivered twice runs once. Only modules that the worker was started with may run, and shipped code
if it accepts that.
"""
