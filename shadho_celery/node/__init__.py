"""Node: the worker's side of the queues, with its slots, leases, heartbeat and consumer.

`slots` runs the attempts in messages, in the slots that `devices` manages. `claims` claims and finishes the attempts of
one message. `leases` renews the leases of running attempts every second. `heartbeat` announces the worker to the
schedulers. `consumer` pauses and resumes the messages from Celery. `shutdown` ends the worker at a signal. `logs`
answers requests for a trial's log, and writes the worker's own log. `code` decides which code the worker can run;
`stay` reads how long the worker stays.

The Celery worker does little itself: its threads drive the slots, and each slot's process runs the trials. A worker
claims an attempt before it runs it, so a message that is delivered twice runs once. It runs only objectives of modules
that it was started with, and code that studies ship if it accepts shipped code.
"""
